"""Several labels and weights, from the file to the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recpipe.data.config import FilesConfig
from recpipe.data.dataset import Dataset
from recpipe.data.make import StreamedDataset, open_dataset, open_source
from recpipe.data.select import select
from recpipe.errors import DataError, UserError
from recpipe.plugin.batch import Batch, BatchShare, total_weight

SIZE = 300
FEATURES = {
    "labels": [
        "click",
        {"name": "watch", "column": "seconds", "kind": "values", "weight": "trust", "missing": ["-1"]},
    ],
    "weight": "w",
    "features": [{"name": "user", "rows": 50}],
}


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rng = np.random.default_rng(3)
    seconds = rng.gamma(2.0, 3.0, SIZE).round(2)
    seconds[::5] = -1.0
    return pa.table(
        {
            "click": pa.array([None if n % 7 == 0 else int(n % 3 == 0) for n in range(SIZE)], pa.int8()),
            "seconds": pa.array([None if n % 11 == 0 else float(x) for n, x in enumerate(seconds)]),
            "trust": rng.integers(1, 5, SIZE) / 4,
            "w": rng.integers(0, 9, SIZE) / 2,
            "user": rng.integers(0, 99, SIZE),
        }
    )


def opened(folder: Path, table: pa.Table, **keys: object) -> Dataset:
    file = folder / "rows.parquet"
    pq.write_table(table, file)
    settings = {"eval_fraction": 0.2, "cache_dir": str(folder / "cache"), "features": FEATURES, **keys}
    return open_dataset(FilesConfig(path=str(file), **settings), 0)


def expected(table: pa.Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and weights [N, 2] by a loop over the rows."""
    labels, weights = [], []
    for row in table.to_pylist():
        click, seconds = row["click"], row["seconds"]
        seconds = None if seconds == -1 else seconds
        labels.append([click or 0, seconds or 0])
        weights.append([row["w"] * (click is not None), row["w"] * row["trust"] * (seconds is not None)])
    return torch.tensor(labels, dtype=torch.float32), torch.tensor(weights, dtype=torch.float32)


def test_labels_and_weights_of_files_are_those_of_their_rows(tmp_path: Path, table: pa.Table) -> None:
    dataset = opened(tmp_path, table)
    batches = [b for split in ("train", "eval") for b in dataset.batches(split, 64)]
    labels, weights = expected(table)
    assert torch.equal(torch.cat([b.labels for b in batches]), labels)
    assert torch.equal(torch.cat([b.weights for b in batches]), weights)
    assert dataset.missing["click"] == sum(n % 7 == 0 for n in range(SIZE))
    assert dataset.missing["watch"] == sum(n % 5 == 0 or n % 11 == 0 for n in range(SIZE))
    assert [(label.name, label.kind) for label in dataset.known_schema().labels] == [
        ("click", "clicks"),
        ("watch", "values"),
    ]


def test_a_stream_has_the_same_and_needs_no_labels_to_predict(tmp_path: Path, table: pa.Table) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(table, file)
    config = FilesConfig(path=str(file), features=FEATURES)
    batches = [*StreamedDataset(open_source(config)).batches("train", 70)]
    labels, weights = expected(table)
    assert torch.equal(torch.cat([b.labels for b in batches]), labels)
    assert torch.equal(torch.cat([b.weights for b in batches]), weights)
    pq.write_table(table.select(["user"]), file)
    (batch,) = StreamedDataset(open_source(config, labelled=False)).batches("train", SIZE)
    assert batch.labels.shape == (SIZE, 2)
    assert batch.weights is None


def test_the_short_form_says_the_same(tmp_path: Path, table: pa.Table) -> None:
    known = table.drop(["seconds"]).append_column("buy", table["click"])
    dataset = opened(
        tmp_path, known, features=None, label=["click", "buy"], weight="w", sparse=["user"], table_rows=50
    )
    batch = next(dataset.batches("train", 100))
    labels, weights = expected(table)
    assert torch.equal(batch.labels, labels[:100, :1].expand(-1, 2))
    assert torch.equal(batch.weights, weights[:100, :1].expand(-1, 2))


def test_one_label_is_a_vector_and_without_weights_there_are_none(tmp_path: Path, table: pa.Table) -> None:
    clicks = table.filter(table["click"].is_valid())
    short = {"features": None, "label": "click", "sparse": ["user"], "table_rows": 50}
    plain, weighted = opened(tmp_path, clicks, **short), opened(tmp_path, clicks, **short, weight="w")
    assert next(plain.batches("train", 9)).weights is None
    batch = next(weighted.batches("train", 9))
    assert batch.labels.shape == batch.weights.shape == (9,)
    assert plain.fingerprint != weighted.fingerprint
    other = clicks.set_column(clicks.column_names.index("w"), "w", pa.array(np.ones(len(clicks))))
    assert opened(tmp_path, other, **short, weight="w").fingerprint != weighted.fingerprint


MASK = {"labels": [{"name": "click", "on_missing": "mask"}], "features": [{"name": "user", "rows": 50}]}
ALONE = {"labels": ["click"], "features": [{"name": "user", "rows": 50}]}
BOTH = {"labels": ["click", "buy"], "features": [{"name": "user", "rows": 50}]}


def test_the_only_label_must_be_there_unless_it_is_masked(tmp_path: Path, table: pa.Table) -> None:
    with pytest.raises(DataError, match="row 1, column click: None is no label"):
        opened(tmp_path, table, features=ALONE)
    batch = next(opened(tmp_path, table, features=MASK).batches("train", 8))
    assert batch.weights.tolist() == [0, 1, 1, 1, 1, 1, 1, 0]
    assert batch.labels.tolist() == [0, 0, 0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("bad", [-0.5, float("nan"), float("inf"), None])
def test_a_weight_that_is_none_is_named(tmp_path: Path, table: pa.Table, bad: float | None) -> None:
    values = table["w"].to_pylist()
    values[4] = bad
    wrong = table.set_column(table.column_names.index("w"), "w", pa.array(values, pa.float64()))
    with pytest.raises(DataError, match=r"row 5, column w: .* is no weight: a number from 0 to"):
        opened(tmp_path, wrong)
    kept = opened(tmp_path, wrong, on_bad_row="skip")
    assert kept.rejected_rows == 1


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"features": {**BOTH, "labels": []}}, "name at least one label"),
        ({"features": {**BOTH, "labels": ["click", "click"]}}, "'click' is named twice"),
        ({"features": {**BOTH, "weights": "w"}}, "no key 'weights'; it has labels, weight"),
        ({"features": BOTH, "weight": "w"}, "data.features says all columns"),
        ({"features": {**BOTH, "labels": [{"name": "a", "on_missing": "drop"}]}}, "on_missing"),
        (
            {"features": BOTH, "label_kind": {"bye": "values"}},
            "'bye' is none|loss, names bye: no such",
        ),
    ],
)
def test_wrong_keys_are_one_line(tmp_path: Path, table: pa.Table, keys: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        opened(tmp_path, table, **keys)
    assert "\n" not in str(caught.value)


def test_a_label_kind_of_each(tmp_path: Path, table: pa.Table) -> None:
    counted = table.append_column("buy", table["user"])
    kinds = {"click": "clicks", "buy": "counts"}
    schema = opened(tmp_path, counted, features=BOTH, label_kind=kinds).known_schema()
    assert {label.name: label.kind for label in schema.labels} == kinds


def test_shares_of_two_trainers_have_the_weights_of_the_whole_batch(tmp_path: Path, table: pa.Table) -> None:
    dataset = opened(tmp_path, table)
    for number, whole in enumerate(dataset.batches("train", 101)):
        scaled = whole.scaled()
        assert scaled.weights is not None
        assert scaled.weights.double().mean(0).tolist() == pytest.approx([1, 1], rel=1e-6)
        parts = [next(dataset.batches("train", 101, number, (part, 2))) for part in (0, 1)]
        assert all(isinstance(part, BatchShare) for part in parts)
        joined = torch.cat([part.scaled().weights for part in parts])
        assert torch.equal(joined, scaled.weights)
        # Scaled by its own weights alone, a share would be another.
        alone = parts[0].weights / parts[0].weights.double().mean(0)
        assert not torch.allclose(alone.float(), scaled.weights[: len(alone)])


def test_batches_keep_weights_wherever_they_go(tmp_path: Path, table: pa.Table) -> None:
    batch = next(opened(tmp_path, table).batches("train", 32))
    rows = np.array([3, 1, 30])
    assert torch.equal(select(batch, rows).weights, batch.weights[rows])
    assert torch.equal(batch.to(torch.device("cpu")).weights, batch.weights)
    with pytest.raises(DataError, match=r"weights must have the labels' shape, \(32, 2\)"):
        Batch(batch.dense, batch.sparse, batch.labels, weights=batch.weights[:, 0])
    with pytest.raises(DataError, match="weights must be float32"):
        Batch(batch.dense, batch.sparse, batch.labels, weights=batch.weights.double())
    wrong = batch.weights.clone()
    wrong[0, 1] = -1
    with pytest.raises(DataError, match="not all finite numbers of at least 0"):
        total_weight(wrong)


def test_scaled_weights_of_one_are_one_and_of_nothing_nothing(tmp_path: Path, table: pa.Table) -> None:
    batch = next(opened(tmp_path, table).batches("train", 77))
    ones = Batch(batch.dense, batch.sparse, batch.labels, weights=torch.ones(77, 2))
    assert torch.equal(ones.scaled().weights, ones.weights)
    none = torch.ones(77, 2)
    none[:, 0] = 0
    scaled = Batch(batch.dense, batch.sparse, batch.labels, weights=none).scaled()
    assert torch.equal(scaled.weights, none)


def test_a_label_without_any_weight_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = {"click": [0, 1] * 5, "buy": pa.nulls(10, pa.int8()), "user": range(10), "w": np.zeros(10)}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    for weight, told in ((None, ["buy"]), ("w", ["click", "buy"])):
        described = {"labels": ["click", "buy"], "weight": weight, "features": [{"name": "user", "rows": 9}]}
        given = {"features": described, "cache_dir": str(tmp_path / "cache")}
        caplog.clear()
        open_dataset(FilesConfig(path=str(tmp_path / "rows.parquet"), **given), 0)
        lines = [line for line in caplog.messages if "nothing is learned of it" in line]
        assert [line.split(":")[0] for line in lines] == [f"label {name}" for name in told]
