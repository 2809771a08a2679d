"""The trainer's side: cached rows with their updates that have not been pushed yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from recpipe.kit import updated
from recpipe.plugin import CachePolicy, Slots, TableOptimizer
from recpipe_het.holder import ABSENT, NONE, Bounds, Check, Floats, Push, Reply, Rows, Sums


class Pending:
    """Records and waiting updates by slot: gradients are added up, and the holder makes one step with their
    sum.

    ``base`` (float32 [slots, width]) is what the holder sent, with what was pushed since, and ``waiting`` the
    sums (float32 [slots, D]); rows that are not cached have no slot.
    """

    def __init__(
        self, slots: int, optimizer: TableOptimizer, dim: int, width: int, columns: int | None = None
    ) -> None:
        """``columns``: of ``waiting``; None: D."""
        self.optimizer, self.dim, self.width = optimizer, dim, width
        self.rate = optimizer.rate.value
        """The learning rate of the step that has made the latest gradients: they are pushed in a later
        one."""
        self.base = np.zeros((slots, width), np.float32)
        self.waiting = np.zeros((slots, columns or dim), np.float32)

    def stepped(self, records: Floats, gradients: Floats) -> Floats:
        """``records`` [n, width] after one optimizer step with ``gradients`` [n, D]."""
        after: Floats = updated(
            self.optimizer, torch.from_numpy(records), torch.from_numpy(gradients), self.rate
        ).numpy()
        return after

    def put(self, slots: Slots, records: Floats) -> None:
        """Replace the base records of ``slots``; what waits there goes on waiting."""
        self.base[slots] = records

    def view(self, slots: Slots) -> Floats:
        """What the holder would have if ``slots`` were pushed now and nobody else pushed, [n, width]."""
        return self.stepped(self.base[slots], self.waiting[slots])

    def add(self, slots: Slots, gradients: Floats) -> None:
        """One more update of ``slots``, gradients float32 [n, D]."""
        self.waiting[slots] += gradients

    def take(self, slots: Slots, rows: Rows, updates: Rows) -> Push:
        """Push what waits in ``slots``, which hold ``rows``; from now on it is part of their base records."""
        sums = Sums(rows, updates, self.waiting[slots])
        self.base[slots] = self.view(slots)
        self.waiting[slots] = 0
        return Push(sums, Sums.none(self.width))


class OwnSteps(Pending):
    """The trainer makes an optimizer step for each of its updates, on its own copy of the record, and pushes
    what they changed. ``waiting`` (float32 [slots, width]) is that copy."""

    def __init__(self, slots: int, optimizer: TableOptimizer, dim: int, width: int) -> None:
        super().__init__(slots, optimizer, dim, width, columns=width)

    def put(self, slots: Slots, records: Floats) -> None:
        # Where nothing waits, ``waiting`` equals ``base`` before and after.
        self.waiting[slots] = records + (self.waiting[slots] - self.base[slots])
        self.base[slots] = records

    def view(self, slots: Slots) -> Floats:
        return self.waiting[slots]

    def add(self, slots: Slots, gradients: Floats) -> None:
        self.waiting[slots] = self.stepped(self.waiting[slots], gradients)

    def take(self, slots: Slots, rows: Rows, updates: Rows) -> Push:
        # The holder adds the same floats to the same record, if nobody else pushed.
        base = self.base[slots]
        change = self.waiting[slots] - base
        self.base[slots] = self.waiting[slots] = base + change
        return Push(Sums.none(self.dim), Sums(rows, updates, change))


UPDATES: dict[str, type[Pending]] = {"each": OwnSteps, "summed": Pending}
"""The values of ``plugins.het.updates``."""


class Lines:
    """One trainer's cache. The calls for a batch are ``open``, (a round with the holders), ``receive``,
    ``add``.

    ``make_policy`` gives an empty policy; ``pending`` has the records, by slot. Updates of rows without a
    line, and of rows with bound 0, do not wait: the next round pushes their gradients.
    """

    def __init__(self, make_policy: Callable[[], CachePolicy], bounds: Bounds, pending: Pending) -> None:
        self._make_policy, self.bounds, self.pending = make_policy, bounds, pending
        self.policy = make_policy()
        self.residents = self.policy.space.residents
        slots = self.policy.space.slots
        self.version = np.full(slots, ABSENT, np.int64)
        self.updates = np.zeros(slots, np.int64)
        """How many updates of each line are waiting."""
        self.pushed: Counter[str] = Counter()
        """How many rows were pushed, by reason."""
        self.largest_pending = 0
        self._close()

    def _close(self) -> None:
        """Note that no batch is open."""
        self._rows: Rows = NONE
        self._slots: Slots = np.empty(0, np.int32)
        self._bounds: Rows = NONE
        self._at_once = Sums.none(self.pending.dim)
        """Gradients that the next round pushes."""

    def open(self, rows: Rows, looked_up: Rows) -> tuple[Push, Check]:
        """Start a batch that looks up the distinct ``rows``; ``looked_up`` has them with repeats.

        All rows are searched before any is inserted, so that a batch cannot evict its own rows.
        """
        slots = self.residents.slot_of(rows)
        hit = slots >= 0
        placement = self.policy.admit(slots[hit], rows[~hit], looked_up)
        push = self.due().plus(self._take(placement.slots, "eviction"))
        self.residents.put(placement.slots, placement.rows)
        self.version[placement.slots] = ABSENT
        self._rows, self._slots, self._bounds = rows, self.residents.slot_of(rows), self.bounds.of(rows)
        versions = np.full(len(rows), ABSENT, np.int64)
        versions[hit] = self.version[slots[hit]]
        return push, Check(rows, versions)

    def due(self) -> Push:
        """What must be pushed now: gradients that do not wait, and lines over their bound. All of them belong
        to the open batch, since those of earlier batches were pushed when it was opened."""
        sums, self._at_once = self._at_once, Sums.none(self.pending.dim)
        if len(sums.rows):
            slots = self._slots[~self._waits]
            cached = slots >= 0
            self.pushed["bound"] += int(cached.sum())
            self.pushed["no_line"] += int((~cached).sum())
            own, kept = slots[cached], self.pending  # nothing waits there
            kept.put(own, kept.stepped(kept.base[own], sums.values[cached]))
            self.version[own] += sums.updates[cached]
        slots, bounds = self._slots[self._waits], self._bounds[self._waits]
        over = self._take(slots[self.updates[slots] > bounds], "bound")
        return Push(sums, Sums.none(self.pending.width)).plus(over)

    @property
    def _waits(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which rows of the open batch have lines whose updates may wait, bool [U]."""
        return (self._slots >= 0) & (self._bounds > 0)

    def _take(self, slots: Slots, reason: str) -> Push:
        """The waiting updates of ``slots``, which from now on are part of their base records."""
        slots = slots[self.updates[slots] > 0]
        if not len(slots):
            return Push(Sums.none(self.pending.dim), Sums.none(self.pending.width))
        updates = self.updates[slots]
        push = self.pending.take(slots, self.residents.row_of_slot[slots], updates)
        self.version[slots] += updates
        self.updates[slots] = 0
        self.pushed[reason] += len(slots)
        return push

    def receive(self, reply: Reply) -> Floats:
        """Store the pulled records; returns the batch's records from this trainer's view, float32 [U,
        width]."""
        records = np.empty((len(self._rows), self.pending.width), np.float32)
        records[reply.positions] = reply.records
        slots = self._slots[reply.positions]
        lined = slots >= 0
        self.pending.put(slots[lined], reply.records[lined])
        self.version[slots[lined]] = reply.versions[lined]
        cached = self._slots >= 0
        records[cached] = self.pending.view(self._slots[cached])
        return records

    def add(self, gradients: Floats) -> None:
        """Add one local update of the open batch's rows, float32 [U, D]; what is ``due`` is pushed in the
        next round."""
        self.pending.rate = self.pending.optimizer.rate.value
        waits = self._waits
        slots = self._slots[waits]
        self.pending.add(slots, gradients[waits])
        self.updates[slots] += 1
        rows, now = self._rows[~waits], gradients[~waits]
        have = self._at_once
        if len(have.rows):  # from the same batch, so they have the same rows
            self._at_once = Sums(rows, have.updates + 1, have.values + now)
        else:
            self._at_once = Sums(rows, np.ones(len(rows), np.int64), now)
        lined = self._slots[~waits] >= 0
        most = (self.updates[slots].max(initial=0), self._at_once.updates[lined].max(initial=0))
        self.largest_pending = max(self.largest_pending, *map(int, most))

    def flush(self) -> Push:
        """Everything that has not been pushed."""
        due = self.due()
        waiting = np.flatnonzero(self.updates > 0).astype(np.int32)
        return due.plus(self._take(waiting, "flush"))

    def clear(self) -> None:
        """Forget all lines, which must have been flushed, and what the policy has learned."""
        assert not self.updates.any(), "flush before clear"
        assert not len(self._at_once.rows), "flush before clear"
        self._close()
        self.residents.empty(np.arange(len(self.version), dtype=np.int32))
        self.policy = self._make_policy()
        self.residents = self.policy.space.residents
        self.version[:] = ABSENT

    @property
    def overhead_bytes(self) -> int:
        """DRAM beyond the base records: waiting updates, versions and maps."""
        return self.residents.nbytes + self.pending.waiting.nbytes + self.version.nbytes + self.updates.nbytes
