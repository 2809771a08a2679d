"""Derives what one trainer has to do in a batch from the plan that all trainers share.

All lists of rows follow from the plan, which every trainer has. So row numbers are never sent, and every
trainer knows which messages would be empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe_bagpipe.oracle import Mask, OraclePlan, Rows


@dataclass(frozen=True)
class Sync:
    """The rows of a batch whose gradients are added over the trainers, from one trainer's point of view."""

    held: Rows
    """The rows that this trainer holds, sorted, int64 [K]."""
    send: tuple[Rows, ...]
    """For each trainer, the positions, among the rows that this trainer looks up, of the gradients that the
    other one needs; empty for this trainer itself."""
    own: Rows
    """The positions, among the rows that this trainer looks up, of the gradients that it keeps."""
    used: tuple[Rows, ...]
    """For each trainer, the positions in ``held`` of the rows that it looks up."""
    rows: int
    """How many rows there are on all trainers together; 0: nothing is sent."""
    copies: int
    """How many gradient rows all trainers send."""


@dataclass(frozen=True)
class HandoverPart:
    """Records that new holders get from a row's lowest holder, from one trainer's point of view."""

    send: tuple[Rows, ...]
    """The rows to send to each trainer."""
    receive: tuple[Rows, ...]
    """The rows that come from each trainer."""
    copies: int
    """How many records all trainers send; 0: nothing is sent."""


@dataclass(frozen=True)
class Cleanup:
    """Rows that leave the caches before a batch, from one trainer's point of view."""

    write: Rows
    """The rows that this trainer writes."""
    free: Rows
    """The rows that this trainer holds, including ``write``."""
    rows: int
    """How many rows all trainers together write."""


@dataclass(frozen=True)
class Step:
    """One trainer's part of a ``OraclePlan``."""

    number: int
    fetch_after: int
    """The cleanup round whose reads may bring this batch's rows."""
    mine: Rows
    """The distinct rows of this trainer's share of the batch, sorted."""
    fetch: Rows
    """The rows that this trainer fetches from the store."""
    fetched: int
    """How many rows all trainers together fetch; a row counts each time it is fetched."""
    cleanup: Cleanup
    handover: HandoverPart
    local: Rows
    """The rows that only this trainer holds."""
    local_at: Rows
    """The positions of these rows in ``mine``."""
    local_rows: int
    """How many rows of all trainers have one holder."""
    critical: Sync
    delayed: Sync
    held: Rows
    """The rows of the whole batch that this trainer holds."""
    writes: NDArray[np.bool_]
    """Whether this trainer writes them, since it is their lowest holder."""


def has(mask: Mask, trainer: int) -> NDArray[np.bool_]:
    """Whether ``trainer`` is in each set."""
    bits: NDArray[np.bool_] = (mask >> np.uint64(trainer)) & np.uint64(1) != 0
    return bits


def lowest(mask: Mask, trainers: int) -> NDArray[np.int64]:
    """The lowest trainer of each set; ``trainers`` if it is empty."""
    found = np.full(len(mask), trainers, np.int64)
    for trainer in reversed(range(trainers)):
        found[has(mask, trainer)] = trainer
    return found


def step_of(plan: OraclePlan, trainer: int, trainers: int) -> Step:
    """What ``plan`` means for ``trainer``, one of ``trainers``."""
    rows, users, holders = plan.rows, plan.users, plan.holders
    mine = rows[has(users, trainer)]
    holds = has(holders, trainer)
    fetched = np.zeros(len(rows), bool)
    fetched[plan.fetch] = True
    alone = ~(plan.critical | plan.delayed)
    local = rows[alone & holds]
    free = plan.expired[has(plan.expired_holders, trainer)]
    moved = plan.handover
    return Step(
        number=plan.number,
        fetch_after=plan.fetch_after,
        mine=mine,
        fetch=rows[fetched & holds],
        fetched=_count(holders[fetched], trainers),
        cleanup=Cleanup(plan.expired[plan.writer == trainer], free, len(plan.expired)),
        handover=HandoverPart(
            send=tuple(moved.rows[(moved.source == trainer) & has(moved.new, t)] for t in range(trainers)),
            receive=tuple(moved.rows[(moved.source == t) & has(moved.new, trainer)] for t in range(trainers)),
            copies=_count(moved.new, trainers),
        ),
        local=local,
        local_at=np.searchsorted(mine, local),
        local_rows=int(alone.sum()),
        critical=_sync(plan, plan.critical, mine, trainer, trainers),
        delayed=_sync(plan, plan.delayed, mine, trainer, trainers),
        held=rows[holds],
        writes=lowest(holders[holds], trainers) == trainer,
    )


def _count(mask: Mask, trainers: int) -> int:
    """The number of members of all sets together."""
    return sum(int(has(mask, trainer).sum()) for trainer in range(trainers))


def _sync(plan: OraclePlan, chosen: NDArray[np.bool_], mine: Rows, trainer: int, trainers: int) -> Sync:
    rows, users, holders = plan.rows[chosen], plan.users[chosen], plan.holders[chosen]
    holds, uses = has(holders, trainer), has(users, trainer)
    assert trainers > 1 or not len(rows), "a single trainer adds up nothing"
    send = [
        np.searchsorted(mine, rows[uses & has(holders, t)]) if t != trainer else np.empty(0, np.int64)
        for t in range(trainers)
    ]
    copies = sum(
        int((has(users, a) & has(holders, b)).sum()) for a in range(trainers) for b in range(trainers)
    )
    return Sync(
        held=rows[holds],
        send=tuple(send),
        own=np.searchsorted(mine, rows[uses]),
        used=tuple(np.flatnonzero(has(users[holds], t)) for t in range(trainers)),
        rows=len(rows),
        copies=copies - _count(users, trainers),
    )
