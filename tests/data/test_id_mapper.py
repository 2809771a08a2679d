"""What is prepared once serves tables of any number of rows, and gives the rows that it always gave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpipe.data import cache, writer
from recpipe.data import prepared as data_prepared
from recpipe.data.columns import Columns, bits_of, concatenate
from recpipe.data.config import CriteoConfig, FileConfig, NpyConfig, ParquetConfig
from recpipe.data.id_mapper import IdMapper, rows_into
from recpipe.data.make import StreamedDataset, open_dataset, open_source
from recpipe.data.prepared import Meta, check_prepared
from recpipe.data.prepared_dataset import PreparedDataset
from recpipe.data.schema import Schema
from recpipe.data.sources.transforms import hash_rows
from recpipe.errors import DataError
from recpipe.plugin.tables import SparseFeature

from .conftest import TABLES

LEAST = -(2**63)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint64])
@pytest.mark.parametrize("features", [1, 9])
def test_keys_become_the_rows_of_the_hash(dtype: type, features: int) -> None:
    draw = np.random.default_rng(0)
    keys = draw.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (600, features), dtype, endpoint=True)
    keys[0], keys[1] = 0, np.iinfo(dtype).max
    rows = np.array([2, 3, 7, 2**14 + 1, 2**15, 2**15 + 1, 2**15 + 2, 10**8, 2**31 - 1])[:features]
    missing = draw.random(keys.shape) < 0.2
    expected = np.stack([hash_rows(keys[:, i].astype(np.uint64), rows[i]) for i in range(features)])
    out = np.empty((features, 600), np.int64)
    rules = np.zeros(features, np.int64)
    rows_into(out.reshape(-1), keys.reshape(-1), np.empty(0, np.uint8), rows, rules, False)
    assert np.array_equal(out, expected)
    bits = bits_of(missing)
    assert bits is not None
    rows_into(out.reshape(-1), keys.reshape(-1), bits.reshape(-1), rows, rules, False)
    assert np.array_equal(out, np.where(missing.T, 0, expected))


@pytest.mark.parametrize("divisor", [1, 2, 3, 22527, 2**15 - 1, 2**15, 2**31 - 2])
def test_a_hash_beside_a_multiple_of_the_divisor(divisor: int) -> None:
    """The quotient in floating point may be one too small there."""
    wanted = np.array([2**64 - 1 - (2**64 - 1) % divisor], np.uint64) - np.arange(5, dtype=np.uint64)
    wanted = np.concatenate([wanted, wanted // np.uint64(2) * np.uint64(2), np.arange(5, dtype=np.uint64)])
    keys = np.array([unmixed(hashed) for hashed in wanted.tolist()], np.uint64)
    out = np.empty(len(keys), np.int64)
    sizes = np.array([divisor + 1])
    rows_into(out, keys, np.empty(0, np.uint8), sizes, np.zeros(1, np.int64), False)
    assert out.tolist() == [1 + hashed % divisor for hashed in wanted.tolist()]


def unmixed(hashed: int) -> int:
    """The key whose mix64 is ``hashed``."""

    def unshifted(value: int, by: int) -> int:
        found = value
        for _ in range(64 // by):
            found = value ^ (found >> by)
        return found

    found = unshifted(hashed, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    return unshifted(unshifted(found, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64, 30)


def table(folder: Path) -> Path:
    if (folder / "a.parquet").exists():
        return folder / "a.parquet"
    draw = np.random.default_rng(1)
    words = [None if draw.random() < 0.2 else f"w{draw.integers(30)}" for _ in range(400)]
    bags = [
        None if draw.random() < 0.1 else [None if x == 7 else int(x) for x in draw.integers(-5, 2**40, 3)]
        for _ in range(400)
    ]
    columns = {
        "y": draw.integers(0, 2, 400),
        "x": draw.normal(size=400),
        "id": draw.integers(0, 90, 400),
        "signed": [None if i % 7 == 0 else (LEAST, -1, 2**62)[i % 3] for i in range(400)],
        "word": words,
        "bag": pa.array(bags, pa.list_(pa.int64())),
        "words": [[f"t{x}" for x in draw.integers(0, 40, i % 3)] for i in range(400)],
        "plain": pa.array([[int(x) for x in draw.integers(0, 90, i % 4)] for i in range(400)]),
    }
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return folder / "a.parquet"


def of_parquet(folder: Path, **more: object) -> ParquetConfig:
    sparse = ["id", "signed", "word", "bag", "words", "plain"]
    own = {"path": str(table(folder)), "label": "y", "dense": ["x"], "sparse": sparse, "table_rows": 100}
    return ParquetConfig(**{**own, "cache_dir": str(folder / "cache"), **more})


def of_rows(folder: Path) -> ParquetConfig:
    return of_parquet(folder, sparse=["id", "plain"], hash_ids=False)


def of_criteo(folder: Path) -> CriteoConfig:
    line = "1" + "\t" * 13 + "".join(f"\t{i:x}" if i % 5 else "\t" for i in range(26))
    (folder / "a.tsv").write_text(f"{line}\n" * 50)
    return CriteoConfig(path=str(folder / "a.tsv"), tables=criteo_tables(100))


def of_npy(folder: Path) -> NpyConfig:
    draw = np.random.default_rng(2)
    np.save(folder / "a_dense.npy", draw.normal(size=(60, 13)).astype(np.float32))
    np.save(folder / "a_sparse.npy", draw.integers(-(2**31), 2**31, (60, 26)).astype(np.int32))
    np.save(folder / "a_labels.npy", draw.integers(0, 2, (60, 1)).astype(np.int32))
    return NpyConfig(path=str(folder), tables=criteo_tables(100), hash_ids=True)


def criteo_tables(rows: int) -> dict[str, int]:
    return {f"C{i}": rows + i for i in range(1, 27)}


@pytest.mark.parametrize("of", [of_parquet, of_rows, of_criteo, of_npy])
def test_what_is_hashed_is_what_batches_have(of: Callable[[Path], FileConfig], tmp_path: Path) -> None:
    source = open_source(of(tmp_path))
    to_rows = IdMapper(source.schema, source.multi_hot, source.kept)
    for columns, _ in source.blocks():
        made, found = to_rows(columns), to_rows.by_column(columns)
        assert np.array_equal(found.pop(""), made.ids)
        assert list(found) == list(source.multi_hot)
        for name, rows in found.items():
            assert np.array_equal(rows, made.bags[name].trimmed().values)


@pytest.mark.parametrize("of", [of_parquet, of_rows, of_criteo, of_npy])
def test_tables_of_other_sizes_use_what_is_prepared(
    of: Callable[[Path], FileConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the batches, and the fingerprints, of data that are prepared for them alone."""
    prepared: list[str] = []
    write = cache._write
    monkeypatch.setattr(
        cache, "_write", lambda source, to: (prepared.append(to.parent.name), write(source, to))
    )
    made, prints = of(tmp_path), set()
    for rows in (100, 3000, 101, 100):
        parquet = isinstance(made, ParquetConfig)
        sizes = {"table_rows": rows} if parquet else {"tables": criteo_tables(rows)}
        shared, own = (
            replace(made, cache_dir=str(tmp_path / name), **sizes) for name in ("shared", f"{rows}")
        )
        dataset, alone = open_dataset(shared, 0), open_dataset(own, 0)
        assert dataset.fingerprint == alone.fingerprint
        prints.add(dataset.fingerprint)
        assert dataset.known_schema() == alone.known_schema()
        assert dataset.known_schema().sparse[0].rows == rows + (not parquet)
        (batch,), (other,) = (found.batches("train", 1000) for found in (dataset, alone))
        assert batch.sparse.values().equal(other.sparse.values())
        assert batch.sparse.lengths().equal(other.sparse.lengths())
        streamed = next(StreamedDataset(open_source(shared)).batches("train", batch.size))
        assert streamed.sparse.values().equal(batch.sparse.values())
    assert prepared == ["shared", "100", "3000", "101"]
    assert len(prints) == 3


def test_ids_that_are_rows_are_looked_at_for_each_size(tmp_path: Path) -> None:
    made = of_rows(tmp_path)
    open_dataset(made, 0)
    less, said = replace(made, table_rows=50), r"a\.parquet, row \d+, column (id|plain): .* not in \[0, 50\)"
    for _ in range(2):
        with pytest.raises(DataError, match=said):
            open_dataset(less, 0)
    skipped = open_dataset(replace(less, on_bad_row="skip"), 0)
    assert skipped.rejected_rows > 0
    assert len(list((tmp_path / "cache").glob("data-" + "?" * 24))) == 2


def test_checkpoints_of_earlier_versions_know_their_data(
    rows: list[str], criteo: Callable, tmp_path: Path
) -> None:
    """The fingerprint of version 2 of the format."""
    (tmp_path / "a.tsv").write_text("".join(row + "\n" for row in rows))
    assert open_dataset(criteo(str(tmp_path / "a.tsv")), 0).fingerprint == FINGERPRINT
    fewer = {**TABLES, "C1": 5}
    assert open_dataset(criteo(str(tmp_path / "a.tsv"), tables=fewer), 0).fingerprint == FEWER
    assert open_dataset(of_parquet(tmp_path), 0).fingerprint == OF_PARQUET
    # A damaged digest is made anew.
    for file in (tmp_path / "cache").glob("data-*/digest-*.json"):
        file.write_text(file.read_text().replace('"digest": "', '"digest": "0'))
    assert open_dataset(criteo(str(tmp_path / "a.tsv")), 0).fingerprint == FINGERPRINT


OF_PARQUET = "d57b2ee92adb63b0bf61d0ae7d850887"
FINGERPRINT, FEWER = "edf922b799459dd42645d313a9532b13", "872bf1f5dd48d12f329225dbfaff8855"


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ([], "u4"),
        ([[2**32 - 1]], "u4"),
        ([[2**32]], "u8"),
        ([[-1], [2**31 - 1]], "i4"),
        ([[-1], [2**31]], "i8"),
        ([[2**31], [-1]], "i8"),
        ([[-(2**31) - 1]], "i8"),
        ([[LEAST, 2**63 - 1]], "i8"),
    ],
)
def test_ids_take_four_bytes_until_one_does_not_fit(
    more: list[list[int]], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "AT_A_TIME", 14)
    monkeypatch.setattr(data_prepared, "AT_A_TIME", 14)
    schema = Schema((), tuple(SparseFeature(name, 1000) for name in ("a", "b")))

    def columns(ids: list[int]) -> Columns:
        made = np.array([ids, ids], np.int64).T
        empty = np.zeros((len(ids), 0), np.float32)
        return Columns(np.zeros(len(ids), np.float32), empty, made, {}, bits_of(made == 5))

    parts = [columns(ids) for ids in (list(range(10, 30)), list(range(30)), *more, list(range(20)))]
    with writer.PreparedWriter(tmp_path / "data", schema, kept=("hashed",) * 2) as out:
        for part in parts:
            out.append(part)
        meta = out.finish(0)
    assert meta.types["ids.npy"] == f"<{kind}"
    assert Meta.read(tmp_path / "data") == meta
    check_prepared(tmp_path / "data", schema, (), (), ("hashed",) * 2)
    (batch,) = PreparedDataset(tmp_path / "data", 0.0, schema).batches("train", 1000)
    whole = concatenate(parts)
    expected = hash_rows(whole.ids[:, 0].astype(np.int64).view(np.uint64), 1000)
    expected[whole.ids[:, 0] == 5] = 0
    assert np.array_equal(batch.sparse["b"].values().numpy(), expected)
    assert np.array_equal(IdMapper(schema, (), ("hashed",) * 2)(whole).ids[:, 1], expected)
    assert not list(tmp_path.glob("*/*.narrow"))
