"""What is known of a run before it: the statistics of its ids, its sizes, and where its rows are to be.

``collect.collect`` reads a part of the training data once. What it finds holds for every budget and store, so
that many recipes can be judged by one reading.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.access.misses import SHARES, Curve
from recpipe.distributed.ranks import Emulation
from recpipe.plugin.bags import RowIds
from recpipe.tables.tiers.policies import POLICIES
from recpipe_perf_model.facts.replay import KeptLookups, Make, Replayed, replay
from recpipe_perf_model.statement import Moved

NEVER = np.float32(np.inf)
"""The rank of a row that was not looked up before."""


@dataclass(frozen=True)
class Misses:
    """What a cache misses in an average batch, once it is full."""

    lookups: float
    """Lookups of rows that are not resident."""
    rows: float
    """Distinct rows among them."""
    carried: float
    """Those of these rows that the batch before looked up too, so that its slab has them."""


@dataclass(frozen=True)
class Stretch:
    """All lookups of some consecutive batches in one group of tables, by sample, so that others can ask what
    is not counted here. [L] each."""

    batches: int
    samples: NDArray[np.int64]
    """The sample of each lookup, numbered over the stretch."""
    rows: RowIds
    ranks: NDArray[np.float32]
    """How popular the row was in earlier batches: the share of the group's rows that were looked up more
    often, or ``NEVER``. A hot set of a ``share`` of the rows has those with a rank below it."""


@dataclass(frozen=True)
class GroupFacts:
    """The lookups of one group of tables, on average over batches."""

    table_rows: tuple[int, ...]
    """Rows of each of its tables."""
    dim: int
    record_bytes: int
    """Bytes of a row's weights and optimizer state in device memory."""
    features: int
    pooled: bool
    width: int
    """float32 values of a record in the cold tier: weights, optimizer state and, where they are averaged, the
    average's."""
    lookups: float
    distinct: float
    repeated: float
    """Those of the distinct rows that the batch before looked up too."""
    curves: dict[str, Curve]
    """What lru, lfu and a hot set hit with each of ``SHARES``."""
    windows: NDArray[np.float64]
    """Distinct rows of 1, 2, 3 .. consecutive batches."""
    stretch: Stretch
    first: Mapping[str, Curve] = field(default_factory=dict)
    """What lru and lfu hit in as many batches before those of ``curves``, when they began empty."""
    kept: KeptLookups | None = None
    """All lookups that were read; None if they were more than are kept."""
    frozen: bool = False
    """Whether its rows never change: they are read, and neither updated nor written back."""

    def from_empty(self, steps: int) -> GroupFacts:
        """The same on average over the first ``steps`` batches, which caches begin empty."""
        curves = dict(self.curves)
        for name, first in self.first.items():
            curves[name] = self.curves[name].blended(first, min(1.0, first.batches / steps))
        return replace(self, curves=curves)

    @property
    def rows(self) -> int:
        """Rows of all its tables."""
        return sum(self.table_rows)

    def misses(self, policy: str, share: float) -> Misses:
        """What ``policy`` (nocache, lru, lfu or hot: the rows that were looked up most often before) misses
        if a ``share`` of the rows have slots."""
        if policy == "nocache" or share <= 0:
            return Misses(self.lookups, self.distinct, self.repeated)
        curve, at = self.curves[policy], np.log(max(share, SHARES[0]))
        figures = (
            1 - curve.hits / max(1.0, curve.lookups),
            1 - curve.hit_rows / max(1.0, curve.rows),
            curve.carried / max(1, curve.batches),
        )
        missed, rows, carried = (float(np.interp(at, np.log(SHARES), values)) for values in figures)
        return Misses(missed * self.lookups, rows * self.distinct, min(carried, rows * self.distinct))

    def moved(self, policy: str, misses: Misses, share: float, full: float, carries: bool) -> Moved:
        """The rows that a cache of a ``share`` of the rows moves; ``policy`` as in ``misses``, which are what
        it misses. ``full``: the share of the batches that find no slot empty.

        A row that is missed gets a slot while there are empty ones. Then each row that leaves was read
        before: as many are written as are read. LRU gives every row that it misses a slot. The others, in a
        stable state, let nearly all of them pass through the slab, from which the next batch takes those it
        needs again (``carries``).
        """
        if not misses.rows:
            return Moved()
        placed = 0.0 if policy == "nocache" else (1 - full) * misses.rows
        evicted = 0.0
        if policy == "lru":
            room = max(0.0, share * self.rows - (self.distinct - misses.rows))
            evicted = full * min(misses.rows, room)
            placed = min(placed, room) + evicted
        slab = misses.rows - placed
        part = slab / misses.rows
        carried = part * misses.carried if carries and policy != "lru" else 0.0
        return Moved(
            read=misses.rows - carried,
            evicted=evicted,
            returned=slab - carried,
            placed=placed,
            slab=slab,
            slab_lookups=part * misses.lookups,
            missed=misses.lookups,
        )

    def fills(self, share: float) -> float:
        """After how many batches so many slots have been filled, if each row that is looked up gets one."""
        slots, low, high = share * self.rows, 1.0, 2.0
        if share >= 1:
            return float("inf")
        while self.window(high) < slots and high < 2**40:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.window(middle) < slots else (low, middle)
        return high

    def window(self, batches: float) -> float:
        """Distinct rows of so many consecutive batches, on average; beyond half of what was read it grows as
        it did last."""
        known = len(self.windows)
        if known < 2 or batches <= known:
            return float(np.interp(batches, np.arange(1, known + 1), self.windows))
        growth = np.log(self.windows[-1] / self.windows[known // 2]) / np.log(known / (known // 2 + 1))
        return min(float(self.rows), float(self.windows[-1] * (batches / known) ** growth))


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
    def kept(self) -> Sequence[KeptLookups]:
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
        (as for ``cached``) misses. ``name``: equal for policies that decide alike.

        What comes after the batches that were read is taken to be as their later half; slots that are still
        empty then fill as more rows are seen."""
        share = self.share if share is None else share
        kept, key = self.kept, (name, share, self.prefetch)
        if not kept:
            return Cached(self._by_curves(like, share), self.popular_samples(share))
        if key not in self.replays:
            slots = [int(share * group.rows) for group in self.groups]
            self.replays[key] = replay(kept, make, slots, self.prefetch)
        run = self.replays[key]
        known = len(run.cold)
        numbers, half = np.arange(known), known // 2
        if self.steps <= known:
            first = self.steps // 2 if self.late else 0
            counted = (numbers >= first) & (numbers < self.steps)
            return Cached(*run.mean(counted.astype(np.float64)))
        early = 0.0 if self.late else 1.0
        each, popular = run.mean(
            np.where(numbers < half, early, (self.steps - early * half) / (known - half))
        )
        if like == "hot":
            return Cached(each, popular)
        found = []
        for group, moved, full in zip(self.groups, each, run.filled, strict=True):
            if not full:  # in a run so long it fills
                rows = moved.placed + moved.slab
                misses = Misses(moved.missed, rows, rows - moved.read)
                moved = group.moved(like, misses, share, self.full(group, share), self.prefetch)
            found.append(moved)
        return Cached(tuple(found), popular)

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
