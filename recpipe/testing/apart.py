"""The suite's runs in processes of their own: what a plugin changes in one reaches no other run.

The processes are forked from a server that has imported recpipe and no plugin.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import (  # type: ignore[attr-defined]
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

import recpipe.testing.varied as varied
from recpipe.data.dataset import Dataset
from recpipe.data.given import GivenBatches
from recpipe.data.select import join
from recpipe.errors import UserError
from recpipe.plugin.errors import PluginFault
from recpipe.testing.judgements import same_samples
from recpipe.testing.process import Others, Process, adopt_orphans
from recpipe.testing.runs import LFU, SuiteRecipe, Trained, read_back, train_composed, watched
from recpipe.testing.watch import Record, Step, Watch

PRELOAD = ["recpipe.run", "recpipe.testing.preload"]
"""Modules that the processes have imported from the start."""


class RunError(Exception):
    """A run that did not come to its end: what its process said."""

    def __init__(self, said: str, refused: bool) -> None:
        super().__init__(said)
        self.refused = refused
        """Whether recpipe or the plugin refused the recipe, in a ``UserError``."""


@dataclass(frozen=True)
class _Job:
    """What the processes of a run are given."""

    composed: DictConfig
    varied: bool
    plugin: str
    beside: str
    dataset: bytes | None
    """A pickled ``Dataset`` for ``data=given``."""
    folder: Path


def train_apart(
    recipe: SuiteRecipe, folder: Path, *more: str, world: int = 1, dataset: Dataset | None = None
) -> Trained:
    """Train ``recipe`` with ``more`` words in ``world`` processes of one thread each. Returns all ranks'
    steps together and rank 0's report.

    ``RunError`` if a process fails, from ``torch.multiprocessing``'s error with that process's traceback.
    """
    composed = watched(recipe.composed(*more), folder)
    folder.mkdir(parents=True, exist_ok=True)
    given = None if dataset is None else pickle.dumps(dataset)
    job = _Job(composed, recipe.varied, recipe.plugin, recipe.beside, given, folder)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    environment, store = dict(os.environ), None
    if world > 1:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment |= environment_of(world, store.port)
    try:
        start_processes(  # type: ignore[no-untyped-call]
            _train, (environment, world, job), nprocs=world, start_method="forkserver"
        )
    except (ProcessRaisedException, ProcessExitedException) as fault:
        failed = sorted(folder.glob("*.fault"), key=lambda file: file.stat().st_mtime)
        if not failed:
            raise RunError(str(fault), False) from fault
        raise RunError(*pickle.loads(failed[0].read_bytes())) from fault
    ended = [pickle.loads(_file(folder, rank, "pickle").read_bytes()) for rank in range(world)]
    left = [
        f"{what} on rank {rank}" if rank else what for rank, (_, each) in enumerate(ended) for what in each
    ]
    return read_back(folder, together([record for record, _ in ended]), left)


_runs: dict[tuple[SuiteRecipe, int, str], Trained | RunError] = {}
_plans: dict[SuiteRecipe, tuple[str, ...]] = {}
"""What decides which rows are resident in tables that a recipe's plugins leave to it."""


def once(recipe: SuiteRecipe, folders: pytest.TempPathFactory, *more: str, world: int = 1) -> Trained:
    """``train_apart``, run once per recipe; later calls return the same result or raise the same error.

    Tables that a recipe's plugins leave to it are under LFU, so that batches miss rows.
    """
    key = (recipe, world, " ".join(more))
    if key not in _runs:
        # LFU is refused where a plugin owns the cache of all tables, or shards them.
        for plan in dict.fromkeys([_plans.get(recipe, LFU if recipe.plugin else ()), ()]):
            try:
                _runs[key] = train_apart(recipe, folders.mktemp("run"), *plan, *more, world=world)
                _plans[recipe] = plan
                break
            except RunError as fault:
                _runs[key] = fault
                if not (plan and fault.refused):
                    break
    found = _runs[key]
    if isinstance(found, RunError):
        raise found
    return found


def environment_of(world: int, port: int) -> dict[str, str]:
    """What torchrun tells all ranks of this machine, which meet at the store behind ``port``."""
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


def together(records: Sequence[Record]) -> Record:
    """The run of all ranks: each step with the shares of all. Every rank knows the whole batch's loss."""
    steps = []
    for first, *others in zip(*(record.steps for record in records), strict=True):
        parts = [first, *others]
        whole = Step(
            first.epoch,
            join([part.batch for part in parts]),
            np.concatenate([part.content for part in parts]),
            np.concatenate([part.outside for part in parts]),
            first.bounds,
            first.moves,
            first.loss,
            first.random,
        )
        steps.append(whole if others else first)
    changed: dict[str, int] = {}
    for rank, record in enumerate(records):
        changed |= {f"{what} on rank {rank}" if rank else what: n for what, n in record.changed.items()}
    return Record(steps, records[0].whole, records[0].first, changed)


def _file(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"rank-{rank}.{kind}"


def _train(rank: int, environment: Mapping[str, str], world: int, job: _Job) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        ended = _ended(job)
    except BaseException as fault:
        said = "; ".join([f"{type(fault).__name__}: {fault}", *getattr(fault, "__notes__", ())])
        # Whether the recipe was refused before anything was trained, and no plugin's part has failed.
        began = Watch.latest is not None and bool(Watch.latest.steps)
        refused = isinstance(fault, UserError) and not isinstance(fault, PluginFault) and not began
        _file(job.folder, rank, "fault").write_bytes(pickle.dumps((said, refused)))
        if isinstance(fault, SystemExit):  # of a plugin; a process that ends so would seem to have trained
            raise RuntimeError(said) from fault
        raise
    _file(job.folder, rank, "pickle").write_bytes(pickle.dumps(ended))
    if any("leaves" in what for what in ended[1]):  # an orderly end would wait for them
        os._exit(0)


def _ended(job: _Job) -> tuple[Record, list[str]]:
    """The steps of a run of ``job``, and what it leaves."""
    recipe = OmegaConf.to_container(job.composed)
    adopt_orphans()
    process, others = Process(), Others(job.composed, job.beside)
    Watch.process, Watch.others = process, others
    given: tuple[Any, ...] = (varied.data(), varied.model()) if job.varied else (None, None)
    if job.dataset is not None:
        given = (pickle.loads(job.dataset), given[1])
    record = train_composed(job.composed, job.folder, *given).record
    left = [*process.left(), *others.left()]
    if OmegaConf.to_container(job.composed) != recipe:
        left.append("changes the recipe's values")
    return record, left


_ONCE = (
    "data=given",
    "trainer.max_epochs=1",
    "trainer.max_steps=null",
    "trainer.eval_every=1.0",
    "trainer.checkpoint_every=null",
)


_REPLACED = ("data", "trainer.max_", "trainer.eval_every", "trainer.checkpoint_every")


_replays: dict[tuple[int, bool], tuple[Trained, Trained]] = {}
"""Replays by the id of the replayed run. The run is kept, so that no other object gets its id."""


def reference(mine: Trained, baseline: Trained, recipe: SuiteRecipe, first_alone: bool = False) -> Trained:
    """``baseline`` if it trained the same samples in each step (with ``first_alone``, in the first step).
    Otherwise a run of ``recipe``, which has no plugin, on the batches of ``mine``."""
    count = 1 if first_alone else None
    if same_samples(mine, baseline, count):
        return baseline
    key = (id(mine), first_alone)
    if key not in _replays:
        dataset, size = recipe.dataset(), int(recipe.composed().data.batch_size)
        held_out = list(dataset.batches("eval", size))
        trained = [step.batch for step in mine.record.steps[:count]]
        batches = GivenBatches(trained, held_out, schema=dataset.schema)
        kept = [word for word in recipe.words if not word.lstrip("+").startswith(_REPLACED)]
        again = SuiteRecipe((*kept, *_ONCE, f"data.batch_size={size}"))
        with tempfile.TemporaryDirectory(prefix="recpipe-") as folder:
            _replays[key] = mine, train_apart(again, Path(folder), dataset=batches)
    return _replays[key][1]
