"""The rows of tables beside prepared ids, from which batches are cut; and data where there are none."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from recpipe.data import table_rows
from recpipe.data.columns import Columns, MultiHot, bits_of, offsets_of
from recpipe.data.id_mapper import IdMapper
from recpipe.data.prepared import Mapped, seal
from recpipe.data.prepared_dataset import PreparedDataset
from recpipe.data.schema import Schema
from recpipe.data.table_rows import TableRows
from recpipe.data.writer import NpyStream, PreparedWriter
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import Growth, SparseFeature

SAMPLES, HASHED = 300, ("hashed", "modulo", "hashed")


def schema(rows: int, growth: Growth | None = None) -> Schema:
    names = ("a", "bag/1", "rows")
    return Schema(("x",), tuple(SparseFeature(name, rows + n, growth) for n, name in enumerate(names)))


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Keys of 64 bits, some of them missing, in a bag as well."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 4, SAMPLES)
    ids = rng.integers(0, 2**63, (SAMPLES, 2), np.int64)
    bag = rng.integers(0, 2**63, lengths.sum(), np.int64)
    whole = Columns(
        rng.integers(0, 2, SAMPLES).astype(np.float32),
        rng.normal(size=(SAMPLES, 1)).astype(np.float32),
        ids,
        {"bag/1": MultiHot(bag, offsets_of(lengths), bits_of(bag[:, None] % 3 == 0))},
        bits_of(ids % 5 == 0),
    )
    with PreparedWriter(tmp_path / "data", schema(9), ["bag/1"], kept=HASHED) as writer:
        writer.append(whole[0:100])
        writer.append(whole[100:SAMPLES])
        writer.finish(rejected_rows=0)
    return tmp_path / "data"


def opened(folder: Path, rows: int = 50, growth: Growth | None = None) -> PreparedDataset:
    return PreparedDataset(folder, 0.0, schema(rows, growth))


def batches(data: PreparedDataset) -> list[Batch]:
    numbers = np.random.default_rng(0).permutation(SAMPLES)[:70]
    return [data.samples_between(0, 64), data.samples_between(64, SAMPLES), data.samples_at(numbers)]


def hashed(data: PreparedDataset) -> list[Batch]:
    """The same batches, each id hashed as it is read."""
    data._of_rows = None
    return batches(data)


def assert_alike(found: list[Batch], wanted: list[Batch]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.sparse.values(), other.sparse.values())
        assert torch.equal(one.sparse.lengths(), other.sparse.lengths())
        assert torch.equal(one.dense, other.dense)
        assert torch.equal(one.labels, other.labels)


ROWS = np.ones((4, 2), np.int32)


def interrupted() -> None:
    raise KeyboardInterrupt


def of_rows(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if "rows-" in file.name}


def test_batches_are_cut_from_rows_and_no_id_is_hashed(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = hashed(opened(prepared))
    assert max(int(batch.sparse.values().max()) for batch in wanted) == 51
    assert len(of_rows(prepared)) == 2
    for again in (opened(prepared), opened(prepared)):
        with monkeypatch.context() as patch:
            patch.delattr(IdMapper, "__call__")
            assert_alike(batches(again), wanted)


def test_rows_are_of_the_latest_sizes(prepared: Path) -> None:
    first = opened(prepared)
    wanted, names = batches(first), of_rows(prepared)
    second = opened(prepared, 70)
    assert not names & of_rows(prepared)
    assert len(of_rows(prepared)) == 2
    assert_alike(batches(first), wanted)
    assert_alike(batches(second), hashed(opened(prepared, 70)))
    before = opened(prepared)
    assert before._of_rows is not None
    assert of_rows(prepared) == names
    assert before.fingerprint == first.fingerprint
    assert_alike(batches(before), wanted)


def test_data_of_an_earlier_version_get_rows(prepared: Path) -> None:
    """Their digest is known, and lies alone."""
    first = opened(prepared)
    (file,) = prepared.glob("digest-*.json")
    values = {key: own for key, own in json.loads(file.read_text()).items() if key in ("rows", "digest")}
    file.write_text(json.dumps({**values, "seal": seal(values)}))
    for name in of_rows(prepared):
        (prepared / name).unlink()
    again = opened(prepared)
    assert again.fingerprint == first.fingerprint
    assert len(of_rows(prepared)) == 2
    assert again._of_rows is not None
    assert_alike(batches(again), batches(first))


def test_one_process_makes_rows_and_others_wait(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    add_all = TableRows._add_all

    def counted(self: TableRows, mapped: Mapped) -> None:
        made.append(1)
        time.sleep(0.05)
        add_all(self, mapped)

    monkeypatch.setattr(TableRows, "_add_all", counted)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(opened, [prepared] * 2)
    assert len(made) == 1
    assert_alike(batches(one), batches(other))
    assert one._of_rows is not None
    assert other._of_rows is not None


def test_a_run_that_ends_early_leaves_nothing(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(TableRows, "_add_all", lambda self, _: (self._append("", ROWS), interrupted()))
        with pytest.raises(KeyboardInterrupt):
            opened(prepared)
    assert not of_rows(prepared)
    assert opened(prepared)._of_rows is not None


@pytest.mark.parametrize("place", [9, 200, -1])
def test_altered_rows_are_made_anew(prepared: Path, place: int) -> None:
    wanted = batches(opened(prepared))
    for name in of_rows(prepared):
        file = prepared / name
        whole = bytearray(file.read_bytes())
        whole[place] ^= 4
        file.write_bytes(whole)
        again = opened(prepared)
        assert_alike(batches(again), wanted)
        assert again._of_rows is not None
        assert file.read_bytes() != bytes(whole)


def test_what_a_killed_run_left_is_removed(prepared: Path) -> None:
    left = prepared / f"bag%2F1.rows-{'0' * 32}.77"
    left.write_bytes(b"half")
    beside = prepared / "rows-of-mine.npy"
    beside.write_bytes(b"not ours")
    opened(prepared)
    assert not left.exists()
    assert beside.exists()


@pytest.mark.parametrize("fails", ["append", "close"])
def test_a_full_disk_leaves_data_that_are_hashed_as_they_are_read(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(NpyStream, fails, full)
        found = opened(prepared)
    assert not of_rows(prepared)
    assert "(No space left on device), which are hashed as batches are read" in caplog.text
    assert_alike(batches(found), hashed(opened(prepared)))


def test_a_read_only_folder_serves_and_says_so(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Root may write everywhere, so that the refusal is the system's only for others."""
    with monkeypatch.context() as patch:
        patch.setattr(table_rows, "locked", refused)
        patch.setattr(Path, "write_text", refused)
        found = opened(prepared)
    assert not of_rows(prepared)
    assert "(Read-only file system), which are hashed as batches are read" in caplog.text
    assert found.fingerprint == opened(prepared).fingerprint
    assert_alike(batches(found), hashed(opened(prepared)))


def refused(*_: object) -> None:
    raise OSError(30, "Read-only file system")


def test_tables_that_grow_have_none(prepared: Path) -> None:
    opened(prepared, growth=Growth("t"))
    assert not of_rows(prepared)
