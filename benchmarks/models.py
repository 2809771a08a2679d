"""Every model's training step under recpipe beside a plain loop over the same module: time and memory.

    python benchmarks/models.py [--models deepfm din ...] [--threads 2] [--rounds 8] [--output FILE.json]

The loop (``any_model.ByHand``) has TorchRec's plain collections, row-wise Adagrad for the tables, fused by
FBGEMM where TorchRec has that on a CPU (not in an ``EmbeddingCollection``: there it goes over whole tables),
the same module and dense optimizer, and takes its batches from a list. recpipe trains a copy of the module on
the same batches through ``recpipe.train`` with all rows in memory, with modules as they are (``plain``) and
with what it compiles (``auto``). Both take turns. Printed are, of each, the ratio of samples per second by
wall and by CPU time (of all threads), round by round: median (lowest..highest), and by how many MB the
process's resident memory is higher in a round than at its beginning. With ``--output`` a data file for
``docs/tables.py``.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import lightning as L
import torch
from any_model import ByHand
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.backend.choices import Host
from recpipe.common.process import quiet_libraries
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.schema import Schema
from recpipe.model.config import UserModel
from recpipe.model.dlrm import DlrmSizes, make_dlrm
from recpipe.model.make import make_model
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import SparseFeature

ROWS, DENSE, HISTORY, BATCH, STEPS, WARM = 20_000, 13, 20, 1024, 4, 2
CPU = torch.device("cpu")
FIELDS = Schema(tuple(f"d{n}" for n in range(DENSE)), tuple(SparseFeature(f"c{n}", ROWS) for n in range(26)))
"""Of models that take features as they come: as many as Criteo's."""
EVENTS = Schema(
    FIELDS.dense,
    (
        *(SparseFeature(f"c{n}", ROWS) for n in range(6)),
        SparseFeature("item", ROWS),
        SparseFeature("kind", ROWS),
        SparseFeature("items", ROWS, table="item", sequence=HISTORY),
        SparseFeature("kinds", ROWS, table="kind", sequence=HISTORY),
    ),
)
"""Of models that compare a history with a target."""
COMPARING = ("din", "bst", "tbsm", "sasrec", "hstu")
TITLES = {
    **{"dlrm": "DLRM", "dlrm_dcn": "DLRM-DCNv2", "wide_deep": "Wide & Deep", "deepfm": "DeepFM"},
    **{
        "xdeepfm": "xDeepFM",
        "dcnv2": "DCNv2",
        "autoint": "AutoInt",
        "finalmlp": "FinalMLP",
        "wukong": "WuKong",
    },
    **{"mmoe": "MMoE", "ple": "PLE", "din": "DIN", "bst": "BST", "tbsm": "TBSM", "sasrec": "SASRec"},
    **{"hstu": "HSTU", "two_tower": "Two towers"},
}
"""Every model, by the title of its page."""
WORDS = {"two_tower": ("model.candidate=[c0,c1,c2,c3]", "model.retrieval=false")}


def model_of(name: str) -> nn.Module:
    """The recipe's model with its default keys, tables of small values."""
    config = Recipe.of(compose([f"model={name}", *WORDS.get(name, ())])).model
    schema = EVENTS if name in COMPARING else FIELDS
    torch.manual_seed(1)
    if isinstance(config, UserModel):
        model = make_model(config, schema, CPU)
    else:
        model = make_dlrm(DlrmSizes.of(config, schema), CPU)
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            for weight in module.to_empty(device=CPU).parameters():
                nn.init.uniform_(weight, -0.01, 0.01)
    return model


def batches(schema: Schema, count: int) -> list[Batch]:
    """Ids of a power law; a history has 1 to ``HISTORY`` events."""
    drawn = torch.Generator().manual_seed(2)
    found = []
    for _ in range(count):
        events = torch.randint(1, HISTORY + 1, (BATCH,), generator=drawn)
        one = torch.ones(BATCH, dtype=torch.long)
        lengths = torch.cat([events if feature.sequence else one for feature in schema.sparse])
        ids = (torch.rand(int(lengths.sum()), generator=drawn) ** 4 * ROWS).long()
        sparse = KeyedJaggedTensor([feature.name for feature in schema.sparse], ids, lengths=lengths)
        dense = torch.randn(BATCH, DENSE, generator=drawn)
        found.append(Batch(dense, sparse, (torch.rand(BATCH, generator=drawn) < 0.25).float()))
    return found


@dataclass
class Cost:
    """Of the steps of a round."""

    wall: float
    cpu: float
    """Seconds, of all threads."""
    memory: float
    """The highest resident MB beyond those at its beginning."""


class Costs:
    """Measures from ``start`` to ``cost``."""

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident size counts anew
        self.resting, self.wall, self.cpu = _resident("VmRSS"), perf_counter(), process_time()

    def cost(self) -> Cost:
        wall, cpu = perf_counter() - self.wall, process_time() - self.cpu
        return Cost(wall, cpu, (_resident("VmHWM") - self.resting) / 1024)


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


class InTurn(L.Callback):
    """After every ``STEPS`` of the run, as many of the loop by hand."""

    by_hand: ByHand
    rounds: list[tuple[Cost, Cost]]
    """Of the run and of the loop."""

    def __init__(self) -> None:
        self.done, self.costs = 0, Costs()
        InTurn.rounds = []

    def on_train_start(self, *_: Any) -> None:
        self.costs.start()

    def on_train_batch_end(self, *_: Any) -> None:
        self.done += 1
        if self.done % STEPS == 0:
            own = self.costs.cost()
            with as_torch_begins():
                self.costs.start()
                self.by_hand.train(STEPS)
                InTurn.rounds.append((own, self.costs.cost()))
            self.costs.start()


@contextmanager
def as_torch_begins() -> Iterator[None]:
    """The precision of products and the attention that a loop by hand has."""
    precision, fused = torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_flash_sdp(True)
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_flash_sdp(fused)


@dataclass
class Row:
    """What was measured of a model under a back end, as cells of the table."""

    name: str
    backend: str
    rounds: list[tuple[Cost, Cost]] = field(repr=False)

    def ratio(self, clock: str) -> list[float]:
        """Speed beside the loop's: median, lowest, highest."""
        found = [getattr(theirs, clock) / getattr(mine, clock) for mine, theirs in self.rounds]
        return [round(value, 4) for value in (median(found), min(found), max(found))]

    def cells(self) -> list[Any]:
        mine, theirs = zip(*self.rounds, strict=True)
        samples = BATCH * STEPS / median(cost.wall for cost in theirs)
        peaks = [round(median(cost.memory for cost in side), 1) for side in (mine, theirs)]
        return [TITLES[self.name], self.backend, round(samples), *map(self.ratio, ("wall", "cpu")), *peaks]


def measure(name: str, backend: str, rounds: int) -> Row:
    schema = EVENTS if name in COMPARING else FIELDS
    rows, model = batches(schema, 40), model_of(name)
    InTurn.by_hand = ByHand(copy.deepcopy(model), rows)
    steps = (rounds + WARM) * STEPS
    words = (
        *("trainer.progress=false", "trainer.logger=null", "optim.tables.lr=0.02"),
        *(f"trainer.backend={backend}", f"trainer.max_steps={steps}", f"trainer.max_epochs={steps}"),
        "trainer.callbacks=[{_target_: __main__.InTurn}]",
    )
    recpipe.train(model, rows, *words, quiet=True).close()
    return Row(name, backend, InTurn.rounds[WARM:])


COLUMNS = {
    "model": None,
    "back end": None,
    "samples/s of the loop": "{:,.0f}",
    "speed beside it, wall": "{:.2f}",
    "by CPU time": "{:.2f}",
    "MB that a step adds, recpipe": "{:,.1f}",
    "the loop": "{:,.1f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--backends", nargs="+", choices=["plain", "auto", "cpu"], default=["plain", "auto"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, help="a data file for docs/tables.py")
    parser.add_argument("--commit", default="", help="what is measured, for that file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    quiet_libraries()
    print(f"{Host.current()}\n{options.threads} threads\n")
    rows = []
    for name in options.models:
        for backend in options.backends:
            rows.append(measure(name, backend, options.rounds).cells())
            print(*rows[-1], flush=True)
    if options.output:
        told = {
            "title": "A training step of each model beside a plain loop over the same module",
            "command": " ".join(
                ["python", "benchmarks/models.py", f"--threads {options.threads} --rounds {options.rounds}"]
            ),
            "machine": str(Host.current()),
            "commit": options.commit,
            "date": date.today().isoformat(),
            "kept": f"medians (lowest..highest) of {options.rounds} rounds of {STEPS} steps of {BATCH}",
            "columns": COLUMNS,
            "rows": rows,
        }
        options.output.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
