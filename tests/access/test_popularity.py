"""Popular rows against a sort in plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from recpipe.access.counts import CAP, Counts, top_rows
from recpipe.common import loops
from recpipe.common.loops import ALONE, Spread
from recpipe.plugin.bags import RowIds


def test_top_rows_break_ties_for_residents_then_low_numbers() -> None:
    counts = np.array([5, 0, 2, 2, 2, 7], np.int32)
    assert top_rows(counts, 3).tolist() == [0, 2, 5]
    assert top_rows(counts, 3, resident=np.array([4])).tolist() == [0, 4, 5]
    assert top_rows(counts, 9).tolist() == [0, 2, 3, 4, 5], "rows never looked up are not popular"
    assert top_rows(counts, 0).tolist() == []


def slow(counts: Counts, size: int, resident: RowIds) -> list[int]:
    held = set(resident.tolist())
    rows = [row for row in range(len(counts)) if counts[row]]
    rows.sort(key=lambda row: (-counts[row], row not in held, row))
    return sorted(rows[:size])


@pytest.mark.parametrize("highest", [2, 5, 40, CAP - 1, CAP, CAP + 1, CAP + 50])
@pytest.mark.parametrize("size", [1, 7, 60, 199, 200, 500])
def test_top_rows_are_those_of_a_sort(highest: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "LEAST", 30)
    several = Spread(3)
    random = np.random.default_rng([highest, size])
    for _ in range(20):
        counts = random.integers(0, 4, 200).astype(np.int32)
        high = random.random(200) < random.random()
        counts[high] = random.integers(max(0, highest - 3), highest + 1, high.sum())
        resident = random.permutation(np.append(random.choice(200, 50, replace=False), [-1] * 5))
        for some in (None, resident):
            expected = slow(counts, size, resident if some is not None else resident[:0])
            for threads in (ALONE, several):
                assert top_rows(counts, size, some, threads).tolist() == expected
    several.close()
