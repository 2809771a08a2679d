"""What preparation learns from the training part, against plain loops: vocabularies, scales, buckets."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpipe.data import cache, columnar, learned
from recpipe.data.config import FilesConfig
from recpipe.data.dataset import Dataset
from recpipe.data.make import StreamedDataset, open_dataset, open_source
from recpipe.errors import DataError, UserError

SIZE, TRAIN = 400, 300
LISTS = 6
FEATURES: list[dict[str, Any]] = [
    {"name": "city", "ids": "vocabulary", "min_count": 3},
    {"name": "item", "ids": "vocabulary", "table": "items", "rows": 90},
    {"name": "seen", "kind": "sequence", "ids": "vocabulary", "table": "items", "rows": 90, "padding": ["0"]},
    {"name": "user", "rows": 50},
    {"name": "price", "kind": "dense", "scale": "standard", "default": -3.0},
    {"name": "clock", "kind": "dense", "scale": "standard", "column": "seconds"},
    {"name": "flat", "kind": "dense", "scale": "log1p", "column": "price"},
    {"name": "level", "kind": "dense", "column": "price", "edges": [1.0, 2.0, 5.0]},
    {"name": "decile", "kind": "dense", "column": "price", "buckets": 10},
]


def rows(seed: int = 1) -> pa.Table:
    rng = np.random.default_rng(seed)
    price = rng.lognormal(size=SIZE).round(3).tolist()
    return pa.table(
        {
            "click": rng.integers(0, 2, SIZE),
            "city": [["", "Köln", "Zürich", f"c{n}"][k] for n, k in enumerate(rng.integers(0, 4, SIZE))],
            "item": [None if n % 13 == 0 else int(v) for n, v in enumerate(rng.zipf(1.4, SIZE) % 60)],
            "seen": [[*(rng.zipf(1.5, rng.integers(0, LISTS)) % 60).tolist(), 0, 0] for _ in range(SIZE)],
            "user": rng.integers(0, 99, SIZE),
            "price": [None if n % 7 == 0 else value for n, value in enumerate(price)],
            "seconds": 1.7e9 + rng.integers(0, 900, SIZE),
        }
    )


def opened(folder: Path, features: Any = FEATURES, name: str = "rows.parquet", **settings: Any) -> Dataset:
    if not (folder / name).exists():
        pq.write_table(rows(), folder / name)
    described = {"labels": ["click"], "features": features}
    made = {"eval_fraction": 0.25, "cache_dir": str(folder / "cache"), **settings}
    return open_dataset(FilesConfig(path=str(folder / name), features=described, **made), 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learned")


@pytest.fixture(scope="module")
def dataset(folder: Path) -> Dataset:
    return opened(folder)


def vocabulary(values: list[Any], least: int = 1) -> dict[Any, int]:
    """The rows of values, those that come most first, and then those seen first."""
    counts = Counter(value for value in values if value not in (None, ""))
    return {v: n + 2 for n, (v, count) in enumerate(counts.most_common()) if count >= least}


def ids(dataset: Dataset, name: str) -> list[list[int]]:
    found = []
    for split in ("train", "eval"):
        for batch in dataset.batches(split, 64):
            own = batch.sparse[name]
            found += [part.tolist() for part in own.values().split(own.lengths().tolist())]
    return found


def test_a_vocabulary_is_of_the_training_part_by_frequency_and_then_by_first_sight(dataset: Dataset) -> None:
    table = rows().to_pylist()
    known = vocabulary([row["city"] for row in table[:TRAIN]], 3)
    assert set(known) == {"Köln", "Zürich"}
    wanted = [[0 if row["city"] == "" else known.get(row["city"], 1)] for row in table]
    assert ids(dataset, "city") == wanted
    assert dataset.unseen["city"] == sum(row == [1] for row in wanted) > 50
    assert {f.name: f.rows for f in dataset.schema.sparse}["city"] == 4


def test_features_that_share_a_table_share_its_vocabulary(dataset: Dataset) -> None:
    table = rows().to_pylist()
    listed = [[item for item in row["seen"] if item != 0] for row in table]
    seen = [v for row, own in zip(table[:TRAIN], listed, strict=False) for v in (row["item"], *own)]
    known = vocabulary(seen)
    assert ids(dataset, "item") == [[0 if r["item"] is None else known.get(r["item"], 1)] for r in table]
    assert ids(dataset, "seen") == [[known.get(item, 1) for item in own] for own in listed]
    assert len(set(known.values())) == len(known) > 20


def test_standard_numbers_have_the_mean_and_deviation_of_the_training_part(dataset: Dataset) -> None:
    table = rows().slice(0, SIZE).to_pydict()
    found = np.concatenate([b.dense.numpy() for s in ("train", "eval") for b in dataset.batches(s, 64)])
    for place, column, default in ((0, "price", -3.0), (1, "seconds", 0.0)):
        own = [value for value in table[column][:TRAIN] if value is not None]
        mean, deviation = np.mean(own), np.std(own)
        wanted = [default if v is None else (v - mean) / deviation for v in table[column]]
        np.testing.assert_allclose(found[:, place], wanted, rtol=1e-6, atol=1e-6)
    assert np.std(found[:TRAIN, 1]) == pytest.approx(1)  # of numbers that float32 could not tell apart
    assert dataset.preparation is not None
    assert dataset.preparation.learned is not None
    told, deviation = dataset.preparation.learned.scales["clock"]
    seconds = np.array(table["seconds"][:TRAIN])
    assert told == pytest.approx(seconds.mean(), rel=1e-12)
    assert deviation == pytest.approx(seconds.std(), rel=1e-12)


def test_numbers_become_buckets_by_edges_and_by_quantiles(dataset: Dataset) -> None:
    price = rows()["price"].to_pylist()
    level = [[0 if v is None else 1 + sum(v >= edge for edge in (1.0, 2.0, 5.0))] for v in price]
    assert ids(dataset, "level") == level
    deciles = [row[0] for row in ids(dataset, "decile")]
    assert [row == 0 for row in deciles] == [value is None for value in price]
    ordered = sorted(value for value in price[:TRAIN] if value is not None)
    edges = [ordered[n * len(ordered) // 10] for n in range(1, 10)]
    assert deciles == [0 if v is None else 1 + sum(v >= edge for edge in edges) for v in price]
    counts = Counter(row for row in deciles[:TRAIN] if row)
    assert set(counts) == set(range(1, 11))
    assert max(counts.values()) - min(counts.values()) <= 4  # equal prices share a bucket
    assert {f.name: f.rows for f in dataset.schema.sparse if f.name in ("level", "decile")} == {
        "level": 5,
        "decile": 11,
    }


def test_what_is_learned_depends_on_no_block_and_is_kept(
    dataset: Dataset, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = opened(folder)
    assert again.fingerprint == dataset.fingerprint
    assert again.preparation == dataset.preparation
    assert again.unseen == dataset.unseen
    monkeypatch.setattr(columnar, "BLOCK_ROWS", 17)
    monkeypatch.setattr(learned, "AT_ONCE", 100)
    monkeypatch.setattr(learned, "LARGEST", 1000)
    assert opened(folder, cache_dir=str(tmp_path)).fingerprint != dataset.fingerprint  # quantiles of a few
    same = [feature for feature in FEATURES if "buckets" not in feature]
    few = opened(folder, same, cache_dir=str(tmp_path))
    monkeypatch.undo()
    assert few.fingerprint == opened(folder, same).fingerprint
    assert opened(folder, same, eval_fraction=0.5).fingerprint != few.fingerprint
    assert not [path for path in (folder / "cache").rglob("*") if path.name == "read"]


def test_other_files_are_encoded_by_what_training_learned(dataset: Dataset, folder: Path) -> None:
    pq.write_table(rows().slice(TRAIN), folder / "later.parquet")
    described = {"labels": ["click"], "features": FEATURES}
    config = FilesConfig(path=str(folder / "later.parquet"), features=described)
    streamed = StreamedDataset(open_source(config, labelled=False, trained_by=dataset.preparation))
    held = next(dataset.batches("eval", 100))
    (batch,) = streamed.batches("train", 100)
    assert batch.dense.tolist() == held.dense.tolist()
    assert batch.sparse.values().tolist() == held.sparse.values().tolist()
    with pytest.raises(DataError, match="does not say what it learned"):
        StreamedDataset(open_source(config, labelled=False))
    other = [*FEATURES[:-1], FEATURES[-1] | {"buckets": 5}]
    config.features = {"labels": ["click"], "features": other}
    with pytest.raises(DataError, match="decile: buckets was 10 in training and is 5 here"):
        open_source(config, labelled=False, trained_by=dataset.preparation)


def whole(folder: Path) -> FilesConfig:
    """The same files in one part."""
    described = {"labels": ["click"], "features": FEATURES}
    path, kept = str(folder / "rows.parquet"), str(folder / "cache")
    return FilesConfig(path=path, cache_dir=kept, features=described, eval_fraction=0.0)


def test_a_trained_model_reads_the_samples_that_training_has_prepared(
    dataset: Dataset, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_write", None)
    again = open_dataset(whole(folder), 0, trained_by=dataset.preparation)
    assert again.size("train") == SIZE
    assert again.unseen == dataset.unseen
    assert ids(again, "city") == ids(dataset, "city")
    with pytest.raises(TypeError):
        open_dataset(whole(folder), 0)


@pytest.mark.parametrize("spoil", [shutil.rmtree, lambda made: (made / "ids.npy").write_bytes(b"")])
def test_what_training_has_prepared_may_be_removed_or_damaged(tmp_path: Path, spoil: Any) -> None:
    trained = opened(tmp_path)
    (made,) = (path for path in (tmp_path / "cache").glob("data-*/") if not path.is_symlink())
    wanted = ids(trained, "city")
    spoil(made)
    again = open_dataset(whole(tmp_path), 0, trained_by=trained.preparation)
    assert ids(again, "city") == wanted
    assert opened(tmp_path).fingerprint == trained.fingerprint


def test_a_vocabulary_that_does_not_fit_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [{"name": "user", "ids": "vocabulary", "rows": 20}]
    with pytest.raises(
        DataError, match=r"vocabulary of 'user' has \d+ ids or more .* has 20 rows, two of which"
    ):
        opened(folder, small)
    monkeypatch.setattr(learned, "LARGEST", 30)
    with pytest.raises(DataError, match="30 is the most; take ids: hash"):
        opened(folder, [{"name": "user", "ids": "vocabulary"}])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"min_count": 2}, "min_count is of ids: vocabulary"),
    ({"kind": "dense", "edges": [2.0, 1.0]}, "edges are not each above the one before"),
    ({"kind": "dense", "edges": [1.0], "buckets": 3}, "buckets are edges as well"),
    ({"kind": "dense", "edges": [1.0], "scale": "log"}, "scale is of numbers, not of buckets"),
    ({"kind": "dense", "buckets": 1}, "greater than or equal to 2"),
    ({"kind": "dense", "buckets": 3, "rows": 9}, "a feature of kind dense has no 'rows'"),
]


@pytest.mark.parametrize(("keys", "fault"), WRONG)
def test_keys_that_do_not_go_together_are_one_line(folder: Path, keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        opened(folder, [{"name": "user", **keys}])
