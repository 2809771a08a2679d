"""Training several labels and weights: exact beside plain PyTorch, and the same wherever rows are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.data.config import FilesConfig
from recpipe.data.given import GivenBatches
from recpipe.data.make import open_dataset
from recpipe.errors import DataError, UserError
from recpipe.model import metrics
from recpipe.model.calibrated import calibration
from recpipe.model.call import Called
from recpipe.model.loss import LOSSES
from recpipe.model.scores import Scores
from recpipe.plugin.batch import Batch

SIZE, ROWS, BATCH, DIM = 480, 40, 64, 4
LABELS = "[click, {name: seconds, kind: values, weight: trust}]"
FEATURES = "[{name: user, ids: rows, rows: 40}, {name: item, ids: rows, rows: 40}, {name: x, kind: dense}]"
QUIET = ("data.batch_size=64", "trainer.progress=false")
SGD = ("optim=sgd", "optim.tables.lr=0.05", "optim.dense.lr=0.05")
SMALL = ("model.bottom=[8]", "model.top=[8]", "model.embedding_dim=4")


def described(labels: str, weight: str = "null") -> str:
    return f"data.features={{labels: {labels}, weight: {weight}, features: {FEATURES}}}"


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rng = np.random.default_rng(5)
    return pa.table(
        {
            "click": pa.array([None if n % 6 == 0 else int(rng.integers(2)) for n in range(SIZE)], pa.int8()),
            "seconds": pa.array([None if n % 5 == 0 else rng.normal() for n in range(SIZE)], pa.float64()),
            "there": rng.integers(0, 2, SIZE),
            "trust": rng.integers(1, 5, SIZE) / 4,
            "w": rng.integers(0, 9, SIZE) / 2,
            "one": np.ones(SIZE),
            "user": rng.integers(0, ROWS, SIZE),
            "item": rng.integers(0, ROWS, SIZE),
            "x": rng.normal(size=SIZE),
        }
    )


@pytest.fixture(scope="module")
def file(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("labels") / "rows.parquet"
    pq.write_table(table, found)
    return found


def trained(file: Path, folder: Path, *words: str, model: nn.Module | None = None) -> dict[str, Any]:
    """The run's report, with the arrays of its parameters as ``parameters``."""
    target = f"task.export_parameters='{folder}'"
    with recpipe.train(model, file, *QUIET, *words, target, quiet=True) as run:
        arrays = {each.stem: np.load(each) for each in folder.glob("*.npy")}
        return {**run.report, "parameters": arrays | dict(np.load(folder / "dense.npz"))}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    mine, theirs = one["parameters"], other["parameters"]
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not np.array_equal(mine[name], theirs[name])]


class Towers(nn.Module):
    """A linear layer over pooled rows and a dense value, with an output for each label."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        torch.manual_seed(2)
        names = ("user", "item")
        self.rows = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=n, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[n])
                for n in names
            ]
        )
        self.head = nn.Linear(2 * DIM + 1, outputs)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.head(torch.cat([self.rows(batch.sparse).values(), batch.dense], dim=1))


def by_hand(table: pa.Table, samples: int) -> tuple[Towers, list[float]]:
    """``Towers`` after an epoch of SGD in plain PyTorch, by a loop over the samples; and the losses."""
    model, rows, losses = Towers(), table.to_pylist()[:samples], []
    for low in range(0, samples, BATCH):
        part, sums = rows[low : low + BATCH], [torch.zeros(()), torch.zeros(())]
        totals = [0.0, 0.0]
        for row in part:
            pooled = [model.rows.embedding_bags[name].weight[row[name]] for name in ("user", "item")]
            x = torch.tensor([np.sign(row["x"]) * np.log1p(abs(row["x"]))], dtype=torch.float32)
            click, seconds = model.head(torch.cat([*pooled, x]))
            if row["click"] is not None:
                label = torch.tensor(float(row["click"]))
                sums[0] = sums[0] + row["w"] * F.binary_cross_entropy_with_logits(click, label)
                totals[0] += row["w"]
            if row["seconds"] is not None:
                weight = row["w"] * row["trust"]
                sums[1] = sums[1] + weight * (seconds - row["seconds"]) ** 2
                totals[1] += weight
        loss = sums[0] / totals[0] + 0.5 * sums[1] / totals[1]
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.05 * gradient
    return model, losses


def test_weighted_losses_of_two_labels_are_those_of_plain_pytorch(
    file: Path, table: pa.Table, tmp_path: Path
) -> None:
    features = FEATURES.replace("kind: dense", "kind: dense, scale: log")
    words = (
        f"data.features={{labels: {LABELS}, weight: w, features: {features}}}",
        "data.eval_fraction=0.2",
        "model.task_weights={seconds: 0.5}",
        *SGD,
    )
    model = Towers()
    report = trained(file, tmp_path, *words, model=model)
    expected, losses = by_hand(table, 384)
    found = report["parameters"]
    for name in ("user", "item"):
        value = expected.rows.embedding_bags[name].weight.detach().numpy()
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-6, err_msg=name)
    for name, value in expected.head.named_parameters():
        np.testing.assert_allclose(found[f"head.{name}"], value.detach().numpy(), rtol=0, atol=2e-6)
    assert report["series"]["loss"] == pytest.approx(losses, rel=1e-5)
    check_figures(report, expected, table)


def check_figures(report: dict[str, Any], model: Towers, table: pa.Table) -> None:
    """The figures of the held-out rows beside plain loops."""
    rows = table.to_pylist()[384:]
    pooled = [[model.rows.embedding_bags[n].weight[row[n]] for n in ("user", "item")] for row in rows]
    x = [np.sign(row["x"]) * np.log1p(abs(row["x"])) for row in rows]
    with torch.no_grad():
        inputs = torch.stack([torch.cat([*p, torch.tensor([v])]) for p, v in zip(pooled, x, strict=True)])
        clicks, seconds = model.head(inputs.float()).double().unbind(1)
    known = [n for n, row in enumerate(rows) if row["click"] is not None]
    w = np.array([rows[n]["w"] for n in known])
    y, score = np.array([rows[n]["click"] for n in known]), clicks[known].numpy()
    over = [
        (w[i] * w[j], 1.0 if score[i] > score[j] else 0.5 if score[i] == score[j] else 0.0)
        for i in np.flatnonzero(y == 1)
        for j in np.flatnonzero(y == 0)
    ]
    area = sum(weight * value for weight, value in over) / sum(weight for weight, _ in over)
    p = 1 / (1 + np.exp(-score))
    logloss = -(w * (y * np.log(p) + (1 - y) * np.log(1 - p))).sum() / w.sum()
    quality = report["quality_by_label"]
    assert quality["click"]["auc"] == pytest.approx(area, abs=1e-9)
    assert quality["click"]["logloss"] == pytest.approx(logloss, rel=1e-5)
    assert quality["click"]["loss"] == pytest.approx(logloss, rel=1e-5)
    rate = (w * y).sum() / w.sum()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert quality["click"]["ne"] == pytest.approx(logloss / entropy, rel=1e-5)
    there = [n for n, row in enumerate(rows) if row["seconds"] is not None]
    weight = np.array([rows[n]["w"] * rows[n]["trust"] for n in there])
    apart = seconds[there].numpy() - np.array([rows[n]["seconds"] for n in there])
    mse = (weight * apart**2).sum() / weight.sum()
    assert quality["seconds"]["mse"] == pytest.approx(mse, rel=1e-5)
    assert quality["seconds"]["mae"] == pytest.approx((weight * abs(apart)).sum() / weight.sum(), rel=1e-5)
    assert "auc" not in quality["seconds"]
    assert report["quality"]["auc"] == quality["click"]["auc"]
    assert report["quality"]["loss"] == pytest.approx(logloss + 0.5 * mse, rel=1e-5)
    binned = report["calibration"]
    assert sum(binned["samples"]) == (w > 0).sum()


@pytest.fixture(scope="module")
def resident(file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two labels of recpipe's own model with weights, all rows in memory."""
    return trained(file, tmp_path_factory.mktemp("resident"), described(LABELS, "w"), *SMALL)


TIERS = ("tiers=host", "tiers.resident_bytes=70%")


@pytest.mark.parametrize("words", [("tiers.policy=lru",), ("+plugin=hotline",)], ids=["lru", "hotline"])
def test_two_labels_train_alike_wherever_rows_are(
    file: Path, resident: dict[str, Any], tmp_path: Path, words: tuple[str, ...]
) -> None:
    other = trained(file, tmp_path, described(LABELS, "w"), *SMALL, *TIERS, *words)
    if words[0].startswith("tiers"):
        assert differences(resident, other) == []
        assert other["quality_by_label"] == resident["quality_by_label"]
        return
    for name, value in resident["parameters"].items():
        np.testing.assert_allclose(other["parameters"][name], value, rtol=0, atol=1e-5, err_msg=name)


def test_batches_of_a_caller_train_as_those_of_files(
    file: Path, resident: dict[str, Any], tmp_path: Path
) -> None:
    config = {"labels": ["click", {"name": "seconds", "kind": "values", "weight": "trust"}], "weight": "w"}
    ids = [{"name": name, "ids": "rows", "rows": ROWS} for name in ("user", "item")]
    features = {**config, "features": [*ids, {"name": "x", "kind": "dense"}]}
    dataset = open_dataset(FilesConfig(path=str(file), features=features, cache_dir=str(tmp_path)), 0)
    own = {split: [*dataset.batches(split, BATCH)] for split in ("train", "eval")}
    given = GivenBatches(own["train"], own["eval"], dataset.schema)
    target = f"task.export_parameters='{tmp_path / 'own'}'"
    with recpipe.train(None, given, "trainer.progress=false", *SMALL, target, quiet=True) as run:
        arrays = {each.stem: np.load(each) for each in (tmp_path / "own").glob("*.npy")}
        made = {**run.report, "parameters": arrays | dict(np.load(tmp_path / "own" / "dense.npz"))}
    assert differences(resident, made) == []
    assert made["quality_by_label"] == resident["quality_by_label"]


@dataclass
class Own:
    """A batch of a user's own type; ``importance`` is by label, of which one may have none."""

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    importance: Any


class OwnTowers(Towers):
    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.head(torch.cat([self.rows(sparse).values(), dense], dim=1))


@pytest.mark.parametrize("technique", ["resident", pytest.param("hotline", marks=pytest.mark.soak)])
def test_batches_of_ones_own_type_have_weights_where_the_recipe_says(
    file: Path, tmp_path: Path, technique: str
) -> None:
    """Like those of recpipe's batches, cut into micro-batches or not; and not where it does not say."""
    features = {"labels": ["there"], "weight": "w", "features": []}
    features["features"] = [{"name": n, "ids": "rows", "rows": ROWS} for n in ("user", "item")]
    features["features"] += [{"name": "x", "kind": "dense"}]
    dataset = open_dataset(FilesConfig(path=str(file), features=features, cache_dir=str(tmp_path)), 0)
    batches = {split: [*dataset.batches(split, BATCH)] for split in ("train", "eval")}
    more = {"resident": (), "hotline": ("+plugin=hotline", "tiers.store=host", "tiers.resident_bytes=20%")}

    def run(given: GivenBatches, *words: str) -> dict[str, Any]:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        target = f"task.export_parameters='{folder}'"
        own = ("trainer.progress=false", "model.loss=binary_cross_entropy", *SGD, *more[technique], *words)
        with recpipe.train(OwnTowers(1), given, *own, target, quiet=True) as made:
            arrays = {each.stem: np.load(each) for each in folder.glob("*.npy")}
            return {**made.report, "parameters": arrays | dict(np.load(folder / "dense.npz"))}

    def of_own(importance: Callable[[torch.Tensor], Any]) -> GivenBatches:
        made = {
            split: [Own(b.dense, b.sparse, b.labels, importance(b.weights)) for b in own]
            for split, own in batches.items()
        }
        return GivenBatches(made["train"], made["eval"])

    wanted = run(GivenBatches(batches["train"], batches["eval"], dataset.schema))
    for path, importance in (
        ("importance", lambda weights: weights.double()),
        ("importance.of", lambda weights: {"of": weights[:, None]}),
    ):
        found = run(of_own(importance), f"model.label_weights={path}")
        assert differences(wanted, found) == []
        assert found["quality"] == wanted["quality"]
    plain = run(of_own(lambda weights: weights))
    assert {"user", "item", "head.weight", "head.bias"} <= {*differences(wanted, plain)}
    with pytest.raises(UserError, match=r"model\.label_weights=trust: the batch \(Own\) has no 'trust'"):
        run(of_own(lambda weights: weights), "model.label_weights=trust")
    with pytest.raises(UserError, match=r"the weights are \[64, 2\] and the labels \[64\]; give"):
        run(of_own(lambda weights: weights[:, None].repeat(1, 2)), "model.label_weights=importance")
    with pytest.raises(DataError, match="weights are not all finite numbers of at least 0"):
        run(of_own(lambda weights: weights - 5), "model.label_weights=importance")


def test_weights_of_one_are_none(file: Path, tmp_path: Path) -> None:
    words = ("data.label=there", "data.sparse=[user,item]", "data.dense=[x]", "data.table_rows=40", *SMALL)
    plain, ones, others = (
        trained(file, tmp_path / name, *words, *more)
        for name, more in (("a", ()), ("b", ("data.weight=one",)), ("c", ("data.weight=w",)))
    )
    assert differences(plain, ones) == []
    assert plain["quality"] == ones["quality"]
    assert plain["quality_by_label"] == {}
    assert len(differences(plain, others)) == len(plain["parameters"])


def test_masked_samples_might_as_well_be_left_out(file: Path, table: pa.Table, tmp_path: Path) -> None:
    """Of a batch for each epoch; with the rows in other batches, other steps would be made."""
    kept = tmp_path / "kept.parquet"
    pq.write_table(table.slice(0, 60).filter(table.slice(0, 60)["click"].is_valid()), kept)
    some = tmp_path / "some.parquet"
    pq.write_table(table.slice(0, 60), some)
    mask = "[{name: click, on_missing: mask}]"
    words = (*SMALL, "data.eval_fraction=0", "trainer.max_epochs=3")
    masked = trained(some, tmp_path / "masked", described(mask), *words)
    without = trained(kept, tmp_path / "without", described("[click]"), *words)
    for name, value in without["parameters"].items():
        np.testing.assert_allclose(masked["parameters"][name], value, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", [n for n, loss in LOSSES.items() if loss.shapes == "same"])
def test_losses_with_weights(name: str) -> None:
    torch.manual_seed(1)
    given = torch.rand(37) if name.endswith("probabilities") else torch.randn(37)
    labels, weights = torch.randint(0, 2, (37,)).float(), torch.randint(0, 4, (37,)).float()
    results = []
    for weight in (None, torch.ones(37), weights):
        prediction = given.clone().requires_grad_()
        loss = LOSSES[name](prediction, labels, weight)
        loss.backward()
        results.append((loss.detach(), prediction.grad))
    (plain, gradient), (ones, of_ones), (weighted, of_weights) = results
    assert torch.equal(plain, ones)
    assert torch.equal(gradient, of_ones)
    each = torch.stack([LOSSES[name](given[n : n + 1], labels[n : n + 1]) for n in range(37)])
    torch.testing.assert_close(weighted, (each * weights).mean())
    torch.testing.assert_close(of_weights, gradient * weights)
    unknown = torch.where(weights > 0, labels, torch.nan)
    assert torch.equal(LOSSES[name](given, unknown, weights), weighted), "masked labels may be anything"
    nothing = given.clone().requires_grad_()
    LOSSES[name](nothing, torch.full((37,), torch.nan), torch.zeros(37)).backward()
    assert torch.equal(nothing.grad, torch.zeros(37))


@pytest.mark.parametrize("columns", [(), ("a", "b")])
def test_an_evaluations_loss_with_and_without_names(columns: tuple[str, ...]) -> None:
    """Two batches whose weights differ; without names both columns are one label."""
    torch.manual_seed(3)
    model, rows = Towers(), [torch.randint(0, ROWS, (9,)), torch.randint(0, ROWS, (4,))]
    named = dict.fromkeys(columns, LOSSES["huber"]) or LOSSES["huber"]
    called = Called(model, named, columns=columns)
    sums, found = torch.zeros(2, 2, dtype=torch.float64), list[torch.Tensor]()
    for own in rows:
        size = len(own)
        ids = KeyedJaggedTensor(
            ["user", "item"], own.repeat(2), lengths=torch.ones(2 * size, dtype=torch.int64)
        )
        batch = Batch(torch.randn(size, 1), ids, torch.randn(size, 2), weights=torch.rand(size, 2))
        with torch.no_grad():
            each = F.huber_loss(model(batch), batch.labels, reduction="none").double()
            found.append(called.judge(batch).losses)
        sums += torch.stack([(each * batch.weights).sum(0), batch.weights.double().sum(0)], dim=1)
    losses = sum(found)
    expected = sums[:, 0] / sums[:, 1] if columns else (sums[:, 0].sum() / sums[:, 1].sum()).reshape(1)
    torch.testing.assert_close(losses[:, 0] / losses[:, 1], expected, rtol=1e-6, atol=0)


def test_classes_with_weights() -> None:
    scores, labels, weights = torch.randn(9, 4), torch.randint(0, 4, (9,)), torch.rand(9)
    each = F.cross_entropy(scores, labels, reduction="none")
    found = LOSSES["cross_entropy"](scores, labels.float(), weights)
    torch.testing.assert_close(found, (each * weights).mean())


def test_figures_with_weights_are_those_of_repeated_samples() -> None:
    rng = np.random.default_rng(1)
    labels, scores = rng.integers(0, 2, 200).astype(np.float32), rng.normal(size=200).round(1)
    weights = rng.integers(0, 4, 200)
    score = scores.astype(np.float32)
    for kind in ("clicks", "values", "counts"):
        weighted = metrics.judged(kind, labels, score, weights.astype(np.float32))
        repeated = metrics.judged(kind, np.repeat(labels, weights), np.repeat(score, weights))
        assert weighted.keys() == repeated.keys()
        for name in weighted.keys() - {"ece"}:  # whose bins are of equally many samples
            assert weighted[name] == pytest.approx(repeated[name], rel=1e-12), name
    bins = calibration(Scores("clicks", labels, score, weights.astype(np.float32)))
    assert bins is not None
    assert sum(bins.samples) == (weights > 0).sum()


class OwnLoss(Towers):
    def forward(self, dense: torch.Tensor, sparse: Any, labels: torch.Tensor) -> Any:  # type: ignore[override]
        output = self.head(torch.cat([self.rows(sparse).values(), dense], dim=1))
        return F.mse_loss(output, labels), output


class NoWeights:
    """A loss that takes none."""

    def __call__(self, prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(prediction, labels)


@pytest.mark.parametrize(
    ("model", "words", "told"),
    [
        (Towers(3), (), r"a mapping of these names, or \[B, 2\], a column for each, not a Tensor \[64, 3\]"),
        (OwnLoss(), (), "OwnLoss returns a loss of its own, which does not see the labels' weights"),
        (Towers(), ("model.loss={bye: huber}",), "bye"),
        (Towers(), ("model.task_weights={bye: 1}",), "model.task_weights.'?bye'?: no such label"),
        (
            Towers(),
            ("model.loss._target_=tests.training.test_labels.NoWeights",),
            "the labels have weights, which it does not take",
        ),
    ],
    ids=["outputs", "own loss", "loss", "task weight", "loss without weights"],
)
def test_what_does_not_fit_is_one_line(
    file: Path, model: nn.Module, words: tuple[str, ...], told: str
) -> None:
    with pytest.raises(UserError, match=told) as caught:
        recpipe.train(model, file, *QUIET, described(LABELS, "w"), *words, quiet=True)
    assert "\n" not in str(caught.value)


def test_recpipes_own_models_have_no_classes(file: Path) -> None:
    labels = "[{name: there, kind: classes}]"
    with pytest.raises(UserError, match="label there is of kind classes: model=dlrm has one output"):
        recpipe.train(None, file, *QUIET, described(labels), *SMALL, quiet=True)
