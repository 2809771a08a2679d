"""Files and runs for tests of answers: parquet with every kind of column, and a small model trained on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import recpipe

ROWS = 3000
COLUMNS = (
    "data.label=click",
    "data.dense=[price,age]",
    "data.sparse=[user,city,tags]",
    "data.tables={user: 500, city: 20, tags: 60}",
)
SMALL = ("model.embedding_dim=8", "model.bottom=[16]", "model.top=[16]")
PLAIN = (
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.device=cpu",
    "task.page=false",
    "task.beside=null",
)
WORDS = ("data=parquet", *COLUMNS, "data.batch_size=128", *SMALL, *PLAIN)
CITIES = ("Ulm", "Bonn", "Köln", "Kiel", "Jena")


def clicks(rows: int, seed: int, shuffled: bool = False) -> pa.Table:
    """``rows`` samples whose clicks depend on user, city and price; ``shuffled``: ``key`` is in no order."""
    rng = np.random.default_rng(seed)
    user, city = rng.zipf(1.3, rows) % 400, rng.integers(0, len(CITIES), rows)
    price = rng.gamma(2.0, 10.0, rows)
    chance = 1 / (1 + np.exp(1.5 - 0.8 * (user % 3) - 0.5 * city + 0.05 * price))
    keys = rng.permutation(rows) if shuffled else np.arange(rows)
    return pa.table(
        {
            "key": keys,
            "click": (rng.random(rows) < chance).astype(np.int8),
            "price": price,
            "age": pa.array(rng.integers(18, 80, rows), mask=rng.random(rows) < 0.1),
            "user": user,
            "city": pa.array([CITIES[i] for i in city], mask=rng.random(rows) < 0.05),
            "tags": [rng.integers(0, 100, n).tolist() for n in rng.integers(0, 4, rows)],
        }
    )


def put(table: pa.Table, file: Path, group: int = 1000) -> Path:
    """Write ``table`` in row groups of ``group`` rows."""
    pq.write_table(table, file, row_group_size=group)
    return file


@dataclass(frozen=True)
class Answers:
    """A finished run and the file that it was trained on."""

    file: Path
    folder: Path
    report: dict


def trained(folder: Path, *words: str) -> Answers:
    """Train a small model on generated parquet; the run's directory is ``folder/run``."""
    file = put(clicks(ROWS, 1), folder / "clicks.parquet")
    with recpipe.train(
        None, None, *WORDS, f"data.path={file}", *words, output=folder / "run", quiet=True
    ) as run:
        return Answers(file, folder / "run", run.report)
