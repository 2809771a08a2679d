"""Every model's training step under recpipe beside a plain loop over the same module: time and memory.

    python benchmarks/models.py [--models deepfm din ...] [--threads 2] [--rounds 8] [--output FILE.json]

The loop (``any_model.ByHand``) has TorchRec's plain collections, row-wise Adagrad for the tables, fused by
FBGEMM where TorchRec has that on a CPU (not in an ``EmbeddingCollection``: there it goes over whole tables),
the same module and dense optimizer, and takes its batches from a list. recpipe trains a copy of the module on
the same batches through ``recpipe.train`` with all rows in memory, with modules as they are (``plain``) and
with what it compiles (``auto``). Both take turns. Tables have 20,000 rows, and those of models with histories
1,000,000 as well, since the loop's step depends on that. Printed are, of each, the ratio of samples per
second by wall and by CPU time (of all threads), round by round: median (lowest..highest). Memory is apart:
each side trains in a process of its own, and what counts is how much higher the most resident memory is than
after everything is imported and the batches are made, tables included. With ``--output`` a data file for
``docs/tables.py``.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

ROWS, MANY, DENSE, HISTORY, BATCH, STEPS, WARM = 20_000, 1_000_000, 13, 20, 1024, 4, 2
KEPT = 40
"""Batches, which are trained again and again."""
CPU = torch.device("cpu")
COMPARING = ("din", "dien", "bst", "tbsm", "sasrec", "hstu")
"""Models that compare a history with a target."""
TITLES = {
    **{"dlrm": "DLRM", "dlrm_dcn": "DLRM-DCNv2", "wide_deep": "Wide & Deep", "deepfm": "DeepFM"},
    **{
        "xdeepfm": "xDeepFM",
        "dcnv2": "DCNv2",
        "autoint": "AutoInt",
        "finalmlp": "FinalMLP",
        "masknet": "MaskNet",
        "shared_bottom": "Shared bottom",
        "wukong": "WuKong",
    },
    **{"mmoe": "MMoE", "ple": "PLE", "din": "DIN", "dien": "DIEN", "bst": "BST", "tbsm": "TBSM"},
    **{"sasrec": "SASRec", "hstu": "HSTU", "two_tower": "Two towers"},
}
"""Every model, by the title of its page."""
WORDS = {"two_tower": ("model.candidate=[c0,c1,c2,c3]", "model.retrieval=false")}


def schema_of(name: str, rows: int) -> Schema:
    """What a model is trained on: 26 sparse features, as many as Criteo's, or 6, a target and histories."""
    dense = tuple(f"d{n}" for n in range(DENSE))
    if name not in COMPARING:
        return Schema(dense, tuple(SparseFeature(f"c{n}", rows) for n in range(26)))
    events = (
        SparseFeature("items", rows, table="item", sequence=HISTORY),
        SparseFeature("kinds", rows, table="kind", sequence=HISTORY),
    )
    single = [*(f"c{n}" for n in range(6)), "item", "kind"]
    return Schema(dense, (*(SparseFeature(name, rows) for name in single), *events))


def model_of(name: str, schema: Schema) -> nn.Module:
    """The recipe's model with its default keys, tables of small values."""
    config = Recipe.of(compose([f"model={name}", *WORDS.get(name, ())])).model
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


def batches(schema: Schema) -> list[Batch]:
    """Ids of a power law; a history has 1 to ``HISTORY`` events."""
    drawn = torch.Generator().manual_seed(2)
    found = []
    for _ in range(KEPT):
        events = torch.randint(1, HISTORY + 1, (BATCH,), generator=drawn)
        one = torch.ones(BATCH, dtype=torch.long)
        lengths = torch.cat([events if feature.sequence else one for feature in schema.sparse])
        ids = (torch.rand(int(lengths.sum()), generator=drawn) ** 4 * schema.sparse[0].rows).long()
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


class Costs:
    """Measures from ``start`` to ``cost``."""

    def start(self) -> None:
        self.wall, self.cpu = perf_counter(), process_time()

    def cost(self) -> Cost:
        return Cost(perf_counter() - self.wall, process_time() - self.cpu)


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


def run(model: nn.Module, given: list[Batch], backend: str, steps: int, *words: str) -> None:
    """Train so many steps under recpipe."""
    own = (
        *("trainer.progress=false", "trainer.logger=null", "optim.tables.lr=0.02", *words),
        *(f"trainer.backend={backend}", f"trainer.max_steps={steps}", f"trainer.max_epochs={steps}"),
    )
    recpipe.train(model, given, *own, quiet=True).close()


# -- memory ------------------------------------------------------------------------------------------


def print_memory(name: str, rows: int, side: str) -> None:
    """In a process of its own: print the most MB that a side's tables, model and steps take."""
    schema = schema_of(name, rows)
    given = batches(schema)
    Path("/proc/self/clear_refs").write_text("5")  # the most resident memory counts anew
    resting = _resident("VmRSS")
    model = model_of(name, schema)
    if side == LOOP:
        ByHand(model, given).train(KEPT)
    else:
        run(model, given, side, KEPT)
    print((_resident("VmHWM") - resting) / 1024)


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


LOOP = "loop"
"""The side that is no back end."""


def memory(name: str, rows: int, side: str) -> float:
    """What ``print_memory`` prints."""
    words = ["--memory-of", side, "--models", name, "--rows", str(rows)]
    words += ["--threads", str(torch.get_num_threads())]
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    return round(float(done.stdout.split()[-1]), 1)


# -- time --------------------------------------------------------------------------------------------


def measure(name: str, rows: int, backend: str, rounds: int) -> list[Any]:
    """A row of the table but for memory."""
    schema = schema_of(name, rows)
    given, model = batches(schema), model_of(name, schema)
    InTurn.by_hand = ByHand(copy.deepcopy(model), given)
    run(model, given, backend, (rounds + WARM) * STEPS, "trainer.callbacks=[{_target_: __main__.InTurn}]")
    found = InTurn.rounds[WARM:]
    samples = BATCH * STEPS / median(theirs.wall for _, theirs in found)
    return [TITLES[name], rows, backend, round(samples), speed(found, "wall"), speed(found, "cpu")]


def speed(rounds: list[tuple[Cost, Cost]], clock: str) -> list[float]:
    """That of recpipe beside the loop's: median, lowest, highest."""
    found = [getattr(theirs, clock) / getattr(mine, clock) for mine, theirs in rounds]
    return [round(value, 4) for value in (median(found), min(found), max(found))]


COLUMNS = {
    "model": None,
    "rows of a table": "{:,}",
    "back end": None,
    "samples/s of the loop": "{:,.0f}",
    "speed beside it, wall": "{:.2f}",
    "by CPU time": "{:.2f}",
    "most MB, recpipe": "{:,.0f}",
    "the loop": "{:,.0f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--backends", nargs="+", choices=["plain", "auto", "cpu"], default=["plain", "auto"])
    parser.add_argument("--rows", nargs="+", type=int, help="of each table, in place of those named above")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, help="a data file for docs/tables.py")
    parser.add_argument("--commit", default="", help="what is measured, for that file")
    parser.add_argument("--memory-of", choices=[LOOP, "plain", "auto", "cpu"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    quiet_libraries()
    if options.memory_of:
        print_memory(options.models[0], options.rows[0], options.memory_of)
        return
    print(f"{Host.current()}\n{options.threads} threads\n")
    table = []
    for name in options.models:
        for rows in options.rows or ([ROWS, MANY] if name in COMPARING else [ROWS]):
            of_loop = memory(name, rows, LOOP)
            for backend in options.backends:
                timed = measure(name, rows, backend, options.rounds)
                table.append([*timed, memory(name, rows, backend), of_loop])
                print(*table[-1], flush=True)
    if options.output:
        words = f"--threads {options.threads} --rounds {options.rounds}"
        told = {
            "title": "A training step of each model beside a plain loop over the same module",
            "command": f"python benchmarks/models.py {words}",
            "machine": str(Host.current()),
            "commit": options.commit,
            "date": date.today().isoformat(),
            "kept": f"medians (lowest..highest) of {options.rounds} rounds of {STEPS} steps of {BATCH}; "
            f"memory: the most in {KEPT} steps, each side in its own process",
            "columns": COLUMNS,
            "rows": table,
        }
        options.output.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
