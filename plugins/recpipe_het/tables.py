"""HET's tables: one trainer's cache of the holders' rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.kit import HoldersStore, RowBags, RowCollection, policy_bytes, row_bags
from recpipe.plugin import IoCounters, Records, Region, TierFigures, TierParts, TierTimes, Values
from recpipe_het.holder import ABSENT, Check, Floats, Push, Reply, Rows
from recpipe_het.lines import Lines
from recpipe_het.rounds import Rounds, Totals, Write


@dataclass
class Shipped:
    """What training looked up on this trainer, and what was shipped for it."""

    lookups: int = 0
    """The number of lookups, including repeats."""
    checks: int = 0
    """The number of distinct rows in the batches, which would be pulled and pushed without a cache."""
    hits: int = 0
    without_pull: int = 0
    """The lookups, including repeats, whose row was cached and fresh enough, so that it was not pulled."""
    rows_pulled: int = 0
    rows_pushed: int = 0
    """Rows pushed, without those pushed only for an evaluation, a checkpoint or the report."""
    bytes_pushed: int = 0
    """Bytes of the gradients or steps of those rows."""
    stale_pulls: int = 0
    """Cached rows that were pulled because they were older than their bound."""
    largest_stale_pull: int = 0
    """The largest difference of versions found when a cached row was pulled."""


class HetTables(RowCollection):
    """This trainer's cache. All trainers make the same calls; each training batch is one round."""

    whole_updates = "a holder applies the gradients of several batches and trainers whenever they come"

    def __init__(self, parts: TierParts, rounds: Rounds, lines: Lines) -> None:
        super().__init__(parts.tables)
        self.ranks = parts.ranks
        self.rounds, self.lines = rounds, lines
        self.shipped = Shipped()
        self.io, self.times = IoCounters(), TierTimes()
        self._empty = True
        self._was_full = False
        """Whether all lines were ever in use; evaluations and checkpoints may empty them."""
        self._waiting = False
        """Whether trainers may have updates that were not pushed; the same on all of them."""
        self._anchor = torch.zeros(0, requires_grad=True)

    def lookup(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Rows of this trainer's share; with gradients enabled, the backward pass adds to the lines.

        Without gradients, the rows are those that a checkpoint would have: all lines are pushed first, and
        stay.
        """
        lookups = row_bags(self.tables, sparse)
        if torch.is_grad_enabled():
            records = self._pull(lookups.distinct, lookups.which.numpy())
            rows: torch.Tensor = _Lookup.apply(self._anchor, self, lookups, records)  # type: ignore[no-untyped-call]
            return rows
        records = self._current(lookups.distinct)
        return lookups.pooled(torch.from_numpy(records[:, : self.tables.dim]).contiguous())

    def _pull(self, rows: Rows, which: Rows) -> Records:
        """The round of a training batch, which looks up the distinct ``rows``; ``which``: their positions,
        lookup by lookup."""
        self._empty = False
        push, check = self.lines.open(rows, rows[which])
        self._was_full = self._was_full or not (self.lines.residents.row_of_slot < 0).any()
        start = perf_counter()
        reply = self._training_round(push, check)
        self.times.wait += perf_counter() - start
        had = check.versions[reply.positions]
        stale = (reply.versions - had)[had != ABSENT]
        shipped = self.shipped
        shipped.lookups += len(which)
        shipped.without_pull += len(which) - int(np.isin(which, reply.positions).sum())
        shipped.checks += len(rows)
        shipped.hits += int((check.versions != ABSENT).sum())
        shipped.rows_pulled += len(reply.positions)
        shipped.stale_pulls += len(stale)
        shipped.largest_stale_pull = max(shipped.largest_stale_pull, int(stale.max(initial=0)))
        return self.lines.receive(reply)

    def _training_round(self, push: Push, check: Check | None = None) -> Reply:
        """A round whose traffic is training's."""
        store = self.rounds.store
        before = replace(store.io)
        reply = self.rounds.run(push, check)
        self.shipped.rows_pushed += len(push.rows)
        self.shipped.bytes_pushed += push.nbytes
        if isinstance(store, HoldersStore):  # rows move between ranks, counted as that store counts them
            moved = IoCounters(
                rows_read=len(reply.positions),
                rows_written=len(push.rows),
                bytes_read=reply.records.nbytes,
                bytes_written=push.nbytes,
            )
        else:
            moved = store.io.plus(before, -1)
        self.io = self.io.plus(moved)
        return reply

    def add_update(self, gradients: Floats) -> None:
        """Add one update of the rows of the last training batch, float32 [U, D]."""
        self._waiting = True
        self.rounds.update_made(len(gradients))
        self.lines.add(gradients)
        self.rounds.rate = self.lines.pending.rate

    def _current(self, rows: Rows) -> Records:
        """Records of distinct ``rows`` with all trainers' updates; this traffic is not counted as
        training's."""
        out = np.empty((len(rows), self.tables.layout.width), np.float32)
        check = Check(rows, np.full(len(rows), ABSENT, np.int64), training=False)
        reply = self.rounds.run(self._flushed(), check)
        out[reply.positions] = reply.records
        return out

    def _flushed(self) -> Push | None:
        """Push what is due anyway, as training's traffic, and take all other updates."""
        if not self._waiting:
            return None
        self._waiting = False
        self._training_round(self.lines.due())
        return self.lines.flush()

    def _forget(self) -> None:
        """Push everything and drop all lines, so that a resumed run starts as this one goes on."""
        self.rounds.run(self._flushed())
        if not self._empty:
            self.lines.clear()
            self._empty = True

    def settle(self) -> Totals:
        """Push everything; returns the totals of all ranks so far. All trainers call it."""
        self.rounds.run(self._flushed())
        self.rounds.run()
        return self.rounds.totals

    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``, on every trainer; empties the caches."""
        self._forget()
        records = self._current(self.rows_of(region))
        return records[:, : self.tables.dim], records[:, self.tables.dim :]

    def write(self, region: Region, values: Values) -> None:
        """Replace weights and optimizer state of ``region``; trainer 0 sends them, the caches are emptied."""
        self._forget()
        chosen = slice(None) if self.ranks.trainer == 0 else slice(0)
        self.rounds.run(write=Write(self.rows_of(region)[chosen], np.concatenate(values, axis=1)[chosen]))

    def tier_figures(self) -> TierFigures:
        """Traffic of training, times and memory, without that of counting what reads miss.

        In one process the traffic is the store's. Between ranks it is the records and updates that this
        trainer exchanges with holders.
        """
        store, holder = self.rounds.store, self.rounds.holder
        versions = 0 if holder is None else holder.versions.nbytes
        return TierFigures(
            self.io,
            self.times,
            store.direct,
            self.lines.pending.base.nbytes,
            store.cold_bytes,
            self.lines.overhead_bytes + policy_bytes(self.lines.policy) + versions + store.overhead_bytes,
            not self._was_full,
            self.shipped.lookups,
            self.shipped.without_pull,
        )

    def write_back(self) -> None:
        """Push what is pending."""
        self.settle()

    def close(self) -> None:
        """Push what is pending, release the holders, and close the store."""
        try:
            self.rounds.run(self._flushed())
            self.rounds.stop()
        finally:
            self.rounds.store.close()


class _Lookup(torch.autograd.Function):
    """Pooling whose backward pass adds to the lines. The anchor makes autograd call it."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, tables: HetTables, bags: RowBags, records: Records
    ) -> torch.Tensor:
        ctx.call = (tables, bags)
        return bags.pooled(torch.from_numpy(records[:, : tables.tables.dim]).contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        tables, bags = ctx.call
        tables.add_update(bags.gradients(gradient.contiguous(), tables.tables.dim).numpy())
        return None, None, None, None
