"""Values against types: what fits, and the one line for what does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Interval

from recpipe.common.validation import Count, FilePath, Positive, Text, chosen, fitted, one_of, typed
from recpipe.errors import UserError


@dataclass(frozen=True)
class Part:
    size: Positive = 1


@dataclass(frozen=True)
class Whole:
    name: str
    size: int = 3
    share: Annotated[float, Interval(ge=0, lt=1)] | None = None
    part: Part = field(default_factory=Part)


def test_a_mapping_becomes_a_dataclass() -> None:
    assert typed(Whole, {"name": "a", "share": 0}, "data") == Whole("a", 3, 0.0)
    assert typed(Whole, {"name": "a", "part": {"size": 2}}, "data") == Whole("a", part=Part(2))
    assert chosen({"a": Whole, "b": Part}, {"name": "a"}, "data") == Whole("a")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "a", "size": "x"}, "data.size=x: must be int, not str"),
        ({"name": "a", "size": True}, "data.size=true: must be int, not bool"),
        ({"name": "a", "size": None}, "data.size=null: must be int, not null"),
        ({"name": "a", "size": 1.5}, "data.size=1.5: must be int, not float"),
        ({"name": "a", "share": "x"}, "data.share=x: must be float or null, not str"),
        ({"name": "a", "share": 1}, "data.share=1: must be less than 1"),
        ({"name": "a", "share": float("nan")}, "data.share=nan: must be a finite number"),
        ({"name": "a", "part": {"size": 0}}, "data.part.size=0: must be greater than or equal to 1"),
        ({"name": "a", "part": [1]}, "data.part=[1]: must map keys to values, as data.part.KEY=VALUE does"),
        ({"name": "a", "shar": 1}, "no 'data.shar' in the recipe. Did you mean 'data.share'?"),
        ({}, "data.name has no value in this recipe: set it, data.name=VALUE"),
        (3, "data=3: must map keys to values, as data.KEY=VALUE does"),
    ],
)
def test_what_does_not_fit_is_named(values: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        typed(Whole, values, "data")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (int | list[int], [1, "x"], "k[1]=x: must be int, not str"),
        (dict[str, int], {"C1": "x"}, "k.C1=x: must be int, not str"),
        (tuple[str, ...], "abc", "k=abc: must be a list, not str"),
        (Literal["a", "b"], "c", "k=c: must be 'a' or 'b'"),
        (Annotated[str, one_of("lru", "lfu")], "lruu", "k=lruu is unknown; did you mean lru?"),
        (Annotated[str, one_of("lru", "lfu")], "x", "k=x is unknown; choose one of lru, lfu"),
        (Count, 10**30, f"k={10**30}: must be less than or equal to 9223372036854775807"),
        (FilePath, "a" * 300, "... is too long for a path"),
        (FilePath, "a/" * 3000, "is too long for a path"),
        (FilePath, "a\0b", "k=a\\x00b is no path: it holds a zero byte"),
        (str, "\udcff", "k=\\udcff: holds bytes that are no UTF-8 text"),
    ],
)
def test_types_with_parts_and_limits(hint: Any, value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        fitted(hint, value, "k")
    assert message in str(caught.value)


def test_what_fits_is_given_back() -> None:
    assert fitted(tuple[str, ...], ["a", "b"], "k") == ("a", "b")
    assert fitted(Text, 2024, "k") == "2024"
    assert fitted(FilePath, "nowhere/file", "k") == "nowhere/file"
    assert fitted(float, 3, "k") == 3.0
