"""For a single trainer: the oracle's plans as a cache policy, with bulk reads in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from recpipe.kit import Batch, BulkStore, IndexBags, distinct, within
from recpipe.plugin import NOTHING, CachePolicy, Placement, RowIds, RowSpace, Slots
from recpipe_bagpipe.ahead import Ahead, slack
from recpipe_bagpipe.oracle import OraclePlan, Rows, plan

COLD, RESIDENT, COMING = 0, 1, 2


class Lookahead(CachePolicy):
    """Rows stay resident while a batch of the window looks them up, and longer if there are free slots.

    Before every C-th batch, rows of batches up to 2C ahead that are neither resident nor being read are
    announced to ``bulk``; a row gets its slot when its batch comes. Slots are taken from rows that were
    needed longest ago, never from rows that a known batch needs. ``bulk`` is also the prefetch gate: a row
    that was evicted and is announced again is found among its waiting writes.
    """

    def __init__(
        self,
        space: RowSpace,
        lookups: Callable[[Any], IndexBags],
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
        """The number of batches planned, over all streams."""
        self.due = np.full(space.rows, -1, np.int32)
        """For each row, the last known batch that looks it up, counted like ``step``."""
        self.state = np.zeros(space.rows, np.uint8)
        self.used = 0
        self.peak_bytes = self.announced_rows = self.evicted = 0
        self.window_sum, self.window_least = 0, lookahead
        """The sum of the effective lookahead over all batches."""
        self._ahead: Ahead[OraclePlan] | None = None
        self._running: Ahead[OraclePlan] | None = None
        self._first = 0
        self._opened: deque[OraclePlan] = deque()
        self._current: OraclePlan | None = None
        self._victims: Slots = NOTHING.slots
        self._next = 0
        self._next_open = 0
        """The batch before which further batches are read next."""
        self._groups: deque[tuple[int, int]] = deque()
        """The groups that ``bulk`` keeps: the last batch that each is for, and the group's number."""

    # -- the stream --------------------------------------------------------------------------

    def stream(self, source: Iterator[Batch], around: int = 0) -> Iterator[Batch]:
        """The batches of ``source``, read and planned ahead; ``around`` other streams read from this one."""

        def planned(lookups: Iterator[tuple[Rows, ...]]) -> Iterator[OraclePlan]:
            knobs = {"increase": self.increase, "decrease": self.decrease}
            return plan(lookups, self.lookahead, self.cleanup, 1, self.space.slots, **knobs)

        def rows(batch: Batch) -> tuple[Rows, ...]:
            return (self.lookups(batch).indices,)

        self._ahead = Ahead(
            source, rows, planned, lambda made: made, slack(self.lookahead, self.cleanup, around)
        )
        return self._ahead.batches()

    def _begin(self, rows: RowIds) -> OraclePlan:
        """The plan of the next batch, which looks up ``rows``."""
        restarts = self._ahead is not self._running
        if restarts:
            self._restart()
        assert self._ahead is not None, "batches come through the stream"
        number = self.step - self._first
        if number >= self._next_open or not self._opened:
            self._open(self._ahead, number)
        if restarts and not np.array_equal(self._opened[0].rows, distinct(rows)):
            # Core already had the decisions for the stream's first batch and has not asked again.
            self._arrived(self._opened.popleft().rows)
            self._first -= 1
            number = 1
        # The batch before may still be on its way from the store.
        while self._groups and self._groups[0][0] < number - 2:
            self.bulk.retire(self._groups.popleft()[1])
        made = self._opened.popleft()
        assert made.number == number, (made.number, number)
        self.window_sum += made.window
        self.window_least = min(self.window_least, made.window)
        return made

    def _restart(self) -> None:
        """Begin a new stream; rows being read for the old one are not awaited any more."""
        for made in self._opened:
            self._arrived(made.rows)
        self._opened.clear()
        self._running, self._first = self._ahead, self.step
        self._next_open = 0
        while self._groups:
            self.bulk.retire(self._groups.popleft()[1])

    def _open(self, ahead: Ahead[OraclePlan], number: int) -> None:
        """Take the plans of batches up to two intervals ahead and read what they need, one interval at a
        time."""
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

    def _interval(self, made: OraclePlan) -> int:
        """The number of batches between two groups; fewer if the budget has shrunk the window."""
        return max(1, self.cleanup * made.window // self.lookahead)

    def _arrived(self, rows: Rows) -> None:
        """Note that ``rows`` are not being read any more, whether they were used or not."""
        self.state[rows[self.state[rows] == COMING]] = COLD

    # -- the policy --------------------------------------------------------------------------

    def migrate(self, rows: RowIds) -> Placement:
        """Place nothing; only missed rows are placed, by ``admit``."""
        self._current = self._begin(rows)
        return NOTHING

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Give every miss a free slot, or the slot of a row that no known batch needs."""
        assert self._current is not None
        fresh = np.arange(self.used, min(self.space.slots, self.used + len(misses)), dtype=np.int32)
        slots = np.concatenate((fresh, self._unneeded(len(misses) - len(fresh))))
        self.used += len(fresh)
        held = self.space.residents.row_of_slot
        placed, leaving = misses[: len(slots)], held[slots]
        planned = self._current.rows
        left = leaving[leaving >= 0]
        self.state[left] = COLD
        self.evicted += len(left)
        self.state[placed] = RESIDENT
        self._arrived(planned)
        self.step += 1
        return Placement(slots, placed)

    def _unneeded(self, wanted: int) -> Slots:
        """Up to ``wanted`` slots whose rows no known batch needs, those needed longest ago first."""
        found: list[Slots] = []
        refreshed = False
        while wanted > 0:
            slots = self._victims[self._next : self._next + wanted]
            self._next += len(slots)
            # A batch that has become known since then may need the row again.
            free = slots[self.due[self.space.residents.row_of_slot[slots]] < self.step]
            found.append(free)
            wanted -= len(free)
            if self._next >= len(self._victims) and wanted > 0:
                if refreshed:
                    break
                self._refresh(found, max(8 * wanted, self.used // 8))
                refreshed = True
        return np.concatenate(found) if found else NOTHING.slots

    def _refresh(self, taken: list[Slots], size: int) -> None:
        """List the ``size`` slots that were needed longest ago, without those ``taken`` for this batch."""
        due = self.due[self.space.residents.row_of_slot[: self.used]]
        due[np.concatenate(taken)] = self.step
        slots = np.flatnonzero(due < self.step).astype(np.int32)
        if len(slots) > size:
            slots = slots[np.argpartition(due[slots], size)[:size]]
        self._victims = slots[np.argsort(due[slots], kind="stable")]
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        """The last batch that needed the row in each slot."""
        rows = self.space.residents.row_of_slot
        return {"due": np.where(rows < 0, 0, self.due[rows] - self.step).astype(np.int32)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """As in ``CachePolicy``."""
        super().check_state(state)
        within(state, "due", np.iinfo(np.int32).min, size=self.space.slots)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the resident rows; batch numbers start again."""
        rows = self.space.residents.row_of_slot
        used = rows >= 0
        self.used = int(used.sum())
        self.state[rows[used]] = RESIDENT
        # The batches that need them become known again; the order by age stays.
        self.due[rows[used]] = np.minimum(state["due"][used], -1)
