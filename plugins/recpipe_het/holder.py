"""The holder's side: rows in a cold store, their versions in DRAM beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recpipe.kit import updated
from recpipe.plugin import ColdStore, Records, TableOptimizer, distinct
from recpipe_het.bounds import Bounds
from recpipe_het.messages import ABSENT, Check, Push, Reply, Rows, Sums
from recpipe_het.missed import Missed


class Holder:
    """Applies pushes and answers checks. Rows are numbered as in ``store``, also those of ``bounds``.

    ``versions`` (int64 [rows]) counts the updates applied to each row. Only rows that are sent or
    updated touch the store. ``missed`` counts what reads miss; None: nobody does.
    """

    def __init__(
        self, store: ColdStore, optimizer: TableOptimizer, dim: int, bounds: Bounds, missed: Missed | None
    ) -> None:
        self.store = store
        self.optimizer = optimizer
        self.dim = dim
        self.bounds = bounds
        self.missed = missed
        self.versions = np.zeros(store.layout.total_rows, np.int64)
        self.applied = 0
        """Sum of ``versions``."""
        self.largest_staleness = 0
        """The most updates applied here that a trainer's line lacked when it was read without a pull."""

    def push(self, pushes: Sequence[tuple[int, Push]]) -> None:
        """Apply one round's pushes, each with its trainer's number. A row's gradients are added in the order
        of ``pushes`` and make one optimizer step; the trainers' own steps are added after that."""
        rows = distinct(np.concatenate([push.rows for _, push in pushes]))
        if not len(rows):
            return
        records = self.read(rows)
        self._step(rows, records, [push.gradients for _, push in pushes if len(push.gradients.rows)])
        for trainer, push in pushes:
            records[np.searchsorted(rows, push.steps.rows)] += push.steps.values
            pushed, updates = push.rows, push.updates
            self.versions[pushed] += updates
            self.applied += int(updates.sum())
            if self.missed is not None:
                self.missed.pushed(trainer, pushed, updates)
        self.store.scatter(rows, records)

    def _step(self, rows: Rows, records: Records, parts: Sequence[Sums]) -> None:
        """Make one step of those of ``rows`` that have gradients; ``records`` are theirs."""
        if not parts:
            return
        touched = distinct(np.concatenate([part.rows for part in parts]))
        total = np.zeros((len(touched), self.dim), np.float32)
        for part in parts:
            total[np.searchsorted(touched, part.rows)] += part.values
        at = np.searchsorted(rows, touched)
        stepped = updated(self.optimizer, torch.from_numpy(records[at]), torch.from_numpy(total))
        records[at] = stepped.numpy()

    def pull(self, trainer: int, check: Check) -> Reply:
        """The rows of ``check`` that its trainer lacks, or whose copy there is older than the bound
        allows."""
        behind = self.versions[check.rows] - check.versions
        sent = (check.versions == ABSENT) | (behind > self.bounds.of(check.rows))
        behind[sent] = 0
        self.largest_staleness = max(self.largest_staleness, int(behind.max(initial=0)))
        if self.missed is not None and check.training:
            self.missed.read(trainer, check.rows, behind)
        positions = np.flatnonzero(sent)
        rows = check.rows[positions]
        return Reply(positions, self.versions[rows], self.read(rows))

    def read(self, rows: Rows) -> Records:
        """Records of distinct ``rows``, float32 [n, width]."""
        out = np.empty((len(rows), self.store.layout.width), np.float32)
        if len(rows):
            self.store.gather(rows, out)
        return out
