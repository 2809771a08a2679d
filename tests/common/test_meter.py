"""Work is shown while it goes on, also while one of its calls takes long."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recpipe.common import console, tensors
from recpipe.common import meter as meters
from recpipe.common.meter import Meter
from recpipe.common.tensors import new_tensors


class Clock:
    """A time that tests move on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The meters' time; a thread looks at it all the time."""
    made = Clock()
    monkeypatch.setattr(meters, "perf_counter", made)
    monkeypatch.setattr(meters, "TICK_SECONDS", 0.001)
    return made


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    made = Lines()
    monkeypatch.setattr(console.log, "info", made.add)
    return made


class Lines:
    """What has been logged."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._more = threading.Condition()

    def add(self, text: str) -> None:
        with self._more:
            self.found.append(text)
            self._more.notify_all()

    def wait_for(self, count: int) -> list[str]:
        """All of them, once there are so many."""
        with self._more:
            assert self._more.wait_for(lambda: len(self.found) >= count, 60), self.found
            return self.found


def test_the_first_line_comes_after_three_seconds_and_others_every_ten(clock: Clock, lines: Lines) -> None:
    with meters.counting("writing rows", 1000) as add:
        clock.now += 2.9
        add(100)
        assert not lines.found
        clock.now += 0.2
        add(100)
        assert lines.found == ["writing rows  200/1,000  0:00:12 left"]
        clock.now += 9.8
        add(100)
        assert len(lines.found) == 1
        clock.now += 0.3
        add(100)
        assert lines.found[1:] == ["writing rows  400/1,000  0:00:20 left"]


def test_a_call_that_takes_long_is_shown_by_itself(clock: Clock, lines: Lines) -> None:
    """Nothing is added while it lasts."""
    with meters.counting("sealing", 100) as add:
        clock.now += 1
        add(93)
        clock.now += 4
        assert lines.wait_for(1) == ["sealing  93/100  waiting 0:00:04  0:00:00 left"]
        clock.now += 10
        assert lines.wait_for(2)[1] == "sealing  93/100  waiting 0:00:14  0:00:01 left"


def test_work_that_cannot_be_counted_is_shown_by_its_time(clock: Clock, lines: Lines) -> None:
    @meters.counting("planning")
    def plan() -> int:
        clock.now += 3.2
        lines.wait_for(1)
        return 7

    for _ in range(2):  # each call is a block of its own
        assert plan() == 7
        assert lines.found == ["planning  0:00:03"]
        lines.found.clear()


def test_a_block_inside_shows_itself_alone(clock: Clock, lines: Lines) -> None:
    with meters.counting("building"), meters.counting("filling", 10) as add:
        clock.now += 5
        add(5)
        clock.now += 10
        assert lines.wait_for(2)[1].startswith("filling  5/10  waiting")
    with meters.counting("building"):
        with Meter() as meter:
            clock.now += 5
            meter.show(0.5, "measuring")
        lines.found.clear()
        clock.now += 3
        assert lines.wait_for(1) == ["building  0:00:08"], "not sooner after what was shown inside"


def test_nothing_is_left_of_it(clock: Clock) -> None:
    before = threading.active_count()

    @meters.counting("building")
    def build() -> None:
        assert threading.active_count() == before + 1
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        build()
    assert threading.active_count() == before
    assert not meters._working.meters


def test_what_is_to_be_durable_is_flushed_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the last flush of a large checkpoint does not take as long as writing it."""
    flushed: list[int] = []
    flush: Callable[[int], None] = os.fdatasync
    monkeypatch.setattr(tensors, "FLUSH_BYTES", 4 * 1000)

    def noted(descriptor: int) -> None:
        flush(descriptor)
        flushed.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", noted)
    for durable in (False, True):
        with new_tensors(tmp_path / "file", {"a": (5000, 1)}, durable=durable) as put:
            for start in range(0, 5000, 500):
                put("a", start, np.ones(500))
        assert len(flushed) == 5 * durable

    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", fails)
    with (
        pytest.raises(OSError, match="No space left"),
        new_tensors(tmp_path / "file", {"a": (1000, 1)}, durable=True) as put,
    ):
        put("a", 0, np.ones(1000))
