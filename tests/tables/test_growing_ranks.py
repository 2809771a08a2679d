"""Two ranks whose ids grow: the same maps and rows as one process, replicated, in tiers and in shards; and
each goes on from the other's checkpoint."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.numpy import load_file

from recpipe.answers.plain import unshard
from recpipe.checkpoint.table_io import newest
from recpipe.config.compose import compose
from recpipe.run import run
from tests.data.test_growing_files import FEATURES, rows, words
from tests.processes import start_ranks

pytestmark = pytest.mark.soak

SHARDED = "tiers.sharded=true"
WAYS = {
    "held": ("tiers.policy=lru", "tiers.resident_bytes=50%", "topology.embedding_ranks=[1]"),
    "replicas": ("tiers.policy=resident",),
    "tiers": ("tiers.policy=lru", "tiers.store=host", "tiers.resident_bytes=50%"),
    "neo": ("+plugin=neo", "plugins.neo.planner=greedy"),
    "neo-cut": (
        "+plugin=neo",
        "plugins.neo.planner=torchrec",
        "plugins.neo.sharding={user: row_wise, item: column_wise, *: data_parallel}",
    ),
    "shards": ("tiers.policy=resident", SHARDED),
    "shards-in-tiers": ("tiers.policy=lru", "tiers.resident_bytes=50%", "tiers.store=ssd", SHARDED),
}


def on_rank(rank: int, folder: str, port: int, jobs: list[tuple[str, list[str]]]) -> None:
    for number, (name, recipe) in enumerate(jobs):
        os.environ |= {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port + number), "OMP_NUM_THREADS": "1"},
        }
        run(compose(recipe), Path(folder) / name)


def content(checkpoint: Path, folder: Path) -> dict[str, np.ndarray]:
    """Rows and keys of a checkpoint."""
    target = folder / f"{checkpoint.parent.parent.name}.safetensors"
    unshard(checkpoint, target, overwrite=True)
    return load_file(target)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        if name.endswith(".keys"):
            assert np.array_equal(values, other[name]), name
        else:
            np.testing.assert_allclose(values, other[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_two_ranks_train_what_one_does(tmp_path: Path) -> None:
    pq.write_table(rows(800), tmp_path / "a.parquet")
    (tmp_path / "f.yaml").write_text(yaml.safe_dump({"labels": ["click"], "features": FEATURES}))

    def recipe(steps: int, *more: str) -> list[str]:
        own = (f"trainer.max_steps={steps}", "trainer.checkpoint_every=5", "trainer.max_epochs=2")
        return words(tmp_path, *own, "trainer.backend=plain", "optim.tables={name: sgd, lr: 0.1}", *more)

    run(compose(recipe(10)), tmp_path / "half")
    run(compose(recipe(15)), tmp_path / "whole")
    half, whole = newest(tmp_path / "half"), newest(tmp_path / "whole")
    jobs = [(name, recipe(15, *way)) for name, way in WAYS.items()]
    jobs += [(f"{name}-resumed", recipe(15, f"resume={half}", *way)) for name, way in WAYS.items()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_ranks(on_rank, (str(tmp_path), port, jobs), 2)
    wanted = content(whole, tmp_path)
    cut = newest(tmp_path / "shards") / "tables"
    assert {file.name[:11] for file in cut.glob("shard-*")} == {"shard-00001", "shard-00002"}
    for name, _ in jobs:
        same(content(newest(tmp_path / name), tmp_path), wanted)
    run(compose(recipe(20, f"resume={newest(tmp_path / 'shards')}")), tmp_path / "back")
    run(compose(recipe(20)), tmp_path / "longer")
    same(content(newest(tmp_path / "back"), tmp_path), content(newest(tmp_path / "longer"), tmp_path))
