"""For tests with processes of their own: how a spawned process joins its group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def joined(rank: int, world: int, meeting: str) -> Iterator[None]:
    """Inside, this process is ``rank`` of a gloo group of ``world`` that meets at the file ``meeting``."""
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def end_process() -> None:
    """The last act of a spawned process that had a DistributedDataParallel: one that outlives its process
    group can abort the process at an orderly exit."""
    os._exit(0)
