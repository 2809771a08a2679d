"""Miss rates without running: what LRU, LFU, a fixed hot set and lookahead miss, for every budget at once.

One pass over a stream of batches gives whole curves. LRU follows Mattson's stack algorithm (IBM Systems
Journal 1970) in units of batches, as recpipe's LRU does: a row that batch s looked up last is resident if the
rows of s and of all batches since then have slots. For LFU and for a hot set, a row's rank by its count says
it; LFU's residents leave only for rows with a higher count. Of rows that are equal the share that fits is
resident.

Of tables with more than ``TRACKED`` rows, a sample is followed, chosen by a hash of the row's number (SHARDS:
Waldspurger, Park, Garthwaite, Ahmad, FAST 2015, section 3); each row stands for 2^k then. The most popular
rows, which a sample would miss or weigh too much, are followed each for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.bags import Bags, RowIds
from recpipe.tables.inputs import Inputs

Figures = NDArray[np.float64]
TRACKED = 1 << 22
"""Most rows that a sample has: 32 MiB for their last batch and count."""
POPULAR = 1 << 12
"""Most popular rows that are followed for themselves beside a sample."""
COUNTED = 32
"""Batches that the most popular rows are taken from."""
SHARES = tuple(float(f"{share:.3g}") for share in np.geomspace(0.0005, 1, 34))
"""Shares of the rows with a slot for which misses are counted; those between are interpolated."""
MOST_COUNT = 1 << 16
"""Counts from here on are taken as equal."""
TIES = 8
"""Of rows with the same count, if it is below this, LFU keeps those that had it first."""
POLICIES = ("lru", "lfu", "hot")
"""The attributes of ``MissRates`` that are curves."""


@dataclass
class Curve:
    """A policy's hits for each of G numbers of slots, in the batches that it is judged by."""

    hits: Figures
    """Lookups of resident rows [G]."""
    hit_rows: Figures
    """Resident rows among each batch's distinct ones, added up [G]."""
    carried: Figures
    """Rows that are not resident and that the batch before looked up too, added up [G]."""
    batches: int = 0
    lookups: float = 0.0
    rows: float = 0.0
    """The batches' distinct rows, added up."""

    @classmethod
    def empty(cls, points: int) -> Curve:
        """No batch yet."""
        return cls(np.zeros(points), np.zeros(points), np.zeros(points))

    def count(
        self,
        batch: tuple[Figures, Figures],
        lookups: Figures,
        rows: Figures,
        again: Figures,
        resident: Figures,
    ) -> None:
        """Count a ``batch``: for each of its distinct rows its lookups, and how many rows it stands for [U].

        Of its hits are told: of classes of equal rows, with their ``lookups`` [K], numbers of distinct
        ``rows`` [K] and of those among them that the batch before had (``again`` [K]), the share
        ``resident`` [K, G] is resident.
        """
        self.batches += 1
        self.lookups += float(batch[0].sum())
        self.rows += float(batch[1].sum())
        self.hits += lookups @ resident
        self.hit_rows += rows @ resident
        self.carried += again.sum() - again @ resident

    def since(self, earlier: Curve) -> Curve:
        """The same of the batches after ``earlier``, a copy made then."""
        return Curve(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def at(self, points: NDArray[np.int64]) -> Curve:
        """The same at some of its numbers of slots."""
        hits, rows, carried = self.hits[points], self.hit_rows[points], self.carried[points]
        return Curve(hits, rows, carried, self.batches, self.lookups, self.rows)

    def blended(self, other: Curve, share: float) -> Curve:
        """The average batch of both, of which a ``share`` is of ``other``'s."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        own, others = self.batches or 1, other.batches or 1
        return Curve(*((1 - share) * one / own + share * two / others for one, two in pairs))

    def fetched(self) -> Figures:
        """Rows that a batch has to fetch, on average [G]."""
        return (self.rows - self.hit_rows) / max(1, self.batches)


def most_popular(rows: int, read: Callable[[], Iterable[RowIds]]) -> RowIds:
    """The rows of a group or table of ``rows`` rows to follow for themselves: those that the first batches
    look up most often, or none where all are followed. ``read``: gives each batch's lookups."""
    if rows <= TRACKED:
        return np.empty(0, np.int64)
    found, counts = np.unique(np.concatenate(list(islice(read(), COUNTED))), return_counts=True)
    popular: RowIds = found[np.argsort(-counts, kind="stable")[:POPULAR]]
    return popular


class RowSample:
    """Which of ``rows`` rows are followed, under which number below ``size``, and how many rows each stands
    for (``weights`` [size]). ``popular``: rows to follow for themselves."""

    def __init__(self, rows: int, popular: RowIds, tracked: int = TRACKED) -> None:
        self._bits = max(1, (rows - 1).bit_length())
        self.shift = max(0, self._bits - (tracked.bit_length() - 1))
        """2^shift rows are told by one; 0: all are followed."""
        self._popular = np.sort(popular) if self.shift else np.empty(0, np.int64)
        self._apart = 1 << self._bits - self.shift if self.shift else rows
        self.size = self._apart + len(self._popular)
        self.weights = np.full(self.size, float(1 << self.shift))
        self.weights[self._apart :] = 1.0

    def of(self, rows: RowIds) -> RowIds:
        """The numbers of those ``rows`` (int64 [L]) that are followed, in no order."""
        if not self.shift:
            return rows
        apart = np.zeros(len(rows), bool)
        if len(self._popular):
            place = np.searchsorted(self._popular, rows).clip(max=len(self._popular) - 1)
            apart = self._popular[place] == rows
        mixed = self._mixed(rows[~apart])
        chosen: RowIds = mixed[mixed & (1 << self.shift) - 1 == 0] >> self.shift
        return np.concatenate((chosen, place[apart] + self._apart)) if apart.any() else chosen

    def _mixed(self, rows: RowIds) -> RowIds:
        """The rows' places in a pseudo-random order of all numbers of ``_bits`` bits, so that two never have
        the same: odd factors and shifts can be undone."""
        mask, half = np.uint64((1 << self._bits) - 1), np.uint64((self._bits + 1) // 2)
        found = rows.astype(np.uint64)
        for odd in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9):
            found = found * np.uint64(odd) & mask
            found ^= found >> half
        return found.astype(np.int64)


class MissRates:
    """Follows one cache's lookups, batch by batch. ``slots`` [G]: the numbers of slots to tell for.

    ``lru`` and ``lfu`` are of all batches, from an empty cache on. ``hot`` has the rows most looked up in the
    first ``learn`` batches, and is judged by those after them.
    """

    def __init__(self, sample: RowSample, slots: Sequence[float], learn: int) -> None:
        self.sample, self.slots, self.learn = sample, np.asarray(slots, np.float64), learn
        self.lru, self.lfu, self.hot = (Curve.empty(len(slots)) for _ in POLICIES)
        self._last = np.full(sample.size, -1, np.int32)
        self._count = np.zeros(sample.size, np.int32)
        self._with_count = np.zeros(MOST_COUNT + 1)
        """How many rows have each count, from 1 on."""
        self._left = np.zeros(0)
        """For each batch so far, how many of its rows no later one has looked up."""
        self._left_with = np.zeros((TIES, 64))
        """The same of rows with each count below ``TIES``; columns beyond the last batch are 0."""
        self._window_rows = np.zeros(0)
        """For w - 1: distinct rows of the last w batches, added up over all batches."""
        self._near = np.zeros(0)
        """For w - 1: lookups of rows whose last batch is w batches ago."""
        self._learnt: tuple[NDArray[np.int32], Figures] | None = None

    def add(self, rows: RowIds) -> None:
        """The rows that the next batch looks up, int64 [L], each as often as it does."""
        followed, times = np.unique(self.sample.of(rows), return_counts=True)
        weights = self.sample.weights[followed]
        lookups: Figures = weights * times
        if self.lru.batches == self.learn:
            self._learnt = self._count.copy(), self._with_count.copy()
        self._by_age(followed, lookups, weights)
        self._by_count(followed, lookups, weights)
        if self._learnt is not None:
            count, with_count = self._learnt
            self._by_learnt(count[followed], with_count, lookups, weights, weights * self._just(followed))
        self._note(followed, times, weights)

    def _by_age(self, followed: RowIds, lookups: Figures, weights: Figures) -> None:
        """LRU: before the rows that a batch looked up last come those of all later ones."""
        last = self._last[followed]
        again = last >= 0
        batches = len(self._left)
        lookups_of = _totals(last[again], lookups[again], batches)
        rows_of = _totals(last[again], weights[again], batches)
        just = np.zeros(batches)
        just[-1:] = rows_of[-1:]
        held = _share_with_slot(_above(self._left), self._left, self.slots)
        self.lru.count((lookups, weights), lookups_of, rows_of, just, held)
        self._near = _sum(self._near, lookups_of[::-1])
        self._window_rows = _sum(self._window_rows, np.cumsum(self._left[::-1]))

    def _by_count(self, followed: RowIds, lookups: Figures, weights: Figures) -> None:
        """LFU: before a row come those with a higher count, then those that have had the same one longer."""
        known = np.flatnonzero(self._count[followed])
        count = self._count[followed[known]].clip(max=MOST_COUNT).astype(np.int64)
        # The batch that looked a row up last is the one that gave it its count.
        since = np.where(count < TIES, self._last[followed[known]], 0)
        classes, which = np.unique(count << 32 | since, return_inverse=True)
        count, since = classes >> 32, classes & 0xFFFFFFFF
        before = _above(self._with_count)[count]
        held = self._with_count[count]
        few = np.flatnonzero(count < TIES)
        at = count[few], since[few]
        held[few] = self._left_with[at]
        before[few] += np.cumsum(self._left_with, axis=1)[at] - held[few]
        amounts = (lookups, weights, weights * self._just(followed))
        looked_up, rows, again = (_totals(which, each[known], len(classes)) for each in amounts)
        resident = _share_with_slot(before, held, self.slots)
        self.lfu.count((lookups, weights), looked_up, rows, again, resident)

    def _by_learnt(
        self,
        count: NDArray[np.int32],
        with_count: Figures,
        lookups: Figures,
        weights: Figures,
        again: Figures,
    ) -> None:
        """A hot set: before a row come those that had a higher count when it was learnt. No row without a
        count is resident; its class is the first."""
        counts, which = np.unique(count.clip(max=MOST_COUNT), return_inverse=True)
        looked_up, rows, repeated = (_totals(which, each, len(counts)) for each in (lookups, weights, again))
        resident = _share_with_slot(_above(with_count)[counts], with_count[counts], self.slots)
        resident[counts == 0] = 0.0
        self.hot.count((lookups, weights), looked_up, rows, repeated, resident)

    def _just(self, followed: RowIds) -> NDArray[np.bool_]:
        """Which rows the last batch looked up."""
        last: NDArray[np.bool_] = self._last[followed] == len(self._left) - 1
        return last

    def _note(self, followed: RowIds, times: NDArray[np.int64], weights: Figures) -> None:
        last, count = self._last[followed], self._count[followed]
        again = last >= 0
        batch = len(self._left)
        self._left = np.append(self._left - _totals(last[again], weights[again], batch), weights.sum())
        self._last[followed] = batch
        self._count[followed] = now = count + times.astype(np.int32)
        if batch == self._left_with.shape[1]:
            self._left_with = np.concatenate((self._left_with, np.zeros_like(self._left_with)), axis=1)
        few = again & (count < TIES)
        np.subtract.at(self._left_with, (count[few], last[few]), weights[few])
        few = now < TIES
        self._left_with[:, batch] = _totals(now[few], weights[few], TIES)
        size = len(self._with_count)
        self._with_count -= _totals(count[again].clip(max=MOST_COUNT), weights[again], size)
        self._with_count += _totals(now.clip(max=MOST_COUNT), weights, size)

    def windows(self) -> tuple[Figures, Figures]:
        """For lookahead over w = 1, 2, 3 .. batches: the distinct rows of w batches, on average, and the
        lookups of rows that none of the w batches before had. At least half of the batches have such a w."""
        most = len(self._left) // 2
        # The first w batches have fewer than w before them; the last one of all has none after it.
        enough = np.maximum(1, len(self._left) - 1 - np.arange(most))
        return self._window_rows[:most] / enough, self.lru.lookups - np.cumsum(self._near)[:most]

    def che(self) -> Figures:
        """The share of lookups that LRU would miss [G] if each row were looked up at random at the rate that
        it has had: a check of ``lru`` that knows no order, and no row that is yet to come."""
        counts = np.flatnonzero(self._with_count > 0.5)
        held = self._with_count[counts]
        return np.array([_che(counts.astype(np.float64), held, slots) for slots in self.slots])


def _che(counts: Figures, held: Figures, slots: float) -> float:
    """Che's approximation (Che, Tung, Wang, IEEE Journal on Selected Areas in Communications 2002): LRU keeps
    a row for the time in which ``slots`` distinct rows are looked up. ``held`` [K] rows have been looked up
    ``counts`` [K] times each."""
    if slots >= held.sum():
        return 0.0
    rates = counts / (counts * held).sum()

    def kept(time: float) -> float:
        return float((held * -np.expm1(-rates * time)).sum())

    low, high = 0.0, 1.0
    while kept(high) < slots:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) < slots else (low, middle)
    return float((held * rates * np.exp(-rates * high)).sum())


def _totals(classes: NDArray[np.integer[Any]], figures: Figures, size: int) -> Figures:
    """The sum of each class's figures: [size]."""
    return np.asarray(np.bincount(classes, figures, size), np.float64)


def _above(figures: Figures) -> Figures:
    """For each figure the sum of those after it."""
    found: Figures = np.cumsum(figures[::-1])[::-1] - figures
    return found


def _share_with_slot(before: Figures, held: Figures, slots: Figures) -> Figures:
    """Of classes with ``held`` [K] rows each, and ``before`` [K] rows that come first, the share that has a
    slot [K, G]."""
    room: Figures = slots[None, :] - before[:, None]
    return np.clip(room / np.maximum(held, 1e-9)[:, None], 0.0, 1.0)


def _sum(one: Figures, other: Figures) -> Figures:
    """Their sum; the shorter one goes on with zeros."""
    found = np.zeros(max(len(one), len(other)))
    found[: len(one)] += one
    found[: len(other)] += other
    return found


class Followed:
    """Group ``number`` of tables as they share one cache, over so many ``batches``, and its so many
    ``largest`` tables each alone; ``read`` begins anew with each call."""

    def __init__(
        self,
        number: int,
        inputs: Inputs,
        read: Callable[[], Iterable[Any]],
        batches: int,
        shares: Sequence[float] = SHARES,
        largest: int = 0,
    ) -> None:
        self.group, self.shares = inputs.tables.groups[number], shares
        """``shares``: of rows that have a slot, ascending, all of ``SHARES`` among them."""
        layout = self.group.tables.layout
        popular = most_popular(
            layout.total_rows, lambda: (inputs.bags(batch, number).indices for batch in read())
        )

        def rates(first: int, rows: int) -> MissRates:
            own = popular[(popular >= first) & (popular < first + rows)] - first
            return MissRates(RowSample(rows, own), [share * rows for share in shares], batches // 2)

        self.together = rates(0, layout.total_rows)
        ordered = sorted(range(len(layout.rows)), key=lambda table: -layout.rows[table])[:largest]
        self.alone = {table: rates(int(layout.bases[table]), layout.rows[table]) for table in sorted(ordered)}
        """By the table's number in the group."""
        self._seen = np.zeros(len(layout.tables), bool)
        """For each table, whether a batch has looked it up."""

    def add(self, bags: Bags) -> None:
        """Note a batch's lookups."""
        self.together.add(bags.indices)
        tables = self.group.tables
        ends = bags.offsets[np.arange(len(tables.features) + 1) * bags.batch_size]
        self._seen[tables.table_of[np.flatnonzero(np.diff(ends))]] = True
        for table, rates in self.alone.items():
            features = np.flatnonzero(tables.table_of == table)
            found = [bags.indices[ends[feature] : ends[feature + 1]] for feature in features]
            rates.add(np.concatenate(found) - tables.layout.bases[table])

    def never(self) -> list[str]:
        """Names of the tables that no batch has looked up."""
        return [self.group.tables.layout.tables[table] for table in np.flatnonzero(~self._seen)]
