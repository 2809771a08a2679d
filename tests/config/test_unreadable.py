"""Overrides that Hydra cannot read: plain words, and no name of its grammar."""

from __future__ import annotations

import pytest

from recpipe.config.compose import check_overrides
from recpipe.errors import UserError

NO_VALUE = "is no number, plain name, list or mapping"


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("a=b=c", ("'b=c'", NO_VALUE, "If it is text, quote it: 'a=\"b=c\"'")),
        ("data.path=données", ("'données'", "'data.path=\"données\"'")),
        ("data.label=price (EUR)", (NO_VALUE, "'data.label=\"price (EUR)\"'")),
        ("data.dense=[price (EUR)]", (NO_VALUE, "Text that is no plain name is quoted: 'data.dense=[\"")),
        ("data.sparse=[a,b", ("its [ is not closed. Pair it",)),
        ("data.tables={a: [1}", ("its } closes nothing",)),
        ("data.label='x", ("its ' is not closed",)),
        ('data.label="x\\"', ('its " is not closed',)),
        ("a=]", ("its ] closes nothing",)),
        ("a b=c", ("'a b' is no key. Write key=value",)),
        ("=3", ("'' is no key",)),
        ("+=3", ("'+' is no key",)),
        ("seed=range(x)", ("range(x): mismatch type argument start",)),
    ],
)
def test_says_what_is_wrong_and_how_to_write_it(word: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        check_overrides([word])
    said = str(caught.value)
    assert said.startswith(f"cannot read the override '{word}': ")
    for part in parts:
        assert part in said
    for jargon in ("Exception", "input", "viable", "<EOF>", "\n"):
        assert jargon not in said


@pytest.mark.parametrize("word", ['a="b=c"', 'data.path="données"', 'data.dense=["price (EUR)"]'])
def test_what_the_messages_tell_to_write_is_read(word: str) -> None:
    check_overrides([word])
