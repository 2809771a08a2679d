"""Every model's training step under recpipe beside a plain loop over the same module: time and memory.

    python benchmarks/models.py [--models deepfm din ...] [--threads 2] [--rounds 8] [--output FILE.json]

The loop (``any_model.ByHand``) has TorchRec's plain collections, row-wise Adagrad for the tables, fused by
FBGEMM where TorchRec has that on a CPU (not in an ``EmbeddingCollection``: there it goes over whole tables),
the same module and dense optimizer, and takes its batches from a list. recpipe trains a copy of the module on
the same batches through ``recpipe.train`` with all rows in memory, with modules as they are (``plain``) and
with what it compiles (``auto``). Each has a process of its own, that of recpipe with the allocator that
``python -m recpipe`` sets up; they take turns, of so many steps as take the loop a quarter of a second, 4 at
least. Tables have 20,000 rows, and those of models with histories
1,000,000 as well, since the loop's step depends on that. Printed are, of each, the ratio of samples per
second by wall and by CPU time (of all threads), round by round: median (lowest..highest).

Memory is apart: each side trains in another process, twice. What it loads, compiles and starts once is there
after the first time, with small tables; what counts is how much higher the most resident memory of the
second time is than before it, tables included. Every process begins as a copy of one that has imported
everything. With ``--output`` a data file for ``docs/tables.py``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import multiprocessing
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
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
from recpipe.backend.allocator import bound_kernel_caches, tune_allocator
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

ROWS, MANY, DENSE, HISTORY, BATCH, WARM = 20_000, 1_000_000, 13, 20, 1024, 2
KEPT = 40
"""Batches, which are trained again and again."""
ROUND_SECONDS, LEAST_STEPS = 0.25, 4
"""How long the loop's part of a round takes at least, and of how many steps each part is."""
FEW_ROWS, MEMORY_STEPS = 1_000, 6
"""Of the tables before memory is measured, and how many steps it is measured in."""
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
    **{"rmc": "RMC", "ncf": "NCF", "mt_wide_deep": "MT-WnD"},
}
"""Every model, by the title of its page, those of recpipe_deeprecsys last."""
WORDS = {
    "two_tower": ("model.candidate=[c0,c1,c2,c3]", "model.retrieval=false"),
    "ncf": ("model.multiplied=[c0,c1]",),
}


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
    """Seconds of a step."""
    cpu: float
    """Of all threads."""


class Costs:
    """Measures from ``start`` on."""

    def start(self) -> None:
        self.wall, self.cpu = perf_counter(), process_time()

    def of(self, steps: int) -> Cost:
        return Cost((perf_counter() - self.wall) / steps, (process_time() - self.cpu) / steps)


class InTurn(L.Callback):
    """After every ``steps`` of the run, some of the loop."""

    loop: Connection
    steps: int
    rounds: list[tuple[Cost, Cost]]
    """Of the run and of the loop."""

    def __init__(self) -> None:
        self.done, self.costs = 0, Costs()
        InTurn.rounds = []

    def on_train_start(self, *_: Any) -> None:
        self.costs.start()

    def on_train_batch_end(self, *_: Any) -> None:
        self.done += 1
        if self.done % self.steps == 0:
            own = self.costs.of(self.steps)
            self.loop.send(self.steps)
            InTurn.rounds.append((own, self.loop.recv()))
            self.costs.start()


def loop(runs: Connection, name: str, rows: int, threads: int) -> None:
    """In a process of its own: so many steps of the loop as ``runs`` asks for, until it sends 0."""
    begin(threads, LOOP)
    schema = schema_of(name, rows)
    by_hand, costs = ByHand(model_of(name, schema), batches(schema)), Costs()
    # A step that goes over whole tables takes as long as many others, and always as long.
    most = 1 if rows == MANY else KEPT
    while asked := runs.recv():
        steps = min(asked, most)
        costs.start()
        by_hand.train(steps)
        runs.send(costs.of(steps))


def run(model: nn.Module, given: list[Batch], backend: str, steps: int, *words: str) -> None:
    """Train so many steps under recpipe, in one epoch: the loop's has no end."""
    given = list(itertools.islice(itertools.cycle(given), steps))
    own = (
        *("trainer.progress=false", "trainer.logger=null", "optim.tables.lr=0.02", *words),
        *(f"trainer.backend={backend}", f"trainer.max_steps={steps}"),
    )
    recpipe.train(model, given, *own, quiet=True).close()


# -- memory ------------------------------------------------------------------------------------------


def most_memory(told: Connection, name: str, rows: int, side: str, threads: int) -> None:
    """Tell the most MB that a side's tables, model and steps take."""
    begin(threads, side)
    _train(name, FEW_ROWS, side)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is given back
    resting = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most resident memory counts anew
    _train(name, rows, side)
    told.send(round((_resident("VmHWM") - resting) / 1024, 1))


def _train(name: str, rows: int, side: str) -> None:
    schema = schema_of(name, rows)
    given, model = batches(schema), model_of(name, schema)
    if side == LOOP:
        ByHand(model, given).train(MEMORY_STEPS)
    else:
        run(model, given, side, MEMORY_STEPS)


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


LOOP, RUN = "loop", "run"
"""The side that is no back end, and any that is one."""


# -- time --------------------------------------------------------------------------------------------


def measure(told: Connection, beside: Connection, name: str, rows: int, options: Any) -> None:
    """Tell the row of the table for each back end, but for memory; ``beside``: the loop."""
    begin(options.threads, RUN)
    InTurn.loop = beside
    schema = schema_of(name, rows)
    given, table = batches(schema), []
    for _ in range(2):  # the first one warms it up
        beside.send(LEAST_STEPS)
        step = beside.recv().wall
    InTurn.steps = max(LEAST_STEPS, min(KEPT, round(ROUND_SECONDS / step)))
    for backend in options.backends:
        callback = f"trainer.callbacks=[{{_target_: {InTurn.__module__}.InTurn}}]"
        run(model_of(name, schema), given, backend, (options.rounds + WARM) * InTurn.steps, callback)
        found = InTurn.rounds[WARM:]
        samples = BATCH / median(theirs.wall for _, theirs in found)
        table.append([TITLES[name], rows, backend, round(samples), speed(found, "wall"), speed(found, "cpu")])
    beside.send(0)
    told.send(table)


def begin(threads: int, side: str) -> None:
    """What a process does first."""
    if side != LOOP:
        tune_allocator()
        bound_kernel_caches()
    torch.set_num_threads(threads)
    quiet_libraries()


def apart(work: Any, *arguments: Any) -> tuple[Any, Connection]:
    """A process of its own that does ``work``, and the connection to it."""
    context = multiprocessing.get_context("forkserver")
    mine, its = context.Pipe()
    process = context.Process(target=work, args=(its, *arguments))
    process.start()
    its.close()  # so that its end is noticed
    return process, mine


def told_by(work: Any, *arguments: Any) -> Any:
    """What ``work`` tells, in a process of its own."""
    process, connection = apart(work, *arguments)
    found = connection.recv()
    process.join()
    return found


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
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__"])
    print(f"{Host.current()}\n{options.threads} threads\n")
    table = []
    for name in options.models:
        for rows in options.rows or ([ROWS, MANY] if name in COMPARING else [ROWS]):
            process, beside = apart(loop, name, rows, options.threads)
            timed = told_by(measure, beside, name, rows, options)
            process.join()
            sides = (*options.backends, LOOP)
            *own, of_loop = (told_by(most_memory, name, rows, side, options.threads) for side in sides)
            for row, memory in zip(timed, own, strict=True):
                table.append([*row, memory, of_loop])
                print(*table[-1], flush=True)
    if options.output:
        words = f"--threads {options.threads} --rounds {options.rounds}"
        told = {
            "title": "A training step of each model beside a plain loop over the same module",
            "command": f"python benchmarks/models.py {words}",
            "machine": str(Host.current()),
            "commit": options.commit,
            "date": date.today().isoformat(),
            "kept": f"medians (lowest..highest) of {options.rounds} rounds of {LEAST_STEPS} and more steps "
            f"of {BATCH}, a quarter of a second of the loop; "
            f"memory: the most in {MEMORY_STEPS} steps, each side in its own process",
            "columns": COLUMNS,
            "rows": table,
        }
        options.output.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
