"""Files that are read in parts, by workers of a Ray cluster too, give the samples of one process."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpipe.data import columnar
from recpipe.data.cache import prepare
from recpipe.data.columns import Columns, MultiHot
from recpipe.data.config import FilesConfig
from recpipe.data.files import RowChecks
from recpipe.data.listing import input_files
from recpipe.data.make import open_source
from recpipe.data.sent import packed, unpacked
from recpipe.data.sources.cluster import in_order
from recpipe.data.sources.reading import Read
from recpipe.errors import BadRow, DataError, UserError

FEATURES = {
    "labels": ["click"],
    "features": [
        {"name": "user", "ids": "vocabulary"},
        {"name": "city", "rows": 40},
        {"name": "price", "kind": "dense", "scale": "standard"},
        {"name": "amount", "kind": "dense", "column": "price", "buckets": 5, "table": "amounts"},
    ],
}


def rows(size: int = 1000) -> pa.Table:
    rng = np.random.default_rng(4)
    return pa.table(
        {
            "click": rng.integers(0, 2, size),
            "user": [None if n % 13 == 0 else int(rng.zipf(1.3)) % 2**60 for n in range(size)],
            "city": [["Zürich", "Kraków", ""][n] for n in rng.integers(0, 3, size)],
            "price": [None if n % 17 == 0 else float(rng.lognormal()) for n in range(size)],
        }
    )


def test_parts_of_a_parquet_file_are_its_rows_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = rows()
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=70)
    monkeypatch.setattr(columnar, "PART_ROWS", 200)
    (file,) = input_files(str(tmp_path / "rows.parquet"))
    assert file.parts == [range(0, 3), range(3, 6), range(6, 9), range(9, 12), range(12, 15)]
    blocks = [block for part in file.parts for block in file.blocks(table.column_names, groups=part)]
    assert pa.Table.from_batches([block.rows for block in blocks]).equals(table)
    lengths = [len(block.rows) for block in blocks]
    assert [block.first_row for block in blocks] == [1 + sum(lengths[:n]) for n in range(len(lengths))]
    shares = [block.share for block in blocks]
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_a_missing_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"data.ray=auto: needs Ray: pip install 'recpipe\[ray\]'"):
        next(in_order(lambda n: [n], bytes, [(b"",)], "auto"))


def read() -> Read:
    """Samples with all that they may have."""
    bag = MultiHot(np.array([3, -1, 5]), np.array([0, 2, 3]), np.packbits([[0], [1], [0]], axis=1))
    weighted = replace(bag, missing=None, weights=np.array([1, 0.5, 2], np.float32))
    columns = Columns(
        np.array([[0, 1], [1, np.nan]], np.float32),
        np.array([[1.5], [np.nan]]),
        np.empty((2, 0), np.int64),
        {"tags": bag, "weights of tags": weighted},
        np.empty((2, 0), np.uint8),
        np.ones((2, 2), np.float32),
    )
    checks = RowChecks("a.csv", 7, 2)
    checks.require(np.array([True, False]), "user", lambda row: "\ud800", "is none")
    of_parts = pa.record_batch({"day": pa.array(["a", None]).dictionary_encode()})
    return Read(2, columns, {"user": 1}, checks, of_parts, 1 / 3, 4)


def plain(value: Any) -> Any:
    """With arrays as their types, shapes and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return plain(vars(value)) if isinstance(value, Read | Columns | MultiHot | RowChecks) else value


def test_what_a_worker_sends_is_what_it_has_read() -> None:
    """Arrow and JSON, whatever text they hold."""
    assert plain(Read.unpacked(read().packed())) == plain(read())
    few = Columns(np.zeros(0, np.float32), np.zeros((0, 3), np.float32), np.zeros((0, 1), np.int32))
    none = replace(read(), columns=few, checks=RowChecks("a", 1, 0), of_parts=pa.record_batch([], []))
    assert plain(Read.unpacked(none.packed())) == plain(none)


def test_another_answer_of_a_worker_is_refused_and_never_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    good = unpacked(read().packed())
    fewer = {name: array for name, array in good.arrays.items() if name != "ids"}
    for other in (
        pickle.dumps(Evil()),
        b"",
        packed(good._replace(head={**good.head, "file": "2"})),
        packed(good._replace(head={**good.head, "run": "rm"})),
        packed(good._replace(head=[1])),
        packed(good._replace(arrays=fewer)),
        packed(good._replace(arrays=good.arrays | {"good": np.ones(3, bool)})),
        packed(good._replace(arrays=good.arrays | {"offsets of tags": np.array([0, 2, 9])})),
        packed(good._replace(rows=None)),
    ):
        with pytest.raises(ValueError, match="."):
            Read.unpacked(other)
    assert not (tmp_path / "executed").exists()


def test_a_damaged_answer_is_refused() -> None:
    """Any byte of it."""
    content, rng = read().packed(), np.random.default_rng(1)
    for place in rng.integers(0, len(content), 300).tolist():
        for other in (content[:place], content[:place] + b"\xff" + content[place + 1 :]):
            with suppress(ValueError):
                Read.unpacked(other)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="recpipe's extra ray is not installed")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20)
    yield
    ray.shutdown()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Parquet file of several parts."""
    monkeypatch.setattr(columnar, "PART_ROWS", 200)
    monkeypatch.setattr(columnar, "BLOCK_ROWS", 64)
    (tmp_path / "in").mkdir()
    for number in range(3):
        pq.write_table(rows(), tmp_path / "in" / f"part-{number}.parquet", row_group_size=70)
    return tmp_path / "in"


def prepared(path: Path, cache: Path, **settings: Any) -> dict[str, bytes]:
    config = FilesConfig(path=str(path), features=FEATURES, cache_dir=str(cache), **settings)
    made = prepare(open_source(config), cache)
    return {file.name: file.read_bytes() for file in made.iterdir()}


@pytest.mark.soak
@pytest.mark.usefixtures("cluster")
def test_other_processes_do_the_work_and_its_order_stays() -> None:
    def work(number: int) -> Iterator[bytes]:
        for each in (number, number + 0.5):
            yield f"{each} {os.getpid()}".encode()

    found = [made.split() for made in in_order(work, bytes, [(n,) for n in range(9)], "auto")]
    assert [float(number) for number, _ in found] == [n / 2 for n in range(18)]
    assert os.getpid() not in {int(process) for _, process in found}


@pytest.mark.soak
@pytest.mark.usefixtures("cluster")
def test_an_answer_with_another_head_is_one_line() -> None:
    other = packed(unpacked(read().packed())._replace(head={"file": 2}))
    with pytest.raises(DataError, match=r"^data.ray=auto: a worker's answer cannot be read \(its head lacks"):
        next(in_order(lambda: [other], Read.unpacked, [()], "auto"))


@pytest.mark.soak
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("split", [None, {"by": "last", "column": "city", "valid": 30, "test": 20}])
def test_workers_of_a_cluster_prepare_what_one_process_does(
    split: dict[str, Any] | None, folder: Path, tmp_path: Path
) -> None:
    wanted = prepared(folder, tmp_path / "one", split=split)
    found = prepared(folder, tmp_path / "many", split=split, ray="auto")
    assert found == wanted
    assert "meta.json" in wanted


@pytest.mark.soak
@pytest.mark.usefixtures("cluster")
def test_the_first_bad_row_is_the_same_one(folder: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        table = rows()
        clicks = table["click"].to_pylist()
        table = table.set_column(0, "click", pa.array([*clicks[:500], 7, *clicks[501:]]))
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=70)
    with pytest.raises(BadRow) as alone:
        prepared(folder, tmp_path / "one")
    with pytest.raises(BadRow) as together:
        prepared(folder, tmp_path / "many", ray="auto")
    assert str(together.value) == str(alone.value)
    assert "part-1.parquet, row 501" in str(alone.value)
    assert prepared(folder, tmp_path / "one", on_bad_row="skip") == prepared(
        folder, tmp_path / "many", on_bad_row="skip", ray="auto"
    )
