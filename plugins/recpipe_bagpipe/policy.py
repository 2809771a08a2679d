"""One trainer: the oracle's plans as a cache policy of the tiers, and bulk reads ahead of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.saved import Damaged, within
from recpipe.data.batch import Batch
from recpipe.tables.stores.bulk import BulkStore
from recpipe.tables.tiers.placement import Bags
from recpipe.tables.tiers.policies import NOTHING, CachePolicy, Placement, RowIds, RowSpace, Slots
from recpipe_bagpipe.ahead import Ahead, slack
from recpipe_bagpipe.oracle import BatchPlan, Rows, plan

COLD, RESIDENT, COMING = 0, 1, 2


class Lookahead(CachePolicy):
    """Rows stay while a batch of the window looks them up, and longer while slots last.

    Before every C-th batch the rows of batches up to 2C ahead that are neither resident nor on their way
    are announced to ``bulk``; each then finds its slot with its batch. A slot is taken from the row that
    was needed longest ago, never from one that a known batch needs. The prefetch gate is ``bulk``'s: a
    row that was evicted and is announced again is found where its write waits.
    """

    def __init__(
        self,
        space: RowSpace,
        lookups: Callable[[Any], Bags],
        bulk: BulkStore,
        lookahead: int,
        cleanup: int,
        increase: int,
        decrease: int,
    ) -> None:
        super().__init__(space)
        self.lookups, self.bulk = lookups, bulk
        self.lookahead, self.cleanup = lookahead, cleanup
        self.increase, self.decrease = increase, decrease
        self.step = 0
        """Batches planned, over all streams."""
        self.due = np.full(space.rows, -1, np.int32)
        """Of each row the last known batch that looks it up, counted as ``step`` is."""
        self.state = np.zeros(space.rows, np.uint8)
        self.row_of_slot = np.full(space.slots, -1, np.int64)
        self.used = 0
        self.peak_bytes = self.announced_rows = self.evicted = 0
        self.window_sum, self.window_least = 0, lookahead
        """Of the effective lookahead, over all batches."""
        self._ahead: Ahead[BatchPlan] | None = None
        self._running: Ahead[BatchPlan] | None = None
        self._first = 0
        self._opened: deque[BatchPlan] = deque()
        self._current: BatchPlan | None = None
        self._undone = False
        self._before: tuple[Slots, RowIds, RowIds, NDArray[np.uint8], int, int, Slots] | None = None
        self._victims: Slots = NOTHING.slots
        self._next = 0
        self._next_open = 0
        """Before which batch others are learned of again."""
        self._groups: deque[tuple[int, int]] = deque()
        """Groups that ``bulk`` keeps: the last batch that each is for, and its number."""

    # -- the stream --------------------------------------------------------------------------

    def stream(self, source: Iterator[Batch], around: int = 0) -> Iterator[Batch]:
        """The batches of ``source``, read and planned ahead; ``around`` other streams read from this one."""

        def planned(lookups: Iterator[tuple[Rows, ...]]) -> Iterator[BatchPlan]:
            knobs = {"increase": self.increase, "decrease": self.decrease}
            return plan(lookups, self.lookahead, self.cleanup, 1, self.space.slots, **knobs)

        def rows(batch: Batch) -> tuple[Rows, ...]:
            return (self.lookups(batch).rows,)

        self._ahead = Ahead(
            source, rows, planned, lambda made: made, slack(self.lookahead, self.cleanup, around)
        )
        return self._ahead.batches()

    def _begin(self) -> BatchPlan:
        """The plan of the batch that comes now."""
        if self._undone and self._ahead is self._running:
            assert self._current is not None
            return self._current
        if self._ahead is not self._running:
            self._restart()
        assert self._ahead is not None, "batches come through the stream"
        number = self.step - self._first
        if number >= self._next_open or not self._opened:
            self._open(self._ahead, number)
        # The batch before may still be on its way from the store, and this one may be taken back once.
        while self._groups and self._groups[0][0] < number - 2:
            self.bulk.retire(self._groups.popleft()[1])
        made = self._opened.popleft()
        assert made.number == number, (made.number, number)
        self.window_sum += made.window
        self.window_least = min(self.window_least, made.window)
        return made

    def _restart(self) -> None:
        """A new stream: what was on its way for the old one is not awaited any more."""
        for made in self._opened:
            self._arrived(made.rows)
        self._opened.clear()
        self._running, self._first = self._ahead, self.step
        self._next_open = 0
        while self._groups:
            self.bulk.retire(self._groups.popleft()[1])

    def _open(self, ahead: Ahead[BatchPlan], number: int) -> None:
        """Learn of the batches up to two intervals ahead and read what they need, an interval at a time."""
        coming = list(ahead.steps(lambda p: p.number < number + 2 * self._interval(p)))
        self.peak_bytes = max(self.peak_bytes, ahead.peak_bytes)
        self._opened.extend(coming)
        interval = min(map(self._interval, self._opened))
        self._next_open = number + interval
        for start in range(0, len(coming), interval):
            part = coming[start : start + interval]
            wanted = []
            for made in part:
                self.due[made.rows] = self._first + made.ttl
                cold = made.rows[self.state[made.rows] == COLD]
                self.state[cold] = COMING
                wanted.append(cold)
            group = np.concatenate(wanted)
            self.announced_rows += len(group)
            if len(group):
                self._groups.append((part[-1].number, self.bulk.announce(group)))

    def _interval(self, made: BatchPlan) -> int:
        """Batches between two groups: fewer where the budget has shrunk the window."""
        return max(1, self.cleanup * made.window // self.lookahead)

    def _arrived(self, rows: Rows) -> None:
        """``rows`` are not on their way any more, whether they were used or not."""
        self.state[rows[self.state[rows] == COMING]] = COLD

    # -- the policy --------------------------------------------------------------------------

    def migrate(self, rows: RowIds) -> Placement:
        """Nothing moves but what the batch misses."""
        self._current = self._begin()
        self._undone = False
        return NOTHING

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Every miss takes a free slot, or that of a row that no known batch needs."""
        assert self._current is not None
        before = (self.used, self._next, self._victims)
        fresh = np.arange(self.used, min(self.space.slots, self.used + len(misses)), dtype=np.int32)
        slots = np.concatenate((fresh, self._unneeded(len(misses) - len(fresh))))
        self.used += len(fresh)
        placed, leaving = misses[: len(slots)], self.row_of_slot[slots]
        planned = self._current.rows
        self._before = (slots, leaving, planned, self.state[planned], *before)
        left = leaving[leaving >= 0]
        self.state[left] = COLD
        self.evicted += len(left)
        self.state[placed] = RESIDENT
        self._arrived(planned)
        self.row_of_slot[slots] = placed
        self.step += 1
        return Placement(slots, placed)

    def _unneeded(self, wanted: int) -> Slots:
        """Up to ``wanted`` slots whose rows no known batch needs, those needed longest ago first."""
        found: list[Slots] = []
        refreshed = False
        while wanted > 0:
            slots = self._victims[self._next : self._next + wanted]
            self._next += len(slots)
            # A batch that has become known since may need the row again.
            free = slots[self.due[self.row_of_slot[slots]] < self.step]
            found.append(free)
            wanted -= len(free)
            if self._next >= len(self._victims) and wanted > 0:
                if refreshed:
                    break
                self._refresh(found, max(8 * wanted, self.used // 8))
                refreshed = True
        return np.concatenate(found) if found else NOTHING.slots

    def _refresh(self, taken: list[Slots], size: int) -> None:
        """List anew the ``size`` slots that were needed longest ago, but those ``taken`` for this batch."""
        due = self.due[self.row_of_slot[: self.used]]
        due[np.concatenate(taken)] = self.step
        slots = np.flatnonzero(due < self.step).astype(np.int32)
        if len(slots) > size:
            slots = slots[np.argpartition(due[slots], size)[:size]]
        self._victims = slots[np.argsort(due[slots], kind="stable")]
        self._next = 0

    def undo(self) -> None:
        """Take the last batch back; what was announced stays announced."""
        if self._before is None:
            return
        slots, leaving, planned, states, self.used, self._next, self._victims = self._before
        self._before = None
        left = leaving >= 0
        self.row_of_slot[slots] = leaving
        self.state[planned] = states
        self.state[leaving[left]] = RESIDENT
        self.evicted -= int(left.sum())
        self.step -= 1
        self._undone = True

    def state_dict(self) -> dict[str, Any]:
        """Who is resident, and since when nobody needs it."""
        rows = self.row_of_slot[: self.used]
        return {"rows": rows.copy(), "due": self.due[rows] - self.step}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """As in ``CachePolicy``."""
        super().check_state(state)
        rows = state["rows"]
        within(state, "rows", 0, self.space.rows)
        within(state, "due", np.iinfo(np.int32).min, size=len(rows))
        if len(np.unique(rows)) < len(rows) or len(rows) > self.space.slots:
            raise Damaged(f"{len(rows)} rows are not distinct ones for {self.space.slots} slots")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with those residents; batch numbers start anew."""
        rows = state["rows"]
        self.used = len(rows)
        self.row_of_slot[: self.used] = rows
        self.state[rows] = RESIDENT
        # Which batches need them is learned anew; the order of age stays.
        self.due[rows] = np.minimum(state["due"], -1)
