"""Labels from other columns: what an expression says, beside Python's own values row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from recpipe.data.config import FilesConfig
from recpipe.data.dataset import Dataset
from recpipe.data.expressions import parse_expression
from recpipe.data.feature_yaml import parse_features
from recpipe.data.features import Label
from recpipe.data.make import open_dataset
from recpipe.data.preparation import Preparation
from recpipe.errors import DataError, UserError

SIZE = 200
NAMES = ("rating", "behavior", "seconds", "length", "returned", "big")


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rng = np.random.default_rng(6)
    words = ("buy", "cart", "view", "it's")

    def some(values: list[Any], every: int) -> list[Any]:
        return [None if n % every == 0 else value for n, value in enumerate(values)]

    return pa.table(
        {
            "rating": pa.array(some(rng.integers(1, 6, SIZE).tolist(), 13), pa.int8()),
            "behavior": some([words[v] for v in rng.integers(0, 4, SIZE)], 17),
            "seconds": some((rng.integers(0, 40, SIZE) / 4).tolist(), 11),
            "length": (1 + rng.integers(0, 20, SIZE)).astype(np.float64),
            "returned": some(rng.integers(0, 2, SIZE).astype(bool).tolist(), 19),
            "big": [2**53 + int(v) for v in rng.integers(0, 3, SIZE)],
            "user": rng.integers(0, 9, SIZE),
        }
    )


def opened(folder: Path, table: pa.Table, *labels: Any, **keys: Any) -> Dataset:
    if "path" not in keys:
        pq.write_table(table, folder / "rows.parquet")
        keys["path"] = str(folder / "rows.parquet")
    features = {"labels": list(labels), "features": [{"name": "user", "rows": 9}]}
    settings = {"eval_fraction": 0.0, "cache_dir": str(folder / "cache"), "features": features, **keys}
    return open_dataset(FilesConfig(**settings), 0)


EXPRESSIONS = (
    "rating >= 4",
    "rating == 5 or rating < 2",
    'behavior in ["buy", "cart"]',
    "behavior not in ('buy', 'cart') and not returned",
    'behavior != "it\'s"',
    '"buy" == behavior',
    "not (rating > 2 and seconds / length > 0.5)",
    "1 < rating <= 3",
    "rating in [1, 3, 5]",
    "rating not in [1, length]",
    "seconds * 2 - 1 >= length + rating / 2",
    "-seconds < -3",
    "returned",
    "returned == True",
    "big == 9007199254740993",
    "big > 9007199254740992 and rating >= 0",
)


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_labels_are_what_python_makes_of_each_row(tmp_path: Path, table: pa.Table, form: str) -> None:
    texts = [text for text in EXPRESSIONS if form == "parquet" or "returned" not in text]
    keys = {}
    if form == "csv":
        pa.csv.write_csv(table, tmp_path / "rows.csv")
        keys = {"path": str(tmp_path / "rows.csv")}
        texts = [text for text in texts if "big" not in text]  # text of numbers is read as float64
    labels = [{"name": f"l{n}", "expression": text} for n, text in enumerate(texts)]
    (batch,) = opened(tmp_path, table, *labels, **keys).batches("train", SIZE)
    for n, text in enumerate(texts):
        found, known = batch.labels[:, n].tolist(), batch.weights[:, n].tolist()
        for row, values in enumerate(table.to_pylist()):
            there = all(values[name] is not None for name in NAMES if name in text)
            wanted = float(bool(eval(text, {}, values))) if there else 0.0
            assert (found[row], known[row]) == (wanted, float(there)), (text, values)
        assert 0 < sum(found) < SIZE


def test_values_and_names_that_are_no_words(tmp_path: Path, table: pa.Table) -> None:
    renamed = table.rename_columns([f"{n} (s)" if n == "length" else n for n in table.column_names])
    share = {"name": "share", "kind": "values", "expression": 'seconds / column["length (s)"]'}
    high = {"name": "high", "expression": "rating > 3"}
    (batch,) = opened(tmp_path, renamed, share, high).batches("train", SIZE)
    rows = table.to_pylist()
    wanted = [0.0 if row["seconds"] is None else row["seconds"] / row["length"] for row in rows]
    np.testing.assert_allclose(batch.labels[:, 0].numpy(), wanted, rtol=1e-7)


def test_a_feature_of_which_a_label_is_made_is_told(
    tmp_path: Path, table: pa.Table, caplog: pytest.LogCaptureFixture
) -> None:
    for expression, told in (("user >= 4", True), ("length >= 4", False)):
        caplog.clear()
        opened(tmp_path, table, {"name": "high", "expression": expression})
        line = "label high is made of column user, which feature user gives to the model"
        assert (line in caplog.text) == told


def test_declared_missing_values_and_the_only_label(tmp_path: Path, table: pa.Table) -> None:
    mask = {"name": "high", "expression": "rating > 3", "missing": ["5"], "on_missing": "mask"}
    (batch,) = opened(tmp_path, table, mask).batches("train", SIZE)
    wanted = [float(row["rating"] not in (None, 5)) for row in table.to_pylist()]
    assert batch.weights.tolist() == wanted
    fault = r"row 1, column high: nan is no label \(on_missing: mask"
    with pytest.raises(DataError, match=fault):
        opened(tmp_path, table, {"name": "high", "expression": "rating > 3"})


@pytest.mark.parametrize(
    ("label", "fault"),
    [
        ({"expression": "seconds / (length - length) > 1"}, "row 2, column l: nan is neither 0 nor 1"),
        ({"expression": "rating"}, r"row \d+, column l: \d\.0 is neither 0 nor 1"),
        ({"expression": "behavior >= 4"}, "row 2, column behavior: .* is not a number, as which"),
        ({"expression": "ratng >= 4"}, "no column 'ratng'"),
        ({"expression": "rating == '4'"}, "column rating: holds int8, and a label's expression compares"),
    ],
)
def test_values_that_cannot_be_are_one_line(tmp_path: Path, table: pa.Table, label: Any, fault: str) -> None:
    with pytest.raises(DataError, match=fault) as raised:
        opened(tmp_path, table, {"name": "l", "on_missing": "mask", **label})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("__import__('os').system('true') == 0", "is no part of one, which has columns"),
        ("rating.real > 1", "is no part of one"),
        ("[x for x in y]", "is no part of one"),
        ("(lambda: 1)()", "is no part of one"),
        ("rating ** 99", "is no part of one"),
        ("rating & 3", "is no part of one"),
        ("other['rating'] > 3", "is no part of one"),
        ("f'{rating}' == 'x'", "neither is a column"),
        ("rating = 4", "at character .*; equality is =="),
        ("rating >=", "invalid syntax; equality is =="),
        ("-" * 900 + "rating", "it is nested too deeply|cannot be read"),
        ("1 < 2", "names no column"),
        ("'a' == 'b'", "neither is a column"),
        ("behavior > 'a'", "text has no order here"),
        ("behavior == 'a' == 3", "neither is a column"),
        ("behavior in ['a', 3]", "'3' is compared with text and is none"),
        ("'a'", "is compared by ==, !=, in or not in"),
        ("rating in 3", "in is followed by a list"),
        ("rating in []", "in is followed by a list"),
        ("rating is 3", "values are compared by"),
        ("rating > 99999999999999999999", "is too large"),
        ("rating > 1e999", "is too large"),
        ("rating > 3j", "is no part of one"),
        ("not " * 5000 + "rating", "has more than 1000 characters"),
        ("(" * 400 + "rating" + ")" * 400, "expression"),
        ("", "expression"),
        ("a\0b", "expression"),
    ],
)
def test_what_is_no_expression_is_one_line(text: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault) as raised:
        parse_features({"labels": [{"name": "l", "expression": text}], "features": [{"name": "user"}]})
    assert str(raised.value).startswith("data.features, label l: expression ")
    assert "\n" not in str(raised.value)


def test_a_column_or_an_expression() -> None:
    with pytest.raises(UserError, match="label l: column and expression both"):
        Label("l", column="a", expression="a > 1")


def test_what_is_read_and_kept() -> None:
    made = parse_expression('a > 1 and column["b c"] in ["x"] and a == b', "here")
    assert (made.numbers, made.words, made.columns) == (("a", "b"), ("b c",), ("a", "b", "b c"))
    values = {"labels": [{"name": "l", "expression": made.text}], "features": [{"name": "user", "rows": 9}]}
    features = parse_features(values)
    assert features.columns == ["a", "b", "b c", "user"]
    saved = Preparation.of(features).to_dict()
    assert Preparation.read(saved).features == features
