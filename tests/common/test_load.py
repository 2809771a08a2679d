"""What other programs take of the processors."""

from __future__ import annotations

import pytest

from recpipe.common import machine
from recpipe.common.machine import Load, Taken, undisturbed


def test_share_of_others() -> None:
    before, after = Load(busy=100, total=1000, own=50), Load(busy=180, total=1200, own=80)
    assert after.others_since(before) == pytest.approx((80 - 30) / 200)
    assert Load(110, 1100, 70).others_since(before) == 0.0  # clocks tick at other times
    assert after.others_since(after) is None
    assert after.others_since(None) is None


def test_this_machine_tells() -> None:
    first = Load.now()
    assert first is not None
    assert 0 < first.busy < first.total
    later = first
    while later.total == first.total:
        found = Load.now()
        assert found is not None
        later = found
    share = later.others_since(first)
    assert share is not None
    assert 0 <= share <= 1


def busy(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """In the measurements that follow, other programs take these shares of the processors."""
    monkeypatch.delenv("RECPIPE_BUSY", raising=False)
    readings = iter([reading for share in shares for reading in (Load(0, 0, 0), Load(share, 1, 0))])
    monkeypatch.setattr(machine.Load, "now", lambda: next(readings))


def measured(*values: float) -> Taken[float]:
    given = iter(values)
    return undisturbed(lambda: next(given), lambda one, other: abs(one - other) < 0.1)


def test_what_nothing_disturbed_is_taken_when_two_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    busy(monkeypatch, 0.02, 0.0)
    assert measured(1.0, 1.05) == Taken(1.05)
    busy(monkeypatch, 0.0, 0.0, 0.0)
    assert measured(1.0, 2.0, 0.95) == Taken(0.95)
    busy(monkeypatch, 0.0)
    given = iter([3.0])
    assert undisturbed(lambda: next(given), None) == Taken(3.0), "what repeats itself is measured once"


def test_what_was_disturbed_is_measured_again_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    busy(monkeypatch, 0.5, 0.0, 0.01)
    assert measured(9.0, 1.0, 1.0) == Taken(1.0), "the disturbed one does not count"
    busy(monkeypatch, 0.5, 0.4, 0.3)
    assert measured(9.0, 9.0, 9.0) == Taken(9.0, "other programs took 30% of this machine's processors")
    busy(monkeypatch, 0.0, 0.0, 0.0)
    assert measured(1.0, 2.0, 3.0) == Taken(3.0, "3 measurements of it do not agree")


def test_a_machine_that_is_never_quiet_may_keep_what_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    busy(monkeypatch, 0.9)
    monkeypatch.setenv("RECPIPE_BUSY", "keep")
    assert measured(1.0) == Taken(1.0)
