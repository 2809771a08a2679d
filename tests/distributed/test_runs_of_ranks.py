"""Several runs one after the other in processes that torchrun has started once."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import recpipe
from recpipe.checkpoint.table_files import open_tables
from recpipe.checkpoint.table_io import newest
from recpipe.errors import UserError
from recpipe.plugin.tables import TableSet
from tests.processes import start_ranks

WORDS = (
    "data.samples=640",
    "data.tables={a: 50, b: 90}",
    "data.batch_size=64",
    "model.embedding_dim=4",
    "model.bottom=[4]",
    "model.top=[4]",
    "trainer.progress=false",
)
BY_HOSTS = ("+plugin=neo", "plugins.neo.planner=torchrec", "plugins.neo.sharding=table_row_wise")
RUNS = {
    "first": ("tiers.policy=lru", "tiers.resident_bytes=20%"),
    "sharded": ("tiers.sharded=true",),
    "first again": ("tiers.policy=lru", "tiers.resident_bytes=20%"),
    "sharded again": ("tiers.sharded=true",),
    "by hosts": BY_HOSTS,
    "by hosts again": BY_HOSTS,
}

LRU = RUNS["first"]
RESUMED = {
    "two trainers": LRU,
    "a trainer and a holder": (*LRU, "topology.embedding_ranks=[1]"),
    "shards": ("tiers.sharded=true",),
}
"""Where a checkpoint of two trainers is gone on from."""


def as_rank(rank: int, port: int) -> None:
    """This process is one of two; what torchrun sets, without its agent."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def several(rank: int, port: int, folder: str) -> None:
    as_rank(rank, port)
    for name, words in RUNS.items():
        target = f"task.export_parameters='{Path(folder, name)}'"
        run = recpipe.train(None, None, *WORDS, *words, target, quiet=True)
        assert run.report["ranks"]["world"] == 2
        resumed = Path(folder, "saved", name)
        if name == "first":
            words = (*words, "trainer.max_steps=4", "trainer.checkpoint_every=2")
            recpipe.train(None, None, *WORDS, *words, f"trainer.checkpoint_dir={resumed}", quiet=True)
            for kind, parts in RESUMED.items():
                going_on(resumed, parts, Path(folder, f"from {kind}"))


def going_on(checkpoint: Path, words: Sequence[str], target: Path) -> None:
    """Train a step that changes hardly anything, with tables that are made of the checkpoint's rows."""
    still = ("optim.tables.lr=1e-30", "trainer.max_steps=5", f"task.export_parameters='{target}'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableSet, "_drawn", None)
        again = recpipe.train(None, None, *WORDS, *words, *still, f"resume={checkpoint}", quiet=True)
    if again.report:
        assert again.report["resumed"]["step"] == 4


def after_an_error(rank: int, port: int) -> None:
    as_rank(rank, port)
    with pytest.raises(UserError, match="nowhere"):
        recpipe.train(None, None, *WORDS, "model.pretrained=nowhere.safetensors", quiet=True)
    with pytest.raises(UserError, match="in a torch.distributed group already.*ended with an error"):
        recpipe.train(None, None, *WORDS, quiet=True)
    os._exit(0)  # as any process does after an error: nobody waits for the others


def exported(folder: Path) -> dict[str, np.ndarray]:
    arrays = {file.stem: np.load(file) for file in folder.glob("*.npy")}
    return arrays | dict(np.load(folder / "dense.npz"))


@pytest.mark.soak  # ten seconds; each run of the suites is one of several in its process
def test_runs_in_a_process_do_not_know_of_each_other(tmp_path: Path) -> None:
    start_ranks(several, (free_port(), str(tmp_path)), 2)
    left = {name: exported(tmp_path / name) for name in RUNS}
    for name in ("first", "sharded", "by hosts"):
        for key, value in left[name].items():
            np.testing.assert_array_equal(left[f"{name} again"][key], value, err_msg=key)
    saved = open_tables(newest(tmp_path / "saved" / "first") / "tables")
    for kind in RESUMED:
        found = exported(tmp_path / f"from {kind}")
        for name, rows in (("a", 50), ("b", 90)):
            np.testing.assert_array_equal(found[name], saved.rows(f"{name}.weight", 0, rows), err_msg=kind)
    assert any(np.any(left["by hosts"][key] != value) for key, value in left["first"].items())


def test_after_an_error_a_run_is_refused_and_does_not_wait() -> None:
    start_ranks(after_an_error, (free_port(),), 2)
