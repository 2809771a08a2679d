"""The recipes of real files train from these as they lie, and from CSV with the same rows; without the files
the tests are skipped."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.config import FilesConfig
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset
from recpipe.data.proposal.propose import propose
from recpipe.run import run
from tests.data.conftest import mix

ROWS = 3000
FILES = {
    "criteo_tsv": "criteo_80k.tsv.gz",
    "talkingdata": "talkingdata_100k.parquet",
    "open_bandit": "open_bandit_40k.parquet",
    "taobao_wanted": "taobao_110k.parquet",
    "online_retail": "online_retail.parquet",
}
TWINS = ("criteo_tsv", "talkingdata", "open_bandit", "taobao_wanted")
"""Those without times, which CSV would write as text."""


@pytest.fixture(scope="module")
def part(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``part(experiment)``: the first rows of its file, or rows of all of it where it is split by time, in
    the format of the file."""
    folder = tmp_path_factory.mktemp("parts")

    def of(experiment: str) -> Path:
        source = data_dir / FILES[experiment]
        if not source.is_file():
            pytest.skip(f"no {source}")
        made = folder / source.name
        if made.is_file():
            return made
        if source.suffix == ".gz":
            with gzip.open(source, "rb") as lines, gzip.open(made, "wb") as out:
                out.writelines(islice(lines, ROWS))
        elif experiment == "online_retail":
            table = pq.read_table(source)
            pq.write_table(table.take(np.linspace(0, len(table) - 1, ROWS).astype(int)), made)
        else:
            rows = next(pq.ParquetFile(source).iter_batches(ROWS))
            pq.write_table(pa.Table.from_batches([rows]), made)
        return made

    return of


def recipe(experiment: str, path: Path, folder: Path, *more: str) -> Any:
    small = (
        "model.embedding_dim=4",
        "trainer.backend=plain",
        "trainer.progress=false",
        "trainer.logger=null",
    )
    words = (f"data.path={path}", f"data.cache_dir={folder / 'cache'}", "task.page=false", *small, *more)
    return compose([f"experiment={experiment}", *words])


def twin(experiment: str, part: Path, folder: Path) -> Path:
    """The same rows as CSV with commas and a header."""
    if part.suffix == ".gz":
        names = compose([f"experiment={experiment}"]).data.columns
        with gzip.open(part, "rt") as lines:
            text = [line.rstrip("\n").replace("\t", ",") for line in lines]
        file = folder / "twin.csv"
        file.write_text("\n".join([",".join(names), *text]) + "\n")
        return file
    pyarrow.csv.write_csv(pq.read_table(part), folder / "twin.csv")
    return folder / "twin.csv"


def samples(dataset: Dataset) -> Iterator[tuple[Any, ...]]:
    for split in ("train", "eval"):
        for batch in dataset.batches(split, 512):
            ids = batch.sparse.values().numpy(), batch.sparse.lengths().numpy()
            yield batch.labels.numpy(), batch.dense.numpy(), *ids


@pytest.mark.parametrize("experiment", FILES)
def test_the_recipe_of_a_real_file_trains_from_it_as_it_lies(
    experiment: str, part: Any, tmp_path: Path
) -> None:
    report = run(recipe(experiment, part(experiment), tmp_path), tmp_path / "run")
    told = report["data"]["train_samples"] + report["data"]["eval_samples"]
    assert told < ROWS if experiment == "online_retail" else told == ROWS, "its last month tests"
    assert report["data"]["rejected_rows"] == 0
    assert np.isfinite(report["quality"]["logloss"])


@pytest.mark.parametrize("experiment", TWINS)
def test_csv_with_the_same_rows_gives_the_same_samples(experiment: str, part: Any, tmp_path: Path) -> None:
    """Bit by bit, by the recipe's features; text of whole numbers is ids of numbers."""
    file = part(experiment)
    config = Recipe.of(recipe(experiment, file, tmp_path)).data
    assert isinstance(config, FilesConfig)
    other = replace(config, path=str(twin(experiment, file, tmp_path)), header=None, columns=[])
    ours, theirs = (list(samples(open_dataset(each, 0))) for each in (config, other))
    assert len(ours) == len(theirs) > 0
    for one, two in zip(ours, theirs, strict=True):
        for mine, same in zip(one, two, strict=True):
            np.testing.assert_array_equal(mine, same)


def test_ids_are_those_of_the_files_hashed(part: Any, tmp_path: Path) -> None:
    """By Python's own arithmetic."""
    file = part("talkingdata")
    dataset = open_dataset(Recipe.of(recipe("talkingdata", file, tmp_path)).data, 0)
    batch = next(iter(dataset.batches("train", 512)))
    table = pq.read_table(file).slice(0, 512)
    for number, feature in enumerate(dataset.schema.sparse):
        wanted = [1 + mix(value) % (feature.rows - 1) for value in table[feature.name].to_pylist()]
        assert batch.sparse.values().view(5, -1)[number].tolist() == wanted
    assert batch.labels.tolist() == table["is_attributed"].to_pylist()


@pytest.mark.parametrize("experiment", FILES)
def test_a_proposal_of_the_file_is_near_its_recipe(experiment: str, part: Any, tmp_path: Path) -> None:
    """The same label and kinds, but for columns that are constant in the first rows, and one of few whole
    numbers, of which both kinds make sense; times may be hours."""
    config = Recipe.of(recipe(experiment, part(experiment), tmp_path)).data
    assert isinstance(config, FilesConfig)
    stated = config.described()
    made = {label.name: label.expression for label in stated.labels if label.expression}
    found = propose(replace(config, features="auto", label=made or None)).features()
    assert [label.name for label in found.labels] == [label.name for label in stated.labels]
    constant = {"campaign", "policy", "device"}
    kinds = {f.name: f.kind for f in (*found.dense, *found.sparse)}
    for feature in (*stated.dense, *stated.sparse):
        if feature.name not in {"I10", *constant}:
            assert kinds[feature.name] == feature.kind, feature.name
    others = {name for name in kinds if name not in {f.name for f in (*stated.dense, *stated.sparse)}}
    assert others <= {"timestamp_hour", "timestamp_weekday", "click_time_hour", "InvoiceNo"}
