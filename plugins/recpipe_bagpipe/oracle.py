"""The oracle: plans, from the rows that future batches look up, what every batch fetches, holds and evicts.

It is a pure function of the stream, without processes or clocks, in numpy alone. The protocol is the paper's
(BagPipe, SOSP 2023, sections 3 and 4), with an explicit prefetch gate: a batch's rows may be fetched after
the cleanup round that was the last one when the oracle announced the batch. Rows that the batch fetches were
written in that round or earlier, and the rows being fetched fit the budget.

A row's time to live is the last batch of the window that looks it up. Batch numbers start at 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import UserError, distinct

Rows = NDArray[np.int64]
Mask = NDArray[np.uint64]
"""A set of trainers for each row: bit t stands for trainer t."""
MAX_TRAINERS = 64
NONE: Rows = np.empty(0, np.int64)


@dataclass(frozen=True)
class HandoverPlan:
    """Rows that are resident, but not yet at all who look them up: they come from a peer."""

    rows: Rows
    source: Rows
    """The trainer that each row comes from: its lowest holder."""
    new: Mask
    """The trainers that get each row."""


@dataclass(frozen=True)
class OraclePlan:
    """The plan of one batch, the same on every trainer. Masks and flags are per row of ``rows``."""

    number: int
    rows: Rows
    """All rows that any trainer's share looks up, sorted, int64 [U]."""
    users: Mask
    """Trainers that look the row up in this batch."""
    holders: Mask
    """Trainers that hold a replica of the row while the batch trains; users are among them."""
    fetch: Rows
    """Positions in ``rows`` of rows that no trainer held; their holders fetch them from the store."""
    fetch_after: int
    """The fetch is allowed once the cleanup round before batch ``fetch_after`` has been made: the gate."""
    handover: HandoverPlan
    critical: NDArray[np.bool_]
    """Whether several trainers hold the row and the next batch looks it up too; then its update must reach
    all holders before that."""
    delayed: NDArray[np.bool_]
    """Whether several trainers hold the row and the next batch does not look it up; then its update may come
    one batch late."""
    expired: Rows
    """Rows that leave every cache in the cleanup round before this batch, sorted."""
    expired_holders: Mask
    writer: Rows
    """The one trainer that writes each expired row to the store."""


def plan(
    stream: Iterator[Sequence[Rows]],
    lookahead: int,
    cleanup: int,
    trainers: int,
    slots: int | None = None,
    *,
    increase: int = 1,
    decrease: int = 2,
) -> Iterator[OraclePlan]:
    """Plans of the batches of ``stream``, in order.

    Args:
        stream: for each batch and trainer, the global rows that the trainer's share looks up, with repeats.
        lookahead: L: batches x + 1 .. x + L are known when x is planned (fewer at the stream's end).
        cleanup: C: rows expire before batches 0, C, 2C, ...; more often if the budget shrinks the window.
        trainers: N. With several, updates of delayed rows come one batch late, and so do expiries.
        slots: how many rows each trainer can hold (None: all), including rows being fetched and rows that
            wait for a cleanup. The window adapts: it is divided by ``decrease`` when it does not fit, and
            grows by ``increase`` at each cleanup when it did.

    Raises ``UserError`` for invalid values, and if the rows of a batch do not fit into ``slots``.
    """
    least = cleanup + (1 if trainers > 1 else 0)
    if cleanup < 1 or trainers < 1 or trainers > MAX_TRAINERS or increase < 1 or decrease < 2:
        raise UserError(
            f"bagpipe: cleanup={cleanup} and increase={increase} must be at least 1, decrease={decrease} at "
            f"least 2, and trainers={trainers} from 1 to {MAX_TRAINERS}"
        )
    if lookahead < least:
        raise UserError(
            f"bagpipe: lookahead={lookahead} must be at least {least}, for a cleanup every {cleanup} batches "
            f"with {trainers} trainers; raise plugins.bagpipe.lookahead or lower plugins.bagpipe.cleanup"
        )
    yield from _Oracle(stream, lookahead, cleanup, trainers, slots, increase, decrease).plans()


@dataclass
class _Known:
    """A batch in the window."""

    rows: Rows
    users: Mask
    gate: int = 0


class _Oracle:
    """The window over the stream and, for every row, which trainers need it, which hold it, and until
    when."""

    def __init__(
        self,
        stream: Iterator[Sequence[Rows]],
        lookahead: int,
        cleanup: int,
        trainers: int,
        slots: int | None,
        increase: int,
        decrease: int,
    ) -> None:
        self.stream, self.trainers, self.slots = stream, trainers, slots
        self.lookahead, self.cleanup = lookahead, cleanup
        self.increase, self.decrease = increase, decrease
        self.window = lookahead
        """The current L."""
        self.lag = 1 if trainers > 1 else 0
        self.round = 0
        """The last cleanup round."""
        self.coming: deque[_Known] = deque()
        """Announced batches that are not planned yet."""
        self.waiting: _Known | None = None
        """A batch that has been read but does not fit yet."""
        self.past: deque[tuple[int, Rows]] = deque()
        """Planned batches that may still have rows to expire."""
        self.ended = False
        self.kept = np.zeros(trainers, np.int64)
        """For each trainer, how many rows it holds or will hold for announced batches."""
        kind = np.min_scalar_type((1 << trainers) - 1)
        self.last = np.full(0, -1, np.int32)
        """For every row, the last announced batch that looks it up; -1: none."""
        self.need = np.zeros(0, kind)
        """For every row, the trainers that hold it or will hold it for an announced batch."""
        self.held = np.zeros(0, kind)
        """For every row, the trainers that hold it."""

    def plans(self) -> Iterator[OraclePlan]:
        """One batch after the other."""
        for x in count():
            # A window that the budget has shrunk is cleaned up more often in proportion.
            due = x - self.round >= max(1, self.cleanup * self.window // self.lookahead) or x == 0
            expired = self._expire(x) if due else NONE
            self._announce(x)
            if not self.coming:
                if self.waiting is None:
                    return
                # The batch itself does not fit: clean up at once.
                expired = np.concatenate((expired, self._expire(x)))
                if self.window > 1:
                    self.window = max(1, self.window // self.decrease)
                if not self._fits(self.waiting):
                    largest = int((self.kept + self._new(self.waiting)).max())
                    raise UserError(
                        f"bagpipe: batch {x} needs {largest:,} resident rows, and tiers.resident_bytes holds "
                        f"{self.slots:,}; raise it or lower data.batch_size"
                    )
                self._take(self.waiting, x)
            batch = self.coming.popleft()
            # The next batch, announced or not, decides which updates are critical.
            if self.coming:
                following = self.coming[0].rows
            else:
                self.waiting = self.waiting or self._read()
                following = NONE if self.waiting is None else self.waiting.rows
            yield self._planned(x, batch, following, np.sort(expired))
            self.past.append((x, batch.rows))

    # -- the window --------------------------------------------------------------------------

    def _announce(self, x: int) -> None:
        """Read on until the window is full, the stream ends, or the budget is used up."""
        while len(self.coming) <= self.window:
            self.waiting = self.waiting or self._read()
            if self.waiting is None:
                return
            if not self._fits(self.waiting):
                if len(self.coming) > 1:
                    self.window = max(1, min(self.window // self.decrease, len(self.coming) - 1))
                return
            self._take(self.waiting, x + len(self.coming))
        if x == self.round:
            self.window = min(self.lookahead, self.window + self.increase)

    def _read(self) -> _Known | None:
        """The next batch of the stream; None after the last one."""
        shares = None if self.ended else next(self.stream, None)
        if shares is None:
            self.ended = True
            return None
        if self.trainers == 1:
            rows = distinct(shares[0])
            users = np.ones(len(rows), np.uint64)
        else:
            own = [distinct(share) for share in shares]
            rows = distinct(np.concatenate(own))
            users = np.zeros(len(rows), np.uint64)
            for trainer, mine in enumerate(own):
                users[np.searchsorted(rows, mine)] |= np.uint64(1 << trainer)
        if len(rows) and rows[-1] >= len(self.last):
            more = max(int(rows[-1]) + 1, 2 * len(self.last)) - len(self.last)
            self.last = np.concatenate((self.last, np.full(more, -1, np.int32)))
            self.need = np.concatenate((self.need, np.zeros(more, self.need.dtype)))
            self.held = np.concatenate((self.held, np.zeros(more, self.held.dtype)))
        return _Known(rows, users)

    def _new(self, batch: _Known) -> NDArray[np.int64]:
        """For each trainer, the rows of ``batch`` that it has not needed before."""
        new = batch.users & ~self.need[batch.rows].astype(np.uint64)
        return np.array([np.count_nonzero(new & np.uint64(1 << t)) for t in range(self.trainers)])

    def _fits(self, batch: _Known) -> bool:
        return self.slots is None or bool((self.kept + self._new(batch) <= self.slots).all())

    def _take(self, batch: _Known, number: int) -> None:
        """Announce ``batch`` as batch ``number``."""
        self.kept += self._new(batch)
        self.need[batch.rows] |= batch.users.astype(self.need.dtype)
        self.last[batch.rows] = number
        batch.gate = self.round
        self.coming.append(batch)
        self.waiting = None

    # -- a batch -----------------------------------------------------------------------------

    def _expire(self, x: int) -> Rows:
        """The cleanup round before batch ``x``: rows whose last batch is over and whose updates are applied
        everywhere."""
        self.round = x
        gone = [NONE]
        while self.past and self.past[0][0] < x - self.lag:
            number, rows = self.past.popleft()
            gone.append(rows[self.last[rows] == number])
        expired = np.concatenate(gone)
        self.last[expired] = -1
        for trainer in range(self.trainers):
            self.kept[trainer] -= np.count_nonzero(self.need[expired] & self.need.dtype.type(1 << trainer))
        self.need[expired] = 0
        return expired

    def _planned(self, x: int, batch: _Known, following: Rows, gone: Rows) -> OraclePlan:
        gone_holders = self.held[gone].astype(np.uint64)
        self.held[gone] = 0
        rows, users = batch.rows, batch.users
        before = self.held[rows].astype(np.uint64)
        need = self.need[rows].astype(np.uint64)
        fetch = np.flatnonzero(before == 0)
        # All trainers known to need a row fetch it; a trainer that needs it later gets it from a peer.
        holders = before | users
        holders[fetch] = need[fetch]
        moved = np.flatnonzero((before != 0) & (holders != before))
        self.held[rows] = holders.astype(self.held.dtype)
        shared = (holders & (holders - np.uint64(1))) != 0
        again = np.zeros(len(rows), bool)
        if len(following) and shared.any():
            again = np.isin(rows, following, assume_unique=True)
        return OraclePlan(
            number=x,
            rows=rows,
            users=users,
            holders=holders,
            fetch=fetch,
            fetch_after=batch.gate,
            handover=HandoverPlan(
                rows[moved],
                _nth_holder(before[moved], np.zeros(len(moved), np.int64), self.trainers),
                holders[moved] & ~before[moved],
            ),
            critical=shared & again,
            delayed=shared & ~again,
            expired=gone,
            expired_holders=gone_holders,
            writer=_nth_holder(gone_holders, gone, self.trainers),
        )


def _nth_holder(holders: Mask, which: Rows, trainers: int) -> Rows:
    """The member of each set with number ``which`` modulo the set's size, in ascending order."""
    member = [(holders >> np.uint64(t)) & np.uint64(1) for t in range(trainers)]
    size = np.sum(member, axis=0, dtype=np.int64) if trainers else np.zeros(len(holders), np.int64)
    left = which % np.maximum(size, 1)
    found = np.zeros(len(holders), np.int64)
    for trainer in range(trainers):
        bit = member[trainer] != 0
        found[bit & (left == 0)] = trainer
        left = left - bit
    return found
