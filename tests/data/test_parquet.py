"""Parquet of any schema against a row-by-row reference; list columns, nulls, and every bad input named."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpipe.data import columnar as module
from recpipe.data.config import ParquetConfig
from recpipe.data.make import open_dataset
from recpipe.errors import DataError, UserError

from .conftest import MASK, mix


def recipe(path: object, tmp_path: Path, **settings: object) -> ParquetConfig:
    values = {"table_rows": 50, "eval_fraction": 0.25, "cache_dir": str(tmp_path / "cache"), **settings}
    return ParquetConfig(path=path, **values)


def row_of(value: object, rows: int) -> int:
    if value is None:
        return 0
    if isinstance(value, str):
        key = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little")
    else:
        key = int(value) & MASK
    return 1 + mix(key) % (rows - 1)


def assert_matches(dataset, records: list[dict], label: str, dense: list[str], rows: dict[str, int]) -> None:
    """Every sample of both splits equals what a plain loop over ``records`` gives."""
    place = 0
    for batch in [b for split in ("train", "eval") for b in dataset.batches(split, 1000)]:
        part = records[place : place + batch.size]
        assert batch.labels.tolist() == [float(record[label]) for record in part]
        logs = [[float(record[name] or 0) for name in dense] for record in part]
        wanted = [[math.copysign(math.log1p(abs(value)), value) for value in line] for line in logs]
        np.testing.assert_allclose(batch.dense, np.array(wanted).reshape(len(part), len(dense)), rtol=1e-6)
        for name, size in rows.items():
            bags = [record[name] if name.startswith("list") else [record[name]] for record in part]
            jagged = batch.sparse[name]
            assert jagged.lengths().tolist() == [len(bag or []) for bag in bags]
            assert jagged.values().tolist() == [row_of(value, size) for bag in bags for value in bag or []]
        place += batch.size
    assert place == len(records)


def make_table(size: int = 500) -> pa.Table:
    rng = np.random.default_rng(0)
    lists = [None if draw == 0 else [int(i) for i in range(draw - 1)] for draw in rng.integers(0, 5, size)]
    words = [None if draw == 0 else f"w{draw}" for draw in rng.integers(0, 9, size)]
    return pa.table(
        {
            "click": pa.array(rng.integers(0, 2, size).astype(bool)),
            "price": pa.array([None if draw < 0.1 else draw * 100 - 50 for draw in rng.random(size)]),
            "count": pa.array(rng.integers(0, 1000, size).astype(np.int16)),
            "user": pa.array(rng.integers(-(2**62), 2**62, size)),
            "big": pa.array(rng.integers(2**62, 2**63, size).astype(np.uint64) * 2),
            "word": pa.array(words),
            "coded": pa.array(words).dictionary_encode(),
            "list_int": pa.array(lists, pa.list_(pa.int32())),
            "list_word": pa.array([None if item is None else [f"x{i}" for i in item] for item in lists]),
            "list_null": pa.array([[1, None, 2]] * size, pa.large_list(pa.int64())),
            "when": pa.array([0] * size, pa.timestamp("us")),
        }
    )


SPARSE = ["user", "list_int", "big", "word", "coded", "list_word", "list_null"]


@pytest.mark.parametrize("block", [64, 32768])
def test_equals_the_reference(tmp_path, monkeypatch, block):
    monkeypatch.setattr(module, "BLOCK_ROWS", block)
    table = make_table()
    pq.write_table(table.slice(0, 200), tmp_path / "part_2.parquet")
    pq.write_table(table.slice(200), tmp_path / "part_10.parquet", row_group_size=70)
    config = recipe(
        str(tmp_path),
        tmp_path,
        label="click",
        dense=["price", "count"],
        sparse=SPARSE,
        tables={"user": 1000, "list_int": 7},
    )
    dataset = open_dataset(config, 0)
    rows = {name: {"user": 1000, "list_int": 7}.get(name, 50) for name in SPARSE}
    assert {feature.name: feature.rows for feature in dataset.schema.sparse} == rows
    assert_matches(dataset, table.to_pylist(), "click", ["price", "count"], rows)


def test_plain_values(tmp_path):
    table = pa.table({"y": [0, 1, 1], "x": [-2.5, None, 3.0], "id": [0, 9, 5], "ids": [[], [9, 9], [0]]})
    pq.write_table(table, tmp_path / "a.parquet")
    config = recipe(
        str(tmp_path / "a.parquet"),
        tmp_path,
        label="y",
        dense=["x"],
        sparse=["id", "ids"],
        table_rows=10,
        hash_ids=False,
        dense_transform="none",
        eval_fraction=0.0,
    )
    batch = next(open_dataset(config, 0).batches("train", 3))
    assert batch.dense[:, 0].tolist() == [-2.5, 0.0, 3.0]
    assert batch.sparse["id"].values().tolist() == [0, 9, 5]
    assert batch.sparse["ids"].values().tolist() == [9, 9, 0]
    assert batch.sparse["ids"].lengths().tolist() == [0, 2, 1]


REAL = [
    ("talkingdata_100k", "is_attributed", [], ["ip", "app", "device", "os", "channel"]),
    ("open_bandit_40k", "click", ["propensity_score"], ["item_id", "position", "campaign", "user_feature_0"]),
]


@pytest.mark.parametrize(("name", "label", "dense", "sparse"), REAL)
def test_real_files(data_dir, tmp_path, name, label, dense, sparse):
    file = data_dir / f"{name}.parquet"
    config = recipe(str(file), tmp_path, label=label, dense=dense, sparse=sparse, table_rows=5000)
    records = pq.read_table(file, columns=[label, *dense, *sparse]).to_pylist()
    assert_matches(open_dataset(config, 0), records, label, dense, dict.fromkeys(sparse, 5000))


def test_real_files_that_cannot_serve(data_dir, tmp_path):
    retail = data_dir / "online_retail.parquet"
    with pytest.raises(DataError, match="row 1, column Quantity: 12 is neither 0 nor 1"):
        open_dataset(recipe(str(retail), tmp_path, label="Quantity", sparse=["StockCode"]), 0)
    with pytest.raises(DataError, match="column InvoiceDate: holds timestamp"):
        open_dataset(recipe(str(retail), tmp_path, label="Quantity", sparse=["InvoiceDate"]), 0)


@pytest.mark.parametrize(
    ("kind", "good", "bad", "message"),
    [
        ("clicks", [0, 1, 1], 0.5, r"0.5 is neither 0 nor 1 \(data.label_kind=values takes any number"),
        ("values", [-2.5, 0, 4.0], math.inf, "inf is not a finite float32 number"),
        ("values", [-2.5, 0, 4.0], 1e39, "1e[+]39 is not a finite float32 number"),
        ("values", [-2.5, 0, 4.0], None, "None is no label"),
        ("counts", [0, 2.5, 7], -1.0, "-1.0 is not a finite float32 number of at least 0"),
        ("classes", [0, 5, 2], 1.5, "1.5 is no class: a whole number from 0 on"),
        ("classes", [0, 5, 2], -1.0, "-1.0 is no class"),
    ],
)
def test_labels_of_each_kind(tmp_path, kind, good, bad, message):
    def write(values):
        table = pa.table({"y": pa.array(values, pa.float64()), "id": range(len(values))})
        pq.write_table(table, tmp_path / "a.parquet")
        settings = {"label": "y", "sparse": ["id"], "label_kind": kind, "eval_fraction": 0.0}
        return open_dataset(recipe(str(tmp_path / "a.parquet"), tmp_path, **settings), 0)

    assert next(write(good).batches("train", 3)).labels.tolist() == good
    with pytest.raises(DataError, match=f"row 4, column y: {message}"):
        write([*good, bad])


def test_kinds_of_labels_are_prepared_apart(tmp_path):
    """What was prepared of values, which may be any numbers, must not be taken for clicks."""
    pq.write_table(pa.table({"y": [0.0, 4.0], "id": [1, 2]}), tmp_path / "a.parquet")
    settings = {"label": "y", "sparse": ["id"]}
    open_dataset(recipe(str(tmp_path / "a.parquet"), tmp_path, **settings, label_kind="values"), 0)
    with pytest.raises(DataError, match="4.0 is neither 0 nor 1"):
        open_dataset(recipe(str(tmp_path / "a.parquet"), tmp_path, **settings), 0)


BAD_VALUES = [
    ({"y": 2}, "column y: 2 is neither 0 nor 1"),
    ({"y": None}, "column y: None is no label"),
    ({"x": -math.inf}, "column x: -inf is not a finite number"),
    ({"id": 50}, "column id: 50 is not in [0, 50): raise data.tables.id or pass data.hash_ids=true"),
    ({"id": -1}, "column id: -1 is not in [0, 50)"),
    ({"id": None}, "column id: None is not in [0, 50)"),
    ({"ids": [3, 99]}, "column ids: [3, 99] is not in [0, 50)"),
    ({"ids": [None]}, "column ids: [None] is not in [0, 50)"),
]


@pytest.mark.parametrize(("change", "message"), BAD_VALUES)
def test_bad_value_is_named(tmp_path, monkeypatch, change, message):
    monkeypatch.setattr(module, "BLOCK_ROWS", 20)
    records = [{"y": index % 2, "x": 1.0, "id": index, "ids": [index] * (index % 3)} for index in range(50)]
    whole = [dict(record) for record in records]
    whole[33].update(change)
    schema = pa.schema({"y": pa.int64(), "x": pa.float64(), "id": pa.int64(), "ids": pa.list_(pa.int64())})
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(whole, schema), file)
    settings = {"label": "y", "dense": ["x"], "sparse": ["id", "ids"], "hash_ids": False}
    with pytest.raises(DataError) as error:
        open_dataset(recipe(str(file), tmp_path, **settings), 0)
    assert str(error.value).startswith(f"{file}, row 34, {message}")
    assert "\n" not in str(error.value)
    dataset = open_dataset(recipe(str(file), tmp_path, on_bad_row="skip", eval_fraction=0.0, **settings), 0)
    batch = next(dataset.batches("train", 50))
    good = records[:33] + records[34:]
    assert (dataset.rejected_rows, batch.size) == (1, 49)
    assert batch.sparse["id"].values().tolist() == [record["id"] for record in good]
    assert batch.sparse["ids"].values().tolist() == [value for record in good for value in record["ids"]]


BAD_RECIPES = [
    ({"label": "clik"}, "no column 'clik'; did you mean click"),
    ({"sparse": ["usr"]}, "no column 'usr'; did you mean user"),
    ({"dense": ["word"]}, r"row \d+, column word: w\d is not a number"),
    ({"dense": ["when"]}, r"column when: holds timestamp\[us\]; a label or dense column"),
    ({"sparse": ["when"]}, "column when: holds timestamp.*sparse ids are integers, strings or lists"),
    ({"sparse": ["price"]}, r"row 1, column price: \S+ is not a whole number that its type holds exactly"),
    ({"sparse": ["word"], "hash_ids": False}, "column word: holds string; text needs data.hash_ids=true"),
    ({"table_rows": None}, r"data.tables lacks column 'user': .* \+data.tables.user="),
    ({"table_rows": 1}, "data.table_rows=1: must be greater than or equal to 2"),
    ({"label": None}, "data.label is not set"),
    ({"sparse": []}, "data.sparse is empty"),
    ({"dense": ["click"]}, "column 'click' is named twice"),
    ({"dense_transform": "sqrt"}, "data.dense_transform=sqrt is unknown; choose one of log, none"),
    ({"tables": {"usr": 5}}, "data.tables.usr: no such column in data.sparse; did you mean user"),
]


@pytest.mark.parametrize(("change", "message"), BAD_RECIPES)
def test_bad_recipe_is_named(tmp_path, change, message):
    file = tmp_path / "a.parquet"
    pq.write_table(make_table(20), file)
    with pytest.raises(UserError, match=message):
        open_dataset(recipe(str(file), tmp_path, **{"label": "click", "sparse": ["user"], **change}), 0)


def test_bad_files(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(make_table(5000), file, compression="none")
    settings = {"label": "click", "sparse": ["user"]}
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"a\.parquet: not a whole Parquet file"):
        open_dataset(recipe(str(file), tmp_path, **settings), 0)
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.parquet: the file is empty"):
        open_dataset(recipe(str(file), tmp_path, **settings), 0)
    pq.write_table(make_table(0), file)
    with pytest.raises(DataError, match=r"a\.parquet: no usable rows"):
        open_dataset(recipe(str(file), tmp_path, **settings), 0)
    with pytest.raises(DataError, match="no such file"):
        open_dataset(recipe(str(tmp_path / "b.parquet"), tmp_path, **settings), 0)
    other = tmp_path / "c.parquet"
    pq.write_table(make_table(20), file)
    pq.write_table(make_table(20).drop_columns(["user"]), other)
    with pytest.raises(DataError, match=r"c\.parquet: no column 'user'"):
        open_dataset(recipe([str(file), str(other)], tmp_path, **settings), 0)
    changed = make_table(20).drop_columns(["user"]).append_column("user", pa.array([[1]] * 20))
    pq.write_table(changed, other)
    with pytest.raises(DataError, match=r"c\.parquet, column user: holds list.* here and int64 in"):
        open_dataset(recipe([str(file), str(other)], tmp_path, **settings), 0)
    # Text and numbers are hashed differently, so that the same user would have two rows.
    text = make_table(20).drop_columns(["user"]).append_column("user", pa.array(["7"] * 20))
    pq.write_table(text, other)
    with pytest.raises(DataError, match=r"c\.parquet, column user: holds string here and int64 in"):
        open_dataset(recipe([str(file), str(other)], tmp_path, **settings), 0)


def read_one(tmp_path: Path, table: pa.Table, **settings: object):
    """The data set of a file with ``table``, whose first columns are y and x."""
    pq.write_table(table, tmp_path / "a.parquet", compression="none", store_schema=False)
    values = {"label": "y", "sparse": ["x"], "eval_fraction": 0.0, **settings}
    return open_dataset(recipe(str(tmp_path / "a.parquet"), tmp_path, **values), 0)


BROKEN = pa.array([b"caf\xc3\xa9", b"ca\xff\x1b", b"x"])
BAD_ROWS = [
    ({"x": BROKEN.view(pa.string())}, {}, r"row 2, column x: ca\\xff\\x1b is not UTF-8"),
    (
        {"x": pa.ListArray.from_arrays([0, 1, 2, 3], BROKEN.view(pa.string()))},
        {},
        r"row 2, column x: \[b'ca\\xff\\x1b'\] is not UTF-8",
    ),
    (
        {"x": [1, 2, 3], "d": [1.0, -1e39, 2.0]},
        {"dense": ["d"], "dense_transform": "none"},
        r"row 2, column d: -1e\+39 is beyond float32",
    ),
    ({"x": [1, 2, 3], "y": [1, 2**60 + 1, 0]}, {}, r"row 2, column y: 1152921504606846977 is neither"),
    (
        {"x": [[0], [7] * 999, [1]]},
        {"hash_ids": False, "table_rows": 5},
        r"row 2, column x: \[7, [7, ]{33}\.\.\.",
    ),
]


@pytest.mark.parametrize(("columns", "settings", "message"), BAD_ROWS)
def test_a_bad_row_is_named_and_its_value_shown_short(tmp_path, columns, settings, message):
    table = pa.table({"y": [0, 1, 0], **columns})
    with pytest.raises(DataError, match=rf"a\.parquet, {message}") as error:
        read_one(tmp_path, table, **settings)
    assert str(error.value).isprintable()
    assert read_one(tmp_path, table, **settings, on_bad_row="skip").rejected_rows == 1


def test_bytes_that_are_no_text_are_ids_of_a_binary_column(tmp_path):
    assert read_one(tmp_path, pa.table({"y": [0, 1, 0], "x": BROKEN})).samples == 3
    large = read_one(tmp_path, pa.table({"y": [0, 1, 0], "x": BROKEN.cast(pa.large_binary())}))
    ids = next(large.batches("train", 3)).sparse.values()
    assert ids.tolist()[0] == row_of("café", 50), "the key of text is that of its bytes"


def test_large_values_are_taken_through_the_logarithm(tmp_path):
    found = read_one(tmp_path, pa.table({"y": [1], "x": [1], "d": [-1e300]}), dense=["d"])
    assert next(found.batches("train", 1)).dense.item() == pytest.approx(-math.log(1e300))


def test_columns_of_one_name_are_refused_where_they_are_used(tmp_path):
    two = pa.Table.from_arrays([pa.array([0, 1]), pa.array([1, 2]), pa.array([3, 4])], names=["y", "x", "x"])
    with pytest.raises(DataError, match=r"a\.parquet: 2 columns are called 'x'; rename all but one"):
        read_one(tmp_path, two)
    unused = pa.Table.from_arrays([*two.columns, pa.array([5, 6])], names=["y", "z", "z", "x"])
    assert read_one(tmp_path, unused).samples == 2


ODD = ["a.b", "a", "a b", "a/b", "keys", "..", "", "é", "'\"", "[red]", "a,b", "\t"]


def test_columns_of_any_name(tmp_path):
    table = pa.table({"y": [0, 1], **{name: [[i, i], [i]] for i, name in enumerate(ODD)}})
    batch = next(read_one(tmp_path, table, sparse=ODD).batches("train", 2))
    for index, name in enumerate(ODD):
        assert batch.sparse[name].values().tolist() == [row_of(index, 50)] * 3
    long = "ü" * 60
    with pytest.raises(DataError, match=r"column name 'ü{37}\.\.\.' is not text of at most 200 bytes"):
        read_one(tmp_path, pa.table({"y": [0], long: [1]}), sparse=[long])
    with pytest.raises(DataError, match=r"'data\.tables=\{a\.b: 100000\}'"):
        read_one(tmp_path, table, sparse=["a.b"], table_rows=None)


def test_files_without_rows(tmp_path):
    empty = pa.table({"y": pa.array([], pa.int64()), "x": pa.array([], pa.int64())})
    with pq.ParquetWriter(tmp_path / "none.parquet", empty.schema):
        pass
    pq.write_table(pa.table({"y": [1], "x": [2]}), tmp_path / "some.parquet")
    assert pq.ParquetFile(tmp_path / "none.parquet").num_row_groups == 0
    settings = {"label": "y", "sparse": ["x"], "eval_fraction": 0.0}
    with pytest.raises(DataError, match=r"none\.parquet: no usable rows"):
        open_dataset(recipe(str(tmp_path / "none.parquet"), tmp_path, **settings), 0)
    assert open_dataset(recipe(str(tmp_path), tmp_path, **settings), 0).samples == 1
