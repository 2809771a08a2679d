"""Two ranks learn two labels with weights as one process does: weighted means are over whole batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recpipe
from tests.distributed.test_runs_of_ranks import as_rank, exported, free_port
from tests.processes import start_ranks

SIZE = 480
WORDS = (
    "data.features={labels: [click, {name: seconds, kind: values, weight: trust}], weight: w, "
    "features: [{name: user, rows: 40}, {name: x, kind: dense}]}",
    "data.batch_size=64",
    "model.embedding_dim=4",
    "model.bottom=[4]",
    "model.top=[4]",
    "trainer.progress=false",
)
RUNS = {
    "resident": (),
    "lru": ("tiers.policy=lru", "tiers.resident_bytes=60%"),
    "shards": ("tiers.sharded=true",),
}


def write(folder: Path) -> Path:
    """Rows whose weights are much larger in the half of each batch that the second trainer has."""
    rng = np.random.default_rng(4)
    second = np.arange(SIZE) % 64 >= 32
    table = pa.table(
        {
            "click": pa.array([None if n % 6 == 0 else int(rng.integers(2)) for n in range(SIZE)], pa.int8()),
            "seconds": pa.array([None if n % 5 == 0 else rng.normal() for n in range(SIZE)], pa.float64()),
            "trust": rng.integers(1, 5, SIZE) / 4,
            "w": rng.integers(1, 9, SIZE) / 2 * np.where(second, 10, 1),
            "user": rng.integers(0, 99, SIZE),
            "x": rng.normal(size=SIZE),
        }
    )
    pq.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


def train(folder: Path, name: str, where: str) -> None:
    target = f"task.export_parameters='{folder / where / name}'"
    run = recpipe.train(None, folder / "rows.parquet", *WORDS, *RUNS[name], target, quiet=True)
    if run.report:
        (folder / f"{where} {name}.json").write_text(json.dumps(run.report["quality_by_label"]))


def ranks(rank: int, port: int, folder: str) -> None:
    as_rank(rank, port)
    for name in RUNS:
        train(Path(folder), name, "two")


@pytest.mark.soak
def test_two_ranks_learn_weighted_labels_as_one_process(tmp_path: Path) -> None:
    write(tmp_path)
    for where in ("one", "two"):
        (tmp_path / where).mkdir()
    train(tmp_path, "resident", "one")
    start_ranks(ranks, (free_port(), str(tmp_path)), 2)
    expected = exported(tmp_path / "one" / "resident")
    figures = json.loads((tmp_path / "one resident.json").read_text())
    for name in RUNS:
        found = exported(tmp_path / "two" / name)
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=0, atol=2e-6, err_msg=f"{name} {key}")
        theirs = json.loads((tmp_path / f"two {name}.json").read_text())
        for label, own in figures.items():
            for figure, value in own.items():
                if value is None:
                    assert theirs[label][figure] is None
                    continue
                assert theirs[label][figure] == pytest.approx(value, rel=1e-4), (name, label, figure)
