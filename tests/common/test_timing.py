"""Calls timed in rounds, by a fake clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from recpipe.common import timing
from recpipe.common.timing import median_seconds, milliseconds, seconds_by_round


class Clock:
    """``called``: which calls were made, by their names."""

    def __init__(self) -> None:
        self.now = 0.0
        self.called = ""

    def taking(self, name: str, seconds: float | Sequence[float]) -> Callable[[], None]:
        """A call that takes so long, or so long each time, the last one ever after."""
        left = [seconds] if isinstance(seconds, float) else list(seconds)

        def run() -> None:
            self.called += name
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "perf_counter", lambda: made.now)
    return made


def test_each_is_timed_in_turn_for_long_enough(clock: Clock) -> None:
    slow, quick = clock.taking("s", 0.003), clock.taking("q", 0.001)
    assert median_seconds([slow, quick], rounds=3, least=0.0025) == pytest.approx([0.003, 0.001])
    assert clock.called == "ssqq" + 3 * "sqqq"


def test_neither_a_cold_call_nor_a_disturbed_round_counts(clock: Clock) -> None:
    disturbed = clock.taking("a", [9.0, 1.0, 1.0, 1.0, 7.0, 2.0])
    assert seconds_by_round([disturbed], rounds=4, least=0.0) == [[1.0, 1.0, 7.0, 2.0]]
    assert median_seconds([clock.taking("b", [9.0, 1.0, 1.0, 7.0, 1.0])], rounds=3, least=0.0) == [1.0]


def test_calls_too_short_to_be_seen_are_repeated_a_bounded_number_of_times(clock: Clock) -> None:
    assert median_seconds([clock.taking("a", 0.0)], rounds=1, least=9.95e-5) == [0.0]
    assert len(clock.called) == 2 + 100


def test_they_use_so_many_threads_of_torchs() -> None:
    before, seen = torch.get_num_threads(), list[int]()
    median_seconds([lambda: seen.append(torch.get_num_threads())], rounds=1, least=0.0, threads=before + 1)
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError):
        median_seconds([lambda: 1 // 0], threads=before + 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1.6, "1600.0"), (1.04e-3, "1.0"), (4.16e-5, "0.042"), (9.6e-4, "0.96"), (3e-6, "0.003"), (0.0, "0")],
)
def test_short_times_keep_their_digits(seconds: float, expected: str) -> None:
    assert milliseconds(seconds) == expected
