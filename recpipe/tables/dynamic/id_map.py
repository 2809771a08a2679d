"""The rows that the ids of a table have got: planned batch by batch, undone where a batch is not trained.

A batch is planned as one: ids that have a row keep it, an id that has waited long enough gets a free row, or
the row of the id that goes first when none is free. No id of the batch itself loses its row. All this depends
on nothing but the batches so far, so that ranks that see the same batches have the same map.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.loops import load_loops
from recpipe.common.memory import untouched
from recpipe.plugin.tables import Growth
from recpipe.tables.dynamic import loops
from recpipe.tables.dynamic.admission import Keys, Sightings, by_chance, sightings_of
from recpipe.tables.dynamic.loops import DEFAULT_ROW, FIRST_ROW, SEEN_BITS
from recpipe.tables.dynamic.policies import Policy, policy_of

Rows = NDArray[np.int64]
ALL = np.iinfo(np.int64).max
LOAD = 1.75
"""Slots of the index for each row: of a full table, 98 keys in a hundred are in their own bucket."""
SHARE = 32
"""One row in so many is in the heap of those that go first when that is filled."""
SAMPLE = 4096


@dataclass
class Figures:
    """What has happened to the ids of a table in training."""

    admitted: int = 0
    evicted: int = 0
    defaulted: int = 0
    """Lookups that got the default row."""


@dataclass
class Turn:
    """What planning a batch has changed."""

    used: int
    """Rows in use before it."""
    figures: Figures
    """The figures before it."""
    touched: Rows
    """The rows of its ids that had one."""
    states: NDArray[np.int64]
    """Their states before it."""
    rows: Rows
    """Rows that its ids have got."""
    keys: Keys
    """The keys of these ids."""
    before: NDArray[np.int64]
    """Key and state of each of ``rows`` before it, [n, 2]: 0 if it was free."""
    sightings: Any
    """What undoes the counts of ids that wait; None: none were counted."""

    @property
    def evicted(self) -> int:
        """How many of ``rows`` were another id's."""
        return int((self.rows < self.used).sum())


@dataclass
class Content:
    """What is saved of a map: all that its decisions depend on."""

    records: NDArray[np.int64]
    """As ``loops`` has them, int64 [2 * capacity]."""
    waiting: Sightings | None
    used: int = FIRST_ROW
    """Rows below are of ids, or kept for others."""
    now: int = 0
    """The number of the latest batch."""
    figures: Figures = field(default_factory=Figures)

    def undo(self, turn: Turn) -> None:
        """Undo the latest turn."""
        pairs = self.records.reshape(-1, 2)
        pairs[turn.rows] = turn.before
        pairs[turn.touched, 1] = turn.states
        if turn.sightings is not None:
            assert self.waiting is not None, "it has counted"
            self.waiting.undo(turn.sightings)
        self.used, self.now, self.figures = turn.used, self.now - 1, turn.figures

    def copied(self) -> Content:
        """A copy with room for the rows in use."""
        waiting = None if self.waiting is None else self.waiting.copied()
        return replace(self, records=self.records[: 2 * self.used].copy(), waiting=waiting)


class _Heap:
    """The rows that go first, up to a bound (see ``loops``). It is made anew where it has run out."""

    def __init__(self, by_times: bool) -> None:
        self.by_times = by_times
        self.scores = self.rows = np.empty(0, np.int64)
        self.bound = -1, -1
        self.sizes = np.zeros(2, np.int64)

    def forget(self) -> None:
        """Know nothing any more, since rows have changed otherwise than by batches that follow one
        another."""
        self.bound, self.sizes[0] = (-1, -1), 0

    def fill(self, content: Content, wanted: int) -> None:
        """Hold about so many of the rows in use."""
        used = content.used
        self.bound = ALL, ALL
        if wanted < used:
            sample = np.arange(FIRST_ROW, used, max(1, used // SAMPLE))
            states = content.records[2 * sample + 1]
            scores = states if self.by_times else states & (1 << SEEN_BITS) - 1
            at = np.lexsort((sample, scores))[len(sample) * wanted // used]
            self.bound = int(scores[at]), int(sample[at])
        held = (content.records, used, self.by_times, *self.bound)
        room = loops.count_up_to(*held) * 5 // 4 + 1024
        self.scores, self.rows = np.empty(room, np.int64), np.empty(room, np.int64)
        self.sizes[0] = loops.gather(*held, self.scores, self.rows)

    def push(self, rows: Rows, content: Content) -> None:
        """Hold these rows, which other ids have got, too."""
        held = (rows, content.records, self.by_times, *self.bound, self.scores, self.rows)
        size = loops.push(*held, int(self.sizes[0]))
        if size < 0:
            self.forget()
        else:
            self.sizes[0] = size

    def take(self, content: Content, count: int, latest: int) -> tuple[Rows, NDArray[np.int64]]:
        """``count`` rows, or fewer, and their states, the one that goes first before the others; of none that
        was seen after batch ``latest``, or in this one."""
        rows, states, found = np.empty(count, np.int64), np.empty(count, np.int64), 0
        wanted, self.sizes[1] = max(1024, content.used // SHARE, 2 * count), 0
        while True:
            held = content.records, self.by_times, *self.bound, self.scores, self.rows, self.sizes
            found += loops.take(*held, content.now, latest, rows[found:], states[found:])
            if found == count or self.bound[0] == ALL or self.sizes[1]:
                return rows[:found], states[:found]
            self.fill(content, wanted)
            wanted *= 4


class IdMap:
    """The rows of the ids of one table of ``capacity`` rows; several features may share it.

    Keys are int64; ``MISSING_KEY`` has the row of missing values.
    """

    def __init__(self, growth: Growth, capacity: int, seed: int) -> None:
        load_loops()
        self.growth, self.capacity, self.seed = growth, capacity, seed
        waiting = sightings_of(growth, capacity, seed)
        # Memory that nobody has touched takes none: it grows with the rows in use.
        self.content = Content(untouched((2 * capacity,), torch.int64).numpy(), waiting)
        buckets = int(LOAD * capacity) // loops.BUCKET + 1
        self._slots = untouched((buckets * loops.BUCKET,), torch.int32).numpy().view(np.uint32)
        self._index = self._slots, capacity.bit_length()
        self._heap = _Heap(growth.evict == "lfu")

    @property
    def occupied(self) -> int:
        """How many ids have a row."""
        return self.content.used - FIRST_ROW

    @property
    def nbytes(self) -> int:
        """Bytes of the map when it is full, without ids that wait and are counted exactly."""
        heap = self._heap.scores.nbytes + self._heap.rows.nbytes
        return self.content.records.nbytes + self._slots.nbytes + heap

    @cached_property
    def _policy(self) -> Policy | None:
        """Another package's, which decides which rows go. Lookups alone do without it."""
        return policy_of(self.growth.evict)

    # -- batches that are trained --------------------------------------------------------------

    def plan(self, keys: Keys) -> tuple[Rows, Turn]:
        """The rows of ``keys`` [n] of the batch that comes next, and what that has changed."""
        _ = self._policy  # so that the first batch says it if it is not there, and not the first eviction
        content = self.content
        content.now += 1
        rows, touched, states = (np.empty(len(keys), np.int64) for _ in range(3))
        count, without = loops.look_up(
            keys, *self._index, content.records, rows, content.now, touched, states
        )
        none = np.empty(0, np.int64)
        turn = Turn(
            content.used,
            replace(content.figures),
            touched[:count],
            states[:count],
            *(none, none, none.reshape(0, 2), None),
        )
        if without:
            missed = np.flatnonzero(rows < 0)
            self._place(keys[missed], missed, rows, turn)
        return rows, turn

    def _place(self, keys: Keys, missed: Rows, rows: Rows, turn: Turn) -> None:
        """Give rows to ``keys`` [m], which have none, and write them into ``rows`` at ``missed`` [m]."""
        content = self.content
        distinct, first, which, counts = np.unique(
            keys, return_index=True, return_inverse=True, return_counts=True
        )
        order = np.argsort(first)
        times, chosen = self._admitted(distinct, counts, turn)
        wanted = order[chosen[order]]
        turn.rows, turn.before = self._free(len(wanted))
        wanted = wanted[: len(turn.rows)]
        turn.keys = distinct[wanted]
        given = np.full(len(distinct), DEFAULT_ROW)
        given[wanted] = turn.rows
        rows[missed] = given[which]
        if content.waiting is not None:
            content.waiting.leave(turn.keys)
        evicted = turn.rows[turn.rows < turn.used]
        loops.remove(evicted, *self._index, content.records)
        pairs = content.records.reshape(-1, 2)
        pairs[turn.rows, 0] = turn.keys
        pairs[turn.rows, 1] = np.minimum(times[wanted], 2**31 - 1) << SEEN_BITS | content.now
        loops.insert(turn.rows, *self._index, content.records)
        self._heap.push(turn.rows, content)
        figures = content.figures
        figures.admitted += len(turn.rows)
        figures.evicted += len(evicted)
        figures.defaulted += int(counts.sum() - counts[wanted].sum())

    def _admitted(
        self, keys: Keys, counts: NDArray[np.int64], turn: Turn
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """How often the distinct ``keys`` were seen so far, as far as that was counted, and which of them are
        to get a row."""
        growth, waiting = self.growth, self.content.waiting
        times, chosen = counts, np.ones(len(keys), bool)
        if waiting is not None:
            times, turn.sightings = waiting.add(keys, counts)
            chosen = times >= growth.admit_after
        if growth.admit_probability < 1:
            chosen &= by_chance(keys, growth.admit_probability, self.seed, self.content.now)
        return times, chosen

    def _free(self, count: int) -> tuple[Rows, NDArray[np.int64]]:
        """``count`` rows, or fewer, that no id of this batch has, and what they were: unused ones first."""
        content = self.content
        unused = min(count, self.capacity - content.used)
        fresh = np.arange(content.used, content.used + unused)
        content.used += unused
        content.records[2 * fresh + 1] = content.now  # so that none of them is taken for another id
        before = np.zeros((unused, 2), np.int64)
        if unused == count or self.growth.evict == "none":
            return fresh, before
        taken, states = self._go_first(count - unused)
        held = np.stack((content.records[2 * taken], states), 1)
        return np.concatenate((fresh, taken)), np.concatenate((before, held))

    def _go_first(self, count: int) -> tuple[Rows, NDArray[np.int64]]:
        content, growth = self.content, self.growth
        if self._policy is None:
            latest = content.now - growth.max_age - 1 if growth.evict == "age" else ALL
            return self._heap.take(content, count, latest)
        every = np.arange(FIRST_ROW, self.capacity)
        states = content.records[2 * every + 1]
        seen = states & (1 << SEEN_BITS) - 1
        scores = self._policy(content.records[2 * every], states >> SEEN_BITS, seen, content.now)
        able = np.flatnonzero(seen != content.now)
        chosen = able[np.lexsort((every[able], scores[able]))[:count]]
        return every[chosen], states[chosen]

    def undo(self, turn: Turn) -> None:
        """Undo the latest turn, as if its batch had not been planned."""
        records = self.content.records
        loops.remove(turn.rows, *self._index, records)
        self.content.undo(turn)
        loops.insert(turn.rows[turn.rows < turn.used], *self._index, records)
        self._heap.forget()

    # -- lookups, which change nothing -----------------------------------------------------------

    def rows_of(self, keys: Keys) -> Rows:
        """The row of each of ``keys``: -1 if it has none."""
        rows = np.empty(len(keys), np.int64)
        loops.look_up(keys, *self._index, self.content.records, rows, 0, rows, rows)
        return rows

    def load(self, content: Content) -> None:
        """Go on from a saved ``content``."""
        records = self.content.records
        records[:] = 0
        records[: len(content.records)] = content.records
        self.content = replace(content, records=records)
        self._slots[:] = 0
        loops.insert(np.arange(FIRST_ROW, content.used), *self._index, records)
        self._heap.forget()
