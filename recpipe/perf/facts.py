"""What is known of a run before it: the statistics of its ids, its sizes, and where its rows are to be.

``collect`` reads a part of the training data once. What it finds holds for every budget and store, so that
many recipes can be judged by one reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.data.parts import leaves, tensors_in
from recpipe.distributed.ranks import Emulation
from recpipe.errors import UserError
from recpipe.perf.misses import SHARES, Curve, MissRates, Sample, most_popular
from recpipe.plugin.costs import Moved
from recpipe.plugin.policy import RowIds
from recpipe.tables.groups import Group
from recpipe.tables.inputs import Inputs
from recpipe.tables.tiers.placement import IndexBags

STRETCH = 24
"""How many consecutive batches' ids are kept."""
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
    optimizer: str
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

    @property
    def width(self) -> int:
        """float32 values of a record in the cold tier."""
        return self.dim + {"sgd": 0, "adagrad": self.dim}.get(self.optimizer, 1)

    def misses(self, policy: str, share: float) -> Misses:
        """What ``policy`` (nocache, lru, lfu or hot: the rows that were looked up most often before) misses
        if a ``share`` of the rows have slots."""
        if policy == "nocache" or share <= 0:
            return Misses(self.lookups, self.distinct, self.repeated)
        curve = self.curves[policy]
        missed = self._at(1 - curve.hits / max(1.0, curve.lookups), share)
        rows = self._at(1 - curve.hit_rows / max(1.0, curve.rows), share)
        carried = self._at(curve.carried / max(1, curve.batches), share)
        return Misses(missed * self.lookups, rows * self.distinct, min(carried, rows * self.distinct))

    def moved(self, policy: str, share: float, full: float, carries: bool) -> Moved:
        """The rows that a cache of a ``share`` of the rows moves; ``policy`` as in ``misses``. ``full``: the
        share of the batches that find no slot empty.

        A row that is missed gets a slot while there are empty ones. Then each row that leaves was read
        before: as many are written as are read. LRU gives every row that it misses a slot. The others, in a
        stable state, let nearly all of them pass through the slab, from which the next batch takes those it
        needs again (``carries``).
        """
        misses = self.misses(policy, share)
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

    def _at(self, values: NDArray[np.float64], share: float) -> float:
        return float(np.interp(np.log(max(share, SHARES[0])), np.log(SHARES), values))

    def window(self, batches: float) -> float:
        """Distinct rows of so many consecutive batches, on average; beyond half of what was read it grows as
        it did last."""
        known = len(self.windows)
        if known < 2 or batches <= known:
            return float(np.interp(batches, np.arange(1, known + 1), self.windows))
        growth = np.log(self.windows[-1] / self.windows[known // 2]) / np.log(known / (known // 2 + 1))
        return min(float(self.rows), float(self.windows[-1] * (batches / known) ** growth))


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

    @property
    def budget(self) -> int:
        """Bytes for resident rows."""
        return int(self.share * sum(group.rows * group.record_bytes for group in self.groups))

    def at(self, **changes: Any) -> Facts:
        """The same data under another budget, store, batch of steps ..."""
        return replace(self, **changes)

    def from_empty(self, steps: int) -> Facts:
        """A run of so many steps, with the average of them all: caches begin empty."""
        groups = tuple(group.from_empty(steps) for group in self.groups)
        return replace(self, steps=steps, groups=groups, late=False)

    def cached(self, policy: str, share: float | None = None) -> tuple[Moved, ...]:
        """What a cache moves, for each group: nocache, lru, lfu or hot (a fixed set of the rows that were
        looked up most often), in the later half of the run or in all of it. ``share``: of the rows that have
        a slot, if it is not all that the budget holds."""
        share = self.share if share is None else share
        found = []
        for group in self.groups:
            full = 1.0 if policy == "hot" else self.full(group, share)  # other rows never get a slot
            found.append(group.moved(policy, share, full, self.prefetch))
        return tuple(found)

    def full(self, group: GroupFacts, share: float) -> float:
        """The share of the batches that find all slots taken, if a ``share`` of the rows have one."""
        full = max(0.0, 1 - group.fills(share) / max(1, self.steps))
        return min(1.0, 2 * full) if self.late else full

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


def collect(
    inputs: Inputs,
    read: Callable[[], Iterable[Any]],
    batch_size: int,
    batches: int,
    epoch_samples: int,
    steps: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Facts:
    """Read ``batches`` batches and count what they look up; ``read`` begins anew with each call.

    Caches are judged by the second half, when those that start empty have filled. ``UserError`` if there are
    fewer than four batches, or none looks anything up.
    """
    if batches < 4:
        raise UserError(
            f"{batches} batches are too few to learn from: lower data.batch_size, or give more data"
        )

    def counting(number: int, group: Group) -> _Counting:
        rows = group.tables.layout.total_rows
        popular = most_popular(rows, lambda: (inputs.bags(batch, number).indices for batch in read()))
        return _Counting(group, popular, batches)

    groups = [counting(number, group) for number, group in enumerate(inputs.tables.groups)]
    size = 0
    for done, batch in zip(range(batches), read(), strict=False):
        size = size or _bytes(batch)
        for number, own in enumerate(groups):
            own.add(inputs.bags(batch, number))
        progress(done + 1)
    if not any(group.rates.lru.lookups for group in groups):
        raise UserError("the batches that were read look nothing up: there is nothing to keep in tiers")
    return Facts(
        batch_size=batch_size,
        epoch_samples=epoch_samples,
        steps=steps,
        groups=tuple(group.facts() for group in groups),
        batch_bytes=size,
    )


def _bytes(batch: Any) -> int:
    tensors = [tensor for leaf in leaves(batch) for tensor in tensors_in(leaf)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Counting:
    """One group's lookups, as batches come."""

    def __init__(self, group: Group, popular: RowIds, batches: int) -> None:
        self.group, self.learn = group, batches // 2
        rows = group.tables.layout.total_rows
        slots = [share * rows for share in SHARES]
        self.rates = MissRates(Sample(rows, popular), slots, self.learn)
        self._filled: dict[str, Curve] = {}
        """The curves when half of the batches were read."""
        self._learnt: list[RowIds] = []
        self._kept: list[IndexBags] = []
        self._last: RowIds = np.empty(0, np.int64)
        self._repeated = 0
        self._batches = 0

    def add(self, bags: IndexBags) -> None:
        """Count a batch."""
        if self._batches == self.learn:
            self._filled = deepcopy({"lru": self.rates.lru, "lfu": self.rates.lfu})
        if self._batches < self.learn:
            self._learnt.append(bags.indices)
        elif len(self._kept) < STRETCH:
            self._kept.append(bags)
        self.rates.add(bags.indices)
        rows = np.unique(bags.indices)
        self._repeated += len(np.intersect1d(rows, self._last, assume_unique=True))
        self._last = rows
        self._batches += 1

    def facts(self) -> GroupFacts:
        """What was counted."""
        tables, rates = self.group.tables, self.rates
        late = {name: getattr(rates, name).since(curve) for name, curve in self._filled.items()}
        judged = max(1, late["lru"].batches)
        return GroupFacts(
            table_rows=tuple(tables.layout.rows),
            dim=tables.dim,
            record_bytes=tables.record_bytes,
            features=len(tables.features),
            pooled=tables.pooled,
            optimizer=tables.optimizer.name,
            lookups=late["lru"].lookups / judged,
            distinct=late["lru"].rows / judged,
            repeated=self._repeated / max(1, self._batches - 1),
            curves={**late, "hot": rates.hot},
            windows=rates.windows()[0],
            stretch=self._stretch(),
            first=self._filled,
        )

    def _stretch(self) -> Stretch:
        """The kept batches' lookups, ranked by the counts before them."""
        known, counts = np.unique(np.concatenate(self._learnt), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        rank = np.empty(len(known), np.float32)
        rank[order] = np.arange(len(known)) / self.group.tables.layout.total_rows
        rows = np.concatenate([bags.indices for bags in self._kept])
        at = np.searchsorted(known, rows).clip(max=max(0, len(known) - 1))
        ranks = np.full(len(rows), NEVER, np.float32)
        if len(known):
            here = known[at] == rows
            ranks[here] = rank[at[here]]
        samples, before = [], 0
        for bags in self._kept:
            bag = np.repeat(np.arange(len(bags.offsets) - 1), np.diff(bags.offsets))
            samples.append(before + bag % max(1, bags.batch_size))
            before += bags.batch_size
        return Stretch(len(self._kept), np.concatenate(samples), rows, ranks)
