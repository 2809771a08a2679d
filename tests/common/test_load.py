"""What other programs take of the processors."""

from __future__ import annotations

import pytest

from recpipe.common.load import Load


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
