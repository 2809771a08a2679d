"""LFUOpt against its definition."""

from __future__ import annotations

import numpy as np
from recpipe_het.policy import PERMANENT_USES, LfuOpt

from recpipe.plugin.policy import RowSpace

SPACE = RowSpace(np.array([0, 100]), 12)


def test_lfuopt_is_the_sorted_definition() -> None:
    """Slot by slot the least used, then least recently used, then lowest slot that may leave."""
    rng = np.random.default_rng(1)
    policy, row_of_slot = LfuOpt(SPACE), np.full(SPACE.slots, -1)
    uses, stamp = np.zeros(SPACE.slots, int), np.zeros(SPACE.slots, int)
    for step in range(1, 400):
        rows = np.unique(np.minimum(rng.zipf(1.2, 7), 100) - 1)
        hits = np.flatnonzero(np.isin(row_of_slot, rows))
        misses = np.setdiff1d(rows, row_of_slot)
        usable = [s for s in range(SPACE.slots) if s not in hits and uses[s] < PERMANENT_USES]
        expected = sorted(usable, key=lambda s: (uses[s], stamp[s], s))[: len(misses)]
        placed = policy.admit(hits.astype(np.int32), misses, rows)
        assert placed.slots.tolist() == expected, step
        assert placed.rows.tolist() == misses[: len(expected)].tolist()
        uses[hits] += 1
        uses[expected] = 1
        stamp[[*hits, *expected]] = step
        row_of_slot[expected] = placed.rows
    assert (uses >= PERMANENT_USES).any()


def test_lfuopt_keeps_rows_of_ten_uses_for_good() -> None:
    """Nine uses do not protect a row, ten do; a cache full of permanent rows admits nothing."""
    none = np.empty(0, np.int32)
    for uses, stays in ((9, False), (10, True)):
        policy = LfuOpt(RowSpace(np.array([0, 100]), 1))
        slot = policy.admit(none, np.array([7]), np.array([7])).slots
        for _ in range(uses - 1):
            policy.admit(slot, np.empty(0, np.int64), np.array([7]))
        placed = policy.admit(none, np.array([8]), np.array([8]))
        assert (len(placed.slots) == 0) is stays
