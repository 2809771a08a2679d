"""Files as they lie: the same rows in every format give the same samples, missing means one thing, and what
cannot be read is one line."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from recpipe.data.config import FilesConfig
from recpipe.data.dataset import Dataset
from recpipe.data.listing import input_files
from recpipe.data.make import open_dataset
from recpipe.errors import DataError, UserError

CITIES = ["Zürich", "New York, NY", "", 'Say "hi"', "007"]
FEATURES = {
    "labels": ["click"],
    "features": [
        {"name": "user", "rows": 50},
        {"name": "city", "rows": 40},
        {"name": "tags", "kind": "multi_hot", "separator": "|", "rows": 20},
        {"name": "price", "kind": "dense", "scale": "log1p", "default": -1.0},
    ],
}


def rows(size: int = 200) -> pa.Table:
    """``size`` rows with a missing value in each column but the label."""
    rng = np.random.default_rng(1)
    user = [None if n % 11 == 0 else int(rng.integers(1, 90)) for n in range(size)]
    price = [None if n % 7 == 0 else round(float(rng.lognormal()), 2) for n in range(size)]
    tags = ["|".join(f"t{n}" for n in rng.integers(0, 9, rng.integers(0, 4))) for _ in range(size)]
    click = rng.integers(0, 2, size)
    return pa.table(
        {
            "click": click,
            "user": pa.array(user, pa.int64()),
            "city": [CITIES[n] for n in rng.integers(0, 5, size)],
            "tags": tags,
            "price": price,
        }
    )


def as_csv(table: pa.Table, separator: str = ",") -> str:
    """The table as text: quotes where a value needs them, nothing for null."""

    def cell(value: object) -> str:
        text = "" if value is None else str(value)
        return '"' + text.replace('"', '""') + '"' if set(text) & {separator, '"'} else text

    lines = [separator.join(table.column_names)]
    lines += [separator.join(cell(value) for value in row.values()) for row in table.to_pylist()]
    return "\n".join(lines) + "\n"


def opened(tmp_path: Path, path: object, **settings: object) -> Dataset:
    config = {"features": FEATURES, "eval_fraction": 0.25, "cache_dir": str(tmp_path / "cache"), **settings}
    return open_dataset(FilesConfig(path=path, **config), 0)


def samples(dataset: Dataset) -> list[list[list[float]]]:
    """Labels, dense values, ids and lengths of every sample of both splits."""
    batches = [b for split in ("train", "eval") for b in dataset.batches(split, 64)]
    return [
        [b.labels.tolist(), b.dense.tolist(), b.sparse.values().tolist(), b.sparse.lengths().tolist()]
        for b in batches
    ]


def write(table: pa.Table, folder: Path, name: str) -> Path:
    """The table in the format that the name's suffix says."""
    file = folder / name
    text = as_csv(table, "\t" if ".tsv" in name else ";" if "semi" in name else ",").encode()
    if name.endswith("latin.csv"):
        file.write_bytes(text.decode().encode("latin-1"))
    elif name.endswith(".gz"):
        file.write_bytes(gzip.compress(text))
    elif name.endswith(".bz2"):
        file.write_bytes(bz2.compress(text))
    elif name.endswith(".zst"):
        with pa.CompressedOutputStream(str(file), "zstd") as out:
            out.write(text)
    elif name.endswith(".jsonl"):
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif name.endswith(".feather"):
        pyarrow.feather.write_feather(table, file)
    elif name.endswith(".parquet"):
        pq.write_table(table, file)
    else:
        file.write_bytes(text)
    return file


def test_the_same_rows_in_every_format_give_the_same_samples(tmp_path: Path) -> None:
    table = rows()
    doubles = table.set_column(1, "user", table["user"].cast(pa.float64()))
    coded = table.set_column(2, "city", table["city"].dictionary_encode())
    decimals = table.set_column(1, "user", table["user"].cast(pa.decimal128(38, 0)))
    wanted = samples(opened(tmp_path, str(write(table, tmp_path, "rows.parquet"))))
    assert sum(len(batch[0]) for batch in wanted) == len(table)
    names = ["rows.csv", "rows.tsv", "semi.csv", "rows.csv.gz", "rows.csv.bz2", "rows.csv.zst", "rows.jsonl"]
    for name in [*names, "rows.feather"]:
        assert samples(opened(tmp_path, str(write(table, tmp_path, name)))) == wanted, name
    latin = str(write(table, tmp_path, "latin.csv"))
    assert samples(opened(tmp_path, latin, encoding="latin-1")) == wanted
    for name, typed in (
        ("doubles.parquet", doubles),
        ("coded.parquet", coded),
        ("decimals.feather", decimals),
    ):
        assert samples(opened(tmp_path, str(write(typed, tmp_path, name)))) == wanted, name


def test_missing_means_one_thing_and_is_counted(tmp_path: Path) -> None:
    table = rows()
    dataset = opened(tmp_path, str(write(table, tmp_path, "rows.csv")))
    batch = next(dataset.batches("train", 150))
    user, city, tags = (batch.sparse[name] for name in ("user", "city", "tags"))
    for n, row in enumerate(table.slice(0, 150).to_pylist()):
        assert (int(user.values()[n]) == 0) == (row["user"] is None)
        assert (int(city.values()[n]) == 0) == (row["city"] == "")
        assert int(tags.lengths()[n]) == len([tag for tag in row["tags"].split("|") if tag])
        assert (float(batch.dense[n, 0]) == -1.0) == (row["price"] is None)
    listed = table.to_pylist()
    assert dataset.missing == {
        "user": sum(row["user"] is None for row in listed),
        "city": sum(row["city"] == "" for row in listed),
        "tags": sum(row["tags"] == "" for row in listed),
        "price": sum(row["price"] is None for row in listed),
    }


def test_padding_is_left_out_and_sequences_are_cut_from_the_side_that_is_named(tmp_path: Path) -> None:
    lists = [[3, 4, 5, 0, 0], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]]
    file = tmp_path / "padded.parquet"
    pq.write_table(pa.table({"click": [0, 1, 1], "history": pa.array(lists, pa.list_(pa.int64(), 5))}), file)
    for keep, wanted in (("last", [4, 5, 4, 5]), ("first", [3, 4, 1, 2])):
        feature = {"name": "history", "kind": "sequence", "padding": ["0"], "max_length": 2, "keep": keep}
        feature |= {"ids": "rows", "rows": 9}
        dataset = opened(
            tmp_path, str(file), features={"labels": ["click"], "features": [feature]}, eval_fraction=0.0
        )
        (batch,) = dataset.batches("train", 3)
        assert batch.sparse.values().tolist() == wanted
        assert batch.sparse.lengths().tolist() == [2, 0, 2]
        assert dataset.missing == {"history": 1}


def test_folders_patterns_and_lists_are_the_same_rows_and_hive_folders_are_columns(tmp_path: Path) -> None:
    table = rows(90)
    for day, low in (("2026-03-09", 0), ("2026-03-10", 30), ("2026-03-11", 60)):
        folder = tmp_path / "hive" / f"dt={day}"
        folder.mkdir(parents=True)
        write(table.slice(low, 30), folder, "part-0.parquet")
        write(table.slice(low, 30), tmp_path, f"day_{low + 1}.csv")
    (tmp_path / "hive" / "_SUCCESS").touch()
    wanted = samples(opened(tmp_path, str(write(table, tmp_path, "all.parquet"))))
    days = [str(tmp_path / f"day_{n}.csv") for n in (1, 31, 61)]
    for path in (str(tmp_path / "hive"), str(tmp_path / "day_*.csv"), days):
        assert samples(opened(tmp_path, path)) == wanted, path
    features = {"labels": ["click"], "features": [{"name": "dt", "rows": 90}]}
    dataset = opened(tmp_path, str(tmp_path / "hive"), features=features)
    ids = [i for s in ("train", "eval") for b in dataset.batches(s, 30) for i in b.sparse.values().tolist()]
    assert [len(set(ids[low : low + 30])) for low in (0, 30, 60)] == [1, 1, 1]
    assert len(set(ids)) == 3


def test_a_part_without_any_value_is_missing(tmp_path: Path) -> None:
    pq.write_table(pa.table({"click": [0, 1], "coupon": pa.nulls(2)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"click": [0, 1], "coupon": [5, None]}), tmp_path / "b.parquet")
    features = {"labels": ["click"], "features": [{"name": "coupon", "ids": "modulo", "rows": 10}]}
    dataset = opened(tmp_path, str(tmp_path), features=features, eval_fraction=0.0)
    (batch,) = dataset.batches("train", 4)
    assert batch.sparse.values().tolist() == [0, 0, 5, 0]
    assert dataset.missing == {"coupon": 3}


def test_text_that_is_a_number_in_every_row_is_one_and_type_text_keeps_spellings_apart(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.csv").write_text("click,user\n0,7\n1,007\n1,7\n")

    def ids(kind: str) -> list[int]:
        features = {"labels": ["click"], "features": [{"name": "user", "rows": 1000, "type": kind}]}
        dataset = opened(tmp_path, str(tmp_path / "a.csv"), features=features, eval_fraction=0.0)
        return next(dataset.batches("train", 3)).sparse.values().tolist()

    text = ids("text")
    assert text[0] == text[2] != text[1]
    assert ids("auto") == text  # for 007 is no whole number
    with pytest.raises(DataError, match=r"a.csv, row 2, column user: 007 is not a whole number"):
        ids("integer")


@pytest.mark.parametrize(
    ("text", "settings", "fault"),
    [
        ("click,user,city,tags,price\n1,2,x,a\n", {}, "row 1: has 4 columns instead of 5"),
        ("click,user,city,tags,price\n1,2,x,a,cheap\n", {}, "row 1, column price: cheap is not a number"),
        ("click;user;city;tags;price\n", {"separator": ","}, "no column 'click'; its header is one column"),
        ("click,user,user,city,tags,price\n", {}, "2 columns are called 'user'"),
        ("click,user,town,tags,price\n1,2,x,a,3\n", {}, "no column 'city'"),
        ("click,user,city,tags,price\n3,2,x,a,1\n", {}, "row 1, column click: 3 is neither 0 nor 1"),
        ("", {}, "the file is empty"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, text: str, settings: dict[str, object], fault: str
) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises((DataError, UserError), match=fault) as raised:
        samples(opened(tmp_path, str(file), **settings))
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_column_that_is_text_in_one_file_and_a_number_in_another_is_refused(tmp_path: Path) -> None:
    table = rows(20)
    write(table, tmp_path, "a.parquet")
    write(table.set_column(1, "user", table["user"].cast(pa.string())), tmp_path, "b.parquet")
    with pytest.raises(
        DataError, match=r"b.parquet, column user: holds string here and int64 in .*a.parquet"
    ):
        opened(tmp_path, str(tmp_path))


@pytest.mark.parametrize("pattern", ["day=*/*.csv", "day=*", "day=*/"])
def test_files_of_a_pattern_are_in_the_order_of_their_paths(tmp_path: Path, pattern: str) -> None:
    """Also where all have one name; a pattern of folders is what lies in them."""
    wanted = [f"day={day}/part-{part}.csv" for day in (2, 10, 11) for part in (0, 9, 10)]
    for name in reversed(wanted):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a\n1\n")
    found = input_files(f"{tmp_path}/{pattern}")
    assert [str(file.path.relative_to(tmp_path)) for file in found] == wanted
    assert found[0].partition == {"day": "2"}
