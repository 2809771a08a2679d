"""Runs of several processes: ``torchrun --nproc-per-node=N -m recpipe ...`` starts them, this module joins
them.

Each process composes the same recipe. They agree on one output directory before Hydra makes it, then
form a torch.distributed group. Only rank 0 prints and writes reports.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import MinLen
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from recpipe.common.validation import Count
from recpipe.distributed.ranks import Emulation, Ranks, backends
from recpipe.errors import UserError

JOINING = timedelta(minutes=5)
"""How long a process waits for the others to start."""
SILENCE = timedelta(hours=1)
"""How long a rank waits for a message before it gives up; a peer that dies is noticed at once."""


@dataclass(frozen=True)
class ProcessRank:
    """What torchrun told this process; the default is a single process."""

    rank: int
    world: int
    local_rank: int
    attempt: int
    """How often torchrun has restarted the run."""

    @classmethod
    def current(cls) -> ProcessRank:
        """Read from the environment that torchrun sets."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
        defaults = (0, 1, 0, 0)
        return cls(*(int(os.environ.get(n, d)) for n, d in zip(names, defaults, strict=True)))


@dataclass(frozen=True)
class Topology:
    """``topology``: which ranks hold embedding rows and which train.

    null, null: every rank does both. With ``embedding_ranks`` alone, the other ranks train.
    """

    embedding_ranks: Annotated[list[Count], MinLen(1)] | None = None
    trainers: Annotated[list[Count], MinLen(1)] | None = None

    def roles(self, world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The trainers and the holders among ranks 0 .. world - 1, both ascending."""
        everyone = range(world)
        holders = set(everyone if self.embedding_ranks is None else self.embedding_ranks)
        others = set(everyone) - holders
        trainers = set(self.trainers) if self.trainers is not None else (others or set(everyone))
        for name, ranks in (("embedding_ranks", holders), ("trainers", trainers)):
            if not ranks or not ranks <= set(everyone):
                raise UserError(
                    f"topology.{name}={sorted(ranks)}: this run has ranks 0 to {world - 1}; name some of "
                    "them, or start more: torchrun --nproc-per-node=N -m recpipe ..."
                )
        idle = set(everyone) - holders - trainers
        if idle:
            raise UserError(f"topology: rank {min(idle)} neither trains nor holds rows; name it in one list")
        if 0 not in trainers:
            raise UserError(
                "topology: rank 0 reports and must train; name other ranks in topology.embedding_ranks"
            )
        return tuple(sorted(trainers)), tuple(sorted(holders))


@cache
def _store() -> TCPStore:
    """The key-value store that torchrun's agent keeps for its processes; it survives restarts."""
    process = ProcessRank.current()
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        process.world,
        is_master=process.rank == 0 and not agent_hosts,
        timeout=JOINING,
        wait_for_workers=False,
    )


_run = 0
"""How many runs this process has begun; it is the same on all ranks."""


def begin_run() -> None:
    """Begin the next run: messages between the ranks belong to it from now on."""
    global _run
    _run += 1


def run_store() -> Store:
    """The same for this run alone, on all of its ranks."""
    # Without the prefix a rank may read the gloo address of a group that has ended, from an earlier run
    # of its process, or of a process that is dead.
    return PrefixStore(f"recpipe_attempt_{ProcessRank.current().attempt}_run_{_run}", _store())


def agreed_arguments(argv: Sequence[str]) -> list[str]:
    """``argv`` with one output directory for all ranks; all ranks but rank 0 stop printing."""
    if any(word in ("-m", "--multirun") for word in argv):
        raise UserError(
            "a sweep (-m) cannot run under torchrun: each of its processes would sweep. Start it without: "
            "python -m recpipe -m ... hydra/launcher=torchrun hydra.launcher.nproc_per_node=N starts one "
            "torchrun for each job"
        )
    words = list(argv)
    if not any(word.startswith("hydra.run.dir=") for word in words):
        mine = datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S")
        agreed = _store().compare_set("recpipe_run_dir", "", mine).decode()
        words.append(f"hydra.run.dir={agreed}")
    if ProcessRank.current().rank:
        words.append("hydra.output_subdir=null")
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    return words


def first_to_say(message: str) -> bool:
    """Whether no other rank has printed ``message`` in this attempt, so that a user's error is printed
    once."""
    digest = hashlib.blake2b(message.encode(), digest_size=16).hexdigest()
    return bool(run_store().add(f"said_{digest}", 1) == 1)


def agreed_path(path: Path | None) -> Path | None:
    """Rank 0's ``path``, on every rank."""
    if ProcessRank.current().world == 1:
        return path
    store = run_store()
    if ProcessRank.current().rank == 0:
        store.set("resume", str(path or ""))
    chosen = store.get("resume").decode()
    return Path(chosen) if chosen else None


def require_same_data(fingerprint: str) -> None:
    """``UserError`` unless all ranks read the data of this ``fingerprint``.

    With different files a rank would train shares of different batches, and might run out of them early.
    """
    if ProcessRank.current().world == 1:
        return
    told = run_store().compare_set("data", "", fingerprint).decode()
    if told != fingerprint:
        raise UserError(
            "the ranks do not read the same data: data.path must name the same files on every machine; "
            "copy them, or put them where all machines see them"
        )


@contextmanager
def joined(topology: Topology, emulation: Emulation, device: torch.device) -> Iterator[Ranks]:
    """The run's processes as ``Ranks``. The group ends with the block, but not after an error.

    After an error this process must end without waiting for the other ranks, so that they notice.
    """
    process = ProcessRank.current()
    trainers, holders = topology.roles(process.world)
    if process.world == 1:
        yield Ranks(emulation=emulation)
        return
    if sys.platform == "linux" and int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == process.world:
        # All ranks are on this machine, so no other machine needs to reach them.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if dist.is_initialized():
        raise UserError(
            "this process is in a torch.distributed group already, and recpipe makes its own: an earlier run "
            "here ended with an error, after which no other can follow, or your code has made one; start the "
            "processes anew, or call torch.distributed.destroy_process_group() first"
        )
    dist.init_process_group(
        backends(device),
        store=run_store(),
        rank=process.rank,
        world_size=process.world,
        timeout=SILENCE,
    )
    yield Ranks(process.rank, process.world, trainers, holders, emulation, device)
    dist.barrier()
    dist.destroy_process_group()
    from recpipe.private_api import leave  # imported here: by now the run has imported TorchRec

    leave()
