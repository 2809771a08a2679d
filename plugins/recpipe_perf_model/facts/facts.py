"""What is known of a run before it: the statistics of its ids, its sizes, and where its rows are to be.

``collect.collect`` reads a part of the training data once. What it finds holds for every budget and store, so
that many recipes can be judged by one reading.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.distributed.ranks import Emulation
from recpipe.tables.tiers.policies import POLICIES
from recpipe_perf_model.facts.group_facts import GroupFacts, Misses
from recpipe_perf_model.facts.replay import Kept, Make, Replayed, replay
from recpipe_perf_model.statement import Moved


@dataclass(frozen=True)
class Cached:
    """What a cache does in an average batch."""

    moved: tuple[Moved, ...]
    """For each group."""
    popular: float
    """The share of samples that need only rows that have a slot."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run to be predicted."""

    batch_size: int
    epoch_samples: int
    steps: int
    """Optimizer steps that the run is to take."""
    groups: tuple[GroupFacts, ...]
    batch_bytes: int
    """Bytes of a batch's tensors."""
    share: float = 1.0
    """The share of all rows that ``tiers.resident_bytes`` holds."""
    store: str = "host"
    """``host``, ``ssd``, or ``holders``: on the ranks that hold rows."""
    prefetch: bool = True
    trainers: int = 1
    emulation: Emulation = field(default_factory=Emulation)
    """What is added to each request to the store (or each message between ranks)."""

    late: bool = True
    """Whether figures are of the later half of the run; else of all its steps."""
    seed: int = 0
    """The recipe's."""
    replays: dict[Hashable, Replayed] = field(default_factory=dict, compare=False, repr=False)
    """What policies did with these groups' lookups, whatever else changes."""

    @property
    def budget(self) -> int:
        """Bytes for resident rows."""
        return int(self.share * sum(group.rows * group.record_bytes for group in self.groups))

    @property
    def changed(self) -> tuple[GroupFacts, ...]:
        """The groups whose rows are trained."""
        return tuple(group for group in self.groups if not group.frozen)

    def bags(self, group: GroupFacts) -> float:
        """The bags of a batch in a group; of rows that are not pooled, each lookup is one."""
        return float(self.batch_size * group.features) if group.pooled else group.lookups

    def at(self, **changes: Any) -> Facts:
        """The same data under another budget, store, batch of steps ..."""
        if "groups" in changes:
            changes.setdefault("replays", {})
        return replace(self, **changes)

    def from_empty(self, steps: int) -> Facts:
        """A run of so many steps, with the average of them all: caches begin empty."""
        groups = tuple(group.from_empty(steps) for group in self.groups)
        return replace(self, steps=steps, groups=groups, late=False)

    @property
    def kept(self) -> Sequence[Kept]:
        """Each group's lookups in the batches that were read; none if they were too many to be kept."""
        found = [group.kept for group in self.groups if group.kept is not None and group.kept.batches]
        return found if len(found) == len(self.groups) else ()

    def cached(self, policy: str, share: float | None = None) -> tuple[Moved, ...]:
        """What a cache moves, for each group: nocache, lru, lfu or hot (a fixed set of the rows that were
        looked up most often), in the later half of the run or in all of it. ``share``: of the rows that have
        a slot, if it is not all that the budget holds."""
        if policy in POLICIES:
            return self.replayed(policy, POLICIES[policy], policy, share).moved
        return self._by_curves(policy, self.share if share is None else share)

    def replayed(self, name: Hashable, make: Make, like: str, share: float | None = None) -> Cached:
        """What any policy moves: ``make`` makes it for a group, and it is asked batch by batch about all
        lookups that were read. If these were too many to be kept it is taken to miss what the policy ``like``
        (as for ``cached``) misses. ``name``: equal for policies that decide alike."""
        share = self.share if share is None else share
        kept = self.kept
        if not kept:
            return Cached(self._by_curves(like, share), self.popular_samples(share))
        key = (name, share, self.prefetch)
        if key not in self.replays:
            slots = [int(share * group.rows) for group in self.groups]
            self.replays[key] = replay(kept, make, slots, self.prefetch)
        return self._on_average(self.replays[key], like, share)

    def _on_average(self, run: Replayed, like: str, share: float) -> Cached:
        """Over the run's later half, or all of it. What comes after the batches that were read is taken to be
        as their later half; slots that are still empty then fill as more rows are seen."""
        known = len(run.cold)
        numbers, half = np.arange(known), known // 2
        if self.steps <= known:
            first = self.steps // 2 if self.late else 0
            counted = (numbers >= first) & (numbers < self.steps)
            return Cached(*run.mean(counted.astype(np.float64)))
        early = 0.0 if self.late else 1.0
        weights = np.where(numbers < half, early, (self.steps - early * half) / (known - half))
        moved, popular = run.mean(weights)
        if like == "hot":
            return Cached(moved, popular)
        return Cached(
            tuple(
                each if full else self._filling(group, each, like, share)
                for group, each, full in zip(self.groups, moved, run.filled, strict=True)
            ),
            popular,
        )

    def _filling(self, group: GroupFacts, moved: Moved, like: str, share: float) -> Moved:
        """What a cache that was not full moves, in a run so long that it fills."""
        rows = moved.placed + moved.slab
        misses = Misses(moved.missed, rows, rows - moved.read)
        return group.moved(like, misses, share, self.full(group, share), self.prefetch)

    def full(self, group: GroupFacts, share: float) -> float:
        """The share of the batches that find all slots taken, if a ``share`` of the rows have one."""
        full = max(0.0, 1 - group.fills(share) / max(1, self.steps))
        return min(1.0, 2 * full) if self.late else full

    def _by_curves(self, policy: str, share: float) -> tuple[Moved, ...]:
        found = []
        for group in self.groups:
            full = 1.0 if policy == "hot" else self.full(group, share)  # other rows never get a slot
            found.append(group.moved(policy, group.misses(policy, share), share, full, self.prefetch))
        return tuple(found)

    def counted(self, sample: float) -> list[NDArray[np.int32]] | None:
        """For each group how often each row is looked up (numbered as ``replayed`` policies' rows are) in a
        ``sample`` of the epoch's batches: those that ``load_profile`` would choose if all of the epoch was
        read. None if lookups were too many to be kept."""
        kept = self.kept
        if not kept:
            return None
        known, epoch = len(kept[0].batches), -(-self.epoch_samples // self.batch_size)
        among = known if known >= epoch else known // 2  # the later half is for judging
        wanted = max(1, min(ceil(sample * epoch), among))
        chosen = np.random.default_rng(self.seed).choice(among, wanted, replace=False).tolist()
        return [each.counts(chosen) for each in kept]

    def seen(self, part: float) -> float:
        """The share of all rows that are looked up in such a ``part`` of an epoch."""
        batches = max(1.0, part * self.epoch_samples / self.batch_size)
        rows = sum(group.rows for group in self.groups)
        return min(1.0, sum(group.window(batches) for group in self.groups) / rows)

    def popular_samples(self, share: float) -> float:
        """The share of samples all of whose rows are among the most popular ``share`` of each group's rows,
        as earlier batches tell."""
        samples = self.batch_size * min(group.stretch.batches for group in self.groups)
        cold = np.zeros(samples, bool)
        for group in self.groups:
            stretch = group.stretch
            missed = stretch.samples[stretch.ranks >= share]
            cold[missed[missed < samples]] = True
        return 1 - float(cold.mean()) if samples else 0.0
