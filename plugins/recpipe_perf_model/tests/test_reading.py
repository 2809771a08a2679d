"""Reading is timed over whole blocks of batches, on a clock that only reading moves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from recpipe_perf_model.step import step as module
from recpipe_perf_model.step.step import BATCHES, LEAST, NO_TIME, reading

INPUTS: Any = SimpleNamespace(each=lambda batch: batch, require_ids=lambda ids: None)


class Blocks:
    """Reads ``block`` batches at a time, in ``seconds``."""

    def __init__(self, count: int, block: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.block, self.seconds, self.now, self.read = count, block, seconds, 0.0, 0
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def batches(self, split: str, size: int) -> Iterator[int]:
        for number in range(self.count):
            self.now += self.seconds if number % self.block == 0 else 0.0
            self.read += 1
            yield number


def test_a_batch_costs_its_part_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    data: Any = Blocks(1000, 8, 0.008, monkeypatch)
    found = reading(data, 1, INPUTS)
    assert found.seconds == pytest.approx(0.001, rel=0.01)
    assert found.low < found.seconds < found.high
    assert data.read == BATCHES


def test_slow_and_short_data_are_not_read_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: Any = Blocks(1000, 1, 3.0, monkeypatch)
    assert reading(slow, 1, INPUTS).seconds == pytest.approx(3.0)
    assert slow.read == LEAST
    assert reading(Blocks(1, 1, 2.0, monkeypatch), 1, INPUTS).seconds == pytest.approx(2.0)  # type: ignore[arg-type]
    assert reading(Blocks(0, 1, 2.0, monkeypatch), 1, INPUTS) == NO_TIME  # type: ignore[arg-type]
