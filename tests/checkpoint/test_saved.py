"""Values read back from files: the types that are taken, and the words for those that are not."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typing_extensions import TypeAliasType, TypeVar

from recpipe.common import saved
from recpipe.common.saved import Damaged, entries, like, parse_json, read_json, residents, typed_as, within
from recpipe.common.tensors import Part, tiles
from tests.mutations import nested


@dataclass(frozen=True)
class Inner:
    number: int
    share: float | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    inner: tuple[Inner, ...]
    sizes: dict[str, tuple[int, str]]


WHOLE: dict[str, Any] = {"name": "x", "kind": "a", "inner": [{"number": 3}], "sizes": {"f": [1, "d"]}}


def test_dataclasses_come_out_of_mappings() -> None:
    made = typed_as(Outer, WHOLE)
    assert made == Outer("x", "a", (Inner(3),), {"f": (1, "d")})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 1}, "name is 1, not a text"),
        ({"kind": "c"}, "kind is 'c', not one of a, b"),
        ({"kind": []}, r"kind is \[\], not one of"),
        ({"inner": 3}, "inner is 3, not a list"),
        ({"inner": [{"number": "3"}]}, r"inner\[0\]\.number is '3', not a whole number"),
        ({"inner": [{"number": True}]}, r"inner\[0\]\.number is True, not a whole number"),
        ({"inner": [{"number": 1.0}]}, r"inner\[0\]\.number is 1.0"),
        ({"inner": [{"number": 1, "share": float("nan")}]}, r"inner\[0\]\.share is nan, not a number"),
        ({"inner": [{"number": 1, "share": 10**400}]}, r"share is 1000.*, not a number"),
        ({"inner": [{}]}, r"inner\[0\] lacks 'number'"),
        ({"inner": [[]]}, r"inner\[0\] is \[\], not a mapping"),
        ({"sizes": {"../a\n": [1]}}, r"sizes\['\.\./a\\n'\] has 1 values, not 2"),
        ({"sizes": {5: [1, "d"]}}, "a key of sizes is 5, not a text"),
        ({"more": 1}, "it has 'more', which is unknown"),
    ],
)
def test_other_values_are_named_with_their_place(change: dict[str, Any], words: str) -> None:
    with pytest.raises(Damaged, match=words):
        typed_as(Outer, WHOLE | change)
    with pytest.raises(Damaged, match="it is"):
        typed_as(Outer, [1])


def test_entries_leaves_other_keys_out() -> None:
    state = {"a": 1, "b": np.zeros(2), "c": object()}
    found = entries({"a": int, "b": NDArray[np.float64]}, state)
    assert list(found) == ["a", "b"]
    with pytest.raises(Damaged, match=r"s\.b is ndarray float64 \(2,\)"):
        entries({"b": NDArray[np.float32]}, state, "s")


def test_aliases_stand_for_their_types() -> None:
    number = TypeVar("number", bound=np.generic)
    shape = tuple[int, ...]
    array = TypeAliasType("array", np.ndarray[shape, np.dtype[number]], type_params=(number,))
    ids = TypeAliasType("ids", array[np.int64])
    state = {"ids": np.arange(3)}
    assert entries({"ids": ids}, state) == state
    with pytest.raises(Damaged, match=r"^s\.ids is "):
        entries({"ids": array[np.int32]}, state, "s")


MODEL = {"n": 0, "on": False, "x": 0.0, "of": np.zeros(2, np.int32), "t": torch.zeros(2), "any": None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"of": np.zeros(9, np.int32), "x": 3, "any": "y"}, None),
        ({"n": 0.5}, "s.n is 0.5, not a whole number"),
        ({"on": 1}, "s.on is 1, not true or false"),
        ({"of": np.zeros(2, np.int64)}, "s.of is ndarray int64"),
        ({"of": np.zeros((2, 1), np.int32)}, "not 1-d int32"),
        ({"of": [0, 0]}, r"s.of is \[0, 0\]"),
        ({"t": torch.zeros(3)}, r"s.t is Tensor torch.float32 \(3,\)"),
        ({"t": torch.zeros(2).to_sparse()}, "s.t is Tensor"),
        ({"t": None}, "s.t is None"),
        ({"more": 1}, "s has unknown 'more'"),
    ],
)
def test_a_state_is_compared_with_a_new_one(change: dict[str, Any], words: str | None) -> None:
    if words is None:
        like(MODEL, MODEL | change, "s")
        return
    with pytest.raises(Damaged, match=words):
        like(MODEL, MODEL | change, "s")
    with pytest.raises(Damaged, match="s lacks 'n'"):
        like(MODEL, {k: v for k, v in MODEL.items() if k != "n"}, "s")


def test_numbers_in_a_range() -> None:
    state = {"n": 3, "slots": np.array([-1, 0, 5])}
    within(state, "n", 0, 4)
    residents(state, "slots", 3, 6)
    for bad, words in (({"n": 4}, "n has a value"), ({"n": -1}, "n has a value")):
        with pytest.raises(Damaged, match=words):
            within(bad, "n", 0, 4)
    for slots, words in (([-1, 0], "has 2 values, not 3"), ([0, 1, 6], "not in"), ([0, 5, 5], "twice")):
        with pytest.raises(Damaged, match=words):
            residents({"slots": np.array(slots)}, "slots", 3, 6)


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": -Infinity}', nested(100_000), "9" * 5000])
def test_json_that_makes_no_sense(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 json's own or ours
        parse_json(text)
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011
        read_json(tmp_path / "x.json")


def test_json_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "LARGEST_JSON", 2**20)
    (tmp_path / "x.json").write_text(" " * 2**20 + "1")
    with pytest.raises(Damaged, match="larger than 1 MiB"):
        read_json(tmp_path / "x.json")


def test_tiles_agrees_with_counting() -> None:
    """Cuts of a table of 6 x 4 values, half of them with one number changed."""
    rng = random.Random(0)
    agreed = {True: 0, False: 0}
    for _ in range(3000):
        parts = _cut(rng, (0, 0, 6, 4), 3)
        if rng.random() < 0.5:
            changed = list(parts.pop())
            changed[rng.randrange(4)] += rng.choice([-1, 1])
            parts.append((changed[0], changed[1], changed[2], changed[3]))
        rng.shuffle(parts)
        covered = np.zeros((20, 20), int)
        filled = [p for p in parts if p[2] and p[3]]
        for row, column, rows, columns in filled:
            covered[row + 5 : row + 5 + max(rows, 0), column + 5 : column + 5 + max(columns, 0)] += 1
        once = (covered[5:11, 5:9] == 1).all() and covered.sum() == 24
        expected = bool(once and all(min(p) >= 0 for p in filled))
        assert tiles(parts, 6, 4) == expected, parts
        agreed[expected] += 1
    assert min(agreed.values()) > 500


def _cut(rng: random.Random, part: Part, depth: int) -> list[Part]:
    """Pieces of a rectangle, some of them empty."""
    row, column, rows, columns = part
    if not depth or rng.random() < 0.2:
        return [part]
    if rng.random() < 0.5:
        at = rng.randrange(rows + 1)
        halves = ((row, column, at, columns), (row + at, column, rows - at, columns))
    else:
        at = rng.randrange(columns + 1)
        halves = ((row, column, rows, at), (row, column + at, rows, columns - at))
    return [piece for half in halves for piece in _cut(rng, half, depth - 1)]
