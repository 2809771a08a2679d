"""What messages echo: one line, printable, and not more of it than one reads."""

from __future__ import annotations

import pickle

import pytest

from recpipe.errors import DataError, UserError, shown


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("café", "café"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("two\nlines\r", r"two\nlines\r"),
        ("\u202eright to left\ufeff", r"\u202eright to left\ufeff"),
        ("\udcff", r"\udcff"),
        (b"caf\xc3\xa9 \xff", "café \\xff"),
        ("x" * 40, "x" * 40),
        ("x" * 41, "x" * 37 + "..."),
        ("\x1b" * 41, r"\x1b" * 9 + r"\..."),
        (12, "12"),
        (None, "None"),
    ],
)
def test_values_are_printable_and_short(value, expected) -> None:
    assert shown(value) == expected


def test_a_message_is_printable_whatever_it_echoes() -> None:
    error = DataError("a\x1b[2Jb.tsv, row 3: bad\n; correct it")
    assert str(error) == r"a\x1b[2Jb.tsv, row 3: bad\n; correct it"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    lines = UserError("2 jobs failed:", "  one\x07")
    assert str(pickle.loads(pickle.dumps(lines))) == str(lines) == "2 jobs failed:\n  one\\x07"
