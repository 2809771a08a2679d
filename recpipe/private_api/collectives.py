"""Counts TorchRec's collectives during a run of several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from time import perf_counter
from typing import Any

import torch
import torch.distributed
from torchrec.distributed import comm, comm_ops, dist_data

from recpipe.common.versions import private


@dataclass
class Collective:
    """Calls of one kind of collective by TorchRec on this rank."""

    calls: int = 0
    bytes_sent: int = 0
    """Payload bytes sent to other ranks."""
    bytes_received: int = 0
    """Payload bytes received from other ranks."""
    wait_seconds: float = 0.0
    """How long this rank's Python waited for these calls."""


class _Timed(torch.distributed.Work):
    """A ``Work`` that measures ``wait``. It derives from ``Work`` because TorchRec checks the type."""

    def __init__(self, work: Any, into: Collective) -> None:
        super().__init__()
        self._work, self._into = work, into

    def wait(self, *arguments: Any) -> Any:
        start = perf_counter()
        try:
            return self._work.wait(*arguments)
        finally:
            self._into.wait_seconds += perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_signature = cache(signature)


class _Counting:
    """``torch.distributed`` as TorchRec's modules see it, counting what goes over the wire."""

    def __init__(self, counts: dict[str, Collective]) -> None:
        self.counts = counts

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.distributed, name)
        if name not in _PAYLOAD:
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            entry = self.counts.setdefault(name, Collective())
            entry.calls += 1
            group = named.get("group")
            world = torch.distributed.get_world_size(group)
            given = _signature(found).bind(*arguments, **named).arguments
            sent, received = _PAYLOAD[name](world, torch.distributed.get_rank(group), given)
            entry.bytes_sent += sent
            entry.bytes_received += received
            start = perf_counter()
            work = found(*arguments, **named)
            if work is not None:
                return _Timed(work, entry)
            entry.wait_seconds += perf_counter() - start
            return None

        return call


def _all_to_all(world: int, rank: int, given: Mapping[str, Any]) -> tuple[int, int]:
    def outward(tensor: torch.Tensor, splits: Sequence[int] | None) -> int:
        if not splits:
            return int(tensor.nbytes * (world - 1) // world)
        row = tensor.nbytes // max(1, tensor.shape[0])
        return int((sum(splits) - splits[rank]) * row)

    return (
        outward(given["input"], given.get("input_split_sizes")),
        outward(given["output"], given.get("output_split_sizes")),
    )


def _reduce_scatter(world: int, rank: int, given: Mapping[str, Any]) -> tuple[int, int]:
    received = int(given["output"].nbytes) * (world - 1)
    if "input_list" in given:
        return sum(int(part.nbytes) for i, part in enumerate(given["input_list"]) if i != rank), received
    return int(given["input"].nbytes * (world - 1) // world), received


def _all_gather(world: int, rank: int, given: Mapping[str, Any]) -> tuple[int, int]:
    size = int(given["tensor" if "tensor" in given else "input_tensor"].nbytes)
    return size * (world - 1), size * (world - 1)


_PAYLOAD = {
    "all_to_all_single": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather,
}


def count_collectives() -> dict[str, Collective]:
    """Count TorchRec's collectives in this process from now on, by name, until ``leave``."""
    counts: dict[str, Collective] = {}
    for module in (comm_ops, dist_data):
        private(module, "dist")
        module.dist = _Counting(counts)
    return counts


def leave() -> None:
    """Undo what a run of several ranks changes in TorchRec: stop counting its collectives, and forget the
    process groups that it keeps for sharding by hosts."""
    for module in (comm_ops, dist_data):
        module.dist = torch.distributed
    for name in ("_INTRA_PG", "_CROSS_PG"):
        private(comm, name)
        setattr(comm, name, None)
