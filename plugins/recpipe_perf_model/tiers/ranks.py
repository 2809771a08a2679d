"""Ranks side by side: the cores that each has, the messages between them, and what a share of a batch looks
up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from recpipe.distributed.ranks import Emulation
from recpipe.plugin.bags import RowIds
from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.facts.group_facts import GroupFacts
from recpipe_perf_model.kernels.moves import COLLECTIVE_FAMILY, Times
from recpipe_perf_model.machine import MachineProfile
from recpipe_perf_model.tiers.stored import Spent

ID = 8
"""Bytes of an id."""
SEEN = 4
"""Batches in which distinct rows of a trainer's share are counted."""


@dataclass(frozen=True)
class Side:
    """Ranks side by side."""

    count: int
    cores: float
    """Cores that each of them has."""
    network: Emulation = field(default_factory=Emulation)
    """What a message between two of them takes beyond this machine's own work for it."""
    apart: bool = False
    """Whether each has a machine of its own; else they share a disk."""

    @property
    def together(self) -> int:
        """How many of them wait for the same disk."""
        return 1 if self.apart else self.count


@dataclass(frozen=True)
class Messages:
    """The times of messages between all ranks; sizes are bytes that each rank gives."""

    times: Times
    side: Side

    def all_to_all(self, size: float) -> Spent:
        """Each rank sends each other an equal part."""
        return self.exchange("all_to_all", size)

    def ordered_sum(self, size: float) -> Spent:
        """``Channel.ordered_sum``: parts are sent to the rank that adds them up, and sums to all."""
        part = size / self.side.count
        return self.all_to_all(size) + self._spent("all_gather", part, part * (self.side.count - 1))

    def gathered(self, size: float) -> Spent:
        """``Channel.gather``: sizes, then all that each has, to each."""
        return self.all_to_all(ID * self.side.count) + self.all_to_all(size * self.side.count)

    def exchange(self, kind: str, size: float) -> Spent:
        """One of the collectives, of parts for each rank."""
        return self._spent(kind, size, size * (self.side.count - 1) / self.side.count)

    def beyond(self, times: float, size: float) -> float:
        """Seconds that a network adds to so many messages of ``size`` bytes together."""
        network = self.side.network
        return network.seconds(int(size)) + (times - 1) * network.seconds(0)

    def _spent(self, kind: str, size: float, sent: float) -> Spent:
        if self.side.count == 1:
            return Spent()
        at = {"bytes": size, "ranks": float(self.side.count)}
        elapsed = self.times.seconds(kind, at)
        busy = min(elapsed, self.times.seconds(f"{kind} busy", at))
        return Spent(busy, elapsed - busy + self.beyond(1, sent))


def added(spent: Iterable[Spent]) -> Spent:
    """Their sum."""
    return sum(spent, start=Spent())


def share_of_distinct(group: GroupFacts, trainers: int, batch_size: int, above: float = 0.0) -> float:
    """How many of a batch's distinct rows a trainer's share of its samples has, on average, as a share of
    them; ``above``: of the rows beyond the most popular ones, which are such a share of all."""
    stretch, size = group.stretch, max(1, batch_size)
    wanted = (stretch.samples < SEEN * size) & (stretch.ranks >= above)
    rows, samples = stretch.rows[wanted], stretch.samples[wanted]
    part = samples % size * trainers // size
    whole = _distinct(rows, samples // size)
    return _distinct(rows, samples // size * trainers + part) / trainers / whole if whole else 1 / trainers


def _distinct(rows: RowIds, among: NDArray[np.int64]) -> int:
    """How many different pairs there are."""
    return len(np.unique(among * (int(rows.max(initial=0)) + 1) + rows))


def busiest_part(facts: Facts) -> float:
    """The share of the lookups that the busiest rank has if tables are given, the largest first, to the rank
    that has least, and those with more than a rank's mean are cut into equal parts before. A group's lookups
    are taken as spread evenly over its tables."""
    ranks = facts.trainers
    work = [(group.lookups * group.dim / len(group.table_rows), group) for group in facts.groups]
    whole = [load for load, group in work for _ in group.table_rows]
    parts = [ranks if load * ranks > sum(whole) else 1 for load in whole]
    loads = [0.0] * ranks
    cut = (load / count for load, count in zip(whole, parts, strict=True) for _ in range(count))
    for load in sorted(cut, reverse=True):
        loads[loads.index(min(loads))] += load
    return max(loads) / max(sum(loads), 1e-12)


def measured_with(profile: MachineProfile, ranks: int) -> MachineProfile:
    """``profile`` with the messages between so many ranks alone, if there are any; else with all of them."""
    samples = profile.samples.get(COLLECTIVE_FAMILY, ())
    own = tuple(sample for sample in samples if sample.at.get("ranks") == ranks)
    return replace(profile, samples={**profile.samples, COLLECTIVE_FAMILY: own or samples})
