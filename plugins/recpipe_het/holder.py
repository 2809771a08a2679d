"""The holder's side: rows in a cold store, their versions in DRAM beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recpipe.kit import ColdStore, Records, TableOptimizer, distinct, updated
from recpipe_het.bounds import Bounds
from recpipe_het.messages import ABSENT, Check, Push, Reply, Rows


class Holder:
    """Applies pushes and answers checks. Rows are numbered as in ``store``, also those of ``bounds``.

    ``versions`` (int64 [rows]) counts the updates applied to each row. Only rows that are sent or
    updated touch the store.
    """

    def __init__(self, store: ColdStore, optimizer: TableOptimizer, dim: int, bounds: Bounds) -> None:
        self.store = store
        self.optimizer = optimizer
        self.dim = dim
        self.bounds = bounds
        self.versions = np.zeros(store.layout.total_rows, np.int64)
        self.applied = 0
        """Sum of ``versions``."""
        self.largest_staleness = 0
        """The most updates that a trainer's line lacked when it was read without a pull."""

    def push(self, pushes: Sequence[Push]) -> None:
        """Apply one round's pushes. A row's gradients are added in the order of ``pushes`` and make one
        optimizer step."""
        rows = distinct(np.concatenate([push.rows for push in pushes]))
        if not len(rows):
            return
        total = np.zeros((len(rows), self.dim), np.float32)
        for push in pushes:
            at = np.searchsorted(rows, push.rows)
            total[at] += push.gradients
            self.versions[push.rows] += push.updates
            self.applied += int(push.updates.sum())
        records = torch.from_numpy(self.read(rows))
        self.store.scatter(rows, updated(self.optimizer, records, torch.from_numpy(total)).numpy())

    def pull(self, check: Check) -> Reply:
        """The rows of ``check`` that its trainer lacks, or whose copy there is older than the bound
        allows."""
        behind = self.versions[check.rows] - check.versions
        sent = (check.versions == ABSENT) | (behind > self.bounds.of(check.rows))
        self.largest_staleness = max(self.largest_staleness, int(behind[~sent].max(initial=0)))
        positions = np.flatnonzero(sent)
        rows = check.rows[positions]
        return Reply(positions, self.versions[rows], self.read(rows))

    def read(self, rows: Rows) -> Records:
        """Records of distinct ``rows``, float32 [n, width]."""
        out = np.empty((len(rows), self.store.layout.width), np.float32)
        if len(rows):
            self.store.gather(rows, out)
        return out
