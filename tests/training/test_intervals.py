"""The intervals behind a report's series."""

from __future__ import annotations

import pytest
import torch

from recpipe.plugin.collection import TierFigures, TierTimes
from recpipe.plugin.store import IoCounters
from recpipe.training.recorder import INTERVALS, Intervals


class Counting:
    """A collection that counts in place, as plugins' own may."""

    def __init__(self) -> None:
        self.figures = TierFigures(IoCounters(), TierTimes(), None, 0, 0, 0, False, 0, 0)
        self.asked = 0

    def tier_figures(self) -> TierFigures:
        self.asked += 1
        io = self.figures.io
        return TierFigures(io, TierTimes(), None, 0, 0, 0, False, io.rows_read * 10, io.rows_read * 9)


@pytest.mark.parametrize("steps", [1, 119, 121, 1000, 12_345])
def test_intervals_are_few_and_add_up(steps: int) -> None:
    tables = Counting()
    intervals = Intervals(tables)  # type: ignore[arg-type]
    intervals.begin(7, 70, 2.0, torch.tensor(0.0))
    for step in range(1, steps + 1):
        tables.figures.io.rows_read += 1
        tables.figures.io.bytes_read += 64
        add(intervals, step)
    intervals.end()
    series = intervals.series([0.5] * steps)
    assert min(steps, INTERVALS // 2) <= len(series.step) <= INTERVALS + 1
    assert tables.asked < 10 * INTERVALS
    assert (sum(series.steps), series.step[-1], series.samples[-1]) == (steps, steps + 7, 10 * steps + 70)
    assert (sum(series.bytes_read), sum(series.lookups), sum(series.hits)) == (
        64 * steps, 10 * steps, 9 * steps
    )  # fmt: skip
    assert len(set(series.steps[:-1])) <= 1, "all but the last have equally many steps"
    assert series.bytes_read == [64 * n for n in series.steps]
    assert series.loss == pytest.approx([0.5] * len(series.step))
    assert series.samples_per_second == pytest.approx([20.0] * len(series.step))


def add(intervals: Intervals, step: int) -> None:
    loss = torch.tensor(0.5 * step)
    intervals.add(step + 7, 10 * step + 70, 2.0 + step, 10 * step, loss)


def test_all_rows_resident_have_no_tiers_in_their_series() -> None:
    class Resident:
        def tier_figures(self) -> None:
            return None

    intervals = Intervals(Resident())  # type: ignore[arg-type]
    intervals.begin(0, 0, 0.0, torch.tensor(0.0))
    add(intervals, 1)
    series = intervals.series([0.5])
    assert series.lookups == series.bytes_read == []
    assert len(series.loss) == 1
