"""For a single trainer: the oracle's groups as a cache policy, with bulk reads in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from recpipe.kit import distinct_slots, within
from recpipe.plugin import NOTHING, Batch, CachePolicy, Placement, RowIds, RowSpace, Slots, distinct
from recpipe_bagpipe.bulk import BulkStore, positions
from recpipe_bagpipe.uses import (
    DUE,
    LAST,
    OFTEN,
    UNKNOWN,
    WIDTH,
    Small,
    announced,
    first_of,
    least,
    touch,
    touch_known,
)
from recpipe_bagpipe.window import Group, Pace, Rows, Steps, Window


class NoBulk:
    """Reads nothing in advance, in place of ``BulkStore``: rows are in memory anyway, or decisions alone are
    of interest."""

    single = False
    waited = 0.0

    def announce(self, rows: RowIds) -> int:
        return 0

    def retire(self, number: int) -> None:
        pass


class Lookahead(CachePolicy):
    """Rows that known batches need stay resident, those needed first before others; then those looked up most
    often since they came.

    When a group's first batch comes, the rows of the next group that are neither resident nor on their way
    are announced to ``bulk``; a row gets its slot when its batch comes. ``bulk`` is also the prefetch gate: a
    row that was evicted and is announced again is found among its waiting writes.
    """

    each_once = True

    def __init__(
        self, space: RowSpace, rows_of: Callable[[Any], Rows], bulk: BulkStore | NoBulk, pace: Pace
    ) -> None:
        """``rows_of``: the distinct rows that a batch looks up, sorted."""
        super().__init__(space)
        self.rows_of, self.bulk, self.pace = rows_of, bulk, pace
        self.step = 0
        """The number of batches planned, over all streams."""
        self.known = np.full(WIDTH * space.slots, -1, np.int32)
        """What is known of each slot's row, as ``uses`` says."""
        self.due.fill(UNKNOWN)
        self.often.fill(0)
        self.used = self.evicted = self.window_sum = 0
        self.singles = 0
        """Batches that read their rows themselves."""
        self.window_least = UNKNOWN
        self._peak_bytes = 0
        """The most that earlier streams' batches have taken."""
        self._window: Window | None = None
        self._running: Window | None = None
        self._first = 0
        self._open: deque[Group] = deque()
        """The group of the current batch, and the next one."""
        self._numbers: deque[tuple[int, int]] = deque()
        """Groups that ``bulk`` keeps: the batch after the last that each is for, and its number there."""
        self._current: tuple[Small, Steps] = NOTHING.rows, NOTHING.slots
        """The rows that the current batch was announced with, and their next uses."""
        self._victims, self._listed = NOTHING.slots, NOTHING.rows

    # Views of ``known``; attributes would count as memory of their own.
    @property
    def due(self) -> Steps:
        """For each slot, the next known batch that looks its row up, counted like ``step``."""
        return self.known[DUE::WIDTH]

    @property
    def often(self) -> Steps:
        """... how many batches did, since the row came."""
        return self.known[OFTEN::WIDTH]

    @property
    def last(self) -> Steps:
        """... the last batch that did."""
        return self.known[LAST::WIDTH]

    # -- the stream --------------------------------------------------------------------------

    def stream(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of ``source``, read and planned ahead."""
        pace, slots = self.pace, self.space.slots
        self._window = Window(source, self.rows_of, pace.batches, slots, lambda: pace.single)
        return self._window.batches()

    def _go_on(self, number: int) -> None:
        """Open groups up to the one after that of batch ``number``."""
        window = self._running
        assert window is not None, "batches come through the stream"
        while self._open and self._open[0].end <= number:
            group = self._open.popleft()
            window.forget(group)
            self.pace.note(len(group.sizes), group.single)
        while len(self._open) < 2 and (coming := window.next()) is not None:
            if self._open:
                # What the group before looks up, too, has been seen to: its next uses are those in this one.
                self._open[-1].link(coming)
            if not coming.single:
                rows, uses = coming.new
                slots = self.space.residents.slot_of(rows)
                cold = announced(self.known, slots, rows, uses, self._first, self.step)
                if len(cold):
                    self._numbers.append((coming.end, self.bulk.announce(cold)))
                self.pace.announced(len(cold), len(coming.sizes))
            self._open.append(coming)
            self.bulk.single = any(known.single for known in self._open)

    # -- the policy --------------------------------------------------------------------------

    def migrate(self, rows: RowIds) -> Placement:
        """Place nothing; only missed rows are placed, by ``admit``."""
        restarts = self._window is not self._running
        if restarts:
            # A new stream; rows being read for the old one are not awaited any more.
            self._peak_bytes = self.waiting_bytes
            self._open.clear()
            self._running, self._first = self._window, self.step
            self.due.fill(UNKNOWN)
            while self._numbers:
                self.bulk.retire(self._numbers.popleft()[1])
        number = self.step - self._first
        self._go_on(number)
        if restarts and not np.array_equal(self._open[0].of(0)[0], distinct(rows)):
            # Core already had the decisions for the stream's first batch and has not asked again.
            self._first -= 1
            number = 1
            self._go_on(number)
        # The batch before may still be on its way from the store.
        while self._numbers and self._numbers[0][0] < number - 1:
            self.bulk.retire(self._numbers.popleft()[1])
        ahead = self._open[-1].end - number
        self.window_sum += ahead
        self.window_least = min(self.window_least, ahead)
        self._current = self._open[0].of(number)
        return NOTHING

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Give every miss a free slot, or that of the row which is worth least."""
        again = self._looked_up(hits, misses, looked_up)
        fresh = np.arange(self.used, min(self.space.slots, self.used + len(misses)), dtype=np.int32)
        taken = np.concatenate((fresh, self._least(len(misses) - len(fresh))))
        self.used += len(fresh)
        self.evicted += len(taken) - len(fresh)
        touch(self.known, taken, again[: len(taken)], self._first, self.step, True)
        self.step += 1
        return Placement(taken, misses[: len(taken)])

    def _looked_up(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Steps:
        """Note that the current batch looks up the resident rows in ``hits``; the next uses of ``misses``."""
        rows, next_use = self._current
        now = self._first, self.step
        if self.times is not None:
            same, again = touch_known(self.known, rows, next_use, looked_up, misses, hits, *now)
            if same:
                return again
        self.last[hits] = self.step
        if not len(rows):  # nothing is known of the batch
            if self.times is None:
                hits = distinct_slots(hits, self.space.slots, self.space.spread)
            self.often[hits] += 1
            self.singles += 1
        else:
            rows = rows.astype(np.int64, copy=False)
            slots = self.space.residents.slot_of(rows)
            here = slots >= 0
            touch(self.known, slots[here], next_use[here], *now, False)
        at, known = positions(rows, misses)
        again = np.full(len(misses), UNKNOWN, np.int32)  # of a row that another plugin brought into the batch
        again[known] = next_use[at[known]]
        return again

    def _least(self, wanted: int) -> Slots:
        """Up to ``wanted`` slots that are worth least, none of them looked up in this batch."""
        found = self._listed_before(wanted)
        if len(found) == wanted:
            return found
        size = max(8 * (wanted - len(found)), self.used // 16)
        self._victims, self._listed = least(self.known, self.used, self.step, found, size)
        return np.concatenate((found, self._listed_before(wanted - len(found))))

    def _listed_before(self, wanted: int) -> Slots:
        """Up to ``wanted`` slots of the list, the first that are still worth as little."""
        found, seen = first_of(self._victims, self._listed, self.known, self.step, wanted)
        self._victims, self._listed = self._victims[seen:], self._listed[seen:]
        return found

    @property
    def waiting_bytes(self) -> int:
        """The most that batches read ahead have taken."""
        return max(self._peak_bytes, 0 if self._running is None else self._running.peak_bytes)

    def state_dict(self) -> dict[str, Any]:
        """How often and when the row in each slot was looked up."""
        return {"often": self.often.copy(), "age": np.minimum(self.last - self.step, -1)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        within(state, "often", 0, size=self.space.slots)
        within(state, "age", np.iinfo(np.int32).min, 0, size=self.space.slots)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the resident rows; batch numbers start again."""
        self.often[:], self.last[:] = state["often"], state["age"]
        # Residents alone would not do: slots that were given to the next batch's rows are empty until then.
        self.used = int(np.count_nonzero(self.often))
        # The batches that need them become known again.
        self.due.fill(UNKNOWN)
