"""Shapes in which public data sets come are trained as they lie, with what ``data.features=auto`` chooses.
The label depends on the odd column, which a wrong reading would make useless."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpipe.config.compose import compose
from recpipe.run import run

SIZE = 3000
WORTH = np.array([1, -1, 1, -1, 1, -1, 1, -1, 1, -1.0])
GENRES = ("Action", "Comedy", "Drama", "Horror", "Sci-Fi", "War", "Crime", "Romance", "Western", "Short")
QUICK = ("model.embedding_dim=8", "trainer.backend=plain", "trainer.progress=false", "trainer.logger=null")


class Situation(NamedTuple):
    """Columns of a file, words of the command line, and what the features say that were chosen."""

    columns: dict[str, Any]
    words: tuple[str, ...]
    chosen: tuple[str, ...]


def labels(rng: np.random.Generator, score: Any) -> list[int]:
    return (np.asarray(score) + rng.normal(0, 0.3, SIZE) > 0).astype(int).tolist()


def sets(rng: np.random.Generator) -> tuple[list[list[int]], list[float]]:
    """Three to six of ten ids a row, of which hardly two rows have the same in the same order; and the sum of
    what they are worth."""
    found = [rng.permutation(10)[: rng.integers(3, 7)].tolist() for _ in range(SIZE)]
    return found, [float(WORTH[own].sum()) for own in found]


def genres_in_one_text(rng: np.random.Generator) -> Situation:
    found, score = sets(rng)
    texts = ["|".join(GENRES[n] for n in own) for own in found]
    columns = {"liked": labels(rng, score), "user": rng.integers(1, 400, SIZE), "genres": texts}
    return Situation(columns, ("data.label=liked",), ("separator: '|'",))


def carets_and_a_column_without_values(rng: np.random.Generator) -> Situation:
    found, score = sets(rng)
    texts = ["^".join(str(900 + n) for n in own) for own in found]
    columns = {
        "click": labels(rng, score),
        "item": rng.integers(1, 90, SIZE),
        "seen": texts,
        "coupon": [""] * SIZE,
    }
    return Situation(columns, ("data.label=click",), ("separator: ^", "- coupon  # has no value"))


def sequences_padded_with_zeros(rng: np.random.Generator) -> Situation:
    found, score = sets(rng)
    padded = pa.array([[n + 1 for n in own] + [0] * (10 - len(own)) for own in found])
    columns = {"click": labels(rng, score), "history": padded, "item": rng.integers(1, 90, SIZE)}
    return Situation(columns, ("data.label=click",), ("padding:",))


def encoded_numbers(rng: np.random.Generator) -> Situation:
    user, item = rng.integers(0, 60, (2, SIZE))
    score = WORTH[user % 10] + WORTH[item * 7 % 10]
    columns = {
        "label": np.array(labels(rng, score), np.float32),
        "I1": rng.random(SIZE).astype(np.float32),
        "C1": user.astype(np.int32),
        "C2": item.astype(np.int64),
    }
    return Situation(columns, ("data.label=label",), ("name: C1, kind: id", "name: I1, kind: dense"))


def two_labels(rng: np.random.Generator) -> Situation:
    user, item = rng.integers(0, 60, (2, SIZE))
    click = np.array(labels(rng, WORTH[user % 10] + WORTH[item * 7 % 10]))
    buy = click * (rng.random(SIZE) < 0.3)
    columns = {"click": click, "buy": buy, "user": user, "item": item}
    return Situation(columns, ("data.label=[click,buy]",), ("- {name: click}", "- {name: buy}"))


def a_vector(rng: np.random.Generator) -> Situation:
    vectors = rng.normal(size=(SIZE, 6)).astype(np.float32)
    columns = {
        "click": labels(rng, 2 * vectors[:, 0] - vectors[:, 3]),
        "item": rng.integers(0, 90, SIZE),
        "embedding": pa.array(vectors.tolist(), pa.list_(pa.float32())),
    }
    return Situation(columns, ("data.label=click",), ("kind: vector, size: 6",))


def criteo_with_commas_and_a_header(rng: np.random.Generator) -> Situation:
    ids = rng.integers(0, 60, (3, SIZE))
    texts = [[f"{n * 2654435761 % 2**32:08x}" for n in own] for own in ids]
    texts[1] = [f"{n:08d}" for n in ids[1]]  # without a letter, and with zeros in front
    counts = [["" if n % 5 == 0 else str(n) for n in own] for own in rng.integers(0, 300, (2, SIZE))]
    score = WORTH[ids[0] % 10] + WORTH[ids[1] % 10]
    columns = {"label": labels(rng, score), **dict(zip(("I1", "I2"), counts, strict=True))}
    columns |= dict(zip(("C1", "C2", "C3"), texts, strict=True))
    return Situation(columns, ("data.label=label",), ("name: C2, kind: id", "type: text"))


CSV = (genres_in_one_text, carets_and_a_column_without_values, two_labels, criteo_with_commas_and_a_header)
PARQUET = (sequences_padded_with_zeros, encoded_numbers, a_vector)


def write(columns: dict[str, Any], file: Path) -> Path:
    if file.suffix == ".parquet":
        pq.write_table(pa.table(columns), file)
    else:
        with file.open("w", newline="") as out:
            csv.writer(out).writerows([[*columns], *zip(*columns.values(), strict=True)])
    return file


def trained(file: Path, folder: Path, *words: str) -> dict[str, Any]:
    """The report of a run with the features that are chosen."""
    mine = (
        f"data.path={file}",
        "data.features=auto",
        f"data.cache_dir={folder / 'cache'}",
        "task.page=false",
    )
    budget = ("data.batch_size=64", "trainer.max_epochs=2", "trainer.eval_every=1.0")
    found: dict[str, Any] = run(compose(["data=files", *mine, *budget, *QUICK, *words]), folder / "run")
    return found


@pytest.mark.parametrize("make", [*CSV, *PARQUET])
def test_public_situations_are_trained_as_they_lie(
    make: Callable[[np.random.Generator], Situation], tmp_path: Path
) -> None:
    found = make(np.random.default_rng(3))
    file = write(found.columns, tmp_path / ("rows.csv" if make in CSV else "rows.parquet"))
    report = trained(file, tmp_path, *found.words)
    chosen = (tmp_path / "run" / "features.yaml").read_text()
    for part in found.chosen:
        assert part in chosen
    assert report["data"]["eval_samples"] == SIZE // 5
    assert report["quality"]["auc"] > 0.8


def test_the_odd_column_read_wrongly_is_of_no_use(tmp_path: Path) -> None:
    """The control: each text of genres as one id."""
    found = genres_in_one_text(np.random.default_rng(3))
    file = write(found.columns, tmp_path / "rows.csv")
    wrong = (
        "data.features={labels: [liked], features: [{name: user, rows: 1000}, {name: genres, rows: 10000}]}"
    )
    assert trained(file, tmp_path, wrong)["quality"]["auc"] < 0.7
