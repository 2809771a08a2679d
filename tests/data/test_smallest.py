"""Every source with its smallest schema and least data, trained by every model over every kind of table."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpipe.config.compose import compose
from recpipe.data.sources.criteo_columns import SPARSE
from recpipe.errors import UserError
from recpipe.run import run

QUIET = ("trainer.progress=false", "trainer.logger=null", "trainer.checkpoint_every=null")
CRITEO_TABLES = "data.tables={" + ", ".join(f"{name}: 2" for name in SPARSE) + "}"
SOURCES = ("synthetic", "criteo", "npy", "parquet", "parquet lists")
MODELS = ("dlrm", "dlrm_dcn")
PRECISIONS = ("float32", "bfloat16")
TABLES = ("resident", "tiers", "sharded")
DEFAULT = (
    ("parquet", "dlrm", "float32", "resident", 3),
    ("parquet", "dlrm", "bfloat16", "tiers", 1),
    ("parquet lists", "dlrm_dcn", "float32", "sharded", 2),
    ("criteo", "dlrm", "float32", "resident", 1),
    ("npy", "dlrm", "float32", "tiers", 1),
    ("synthetic", "dlrm_dcn", "float32", "tiers", 1),
)


def recipe(source: str, folder: Path, rows: int) -> list[str]:
    """``rows`` rows, no dense columns where the source may lack them, one table of two rows."""
    if source == "synthetic":
        return [f"data.samples={rows}", "data.tables={only: 2}"]
    if source == "criteo":
        (folder / "rows.tsv").write_text("\n".join(["1" + "\t" * 39] * rows))
        return ["data=criteo", CRITEO_TABLES, f"data.path={folder / 'rows.tsv'}"]
    if source == "npy":
        for part, width, kind in (("dense", 13, "f4"), ("sparse", 26, "i4"), ("labels", 1, "i4")):
            np.save(folder / f"day_{part}.npy", np.ones((rows, width), kind))
        return ["data=npy", CRITEO_TABLES, f"data.path={folder}"]
    ids: list[object] = [[], [1], [1, 2]] if source == "parquet lists" else [7, None, 9]
    labels = [True, False, True]
    pq.write_table(pa.table({"click": labels[:rows], "user": ids[:rows]}), folder / "rows.parquet")
    named = ["data.label=click", "data.sparse=[user]", "data.table_rows=2"]
    return ["data=parquet", f"data.path={folder / 'rows.parquet'}", *named]


def train(folder: Path, source: str, model: str, precision: str, tables: str, rows: int, *more: str) -> None:
    where = {
        "resident": [],
        "tiers": ["tiers.policy=lru", "tiers.resident_bytes=100%"],
        "sharded": ["tiers.sharded=true"],
    }[tables]
    overrides = [
        *QUIET,
        *recipe(source, folder, rows),
        *where,
        f"model={model}",
        f"model.precision={precision}",
        "model.emulate_bfloat16=true",
    ]
    report = run(compose([*overrides, *more]), folder / "run")
    assert report["data"]["train_samples"] + report["data"]["eval_samples"] == rows
    assert report["data"]["train_samples"] >= 1


@pytest.mark.parametrize(("source", "model", "precision", "tables", "rows"), DEFAULT)
def test_the_smallest_data_trains(tmp_path, source, model, precision, tables, rows) -> None:
    train(tmp_path, source, model, precision, tables, rows)


@pytest.mark.soak
@pytest.mark.parametrize("split", ["data.eval_fraction=0", "data.eval_fraction=0.2"])
@pytest.mark.parametrize("case", list(product(SOURCES, MODELS, PRECISIONS, TABLES)), ids=" ".join)
def test_every_combination_trains(tmp_path, case, split) -> None:
    train(tmp_path, *case, 3, split)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["data=parquet", "data.path=x", "data.label=y"], r"data\.sparse is empty: name at least one"),
        (["data.tables={}"], r"data\.tables=\{\}: must have at least 1 item"),
    ],
)
def test_a_model_has_at_least_one_table(tmp_path, change, words) -> None:
    with pytest.raises(UserError, match=words):
        run(compose([*QUIET, *change]), tmp_path)
