"""The prepared format: whole or absent, found again, every sample in every batch size, cheap to seek."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from recpipe.data import cache, prepared
from recpipe.data.columns import Columns, MultiHot, offsets_of
from recpipe.data.config import CriteoConfig
from recpipe.data.make import open_dataset
from recpipe.data.prepared import META, check_prepared
from recpipe.data.prepared_dataset import PreparedDataset
from recpipe.data.schema import Schema
from recpipe.data.writer import PreparedWriter
from recpipe.errors import DataError, UserError
from recpipe.plugin.tables import SparseFeature
from tests.processes import Child

from .conftest import TABLES, assert_matches, make_row

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = Schema(("x",), (SparseFeature("a", 9), SparseFeature("bag/1", 99), SparseFeature("b", 9)))


def some_columns(size: int, seed: int) -> Columns:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, size)
    values = rng.integers(0, 99, lengths.sum()).astype(np.int32)
    return Columns(
        rng.integers(0, 2, size).astype(np.float32),
        rng.normal(size=(size, 1)).astype(np.float32),
        rng.integers(0, 9, (size, 2)).astype(np.int32),
        {"bag/1": MultiHot(values, offsets_of(lengths))},
    )


def write(directory: Path, parts: list[Columns]) -> PreparedDataset:
    with PreparedWriter(directory, SCHEMA, ["bag/1"]) as writer:
        for part in parts:
            writer.append(part)
        writer.finish(rejected_rows=0)
    return PreparedDataset(directory, 0.25, SCHEMA)


def test_bags_round_trip(tmp_path):
    whole = some_columns(100, 0)
    dataset = write(tmp_path / "a", [whole[0:33], whole[33:34], whole[34:100]])
    assert (dataset.size("train"), dataset.size("eval")) == (75, 25)
    assert write(tmp_path / "b", [whole]).fingerprint == dataset.fingerprint
    low = 0
    for batch in [*dataset.batches("train", 16), *dataset.batches("eval", 16)]:
        part = whole[low : low + batch.size]
        own = part.bags["bag/1"].trimmed()
        assert batch.sparse.keys() == ["a", "bag/1", "b"]
        np.testing.assert_array_equal(batch.sparse["a"].values(), part.ids[:, 0])
        np.testing.assert_array_equal(batch.sparse["b"].values(), part.ids[:, 1])
        np.testing.assert_array_equal(batch.sparse["bag/1"].values(), own.values)
        np.testing.assert_array_equal(batch.sparse["bag/1"].lengths(), np.diff(own.offsets))
        np.testing.assert_array_equal(batch.dense, part.dense)
        np.testing.assert_array_equal(batch.labels, part.labels)
        low += batch.size
    assert low == 100


@pytest.fixture
def dataset(rows, criteo, tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text("".join(row + "\n" for row in rows))
    return open_dataset(criteo(str(file)), 0)


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("size", [1, 7, 24, 60, 1000])
def test_every_batch_from_any_position(dataset, split, size):
    batches = list(dataset.batches(split, size))
    assert len(batches) == dataset.num_batches(split, size)
    assert sum(batch.size for batch in batches) == dataset.size(split)
    for first in {0, 1, len(batches) // 2, len(batches) - 1, len(batches)}:
        rest = list(dataset.batches(split, size, first))
        assert len(rest) == max(0, len(batches) - first)
        for got, wanted in zip(rest, batches[first:], strict=True):
            assert torch.equal(got.dense, wanted.dense)
            assert torch.equal(got.labels, wanted.labels)
            assert torch.equal(got.sparse.values(), wanted.sparse.values())
            assert torch.equal(got.sparse.lengths(), wanted.sparse.lengths())


def test_ten_of_ten_batches(dataset):
    assert [batch.size for batch in dataset.batches("train", 24)] == [24] * 10


def test_kjt_is_consistent(dataset):
    sparse = next(dataset.batches("train", 24)).sparse
    assert sparse.values().dtype == torch.int64
    assert sparse.stride() == 24
    for feature in dataset.schema.sparse:
        jagged = sparse[feature.name]
        assert jagged.lengths().tolist() == [1] * 24
        assert 0 <= int(jagged.values().min()) <= int(jagged.values().max()) < feature.rows
    sparse.sync()
    assert sparse.offset_per_key() == [24 * index for index in range(27)]


def test_second_run_prepares_nothing(rows, criteo, tmp_path, monkeypatch):
    file = tmp_path / "a.tsv"
    file.write_text("".join(row + "\n" for row in rows))
    first = open_dataset(criteo(str(file)), 0)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_write", lambda *_: pytest.fail("prepared again"))
        again = open_dataset(criteo(str(file)), 0)
        other_split = open_dataset(criteo(str(file), eval_fraction=0.5), 0)
    assert again.fingerprint == first.fingerprint
    assert other_split.fingerprint != first.fingerprint
    file.write_text("".join(row + "\n" for row in rows[:-1]))
    assert open_dataset(criteo(str(file)), 0).fingerprint != first.fingerprint
    fewer = {**TABLES, "C1": 5}
    assert open_dataset(criteo(str(file), tables=fewer), 0).schema.sparse[0].rows == 5


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("ids.npy", lambda whole: whole[:-4]),
        ("ids.npy", lambda whole: whole.replace(b"shape", b"sha}(", 1)),
        ("label.npy", lambda whole: whole.replace(b"'<f4'", b"'<q4'", 1)),
        ("dense.npy", lambda whole: whole.replace(b"13)", b"14)", 1)),
        ("dense.npy", lambda whole: b""),
        ("meta.json", lambda whole: b"{}"),
        ("meta.json", lambda whole: b"\xff" + whole),
        ("meta.json", lambda whole: whole.replace(b"C7", b"C8", 1)),
        ("meta.json", lambda whole: whole.replace(b'"format": 4', b'"format": 1')),
        ("meta.json", lambda whole: whole.replace(b'"rejected_rows": 0', b'"rejected_rows": 1')),
        ("ids.npy", lambda whole: whole[:-4] + b"\1" + whole[-3:]),
    ],
)
def test_a_damaged_cache_is_prepared_again(dataset, criteo, tmp_path, caplog, name, damaged):
    (directory,) = (tmp_path / "cache").glob("data-*/")
    file = directory / name
    whole = file.read_bytes()
    file.write_bytes(damaged(whole))
    assert file.read_bytes() != whole
    again = open_dataset(criteo(str(tmp_path / "a.tsv")), 0)
    assert again.fingerprint == dataset.fingerprint
    assert file.read_bytes() == whole
    assert "preparing the data again, for the cache is damaged" in caplog.text


def test_every_flipped_bit_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "BLOCK", 96)
    write(tmp_path / "data", [some_columns(70, 0), some_columns(30, 1)])
    check_prepared(tmp_path / "data", SCHEMA, ["bag/1"])
    rng = random.Random(0)
    files = sorted(file for file in (tmp_path / "data").iterdir() if not file.match("digest-*.json"))
    assert len(files) == 6
    for file in files:
        whole = file.read_bytes()
        for place in {0, 9, len(whole) - 1, *rng.sample(range(len(whole)), 40)}:
            bit = 1 << rng.randrange(8)
            file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(DataError):
                check_prepared(tmp_path / "data", SCHEMA, ["bag/1"])
        file.write_bytes(whole)
    check_prepared(tmp_path / "data", SCHEMA, ["bag/1"])


def test_digests_do_not_depend_on_how_samples_came(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "BLOCK", 96)
    whole = some_columns(100, 0)
    write(tmp_path / "a", [whole])
    write(tmp_path / "b", [whole[0:33], whole[33:34], whole[34:100]])
    assert (tmp_path / "a/meta.json").read_bytes() == (tmp_path / "b/meta.json").read_bytes()
    blocks = prepared.Meta.read(tmp_path / "a").blocks["label.npy"]
    raw = whole.labels.tobytes()
    assert list(blocks)[1:] == [zlib.crc32(raw[low : low + 96]) for low in range(0, len(raw), 96)]


def test_split_that_leaves_nothing(rows, criteo, tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text(rows[0] + "\n")
    with pytest.raises(DataError, match=r"data\.eval_fraction=0\.9 leaves none of 1 samples"):
        open_dataset(criteo(str(file), eval_fraction=0.9), 0)


def test_prepared_data_used_longest_ago_make_room(rows, criteo, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cache = tmp_path / "cache"

    def prepared(name: str, limit: str, age: int) -> Path:
        file = tmp_path / name
        if not file.exists():  # another time of change would make it other data
            file.write_text("\n".join(rows) + "\n")
        before = set(cache.glob("data-" + "?" * 24))
        found = open_dataset(criteo(str(file), cache_bytes=limit), 0)
        new = set(cache.glob("data-" + "?" * 24)) - before
        assert found.samples == len(rows)
        for folder in new:
            os.utime(folder / META, (age, age))
        return next(iter(new), Path())

    first, second = prepared("a.tsv", "1GB", 1000), prepared("b.tsv", "1GB", 2000)
    assert prepared("a.tsv", "1GB", 0) == Path(), "it is found, and was used just now"
    size = sum(file.stat().st_size for file in first.iterdir())
    third = prepared("c.tsv", str(int(1.5 * size)), 3000)
    assert first.exists()
    assert third.exists()
    assert not second.exists()
    assert f"removed prepared data that were used longest ago: {second}" in caplog.text
    assert f"prepared data of other files and settings in {cache}" in caplog.text
    assert prepared("d.tsv", "0", 4000).exists()
    assert not first.exists()
    with pytest.raises(UserError, match=r"data\.cache_bytes=lots: give bytes"):
        criteo(str(tmp_path / "a.tsv"), cache_bytes="lots")


def test_unwritable_cache_is_named(rows, criteo, tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text(rows[0] + "\n")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DataError, match=r"cannot write prepared data to .*file/x .*: .*data\.cache_dir=DIR"):
        open_dataset(criteo(str(file), cache_dir=str(blocked / "x")), 0)


SLOW = """
import sys, time
from recpipe.data.sources import criteo
from recpipe.data.sources import criteo_text
from recpipe.data.config import CriteoConfig
from recpipe.data.make import open_dataset

criteo.BLOCK_BYTES = 10_000
parse = criteo_text.parse_block

def slow(*arguments):
    print("block", flush=True)
    time.sleep(PAUSE)
    return parse(*arguments)

criteo_text.parse_block = slow
tables = {f"C{index}": 50 * index + 2 for index in range(1, 27)}
dataset = open_dataset(CriteoConfig(path=sys.argv[1], cache_dir=sys.argv[2], tables=tables), 0)
print(dataset.fingerprint)
"""


def start(file: Path, directory: Path, pause: float) -> Child:
    code = SLOW.replace("PAUSE", str(pause))
    return Child(file.parent / "child", str(file), str(directory), script=code)


def test_kill_during_preparation_leaves_no_cache(rows, tmp_path):
    file, directory = tmp_path / "a.tsv", tmp_path / "cache"
    file.write_text("".join(row + "\n" for row in rows))
    process = start(file, directory, pause=30)
    process.until("block\n")
    process.kill()
    assert list(directory.glob("data-*.tmp")), "the kill came too late to test anything"
    assert not [path for path in directory.glob("data-*") if path.is_dir() and path.suffix != ".tmp"]
    (directory / "data-mine.tmp").mkdir()
    other = tmp_path / "b.tsv"
    other.write_text("".join(row + "\n" for row in rows))
    config = CriteoConfig(path=str(other), cache_dir=str(directory), tables=dict(TABLES))
    assert_matches(open_dataset(config, 0), rows, TABLES)
    left = [path.name for path in directory.glob("data-*.tmp")]
    assert left == ["data-mine.tmp"], "another preparation clears what the killed one left, and no more"


def test_two_processes_prepare_once(tmp_path):
    rng = random.Random(1)
    file, directory = tmp_path / "a.tsv", tmp_path / "cache"
    file.write_text("".join(make_row(rng) + "\n" for _ in range(300)))
    outputs = [process.ended().stdout for process in [start(file, directory, 0.1) for _ in range(2)]]
    fingerprints = [output.split()[-1] for output in outputs]
    assert fingerprints[0] == fingerprints[1]
    assert sorted(output.count("block") > 0 for output in outputs) == [False, True]


MEMORY = """
import gc, sys
from pathlib import Path
from recpipe.data.sources import criteo
from recpipe.data.cache import prepare

def peak(task):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    status = lambda key: int(Path("/proc/self/status").read_text().split(key)[1].split()[0])
    before = status("VmRSS:")
    result = task()
    return (status("VmHWM:") - before) // 1024

criteo.BLOCK_BYTES = 1 << 20
tables = {f"C{index}": 50 * index + 2 for index in range(1, 27)}
small, large = (criteo.CriteoSource([Path(name)], tables, False) for name in sys.argv[1:3])
prepare(small, Path(sys.argv[3]) / "warm")
print(peak(lambda: prepare(small, Path(sys.argv[3]))), peak(lambda: prepare(large, Path(sys.argv[3]))))
print(peak(lambda: list(large.blocks())))
"""


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_file(tmp_path):
    rng = random.Random(2)
    block = "".join(make_row(rng) + "\n" for _ in range(5000))
    small, large = tmp_path / "small.tsv", tmp_path / "large.tsv"
    small.write_text(block * 4)
    large.write_text(block * 80)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        MEMORY,
        str(small),
        str(large),
        str(tmp_path / "cache"),
    ]
    output = subprocess.run(arguments, capture_output=True, text=True, env=env, check=True).stdout
    few, many, all_at_once = (int(word) for word in output.split())
    assert many < few + 12, f"20 times the rows took {many} MiB instead of {few} MiB"
    assert all_at_once > many + 30, "negative control: keeping the rows (64 MB) must show"
