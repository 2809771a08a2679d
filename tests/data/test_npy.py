"""TorchRec's .npy triples: read as they are or hashed as TorchRec does; every bad input named."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from recpipe.data.config import NpyConfig
from recpipe.data.make import open_dataset
from recpipe.errors import DataError

from .conftest import TABLES


def write(folder: Path, stem: str, size: int, seed: int, limit: int = 50) -> list[Path]:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    arrays = {
        "dense": rng.normal(size=(size, 13)).astype(np.float32),
        "sparse": rng.integers(0, limit, (size, 26)).astype(np.int32),
        "labels": rng.integers(0, 2, (size, 1)).astype(np.int32),
    }
    files = []
    for part, array in arrays.items():
        files.append(folder / f"{stem}_{part}.npy")
        np.save(files[-1], array)
    return files


def recipe(path: object, tmp_path: Path, **settings: object) -> NpyConfig:
    values = {"tables": dict(TABLES), "eval_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), **settings}
    return NpyConfig(path=path, **values)


def edit(file: Path, index: tuple[int, int], value: float) -> None:
    array = np.load(file)
    array[index] = value
    np.save(file, array)


@pytest.fixture
def iopath(monkeypatch):
    """TorchRec's reader asks for iopath, just to open files; a stand-in spares the dependency."""
    file_io = ModuleType("iopath.common.file_io")
    file_io.PathManager = object
    file_io.PathManagerFactory = lambda: SimpleNamespace(get=lambda key: SimpleNamespace(open=open))
    for name, module in (("iopath", None), ("iopath.common", None), ("iopath.common.file_io", file_io)):
        monkeypatch.setitem(sys.modules, name, module or ModuleType(name))


def test_equals_torchrecs_own_reader(tmp_path, iopath):
    from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

    folder = tmp_path / "data"
    parts = [write(folder, f"day_{day}", 100, day, limit=2**31 - 1) for day in (2, 10)]
    rows = list(TABLES.values())
    dense, sparse, labels = ([str(part[index]) for part in parts] for index in range(3))
    reader = InMemoryBinaryCriteoIterDataPipe(
        "train", dense, sparse, labels, batch_size=40, rank=0, world_size=1, hashes=rows
    )
    dataset = open_dataset(recipe(str(folder), tmp_path, hash_ids=True), 0)
    count = 0
    for wanted, got in zip(reader, dataset.batches("train", 40), strict=True):
        np.testing.assert_array_equal(got.dense, wanted.dense_features)
        np.testing.assert_array_equal(got.labels, wanted.labels)
        np.testing.assert_array_equal(got.sparse.values(), wanted.sparse_features.values())
        count += got.size
    assert count == 200


def test_criteo_recipes_find_triples_too(criteo, tmp_path):
    dense, _, _ = write(tmp_path / "data", "a", 50, 0)
    for path in (str(tmp_path / "data"), str(dense), [str(dense)]):
        assert open_dataset(criteo(path), 0).fingerprint == open_dataset(criteo(str(dense)), 0).fingerprint
    with pytest.raises(DataError, match=r"mixes \.npy triples and other files: day_1"):
        open_dataset(criteo(["day_1", str(dense)]), 0)
    direct = open_dataset(recipe(str(dense), tmp_path), 0)
    np.testing.assert_array_equal(
        next(direct.batches("train", 50)).dense, np.load(dense), "dense values are transformed already"
    )


@pytest.mark.parametrize("value", [52, -1])
def test_ids_outside_of_their_table(tmp_path, value):
    _, sparse, _ = write(tmp_path / "data", "a", 70000, 0)
    edit(sparse, (66000, 0), value)
    with pytest.raises(DataError) as error:
        open_dataset(recipe(str(tmp_path / "data"), tmp_path), 0)
    assert str(error.value).startswith(f"{sparse}, row 66001, column C1: {value} is not in [0, 52)")
    assert "data.hash_ids=true" in str(error.value)
    skipping = open_dataset(recipe(str(tmp_path / "data"), tmp_path, on_bad_row="skip"), 0)
    assert (skipping.rejected_rows, skipping.size("train")) == (1, 69999)


def test_bad_values(tmp_path):
    dense, _, labels = write(tmp_path / "data", "a", 20, 0)
    edit(labels, (4, 0), 2)
    with pytest.raises(DataError, match=r"a_labels\.npy, row 5, column label: 2 is neither 0 nor 1"):
        open_dataset(recipe(str(tmp_path / "data"), tmp_path), 0)
    edit(labels, (4, 0), 1)
    edit(dense, (7, 2), np.nan)
    with pytest.raises(DataError, match=r"a_dense\.npy, row 8, column I3: nan is not a finite number"):
        open_dataset(recipe(str(tmp_path / "data"), tmp_path), 0)


def test_bad_files(tmp_path):
    folder = tmp_path / "data"
    dense, sparse, labels = write(folder, "a", 20, 0)
    whole = sparse.read_bytes()
    sparse.write_bytes(whole[:-4])
    with pytest.raises(DataError, match=r"a_sparse\.npy: not a whole \.npy file"):
        open_dataset(recipe(str(folder), tmp_path), 0)
    np.save(sparse, np.zeros((20, 25), np.int32))
    with pytest.raises(DataError, match=r"a_sparse\.npy: shape \(20, 25\), expected \(20, 26\)"):
        open_dataset(recipe(str(folder), tmp_path), 0)
    np.save(sparse, np.zeros((20, 26), np.float32))
    with pytest.raises(DataError, match=r"a_sparse\.npy: holds float32, expected int32"):
        open_dataset(recipe(str(folder), tmp_path), 0)
    np.save(sparse, np.array([[{}] * 26] * 20, object), allow_pickle=True)
    with pytest.raises(DataError, match=r"a_sparse\.npy: not a whole \.npy file"):
        open_dataset(recipe(str(folder), tmp_path), 0)
    sparse.write_bytes(whole)
    with pytest.raises(DataError, match=r"give the \*_dense\.npy file"):
        open_dataset(recipe(str(labels), tmp_path), 0)
    labels.unlink()
    with pytest.raises(DataError, match=r"a_labels\.npy: missing"):
        open_dataset(recipe(str(folder), tmp_path), 0)
    dense.unlink()
    with pytest.raises(DataError, match=r"none is named \*_dense\.npy"):
        open_dataset(recipe(str(folder), tmp_path), 0)
    with pytest.raises(DataError, match="no such file"):
        open_dataset(recipe(str(tmp_path / "nowhere"), tmp_path), 0)


DAMAGE = [
    (lambda file: np.save(file, np.float32(1)), r"shape \(\), expected \(N, 13\)"),
    (lambda file: np.save(file, np.zeros(13, np.float32)), r"shape \(13,\), expected"),
    (lambda file: np.save(file, np.full((20, 13), None), allow_pickle=True), r"not a whole \.npy file"),
    (lambda file: np.save(file, np.zeros((20, 13), "f4,i4")), r"holds \[\("),
    (lambda file: np.savez(file.open("wb"), a=np.zeros(3)), r"not a whole \.npy file"),
    (lambda file: file.write_bytes(file.read_bytes()[:40]), r"not a whole \.npy file"),
    (
        lambda file: file.write_bytes(file.read_bytes().replace(b"shape", b"sha}(", 1)),
        r"not a whole \.npy file",
    ),
    (
        lambda file: file.write_bytes(file.read_bytes().replace(b"(20,", b"(2-,", 1)),
        r"not a whole \.npy file",
    ),
    (lambda file: file.write_bytes(file.read_bytes().replace(b"'<f4'", b"'<\xff4'", 1)), r"not a whole"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damaged_headers_and_other_arrays(tmp_path, damage, message):
    dense, _, _ = write(tmp_path / "data", "a", 20, 0)
    before = dense.read_bytes()
    damage(dense)
    assert dense.read_bytes() != before
    with pytest.raises(DataError, match=rf"a_dense\.npy: {message}"):
        open_dataset(recipe(str(dense), tmp_path), 0)


def test_an_archive_of_arrays_is_no_triple(tmp_path):
    np.savez(tmp_path / "all.npz", a=np.zeros(3))
    with pytest.raises(DataError, match=r"all\.npz: no \*_dense\.npy"):
        open_dataset(recipe(str(tmp_path / "all.npz"), tmp_path), 0)


def test_other_number_types(tmp_path):
    """float64 beyond float32 is a bad row; unsigned ids keep all their bits."""
    dense, sparse, _ = write(tmp_path / "data", "a", 3, 0)
    values = np.ones((3, 13))
    values[1, 2] = 1e39
    np.save(dense, values)
    np.save(sparse, np.full((3, 26), 2**64 - 1, np.uint64))
    with pytest.raises(DataError, match=r"a_dense\.npy, row 2, column I3: 1e\+39 is beyond float32"):
        open_dataset(recipe(str(dense), tmp_path, hash_ids=True), 0)
    found = open_dataset(recipe(str(dense), tmp_path, hash_ids=True, on_bad_row="skip"), 0)
    ids = next(found.batches("train", 9)).sparse.values().view(26, -1)[:, 0].tolist()
    assert ids == [(2**64 - 1) % rows for rows in TABLES.values()]
    edit(dense, (1, 2), 1)
    with pytest.raises(DataError, match=r"row 1, column C1: 18446744073709551615 is not in \[0, 52\)"):
        open_dataset(recipe(str(dense), tmp_path), 0)
