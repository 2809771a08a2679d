"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from recpipe.common.words import Amount, readable_bytes
from recpipe.errors import UserError

WHOLE = 10_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1048576, 1 << 20),
        ("1000000", 10**6),
        ("64MiB", 64 << 20),
        ("1.5 GB", 1_500_000_000),
        ("1.5gib", 3 << 29),
        ("2kB", 2000),
        (" 7 B ", 7),
        ("1e6", 10**6),
        (1e6, 10**6),
        ("10%", 1000),
        ("0.5 %", 50),
        ("100%", WHOLE),
        (0, 0),
    ],
)
def test_sizes(text, expected) -> None:
    assert Amount.parsed(text, "key").of(WHOLE) == expected


@pytest.mark.parametrize(
    "text", ["", "much", "-5", "-5%", "10 parsecs", "1,5GB", "%", "0x10", None, "5%%", "nan"]
)
def test_other_things_are_refused(text) -> None:
    with pytest.raises(UserError, match=r"tiers\.resident_bytes=.*: give bytes"):
        Amount.parsed(text, "tiers.resident_bytes")


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (64 << 20, "64 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_readable(count, expected) -> None:
    assert readable_bytes(count) == expected
