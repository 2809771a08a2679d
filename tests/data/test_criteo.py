"""Raw Criteo rows: equal to a slow reference parser in every packing; every bad input named."""

from __future__ import annotations

import gzip
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from recpipe.common import meter
from recpipe.data import cache
from recpipe.data.config import CriteoConfig
from recpipe.data.make import open_dataset
from recpipe.data.sources import criteo as module
from recpipe.errors import DataError, UserError

from .conftest import TABLES, assert_matches

CONF = Path(__file__).resolve().parents[2] / "conf" / "data"


def pack(path: Path, text: bytes) -> Path:
    if path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(text)
    else:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def joined(rows: list[str]) -> bytes:
    return "".join(row + "\n" for row in rows).encode()


@pytest.mark.parametrize("name", ["a.tsv", "a.txt", "a.gz", "a.zst"])
@pytest.mark.parametrize("block", [300, 5000, 8 << 20])
def test_equals_the_reference(rows, criteo, tmp_path, monkeypatch, name, block):
    monkeypatch.setattr(module, "BLOCK_BYTES", max(block, 1000))
    file = pack(tmp_path / name, joined(rows))
    assert_matches(open_dataset(criteo(str(file)), 0), rows, TABLES)


def test_a_long_preparation_is_followed(rows, criteo, tmp_path, monkeypatch, caplog):
    """Also by a process that finds another one at it."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 30_000)
    monkeypatch.setattr(meter, "LINE_SECONDS", 0.0)
    recipe = criteo(str(pack(tmp_path / "a.tsv", joined(rows))))
    held = cache.locked(tmp_path / "held")
    with caplog.at_level(logging.INFO, "recpipe"), ThreadPoolExecutor(1) as pool:
        open_dataset(recipe, 0)
        assert f"reading data: {tmp_path}/a.tsv" in caplog.messages
        assert any(m.startswith(f"preparing {tmp_path}/a.tsv, ") for m in caplog.messages)
        shares = [re.match(r"preparing data  [\d,]+ rows  (\d+)%", m) for m in caplog.messages]
        assert len([share for share in shares if share]) > 1
        caplog.clear()
        open_dataset(recipe, 0)
        assert not any(m.startswith("preparing") for m in caplog.messages), "found again"
        with held:
            second = pool.submit(_enter, tmp_path / "held")
            waiting = "waiting for another process, which is preparing the same data"
            while waiting not in caplog.messages:
                time.sleep(0.01)
        second.result()


def _enter(target: Path) -> None:
    with cache.locked(target):
        pass


def test_line_ends(rows, criteo, tmp_path):
    text = joined(rows).replace(b"\n", b"\r\n")
    assert_matches(open_dataset(criteo(str(pack(tmp_path / "a.tsv", text))), 0), rows, TABLES)
    bare = joined(rows)[:-1]
    assert_matches(open_dataset(criteo(str(pack(tmp_path / "b.tsv", bare))), 0), rows, TABLES)


def test_many_files_in_natural_order(rows, criteo, tmp_path):
    folder = tmp_path / "days"
    folder.mkdir()
    parts = {"day_2.gz": rows[:100], "day_10.zst": rows[100:200], "day_11": rows[200:]}
    for name, part in parts.items():
        pack(folder / name, joined(part))
    (folder / "README.md").write_text("not data")
    whole = open_dataset(criteo(str(pack(tmp_path / "a.tsv", joined(rows)))), 0)
    for path in (str(folder), [str(folder / name) for name in parts]):
        dataset = open_dataset(criteo(path), 0)
        assert_matches(dataset, rows, TABLES)
        assert dataset.fingerprint == whole.fingerprint
    swapped = open_dataset(criteo([str(folder / name) for name in reversed(parts)]), 0)
    assert swapped.fingerprint != whole.fingerprint


@pytest.mark.parametrize("name", ["criteo_first8000_raw.tsv.gz", "criteo_80k.tsv.gz"])
def test_real_rows_equal_the_reference(data_dir, tmp_path, name):
    recipe = OmegaConf.load(CONF / "criteo.yaml")
    recipe.path, recipe.cache_dir = str(data_dir / name), str(tmp_path)
    dataset = open_dataset(recipe, 0)
    lines = gzip.decompress((data_dir / name).read_bytes()).decode().splitlines()
    assert dataset.size("train") + dataset.size("eval") == len(lines)
    assert dataset.size("eval") == round(0.2 * len(lines))
    assert_matches(dataset, lines, dict(recipe.tables))


def broken(rows: list[str], row: int, column: int, value: str) -> list[str]:
    fields = rows[row].split("\t")
    fields[column] = value
    return [*rows[:row], "\t".join(fields), *rows[row + 1 :]]


BAD_FIELDS = [
    (0, "2", "column label: '2' is neither 0 nor 1"),
    (0, "", "column label: '' is neither 0 nor 1"),
    (0, "01", "column label: '01' is neither 0 nor 1"),
    (3, "x7", "column I3: 'x7' is not a finite number"),
    (3, "nan", "column I3: 'nan' is not a finite number"),
    (13, "1e999", "column I13: '1e999' is not a finite number"),
    (14, "zz", "column C1: 'zz' is not a hexadecimal id"),
    (15, "0x1f", "column C2: '0x1f' is not a hexadecimal id"),
    (39, "1" * 17, "column C26: '11111111111111111' is not a hexadecimal id"),
    (39, "é", "column C26: 'é' is not a hexadecimal id"),
    (20, "1\t2", "expected 40 tab-separated columns, found 41"),
]


@pytest.mark.parametrize(("column", "value", "message"), BAD_FIELDS)
@pytest.mark.parametrize("block", [1000, 8 << 20])
def test_bad_field_is_named(rows, criteo, tmp_path, monkeypatch, column, value, message, block):
    monkeypatch.setattr(module, "BLOCK_BYTES", block)
    file = pack(tmp_path / "a.tsv", joined(broken(rows, 122, column, value)))
    with pytest.raises(DataError) as error:
        open_dataset(criteo(str(file)), 0)
    assert str(error.value).startswith(f"{file}, row 123: {message}")
    assert "\n" not in str(error.value)
    skipping = open_dataset(criteo(str(file), on_bad_row="skip"), 0)
    assert skipping.rejected_rows == 1
    assert_matches(skipping, rows[:122] + rows[123:], TABLES)


def test_skip_counts_all_and_refuses_nothing_but_bad_rows(rows, criteo, tmp_path):
    lines = list(rows)
    for row in (0, 50, 51, 299):
        lines = broken(lines, row, 1, "?")
    file = pack(tmp_path / "a.tsv", joined([*lines[:10], "", *lines[10:]]))
    with pytest.raises(DataError, match="row 1: column I1"):
        open_dataset(criteo(str(file)), 0)
    dataset = open_dataset(criteo(str(file), on_bad_row="skip"), 0)
    assert dataset.rejected_rows == 5
    assert open_dataset(criteo(str(file), on_bad_row="skip"), 0).rejected_rows == 5
    assert_matches(dataset, rows[1:50] + rows[52:299], TABLES)
    only = pack(tmp_path / "b.tsv", b"label\n")
    with pytest.raises(DataError, match=r"no usable rows \(1 rejected\)"):
        open_dataset(criteo(str(only), on_bad_row="skip"), 0)


def test_a_parquet_file_is_called_one(criteo, tmp_path):
    file = tmp_path / "a.tsv"
    pq.write_table(pa.table({"label": [0, 1]}), file)
    with pytest.raises(DataError, match=r"found \d+, in a Parquet file, which data=parquet reads"):
        open_dataset(criteo(str(file)), 0)


def test_blank_line_and_test_file(rows, criteo, tmp_path):
    file = pack(tmp_path / "a.tsv", joined([*rows[:4], "", *rows[4:]]))
    with pytest.raises(DataError, match="row 5: expected 40 tab-separated columns, found 1"):
        open_dataset(criteo(str(file)), 0)
    file = pack(tmp_path / "b.tsv", joined([row[2:] for row in rows]))
    with pytest.raises(DataError, match=r"found 39 \(a test file without labels\?\)"):
        open_dataset(criteo(str(file)), 0)


@pytest.mark.parametrize("name", ["a.gz", "a.zst"])
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_damaged_archives(rows, criteo, tmp_path, name, on_bad_row):
    file = pack(tmp_path / name, joined(rows * 20))
    whole = file.read_bytes()
    for keep in (1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:keep])
        with pytest.raises(DataError, match="truncated") as error:
            open_dataset(criteo(str(file), on_bad_row=on_bad_row), 0)
        assert str(error.value).startswith(str(file))
    # gzip carries a checksum of the text; of zstd's parts only the frame's head is sure to be checked.
    at = 5000 if name == "a.gz" else 0
    file.write_bytes(whole[:at] + b"????" + whole[at + 4 :])
    with pytest.raises(DataError, match="fetch or pack the file again"):
        open_dataset(criteo(str(file), on_bad_row=on_bad_row), 0)
    assert not list((tmp_path / "cache").glob("data-*.tmp"))


def test_paths(criteo, tmp_path):
    with pytest.raises(DataError, match="no such file or directory"):
        open_dataset(criteo(str(tmp_path / "nowhere.tsv")), 0)
    empty = pack(tmp_path / "empty.tsv", b"")
    with pytest.raises(DataError, match=r"empty\.tsv: the file is empty"):
        open_dataset(criteo(str(empty)), 0)
    hollow = pack(tmp_path / "hollow.gz", b"")
    hollow.write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"hollow\.gz: the file is empty"):
        open_dataset(criteo(str(hollow)), 0)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(DataError, match="no data file in this directory"):
        open_dataset(criteo(str(folder)), 0)
    with pytest.raises(UserError, match="data.path is not set"):
        open_dataset(CriteoConfig(tables=dict(TABLES)), 0)
    binary = pack(tmp_path / "binary.tsv", bytes(20 << 20))
    with pytest.raises(DataError, match="is this a text file"):
        open_dataset(criteo(str(binary)), 0)


def test_tables_of_the_recipe(rows, criteo, tmp_path):
    file = str(pack(tmp_path / "a.tsv", joined(rows)))
    without = {name: size for name, size in TABLES.items() if name != "C7"}
    with pytest.raises(UserError, match=r"data.tables lacks C7: .*\+data.tables.C7="):
        open_dataset(criteo(file, tables=without), 0)
    with pytest.raises(UserError, match=r"data.tables.C27: .* did you mean C"):
        open_dataset(criteo(file, tables={**TABLES, "C27": 9}), 0)
    with pytest.raises(UserError, match=r"data.tables.C1=1"):
        open_dataset(criteo(file, tables={**TABLES, "C1": 1}), 0)
