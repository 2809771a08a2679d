"""The processes of a run: who trains, who holds embedding rows, and the channels between them.

A single process is a group of one, so that callers need not ask how many there are. Several are started by
``torchrun --nproc-per-node=N -m recpipe ...``; they talk through torch.distributed: arrays in host memory and
tensors on a CPU by gloo, tensors on a GPU by NCCL.

Why ranks cannot wait for each other in a circle, though several threads use channels at a time:

* Each channel has a group of its own and is used by one thread at a time, in the same order on all ranks.
  A gloo group has its own connections, and its messages block only the thread that sends them.
* NCCL's kernels hold parts of a GPU while they wait for other ranks, so that kernels of two communicators
  that start in different orders on two ranks can block each other. Therefore only the training thread calls
  NCCL (or autograd's thread, while the training thread waits for it). What it calls is the same on all ranks
  in the same order, over all communicators, TorchRec's included. Threads that read batches or move cold rows
  send arrays alone, and these never pass through a GPU.
* A thread waits for what was begun before: the store's thread for copies of the step that asked for them, the
  training thread for the store's answer to an earlier request. So the earliest unfinished call has nothing
  left to wait for but the same call on the other ranks.
"""

from __future__ import annotations

import atexit
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
from annotated_types import Interval
from numpy.typing import NDArray
from pydantic import BeforeValidator

from recpipe.errors import UserError

Array = NDArray[Any]


@dataclass(frozen=True)
class Emulation:
    """A slower network or device than this machine's (``tiers.emulate``): a delay added to every message
    between ranks and, in a run of one rank, to every request to its cold store."""

    latency_us: Annotated[
        float, Interval(ge=0, le=1e9), BeforeValidator(lambda value: 0.0 if value is None else value)
    ] = 0.0
    """null: no latency is added."""
    gbit_per_s: Annotated[float, Interval(ge=1e-6)] | None = None
    """null: bandwidth is not limited."""

    @property
    def active(self) -> bool:
        """Whether any delay is added."""
        return self.latency_us > 0 or self.gbit_per_s is not None

    def seconds(self, size: int) -> float:
        """Seconds that a message or request of ``size`` bytes takes in addition."""
        return self.latency_us * 1e-6 + (size * 8e-9 / self.gbit_per_s if self.gbit_per_s else 0.0)


@dataclass
class Traffic:
    """Payload bytes that this rank sent to and received from other ranks through a channel."""

    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Ranks:
    """The run's processes. ``trainers`` and ``holders`` are global ranks, ascending; a rank can be both."""

    rank: int = 0
    world: int = 1
    trainers: tuple[int, ...] = (0,)
    holders: tuple[int, ...] = (0,)
    emulation: Emulation = field(default_factory=Emulation)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device that this rank trains on. With a GPU, channels can also send tensors on it."""
    channels: list[Channel] = field(default_factory=list, compare=False, repr=False)
    """All channels that were made, for the report."""
    groups: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The process group of TorchRec's collectives, by backend, once it is made. One, as NCCL takes memory of
    a GPU for each."""

    @property
    def trains(self) -> bool:
        """Whether this rank trains."""
        return self.rank in self.trainers

    @property
    def holds(self) -> bool:
        """Whether this rank holds embedding rows."""
        return self.rank in self.holders

    @property
    def trainer(self) -> int:
        """This rank's number among the trainers; -1 when it does not train."""
        return self.trainers.index(self.rank) if self.trains else -1

    @property
    def part(self) -> tuple[int, int] | None:
        """The part of every batch that this rank trains (see ``part_of``); None: all of it."""
        return (self.trainer, len(self.trainers)) if len(self.trainers) > 1 else None

    @contextmanager
    def closing(self, close: Callable[[], None]) -> Iterator[None]:
        """``close`` is called after the block, after an error in it only with one rank. Closing may need all
        ranks, but the others do not know of the error: this process ends, and they notice that."""
        try:
            yield
        except BaseException:
            if self.world == 1:
                close()
            raise
        else:
            close()

    def channel(self, members: Sequence[int] | None = None) -> Channel:
        """Make a new channel between ``members`` (None: all ranks).

        Every rank of the run must call this in the same order, whether it is a member or not. Different
        channels can be used from different threads at the same time, but tensors on a GPU are sent from the
        training thread alone (see the module's docstring).
        """
        chosen = tuple(range(self.world)) if members is None else tuple(members)
        group = None
        if self.world > 1:
            group = dist.new_group(list(chosen), backend=backends(self.device))
        made = Channel(chosen, self.rank, group, self.emulation)
        self.channels.append(made)
        return made

    def traffic(self) -> Traffic:
        """What this rank sent and received through all its channels."""
        total = Traffic()
        for channel in self.channels:
            for part in fields(Traffic):
                setattr(total, part.name, getattr(total, part.name) + getattr(channel.traffic, part.name))
        return total

    def shares(self, low: int, high: int) -> list[slice]:
        """Cut [low, high) into one part for each trainer, in their order; sizes differ by at most 1."""
        count = len(self.trainers)
        return [part_of(low, high, (index, count)) for index in range(count)]


def backends(device: torch.device) -> str:
    """torch.distributed's backends for ranks that train on ``device``. A communicator of NCCL is made when
    the first tensor on a GPU is sent, so that channels for arrays alone have none."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def part_of(low: int, high: int, part: tuple[int, int]) -> slice:
    """Cut [low, high) into ``count`` consecutive parts and return the one with ``index``. Sizes differ by at
    most 1, larger parts come first, and some are empty if there are more parts than samples."""
    index, count = part
    size, extra = divmod(high - low, count)
    start = low + index * size + min(index, extra)
    return slice(start, start + size + (index < extra))


class PeerLost(UserError):
    """Another rank has died or left. That rank's own message, if it could print one, says why."""


class Channel:
    """Collectives between its members, all of which must call the same methods in the same order."""

    def __init__(
        self,
        members: tuple[int, ...],
        rank: int,
        group: Any,
        emulation: Emulation,
    ) -> None:
        self.members, self.size = members, len(members)
        self.index = members.index(rank) if rank in members else -1
        """This rank's position among the members."""
        self.traffic = Traffic()
        self._group = group
        self._emulation = emulation

    def exchange(self, parts: Sequence[Array], sizes: Sequence[int] | None = None) -> list[Array]:
        """All to all: ``parts[i]`` goes to member i; returns what each member sent here, in their order.

        All parts of all members have the same dtype and the same shape beyond the first axis. ``sizes`` are
        the lengths of the parts that will arrive; None: an additional message tells them first.
        """
        assert len(parts) == self.size
        if self.size == 1:
            return [parts[0]]
        if sizes is None:
            mine = [np.array([len(part)], np.int64) for part in parts]
            sizes = [int(n[0]) for n in self._all_to_all(mine, [1] * self.size)]
        return self._all_to_all(parts, sizes)

    def _all_to_all(self, parts: Sequence[Array], sizes: Sequence[int]) -> list[Array]:
        start = time.perf_counter()
        row = parts[0].shape[1:]
        width = int(np.prod(row, dtype=np.int64))
        out = torch.from_numpy(np.concatenate(parts).reshape(-1))
        into = torch.empty(sum(sizes) * width, dtype=out.dtype)
        with self._peers():
            dist.all_to_all_single(
                into, out, [n * width for n in sizes], [len(part) * width for part in parts], self._group
            )
        received = into.numpy().reshape(-1, *row)
        own = parts[self.index].nbytes
        self._account(out.nbytes - own, into.nbytes - own, start)
        ends = np.cumsum(sizes)
        return [received[end - size : end] for size, end in zip(sizes, ends.tolist(), strict=True)]

    def ordered_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of the members' ``values`` (float [n], on a CPU or on this rank's GPU, on all members alike),
        added in the members' order, so that every member gets the same bits. Only the training thread calls
        it for a GPU's."""
        count = values.numel()
        if self.size == 1 or not count:
            return values
        start = time.perf_counter()
        part = -(-count // self.size)
        padded = values.new_zeros(part * self.size)
        padded[:count] = values
        pieces = torch.empty_like(padded)
        with self._peers():
            dist.all_to_all_single(pieces, padded, group=self._group)
        total = pieces[:part].clone()
        for piece in pieces.view(self.size, part)[1:]:
            total += piece
        gathered = [torch.empty_like(total) for _ in range(self.size)]
        with self._peers():
            dist.all_gather(gathered, total, group=self._group)
        moved = 2 * total.nbytes * (self.size - 1)
        self._account(moved, moved, start)
        return torch.cat(gathered)[:count]

    def gather(self, part: Array) -> list[Array]:
        """Every member's ``part`` (any length, one dtype and row shape), in their order."""
        return self.exchange([part] * self.size)

    def barrier(self) -> None:
        """Return once every member is here."""
        self.gather(np.zeros(1, np.int64))

    @contextmanager
    def _peers(self) -> Iterator[None]:
        """Turn the backend's error for a broken connection into ``PeerLost``."""
        try:
            yield
        except RuntimeError as fault:
            reason = str(fault).splitlines()[0].rpartition("] ")[2][:120]
            raise PeerLost(
                f"lost the connection to another rank ({reason}): that rank's own message says why; "
                "torchrun --max-restarts=N starts the run again from its newest checkpoint"
            ) from fault

    def _account(self, sent: int, received: int, start: float) -> None:
        traffic = self.traffic
        traffic.messages += 1
        traffic.bytes_sent += sent
        traffic.bytes_received += received
        if self._emulation.active and sent + received:
            time.sleep(self._emulation.seconds(max(sent, received)))
        traffic.seconds += time.perf_counter() - start


def join_group(device: torch.device, ranks: Ranks) -> dist.ProcessGroup:
    """The run's process group for TorchRec's collectives alone, also if there is only one process."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backends(device), store=store, rank=0, world_size=1)
        if device.type == "cuda":
            atexit.register(_end_group)
    if backend not in ranks.groups:
        ranks.groups[backend] = dist.new_group(list(range(ranks.world)), backend=backend)
    group: dist.ProcessGroup = ranks.groups[backend]
    return group


def _end_group() -> None:
    """End a single process's group at its exit: a model that a caller keeps may use it until then, and NCCL
    warns of a group that nobody has ended."""
    gc.collect()  # sharded modules have reference cycles, and are not to outlive their group
    if dist.is_initialized():
        dist.destroy_process_group()
