"""Runs over shuffled data: another order each epoch, resumed bit by bit, and tested at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recpipe
from recpipe.data.shuffle import Shuffled
from recpipe.errors import UserError
from recpipe.pipeline.loader import TrainLoader

SIZE, TRAIN, BATCH = 400, 280, 64
WORDS = (
    "data.label=click",
    "data.sparse=[user,item]",
    "data.dense=[number]",
    "data.dense_transform=none",
    "data.table_rows=40",
    "data.batch_size=64",
    "data.eval_fraction=0.2",
    "data.test_fraction=0.1",
    "data.shuffle=all",
    "model.bottom=[8]",
    "model.top=[8]",
    "model.embedding_dim=4",
    "trainer.max_epochs=3",
    "trainer.progress=false",
    "trainer.backend=plain",
    "trainer.logger=null",
)
STEPS = 5
"""Of an epoch of 280 samples."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 60, (2, SIZE))
    columns = {"click": rng.integers(0, 2, SIZE), "user": ids[0], "item": ids[1]}
    made = tmp_path_factory.mktemp("shuffled") / "rows.parquet"
    pq.write_table(pa.table({**columns, "number": np.arange(SIZE) / SIZE}), made)
    return made


@pytest.fixture(scope="module")
def seen() -> Iterator[list[list[int]]]:
    """The numbers of the samples of each batch that is trained."""
    batches: list[list[int]] = []
    made = TrainLoader._batches

    def watched(self: TrainLoader) -> Iterator[Any]:
        for batch in made(self):
            batches.append((batch.batch.dense[:, 0] * SIZE).round().long().tolist())
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainLoader, "_batches", watched)
        yield batches


def trained(file: Path, folder: Path, *words: str) -> dict[str, Any]:
    """The run's report, with the arrays of its parameters as ``parameters``."""
    export = folder.parent / f"{folder.name}-parameters"
    own = (f"data.cache_dir={file.parent}/cache", f"task.export_parameters={export}")
    with recpipe.train(None, file, *WORDS, *own, *words, output=folder, quiet=True) as run:
        tables = {each.stem: np.load(each) for each in export.glob("*.npy")}
        return {**run.report, "parameters": tables | dict(np.load(export / "dense.npz"))}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    mine, theirs = one["parameters"], other["parameters"]
    assert mine.keys() == theirs.keys()
    return all(np.array_equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def folder(file: Path) -> Path:
    return file.parent / "whole"


@pytest.fixture(scope="module")
def whole(file: Path, folder: Path, seen: list[list[int]]) -> dict[str, Any]:
    """A run of three epochs, with the samples that it trained."""
    seen.clear()
    report = trained(file, folder, "trainer.checkpoint_every=15")
    return {**report, "seen": [*seen]}


def test_each_epoch_is_trained_in_its_order(whole: dict[str, Any], file: Path, tmp_path: Path) -> None:
    assert whole["data"]["train_samples"] == 3 * TRAIN
    for epoch in range(3):
        own = [number for batch in whole["seen"][epoch * STEPS : (epoch + 1) * STEPS] for number in batch]
        assert own == Shuffled(TRAIN, int(whole["recipe"]["seed"]), epoch).between(0, TRAIN).tolist()
    assert not same(whole, trained(file, tmp_path / "plain", "data.shuffle=none")), "the order matters"


@pytest.mark.parametrize(
    ("step", "every"), [pytest.param(STEPS, STEPS, marks=pytest.mark.soak), (2 * STEPS + 2, 4)]
)
def test_a_resumed_run_goes_on_in_the_order(
    whole: dict[str, Any], file: Path, tmp_path: Path, seen: list[list[int]], step: int, every: int
) -> None:
    """Between two epochs, and within the last one. Another order is refused."""
    seen.clear()
    trained(file, tmp_path / "part", f"trainer.max_steps={step}", f"trainer.checkpoint_every={every}")
    rest = trained(file, tmp_path / "rest", f"resume={tmp_path}/part")
    assert seen == whole["seen"]
    assert same(whole, rest)
    for how in ("none", "50"):
        with pytest.raises(UserError, match="made on other data"):
            trained(file, tmp_path / how, f"resume={tmp_path}/part", f"data.shuffle={how}")


def test_the_test_part_is_for_the_finished_model(whole: dict[str, Any], folder: Path) -> None:
    assert whole["data"]["eval_samples"] == 80
    for split, count in {"all": SIZE, "eval": 80, "test": 40}.items():
        content = recpipe.evaluate(folder, None, f"split={split}", "by=user", quiet=True)
        assert content["data"]["samples"] == count
        slices = content["by"]["slices"]
        assert sum(part["tasks"]["score"]["samples"] for part in slices) == count
    with pytest.raises(UserError, match=r"split=test: .*data\.test_fraction"):
        recpipe.evaluate(folder, None, "split=test", "data.test_fraction=0", quiet=True)


def test_slices_of_a_part_are_of_its_rows(file: Path, tmp_path: Path) -> None:
    """Samples that are split by users lie in another order than the rows of the file."""
    split = "data.split={by: last, column: user, valid: 1, test: 2}"
    words = (split, "data.test_fraction=0", "trainer.checkpoint_every=5", "trainer.max_steps=5")
    trained(file, tmp_path / "run", *words)
    content = recpipe.evaluate(tmp_path / "run", None, "split=test", "by=user", "by_top=100", quiet=True)
    clicks: dict[str, list[int]] = {}
    for row in pq.read_table(file).to_pylist():
        clicks.setdefault(str(row["user"]), []).append(row["click"])
    slices = content["by"]["slices"]
    assert len(slices) == sum(len(own) > 1 for own in clicks.values()) > 50
    for part in slices:
        own, wanted = part["tasks"]["score"], clicks[part["value"]][1:][-2:]
        assert (own["samples"], own["positives"]) == (len(wanted), sum(wanted))
