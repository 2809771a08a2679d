"""The trainer's side: cached rows with their gradients that have not been pushed yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from recpipe.kit import TableOptimizer, updated
from recpipe.plugin import CachePolicy, Slots
from recpipe_het.bounds import Bounds
from recpipe_het.messages import ABSENT, Check, Floats, Push, Reply, Rows


class Lines:
    """One trainer's cache. The calls for a batch are ``open``, (a round with the holders), ``receive``,
    ``add``.

    ``make_policy`` gives an empty policy; ``width`` is that of a record. A line's view is what its holder
    would have if the line were pushed now and no other trainer pushed.
    """

    def __init__(
        self,
        make_policy: Callable[[], CachePolicy],
        bounds: Bounds,
        optimizer: TableOptimizer,
        dim: int,
        width: int,
    ) -> None:
        self._make_policy, self.bounds = make_policy, bounds
        self.optimizer, self.dim, self.width = optimizer, dim, width
        self.policy = make_policy()
        space = self.policy.space
        self.residents = space.residents
        self.version = np.full(space.slots, ABSENT, np.int64)
        self.updates = np.zeros(space.slots, np.int64)
        self.base = np.zeros((space.slots, width), np.float32)
        self.gradient = np.zeros((space.slots, dim), np.float32)
        self.pushed: Counter[str] = Counter()
        """How many rows were pushed, by reason."""
        self.largest_pending = 0
        self._close()

    def _close(self) -> None:
        """Note that no batch is open."""
        self._rows: Rows = np.empty(0, np.int64)
        self._slots: Slots = np.empty(0, np.int32)
        self._loose = Push.of(self.dim, [])

    def open(self, rows: Rows, looked_up: Rows) -> tuple[Push, Check]:
        """Start a batch that looks up the distinct ``rows``; ``looked_up`` has them with repeats.

        All rows are searched before any is inserted, so that a batch cannot evict its own rows.
        """
        slots = self.residents.slot_of(rows)
        hit = slots >= 0
        placement = self.policy.admit(slots[hit], rows[~hit], looked_up)
        push = Push.of(self.dim, [self.due(), self._take(placement.slots, "eviction")])
        self._place(placement.slots, placement.rows)
        self._rows, self._slots = rows, self.residents.slot_of(rows)
        versions = np.full(len(rows), ABSENT, np.int64)
        versions[hit] = self.version[slots[hit]]
        return push, Check(rows, versions)

    def due(self) -> Push:
        """What must be pushed now: gradients without a line, and lines over their bound. All of them belong
        to the open batch, since those of earlier batches were pushed when it was opened."""
        loose, self._loose = self._loose, Push.of(self.dim, [])
        self.pushed["no_line"] += len(loose.rows)
        cached = self._slots >= 0
        slots = self._slots[cached]
        over = slots[self.updates[slots] > self.bounds.of(self._rows[cached])]
        return Push.of(self.dim, [loose, self._take(over, "bound")])

    def _take(self, slots: Slots, reason: str) -> Push:
        """The pending gradients of ``slots``, which from now on are part of their base records."""
        slots = slots[self.updates[slots] > 0]
        push = Push(self.residents.row_of_slot[slots], self.updates[slots], self.gradient[slots])
        self.base[slots] = self._view(slots)
        self.version[slots] += push.updates
        self.updates[slots], self.gradient[slots] = 0, 0
        self.pushed[reason] += len(slots)
        return push

    def _place(self, slots: Slots, rows: Rows) -> None:
        self.residents.put(slots, rows)
        self.version[slots] = ABSENT

    def receive(self, reply: Reply) -> Floats:
        """Store the pulled records; returns the batch's records from this trainer's view, float32 [U,
        width]."""
        records = np.zeros((len(self._rows), self.width), np.float32)
        records[reply.positions] = reply.records
        slots = self._slots[reply.positions]
        lined = slots >= 0
        self.base[slots[lined]] = reply.records[lined]
        self.version[slots[lined]] = reply.versions[lined]
        cached = self._slots >= 0
        records[cached] = self._view(self._slots[cached])
        return records

    def _view(self, slots: Slots) -> Floats:
        base, gradient = torch.from_numpy(self.base[slots]), torch.from_numpy(self.gradient[slots])
        view: Floats = updated(self.optimizer, base, gradient).numpy()
        return view

    def add(self, gradients: Floats) -> None:
        """Add one local update of the open batch's rows, float32 [U, D]; what is ``due`` is pushed in the
        next round."""
        cached = self._slots >= 0
        slots = self._slots[cached]
        self.gradient[slots] += gradients[cached]
        self.updates[slots] += 1
        self.largest_pending = max(self.largest_pending, int(self.updates[slots].max(initial=0)))
        rows, loose = self._rows[~cached], gradients[~cached]
        if len(self._loose.rows):  # from the same batch, so they have the same rows
            self._loose = Push(rows, self._loose.updates + 1, self._loose.gradients + loose)
        else:
            self._loose = Push(rows, np.ones(len(rows), np.int64), loose)

    def flush(self) -> Push:
        """Everything that has not been pushed."""
        due = self.due()
        used = np.flatnonzero(self.updates > 0).astype(np.int32)
        return Push.of(self.dim, [due, self._take(used, "flush")])

    def clear(self) -> None:
        """Forget all lines, which must have been flushed, and what the policy has learned."""
        assert not self.updates.any(), "flush before clear"
        assert not len(self._loose.rows), "flush before clear"
        self._close()
        self.residents.empty(np.arange(len(self.version), dtype=np.int32))
        self.policy = self._make_policy()
        self.residents = self.policy.space.residents
        self.version[:] = ABSENT

    @property
    def overhead_bytes(self) -> int:
        """DRAM beyond the base records: pending gradients, versions and maps."""
        parts = (self.version, self.updates, self.gradient)
        return self.residents.nbytes + sum(part.nbytes for part in parts)
