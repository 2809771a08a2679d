"""Missing means one thing in every source: null, NaN, empty text and the declared values."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from recpipe.data.config import FilesConfig
from recpipe.data.feature import Feature
from recpipe.data.handed import write_records
from recpipe.data.make import open_dataset
from recpipe.data.values import read_ids, read_numbers

NAN = float("nan")
PRICES = [2.5, None, NAN, -1.0, 0.0, -0.5, 2.0]
WORDS = ["a", None, "", "NA", "7", "007", "nan"]
ITEMS = [3, None, -1, 0, 12, 3, 7]
LISTS = [[1, 0, 2], None, [-1], [0], [-1, 5], [3, 3], [0, 0]]
LABELS = [1, None, 0, 0, 1, 1, 0]
ROWS = [dict(zip(("price", "word", "item", "seen", "buy"), row, strict=True)) | {"click": n % 2}
        for n, row in enumerate(zip(PRICES, WORDS, ITEMS, LISTS, LABELS, strict=True))]  # fmt: skip
KINDS = {
    **{"price": pa.float64(), "word": pa.string(), "item": pa.int32(), "seen": pa.list_(pa.int16())},
    **{"buy": pa.int8(), "click": pa.int8()},
}


def table() -> pa.Table:
    columns = {name: pa.array([row[name] for row in ROWS], kind) for name, kind in KINDS.items()}
    return pa.table(columns)


def as_text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def to_text(file: Path, separator: str) -> None:
    with file.open("w", newline="") as out:
        writer = csv.writer(out, delimiter=separator, lineterminator="\n")
        writer.writerow(KINDS)
        writer.writerows([[as_text(row[name]) for name in KINDS] for row in ROWS])


def to_json(file: Path) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


WRITTEN: dict[str, Callable[[Path], Any]] = {
    "rows.parquet": lambda file: pq.write_table(table(), file),
    "rows.feather": lambda file: pyarrow.feather.write_feather(table(), file),
    "rows.jsonl": to_json,
    "rows.csv": lambda file: to_text(file, ","),
    "rows.tsv": lambda file: to_text(file, "\t"),
    "handed.arrow": lambda file: write_records(table(), file),
    "dicts.arrow": lambda file: write_records([table().to_pydict()], file),
}


def features(in_text: bool) -> dict[str, Any]:
    lists = {"separator": " ", "type": "integer"} if in_text else {}
    return {
        "labels": ["click", "buy"],
        "features": [
            {"name": "price", "kind": "dense", "missing": ["-1"], "default": 9.0},
            {"name": "word", "rows": 1000, "type": "text", "missing": ["NA"]},
            {"name": "item", "rows": 1000, "type": "integer", "missing": ["-1", "12.0"]},
            {"name": "bucket", "kind": "dense", "column": "price", "edges": [0, 2.25], "missing": ["-1"]},
            {"name": "both", "kind": "cross", "of": ["item", "word"], "rows": 1000},
            {"name": "seen", "kind": "sequence", "rows": 50, "padding": ["0"], "missing": ["-1"], **lists},
        ],
    }


def test_what_is_missing_is_so_in_every_source(tmp_path: Path) -> None:
    price = [value is None or math.isnan(value) or value == -1 for value in PRICES]
    word = [value in (None, "", "NA") for value in WORDS]
    item = [value in (None, -1, 12) for value in ITEMS]
    both = [one or other for one, other in zip(word, item, strict=True)]
    lengths = [len([v for v in values or () if v != 0 and values != [-1]]) for values in LISTS]
    found = {}
    for name, write in WRITTEN.items():
        write(tmp_path / name)
        described = features(name.endswith(("csv", "tsv")))
        given = {"path": str(tmp_path / name), "features": described, "cache_dir": str(tmp_path / "cache")}
        dataset = open_dataset(FilesConfig(eval_fraction=0.0, **given), 0)
        (batch,) = dataset.batches("train", len(ROWS))
        ids = batch.sparse.to_dict()
        single = {key: ids[key].values().numpy() == 0 for key in ("word", "item", "bucket", "both")}
        for key, wanted in {"word": word, "item": item, "bucket": price, "both": both}.items():
            assert single[key].tolist() == wanted, (name, key)
        assert (batch.dense[:, 0].numpy() == 9).tolist() == price, name
        assert ids["seen"].lengths().tolist() == lengths, name
        assert (batch.weights[:, 1] == 0).tolist() == [value is None for value in LABELS], name
        assert dataset.missing == {
            **{"buy": 1, "price": sum(price), "bucket": sum(price), "word": sum(word)},
            **{"item": sum(item), "both": sum(both), "seen": lengths.count(0)},
        }, name
        parts = (batch.dense, batch.labels, batch.weights, batch.sparse.values())
        found[name] = [part.numpy().tobytes() for part in parts]
    assert all(own == found["rows.parquet"] for own in found.values())


@pytest.mark.parametrize(
    ("values", "kind", "declared", "missing"),
    [
        ([2, 3, None], pa.int64(), ("2.5", "nan", "inf", "x", "1e300"), [False, False, True]),
        ([2, 3, None], pa.int64(), ("2.0", "+3"), [True, True, True]),
        ([2**53, 2**53 + 1], pa.int64(), (str(2**53 + 1),), [False, True]),
        ([2**64 - 1, 1], pa.uint64(), (str(2**64 - 1),), [True, False]),
        ([2.0, NAN], pa.float64(), ("2",), [True, True]),
    ],
)
def test_declared_ids_are_whole_numbers(
    values: list[Any], kind: pa.DataType, declared: tuple[str, ...], missing: list[bool]
) -> None:
    found = read_ids(pa.array(values, kind), Feature("id", missing=declared))
    assert found.missing.tolist() == missing


@pytest.mark.parametrize(
    ("text", "missing", "valid"),
    [
        (["nan", "NaN", "NAN", "1"], [True, True, True, False], [True] * 4),
        (["-1", "-1.0", "-1e0", "-1.5"], [True, True, True, False], [True] * 4),
        (["-nan", "nan(1)", "inf", "NA"], [False] * 4, [False, False, False, False]),
    ],
)
def test_numbers_in_text(text: list[str], missing: list[bool], valid: list[bool]) -> None:
    found = read_numbers(pa.array(text), Feature("x", "dense", missing=("-1",)))
    assert found.missing.tolist() == missing
    known = np.isfinite(found.values) & found.valid
    assert (known | found.missing).tolist() == valid
