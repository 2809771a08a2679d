"""The holder's side: rows in a cold store, their versions in DRAM beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recpipe.embedding.rowtable import updated
from recpipe.embedding.stores.base import ColdStore, Records
from recpipe.embedding.tables import TableOptimizer
from recpipe_het.messages import Check, Push, Reply, Rows


class Holder:
    """Applies pushes and answers checks. Rows are numbered as in ``store``.

    ``versions`` (int64 [rows]) counts the updates applied to each row. Only rows that are sent or
    updated touch the store.
    """

    def __init__(self, store: ColdStore, optimizer: TableOptimizer, dim: int) -> None:
        self.store = store
        self.optimizer = optimizer
        self.dim = dim
        self.versions = np.zeros(store.layout.total_rows, np.int64)

    def push(self, pushes: Sequence[Push]) -> None:
        """Apply one round's pushes: a row's gradients are added in the order of ``pushes`` and make one
        optimizer step."""
        rows = np.unique(np.concatenate([push.rows for push in pushes]))
        if not len(rows):
            return
        total = np.zeros((len(rows), self.dim), np.float32)
        for push in pushes:
            at = np.searchsorted(rows, push.rows)
            total[at] += push.gradients
            self.versions[push.rows] += push.updates
        records = torch.from_numpy(self.read(rows))
        self.store.scatter(rows, updated(self.optimizer, records, torch.from_numpy(total)).numpy())

    def pull(self, check: Check) -> Reply:
        """The rows of ``check`` that are newer than its trainer accepts."""
        positions = np.flatnonzero(self.versions[check.rows] > check.newest)
        rows = check.rows[positions]
        return Reply(positions, self.versions[rows], self.read(rows))

    def read(self, rows: Rows) -> Records:
        """Records of distinct ``rows``, float32 [n, width]."""
        out = np.empty((len(rows), self.store.layout.width), np.float32)
        if len(rows):
            self.store.gather(rows, out)
        return out
