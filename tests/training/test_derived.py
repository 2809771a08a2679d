"""Training on what is derived from files: a sampled softmax beside plain PyTorch, runs that go on with their
draws, and a log of events with a side table, from training to scores."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.answers.trained import open_trained

SIZE, TRAIN, ROWS, BATCH, DIM = 300, 240, 30, 40, 4
FEATURES = "[{name: user, ids: rows, rows: 30}, {name: item, ids: rows, rows: 30}]"
WORDS = (
    f"data.features={{labels: [seen], features: {FEATURES}}}",
    f"data.batch_size={BATCH}",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.backend=plain",
    "optim=sgd",
    "optim.tables.lr=0.5",
    "optim.dense.lr=0.5",
)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rng = np.random.default_rng(3)
    item = np.minimum(rng.geometric(0.15, SIZE), ROWS - 1)
    return pa.table({"seen": np.ones(SIZE, np.int8), "user": rng.integers(0, ROWS, SIZE), "item": item})


@pytest.fixture(scope="module")
def file(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("drawn") / "rows.parquet"
    pq.write_table(table, found)
    return found


class Softmax(nn.Module):
    """Users and items as rows of two tables; the other samples' items are the negatives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=n, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[n])
                for n in ("user", "item")
            ]
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(
        self, sparse: KeyedJaggedTensor, log_q: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        user, item = self.rows(sparse).values().split(DIM, dim=1)
        score = self.scale * (user * item).sum(dim=1)
        if log_q is None:
            return score
        logits = self.scale * (user @ item.T) - log_q
        return nn.functional.cross_entropy(logits, torch.arange(len(logits))), score


def by_hand(table: pa.Table, corrected: bool) -> tuple[Softmax, list[float]]:
    """``Softmax`` after an epoch of SGD, sample by sample, and the losses."""
    model, rows, losses = Softmax(), table.to_pylist()[:TRAIN], []
    counts = Counter(row["item"] for row in rows)
    bags = model.rows.embedding_bags
    for low in range(0, TRAIN, BATCH):
        part, loss = rows[low : low + BATCH], torch.zeros(())
        for place, row in enumerate(part):
            logits = []
            for other in part:
                product = bags["user"].weight[row["user"]] @ bags["item"].weight[other["item"]]
                logits.append(model.scale * product - corrected * np.log(counts[other["item"]] / TRAIN))
            loss = loss + torch.logsumexp(torch.stack(logits), 0) - logits[place]
        loss = loss / len(part)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    return model, losses


def trained(model: nn.Module | None, file: Path, folder: Path, *words: str) -> dict[str, Any]:
    """The run's report, with the arrays of its parameters as ``parameters``."""
    export = folder.parent / f"{folder.name}-parameters"
    own = (f"data.cache_dir={file.parent}/cache", f"task.export_parameters={export}")
    with recpipe.train(model, file, *WORDS, *own, *words, output=folder, quiet=True) as run:
        tables = {each.stem: np.load(each) for each in export.glob("*.npy")}
        return {**run.report, "parameters": tables | dict(np.load(export / "dense.npz"))}


def test_a_softmax_over_the_batch_is_that_of_plain_pytorch(
    table: pa.Table, file: Path, tmp_path: Path
) -> None:
    """With the correction by how often each item comes, measured while the files were prepared."""
    words = ("data.negatives={feature: item, sampling: in_batch}", f"data.eval_fraction={1 - TRAIN / SIZE}")
    report = trained(Softmax(), file, tmp_path / "run", *words)
    expected, losses = by_hand(table, True)
    assert report["series"]["loss"] == pytest.approx(losses, rel=1e-5)
    for name in ("user", "item"):
        wanted = expected.rows.embedding_bags[name].weight.detach().numpy()
        np.testing.assert_allclose(report["parameters"][name], wanted, rtol=0, atol=2e-6)
    assert by_hand(table, False)[1] != pytest.approx(losses, rel=1e-2), "the correction matters"
    assert report["data"]["train_samples"] == TRAIN


def test_an_evaluation_takes_the_chances_that_training_had(
    table: pa.Table, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all rows, of another file, and, with a warning, of what is there where training's file has gone."""
    words = ("data.negatives={feature: item, sampling: in_batch}", f"data.eval_fraction={1 - TRAIN / SIZE}")
    source = tmp_path / "source.parquet"
    source.write_bytes(file.read_bytes())
    trained(Softmax(), source, tmp_path / "run", *words, f"data.cache_dir={tmp_path}/cache")
    other = tmp_path / "other.parquet"
    pq.write_table(table.slice(0, 100), other)

    def log_q(*overrides: str) -> dict[int, float]:
        opened = open_trained(tmp_path / "run", overrides, Softmax())
        whole = replace(opened, cfg=replace(opened.cfg, data=opened.cfg.data.whole()))
        (batch,) = whole.dataset.batches("train", SIZE)
        return dict(zip(batch.sparse["item"].values().tolist(), batch.log_q.tolist(), strict=True))

    def chances(rows: pa.Table) -> dict[int, float]:
        counts = Counter(rows["item"].to_pylist())
        return {item: float(np.float32(np.log(max(1, counts[item]) / len(rows)))) for item in range(ROWS)}

    wanted = chances(table.slice(0, TRAIN))
    found = log_q()
    assert set(found) == set(table["item"].to_pylist())
    assert found == pytest.approx({item: wanted[item] for item in found})
    own = chances(table)
    assert found != pytest.approx({item: own[item] for item in found})
    found = log_q(f"data.path={other}")
    assert found == pytest.approx({item: wanted[item] for item in found})
    source.unlink()
    found, own = log_q(f"data.path={other}"), chances(table.slice(0, 100))
    assert found == pytest.approx({item: own[item] for item in found})
    assert "those of training cannot be read" in caplog.text


def test_a_resumed_run_draws_the_same_negatives(file: Path, tmp_path: Path) -> None:
    """Of recpipe's own model, in its second epoch, whose negatives are others than those of the first."""
    words = (
        "data.negatives={feature: item, ratio: 2, sampling: popularity}",
        "model.bottom=[8]",
        "model.top=[8]",
        "model.embedding_dim=4",
        "data.eval_fraction=0.2",
        "trainer.max_epochs=2",
    )
    whole = trained(None, file, tmp_path / "whole", *words)
    assert whole["data"]["train_samples"] == 2 * 3 * TRAIN
    assert whole["data"]["eval_samples"] == 3 * (SIZE - TRAIN)
    steps = 3 * TRAIN // BATCH + 4
    trained(None, file, tmp_path / "part", *words, f"trainer.max_steps={steps}", "trainer.checkpoint_every=2")
    rest = trained(None, file, tmp_path / "rest", *words, f"resume={tmp_path}/part")
    mine, theirs = whole["parameters"], rest["parameters"]
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert whole["series"]["loss"][: 3 * TRAIN // BATCH] != whole["series"]["loss"][3 * TRAIN // BATCH :]
    scores = recpipe.predict(tmp_path / "part", file, "scores=raw", quiet=True)
    assert len(scores) == SIZE, "rows of files get a score each, and no negatives"


def test_a_log_in_text_with_a_side_table_is_trained_and_scored(tmp_path: Path) -> None:
    """A row of the scores is an event with those before it; an evaluation tells them apart by its columns."""
    rng = np.random.default_rng(4)
    user, item = rng.integers(0, 12, 200), rng.integers(1, 20, 200)
    events = pa.table({"user": [f"u{n}" for n in user], "item": item, "ts": rng.permutation(200)})
    pyarrow.csv.write_csv(events, tmp_path / "log.csv")
    colours = ["red", "green", "blue"]
    side = pa.table({"id": np.arange(1, 18), "colour": [colours[n % 3] for n in range(17)]})
    pyarrow.csv.write_csv(side, tmp_path / "items.csv")
    (tmp_path / "features.yaml").write_text(
        """
labels: [{name: seen, column: positive}]
features:
  - {name: item, rows: 50}
  - {name: colour, rows: 10}
  - {name: items, kind: sequence, column: item_history, table: item, rows: 50}
  - {name: colours, kind: sequence, column: colour_history, table: colour, rows: 10}
"""
    )
    words = (
        "data=files",
        f"data.path={tmp_path}/log.csv",
        f"data.joins=[{{path: '{tmp_path}/items.csv', on: {{left: item, right: id}}}}]",
        "data.sessions={by: user, order: ts, max_length: 3}",
        "data.negatives={feature: item, along: [colour], ratio: 1}",
        f"data.features={tmp_path}/features.yaml",
        "data.split={by: last, column: user, test: 1}",
        "data.eval_fraction=0",
        "data.batch_size=64",
        f"data.cache_dir={tmp_path}/cache",
        "model.bottom=[8]",
        "model.top=[8]",
        "model.embedding_dim=4",
        "trainer.progress=false",
        "trainer.logger=null",
    )
    with recpipe.train(None, None, *words, output=tmp_path / "run", quiet=True) as run:
        data = run.report["data"]
    users = len(set(user.tolist()))
    samples = 200 - users
    assert data["train_samples"] == 2 * (samples - users)
    unknown = sum(n > 17 for n in item.tolist())
    assert 0 < data["missing"]["colour"] <= unknown
    content = recpipe.evaluate(tmp_path / "run", None, "split=test", "by=colour", quiet=True)
    assert content["data"]["samples"] == 2 * users
    output = tmp_path / "scores.parquet"
    recpipe.predict(tmp_path / "run", tmp_path / "log.csv", "keys=[user,ts]", output=output, quiet=True)
    found = pq.read_table(output).to_pylist()
    order = sorted(range(200), key=lambda n: events["ts"][n].as_py())
    of: dict[str, list[str]] = {}
    for n in order:
        name = events["user"][n].as_py()
        of[name] = [*of.pop(name, []), str(events["ts"][n].as_py())]
    wanted = [(name, time) for name, times in of.items() for time in times[1:]]
    assert [(row["user"], row["ts"]) for row in found] == wanted
