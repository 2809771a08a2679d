"""Streams: records of files as they appear are each given once, in order, and from any position again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpipe.data.config import FilesConfig, StreamConfig
from recpipe.data.dataset import Dataset, WaitingStopped
from recpipe.data.make import open_dataset
from recpipe.data.stream.folder import _Arrivals
from recpipe.data.stream.stream import Stream
from recpipe.errors import DataError, UserError
from recpipe.plugin.batch import Batch

FEATURES = {
    "labels": ["click"],
    "features": [
        {"name": "user", "rows": 50},
        {"name": "city", "rows": 40},
        {"name": "tags", "kind": "multi_hot", "rows": 20},
        {"name": "price", "kind": "dense", "scale": "log1p", "default": -1.0},
    ],
}
SIZES = {"part_2": 70, "part_9": 30, "part_10": 1, "part_11": 44}
"""The rows of each file, in the order of their names."""


def rows(size: int = sum(SIZES.values())) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    return [
        {
            "click": int(rng.integers(0, 2)),
            "user": None if n % 11 == 0 else int(rng.integers(1, 90)),
            "city": f"c{rng.integers(0, 9)}",
            "tags": [f"t{tag}" for tag in rng.integers(0, 9, rng.integers(0, 4))],
            "price": None if n % 7 == 0 else round(float(rng.lognormal()), 2),
        }
        for n in range(size)
    ]


def lines(content: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of ``rows`` in a folder, beside what is none."""
    made, content = tmp_path / "incoming", rows()
    made.mkdir()
    for name, size in SIZES.items():
        (made / f"{name}.jsonl").write_text(lines(content[:size]))
        content = content[size:]
    (made / "_SUCCESS").touch()
    (made / ".part_1.jsonl").write_text("half a fi")
    (made / "part_3.jsonl.tmp").write_text("half a fi")
    (made / "part_12.jsonl").touch()  # empty
    return made


def stream(folder: Path, **keys: Any) -> Stream:
    own = {"path": str(folder), "features": FEATURES, "settle": 0.0, "end": "stop", "idle": 0.15, **keys}
    return Stream(StreamConfig(**own))


def prepared(tmp_path: Path, content: Sequence[dict[str, Any]]) -> Dataset:
    """The same rows, as ``data=files`` prepares them."""
    file = tmp_path / "all.jsonl"
    file.write_text(lines(content))
    config = FilesConfig(
        path=str(file), features=FEATURES, cache_dir=str(tmp_path / "cache"), eval_fraction=0.0
    )
    return open_dataset(config, 1)


def alike(one: Batch, other: Batch) -> bool:
    pairs = [(one.labels, other.labels), (one.dense, other.dense)]
    pairs += [(one.sparse.values(), other.sparse.values()), (one.sparse.lengths(), other.sparse.lengths())]
    return all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)


def test_every_record_comes_once_in_the_order_of_names(folder, tmp_path) -> None:
    found = stream(folder)
    wanted = list(prepared(tmp_path, rows()).batches("train", 32))
    batches = list(found.batches("train", 32))
    assert [len(batch.labels) for batch in batches] == [32, 32, 32, 32, 17]
    assert all(map(alike, batches, wanted))
    assert found.last_batch == 5
    assert dict(found.missing) == dict(prepared(tmp_path, rows()).missing)
    assert list(found.batches("eval", 32)) == []
    assert not alike(batches[0], batches[1])


def test_a_batch_that_ends_with_the_stream_is_its_last(folder) -> None:
    found, sizes = stream(folder), []
    for number, batch in enumerate(found.batches("train", 29), 1):
        assert found.last_batch == (5 if number == 5 else None), "known before its last batch is given"
        sizes.append(len(batch.labels))
    assert sizes == [29] * 5


@pytest.mark.parametrize(
    ("done", "position"),
    [
        (1, {"part_2.jsonl": 35}),
        (2, {"part_2.jsonl": 70}),
        (3, {"part_11.jsonl": 4}),
        (4, {"part_11.jsonl": 39}),
    ],
)
def test_a_stream_goes_on_at_a_position(folder, done, position) -> None:
    """At the middle of a file, and where one begins; positions are plain values."""
    whole = stream(folder)
    batches = list(whole.batches("train", 35))
    assert json.loads(json.dumps(whole.position_after(done))) == position
    rest = stream(folder)
    rest.resume_at(done, position)
    assert alike(next(rest.batches("train", 35)), batches[0]), "what is looked at before training"
    again = list(rest.batches("train", 35, done))
    assert len(again) == len(batches) - done
    assert all(map(alike, again, batches[done:]))
    assert rest.position_after(5) == whole.position_after(5)


def test_bad_rows_are_passed_by(tmp_path) -> None:
    content = rows(60)
    for bad in (0, 9, 10, 31, 59):
        content[bad]["click"] = 7
    (tmp_path / "a.jsonl").write_text(lines(content))
    with pytest.raises(DataError, match=r"a\.jsonl, row 1, column click: 7"):
        next(stream(tmp_path).batches("train", 10))
    whole = stream(tmp_path, on_bad_row="skip")
    batches = list(whole.batches("train", 10))
    assert [len(batch.labels) for batch in batches] == [10, 10, 10, 10, 10, 5]
    assert whole.rejected_rows == 5
    assert whole.position_after(1) == {"a.jsonl": 13}, "13 rows, 3 of them bad"
    rest = stream(tmp_path, on_bad_row="skip")
    rest.resume_at(1, whole.position_after(1))
    assert all(map(alike, rest.batches("train", 10, 1), batches[1:]))


def test_files_that_come_later_are_waited_for(folder) -> None:
    found = stream(folder, end="wait")
    batches = found.batches("train", 100)
    first = next(batches)
    assert len(first.labels) == 100
    (folder / "part_20.parquet.tmp").write_text("half a fi")
    pq.write_table(pa.Table.from_pylist(rows(70)), folder / "part_20.parquet")
    assert len(next(batches).labels) == 100
    found.interrupt()
    with pytest.raises(WaitingStopped):  # 15 records are left, which are no batch
        next(batches)
    assert found.position_after(2) == {"part_20.parquet": 55}


def test_a_file_is_settled_before_it_or_a_later_one_is_read(tmp_path) -> None:
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for file in files:
        file.write_text(lines(rows(2)))
        os.utime(file, (0, 0))
    os.utime(files[1])  # now
    arrivals = _Arrivals(1000)
    assert arrivals.next_of(files) == files[0]
    assert arrivals.next_of(files) is None
    os.utime(files[1], (0, 0))
    assert [arrivals.next_of(files) for _ in range(3)] == [*files[1:], None]


def test_a_file_that_comes_too_late_is_told(folder, caplog) -> None:
    found = stream(folder)
    batches = found.batches("train", 100)
    next(batches)
    (folder / "part_1.jsonl").write_text(lines(rows(40)))
    with caplog.at_level(logging.WARNING, "recpipe"):
        assert [len(batch.labels) for batch in batches] == [45]
    assert [record.getMessage().split("/")[-1] for record in caplog.records] == [
        "part_1.jsonl came when part_10.jsonl had been read, and is not trained: a stream's files are read "
        "in the order of their names; give it a later one"
    ]


def test_a_file_that_changed_is_refused(folder, caplog) -> None:
    (folder / "part_11.jsonl").write_text(lines(rows(3)))
    found = stream(folder)
    found.resume_at(3, {"part_11.jsonl": 4})
    with pytest.raises(DataError, match=r"part_11\.jsonl: has 3 rows, and 4 of it were trained"):
        next(found.batches("train", 35, 3))
    (folder / "part_11.jsonl").unlink()
    with caplog.at_level(logging.WARNING, "recpipe"):
        assert list(found.batches("train", 35, 3)) == []
    assert "the rows after its first 4 are not trained" in caplog.text


def test_a_column_is_what_it_was(tmp_path) -> None:
    content = rows(6)
    (tmp_path / "a.jsonl").write_text(lines(content))
    (tmp_path / "b.jsonl").write_text(lines([{**row, "user": "u7"} for row in content]))
    with pytest.raises(DataError, match=r"b\.jsonl, column user: holds string here and int64 in .*a\.jsonl"):
        list(stream(tmp_path).batches("train", 100))


def test_labels_are_expressions_as_in_prepared_files(tmp_path) -> None:
    content = [{"stars": n % 5 + 1, "city": f"c{n % 3}"} for n in range(20)]
    features = {
        "labels": [{"name": "liked", "expression": "stars >= 4"}],
        "features": [FEATURES["features"][1]],
    }
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(lines(content))
    (batch,) = stream(tmp_path / "in", features=features).batches("train", 32)
    assert batch.labels.tolist() == [float(row["stars"] >= 4) for row in content]
    (tmp_path / "in" / "b.jsonl").write_text(lines([{"stars": {"of": 5}, "city": "c1"}]))
    with pytest.raises(DataError, match=r"b\.jsonl, column stars: holds struct"):
        list(stream(tmp_path / "in", features=features).batches("train", 32))


def test_text_of_csv_is_read_as_in_prepared_files(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("click,user,price\n1,7,2.5\n0,,\n1,12,1\n")
    user, price = {"name": "user", "rows": 50}, {"name": "price", "kind": "dense"}
    features = {"labels": ["click"], "features": [user, price]}
    files = FilesConfig(
        path=str(tmp_path / "a.csv"), features=features, cache_dir=str(tmp_path / "cache"), eval_fraction=0.0
    )
    found = stream(tmp_path, features=features)
    assert found.encoding.features.sparse[0].type == "integer"
    assert alike(next(found.batches("train", 9)), next(open_dataset(files, 1).batches("train", 9)))


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        ({"name": "user", "ids": "vocabulary"}, "take ids: hash, or rows: dynamic"),
        ({"name": "price", "kind": "dense", "scale": "standard"}, "take scale: log"),
        ({"name": "price", "kind": "dense", "buckets": 4}, "state their edges"),
        ({"name": "at", "kind": "timestamp", "as": ["age"], "unit": "s"}, "state now, a date"),
    ],
)
def test_what_would_be_learned_is_refused(tmp_path, feature, said) -> None:
    with pytest.raises(DataError, match=f"{feature['name']}.*: a stream has no training part, and .*{said}"):
        stream(tmp_path, features={"labels": ["click"], "features": [feature, {"name": "shop", "rows": 9}]})


def test_what_was_learned_from_files_is_used(folder, tmp_path) -> None:
    """Of the first file, whose vocabulary lacks ids of the others."""
    learned = {
        "labels": ["click"],
        "features": [
            {"name": "user", "ids": "vocabulary"},
            {"name": "city", "ids": "vocabulary", "min_count": 3},
            {"name": "price", "kind": "dense", "scale": "standard"},
            {"name": "price_range", "column": "price", "kind": "dense", "buckets": 4},
        ],
    }
    cache = str(tmp_path / "cache")
    files = FilesConfig(
        path=str(folder / "part_2.jsonl"), features=learned, cache_dir=cache, eval_fraction=0.0
    )
    trained = open_dataset(files, 1)
    assert trained.preparation is not None
    everything = tmp_path / "all.jsonl"
    everything.write_text(lines(rows()))
    files = FilesConfig(path=str(everything), features=learned, cache_dir=cache, eval_fraction=0.0)
    wanted = open_dataset(files, 1, trained_by=trained.preparation)
    encoding = json.loads(json.dumps(trained.preparation.to_dict()))
    found = stream(folder, features=None, encoded_as=encoding)
    batches = list(found.batches("train", 40))
    assert all(map(alike, batches, wanted.batches("train", 40)))
    assert len(batches) == 4
    assert dict(found.unseen) == dict(wanted.unseen) != {}
    with pytest.raises(UserError, match=r"data\.encoded_as says all columns"):
        stream(folder, encoded_as=encoding)
    with pytest.raises(DataError, match=r"data\.encoded_as cannot be used: it lacks what was learned"):
        stream(folder, features=None, encoded_as={**encoding, "learned": None})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"path": "nowhere"}, "nowhere: no such folder"),
        ({"path": "s3://bucket/in"}, "^s3://bucket/in: a stream reads a folder of this machine; mount it"),
        ({"path": None}, "data=stream needs data.path=FOLDER"),
        ({"features": "auto"}, "recpipe schema FILES writes"),
        ({"features": None}, "data.label is not set"),
        ({}, "no record came within data.idle=0.15 seconds"),
    ],
)
def test_wrong_recipes_are_one_line(tmp_path, keys, said) -> None:
    with pytest.raises(UserError, match=said):
        stream(tmp_path, **keys)
