"""A damaged file is refused in one line, or gives the rows that a plain reader finds in its bytes: none is
changed in silence."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpipe.data.config import FilesConfig
from recpipe.data.listing import input_files
from recpipe.data.make import open_dataset
from recpipe.errors import UserError
from tests.data.test_damage import mutated

Rows = list[dict[str, Any]]
FEATURES = {
    "labels": ["click"],
    "features": [
        {"name": "user", "rows": 50},
        {"name": "city", "rows": 40},
        {"name": "price", "kind": "dense"},
    ],
}
COLUMNS = ("click", "user", "city", "price")
CITIES = ["Zürich", "New York, NY", 'Say "hi"', "007", "two\nlines"]


def table() -> pa.Table:
    size = range(40)
    return pa.table(
        {
            "click": [n % 2 for n in size],
            "user": [n * 7919 % 1000 for n in size],
            "city": [CITIES[n % 5] for n in size],
            "price": [n / 4 + 0.5 for n in size],
        }
    )


def as_csv(separator: str = ",") -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=separator).writerows(
        [COLUMNS, *zip(*table().to_pydict().values(), strict=True)]
    )
    return out.getvalue().encode()


def as_json() -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table().to_pylist()).encode()


def packed(data: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def unpacked(data: bytes, codec: str) -> bytes:
    return bytes(pa.CompressedInputStream(pa.BufferReader(data), codec).read())


def as_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table(), sink, row_group_size=16, write_page_checksum=True, compression="none")
    return sink.getvalue().to_pybytes()


def as_arrow(make: Callable[..., Any] = pa.ipc.new_file) -> bytes:
    sink = pa.BufferOutputStream()
    with make(sink, table().schema) as out:
        out.write_table(table(), max_chunksize=16)
    return sink.getvalue().to_pybytes()


def of_csv(data: bytes, separator: str = ",") -> Rows:
    """By Python's own reader; all is text."""
    names, *lines = filter(None, csv.reader(io.StringIO(data.decode(), newline=""), delimiter=separator))
    return [dict(zip(names, line, strict=True)) for line in lines]


def of_json(data: bytes) -> Rows:
    return [json.loads(line) for line in data.decode().split("\n") if line.strip()]


def of_arrow(data: bytes) -> Rows:
    return pa.ipc.open_file(data).read_all().to_pylist()


KINDS: dict[str, tuple[bytes, Callable[[bytes], Rows]]] = {
    "rows.csv": (as_csv(), of_csv),
    "rows.csv.gz": (gzip.compress(as_csv(), mtime=0), lambda data: of_csv(gzip.decompress(data))),
    "rows.csv.bz2": (bz2.compress(as_csv()), lambda data: of_csv(bz2.decompress(data))),
    "rows.csv.zst": (packed(as_csv(), "zstd"), lambda data: of_csv(unpacked(data, "zstd"))),
    "rows.jsonl": (as_json(), of_json),
    "rows.jsonl.gz": (gzip.compress(as_json(), mtime=0), lambda data: of_json(gzip.decompress(data))),
    "rows.parquet": (as_parquet(), lambda data: table().to_pylist()),  # whose pages have checksums
    "rows.feather": (as_arrow(), of_arrow),
    "rows.arrow": (
        as_arrow(pa.ipc.new_stream),
        lambda data: pa.ipc.open_stream(data).read_all().to_pylist(),
    ),
    "rows.tsv": (as_csv("\t"), lambda data: of_csv(data, "\t")),
}


def read(file: Path, cache: Path) -> Rows | str:
    """Its rows, or with which line it is refused; warnings are errors."""
    config = FilesConfig(path=str(file), features=FEATURES, cache_dir=str(cache))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            open_dataset(config, 0)
            (found,) = input_files(str(file))
            return [row for block in found.blocks(COLUMNS) for row in block.rows.to_pylist()]
        except UserError as error:
            return str(error)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 11))])
def test_no_row_of_a_damaged_file_is_changed_in_silence(name: str, seed: int, tmp_path: Path) -> None:
    whole, plainly = KINDS[name]
    rng = random.Random(seed)
    assert read_as_written(whole, name, tmp_path / "whole") == plainly(whole)
    for number in range(4):
        damaged = mutated(rng, whole)
        found = read_as_written(damaged, name, tmp_path / str(number))
        if isinstance(found, str):
            assert str(tmp_path) in found
            assert found.isprintable()
        else:
            assert found == [{key: row.get(key) for key in COLUMNS} for row in plainly(damaged)], damaged


def read_as_written(data: bytes, name: str, folder: Path) -> Rows | str:
    folder.mkdir()
    (folder / name).write_bytes(data)
    return read(folder / name, folder / "cache")
