"""The suite's run in several processes, as torchrun would start them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import start_processes  # type: ignore[attr-defined]

from recpipe.data.select import join
from recpipe.testing.runs import SuiteRecipe, Trained, read_back, train_recipe
from recpipe.testing.watch import Record, Step

PRELOAD = ["recpipe.run"]
"""Modules that the processes have imported from the start."""


def train_ranks(world: int, recipe: SuiteRecipe, folder: Path, *more: str) -> Trained:
    """Train ``recipe`` in ``world`` processes of one thread each. Returns all ranks' steps together and rank
    0's report.

    If a process fails, raises ``torch.multiprocessing``'s error with that process's traceback.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    arguments = ({**os.environ, **environment_of(world, store.port)}, recipe, folder, more)
    start_processes(  # type: ignore[no-untyped-call]
        _train, arguments, nprocs=world, start_method="forkserver"
    )
    records = [pickle.loads(_file(folder, rank).read_bytes()) for rank in range(world)]
    return read_back(folder, together(records))


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
    """The run of all ranks: each step with the shares of all and the sum of their losses."""
    steps = [_together(parts) for parts in zip(*(record.steps for record in records), strict=True)]
    return Record(steps, records[0].whole, records[0].first)


def _together(parts: Sequence[Step]) -> Step:
    first = parts[0]
    return Step(
        first.epoch,
        join([part.batch for part in parts]),
        np.concatenate([part.content for part in parts]),
        np.concatenate([part.outside for part in parts]),
        first.bounds,
        first.moves,
        sum(part.loss for part in parts),
    )


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pickle"


def _train(
    rank: int, environment: Mapping[str, str], recipe: SuiteRecipe, folder: Path, more: Sequence[str]
) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    run = train_recipe(recipe, folder, *more)
    _file(folder, rank).write_bytes(pickle.dumps(run.record))
