"""Two ranks learn what one process does, by losses that parts of a batch add up to; a softmax over the batch
is over each rank's share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

import recpipe
from tests.distributed.test_runs_of_ranks import as_rank, exported, free_port
from tests.model.objectives import FEATURES, QUIET, TwoTower, batch_of, written
from tests.processes import start_ranks

DLRM = ("model.embedding_dim=4", "model.bottom=[4]", "model.top=[4]")
FOCAL = "model.loss={buy: {name: focal, gamma: 1}, stay: {name: huber, delta: 0.5}}"
RUNS: dict[str, tuple[str, ...]] = {
    "uncertainty": (
        *DLRM,
        f"data.features={{labels: [buy, {{name: stay, kind: values}}], weight: trust, features: {FEATURES}}}",
        FOCAL,
        "model.task_weights=uncertainty",
    ),
    "esmm": (
        *DLRM,
        f"data.features={{labels: [click, buy], weight: trust, features: {FEATURES}}}",
        "model.loss=esmm",
    ),
    "softmax": (
        f"data.features={{labels: [click], features: {FEATURES}}}",
        "model._target_=tests.model.objectives.TwoTower",
        "model.loss={name: in_batch_softmax, temperature: 0.5}",
    ),
}
RATE = 0.5


def train(folder: Path, name: str, where: str) -> None:
    target = f"task.export_parameters='{folder / where / name}'"
    rates = (f"optim.tables.lr={RATE}", f"optim.dense.lr={RATE}")
    file = folder / "rows.parquet"
    recpipe.train(None, file, *QUIET, *RUNS[name], *rates, target, quiet=True).close()


def ranks(rank: int, port: int, folder: str) -> None:
    as_rank(rank, port)
    for name in RUNS:
        train(Path(folder), name, "two")


def by_hand(file: Path) -> TwoTower:
    """An epoch of SGD in which each batch's loss is the mean of its halves' losses."""
    model, rows = TwoTower(), pq.read_table(file).to_pydict()
    for low in range(0, 256, 32):
        lost = torch.zeros(())
        for half in (slice(low, low + 16), slice(low + 16, low + 32)):
            batch = batch_of(rows["item"][half], torch.ones(16), users=rows["user"][half])
            output = model(batch)
            scores = output["query"] @ output["candidate"].T / 0.5
            lost = lost + F.cross_entropy(scores, torch.arange(16)) / 2
        slopes = torch.autograd.grad(lost, [*model.parameters()])
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter -= RATE * slope
    return model


@pytest.mark.soak
def test_two_ranks_learn_by_each_objective(tmp_path: Path) -> None:
    file = written(tmp_path)
    for where in ("one", "two"):
        (tmp_path / where).mkdir()
    start_ranks(ranks, (free_port(), str(tmp_path)), 2)
    for name in ("uncertainty", "esmm"):
        train(tmp_path, name, "one")
        expected, found = (exported(tmp_path / where / name) for where in ("one", "two"))
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=0, atol=2e-6, err_msg=f"{name} {key}")
    assert "recpipe.task_log_variances" in exported(tmp_path / "two" / "uncertainty")
    wanted, found = by_hand(file).state_dict(), exported(tmp_path / "two" / "softmax")
    train(tmp_path, "softmax", "one")
    whole = exported(tmp_path / "one" / "softmax")
    tables = {name: f"rows.embedding_bags.{name}.weight" for name in ("user", "item")}
    for key in ("user", "item", "project.weight", "project.bias"):
        own = wanted[tables.get(key, key)].numpy()
        np.testing.assert_allclose(found[key], own, rtol=0, atol=2e-6, err_msg=key)
    assert np.abs(found["user"] - whole["user"]).max() > 1e-3, "whole batches have other negatives"
