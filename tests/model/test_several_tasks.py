"""Losses of several labels: weights that are learnt, and the product of two rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import recpipe
from recpipe.data.schema import LabelColumn
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.model.config import UserModel
from tests.model.objectives import FEATURES, QUIET, batch_of, report_of, written

CLICK, BUY, STAY = LabelColumn("click"), LabelColumn("buy"), LabelColumn("stay", "values")
DLRM = ("model.bottom=[8]", "model.top=[8]", "model.embedding_dim=4")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("tasks"))


class Heads(nn.Module):
    """Outputs [B, L] that are parameters."""

    def __init__(self, outputs: torch.Tensor) -> None:
        super().__init__()
        self.outputs = nn.Parameter(outputs.clone())

    def forward(self, batch: Any) -> torch.Tensor:
        return self.outputs[: batch.size]


def labelled(labels: torch.Tensor, weights: torch.Tensor | None = None) -> Any:
    return batch_of([0] * len(labels), labels, weights)


def of(outputs: torch.Tensor, labels: list[LabelColumn], **section: Any) -> Called:
    return Called.of(Heads(outputs), UserModel(target="a.B", **section), labels)


OUTPUTS = torch.randn(9, 2, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([[1.0, 0], [1, 1], [0, 0], [1, 1], [0, 0], [1, 0], [0, 0], [1, 1], [0, 0]])


# -- weights by uncertainty ------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_uncertainty_is_kendalls_formula(weighted: bool) -> None:
    """With gradients of the log-variances; clicks have the factor 1, values 1/2."""
    called = of(OUTPUTS, [CLICK, STAY], task_weights="uncertainty")
    assert called.uncertainty is not None
    logs = called.uncertainty.log_variances
    with torch.no_grad():
        logs.copy_(torch.tensor([0.3, -0.8]))
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(2)) if weighted else None
    batch = labelled(LABELS, weights)
    batch = batch.scaled()
    loss, _ = called(batch)
    v, x = logs.detach().clone().requires_grad_(), OUTPUTS.clone().requires_grad_()
    clicks = F.binary_cross_entropy_with_logits(x[:, 0], LABELS[:, 0], reduction="none")
    each = torch.stack([clicks, (x[:, 1] - LABELS[:, 1]) ** 2], dim=1)
    own = torch.ones(9, 2) if weights is None else weights
    mean = (each * own).sum(0) / own.sum(0)
    wanted = (torch.tensor([1.0, 0.5]) * torch.exp(-v) * mean + v / 2).sum()
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(logs.grad, v.grad)
    torch.testing.assert_close(called.module.outputs.grad, x.grad)
    told = called.objective(batch)
    torch.testing.assert_close(told["click"]["weight"], float(torch.exp(-v[0])))
    torch.testing.assert_close(told["stay"]["weight"], 0.5 * float(torch.exp(-v[1])))


def test_parts_of_a_batch_add_up_and_unknown_labels_change_nothing() -> None:
    weights = torch.ones(9, 2)
    weights[:4, 0], weights[:, 1] = 0, 0
    whole = labelled(LABELS, weights).scaled()
    assert whole.weights is not None
    called = of(OUTPUTS, [CLICK, STAY], task_weights="uncertainty")
    assert called.uncertainty is not None
    logs = called.uncertainty.log_variances
    nn.init.constant_(logs, 0.7)
    value, _ = called(whole)
    parts = torch.zeros(())
    for low, high in ((0, 3), (3, 9)):
        part = of(OUTPUTS[low:high], [CLICK, STAY])
        part.uncertainty = called.uncertainty
        loss, _ = part(labelled(whole.labels[low:high], whole.weights[low:high]))
        parts = parts + loss * (high - low) / 9
    torch.testing.assert_close(parts, value)
    (slope,) = torch.autograd.grad(value, logs)
    assert slope[0] != 0
    assert slope[1] == 0, "no sample has that label"
    nothing = of(OUTPUTS[:0], [CLICK, STAY])
    nothing.uncertainty = called.uncertainty
    assert nothing(labelled(LABELS[:0]))[0] == 0


def test_learnt_weights_are_trained_saved_and_resumed(file: Path, tmp_path: Path) -> None:
    """And are no part of the model: a plain one takes the checkpoint; fixed weights have none."""
    labels = "[buy, {name: stay, kind: values}]"
    features = f"data.features={{labels: {labels}, features: {FEATURES}}}"
    words = (*QUIET, features, *DLRM, "model.task_weights=uncertainty", "optim.dense.lr=0.5")
    with recpipe.train(
        None, file, *words, "trainer.max_epochs=2", output=tmp_path / "whole", quiet=True
    ) as run:
        told = run.report["objective"]
    assert 0.5 < told["buy"]["weight"] < 0.99, "1 / (2 L) is where it ends, of a loss L"
    half = ("trainer.max_epochs=1", "trainer.checkpoint_every=1")
    recpipe.train(None, file, *words, *half, output=tmp_path / "half", quiet=True).close()
    with recpipe.train(
        None,
        file,
        *words,
        "trainer.max_epochs=2",
        f"resume={tmp_path / 'half'}",
        output=tmp_path / "rest",
        quiet=True,
    ) as run:
        assert run.report["objective"] == told, "bit by bit"
    found = recpipe.evaluate(tmp_path / "whole", None, "split=eval", quiet=True)
    whole = json.loads((tmp_path / "whole" / "report.json").read_text())
    assert found["loss"] == pytest.approx(whole["quality"]["loss"], rel=1e-6)
    names = {*recpipe.load(tmp_path / "whole").state_dict()}
    assert not any("variance" in name for name in names)
    fixed = report_of(file, None, *DLRM, "model.task_weights={stay: 0.25}", labels=labels)["objective"]
    assert (fixed["buy"]["weight"], fixed["stay"]["weight"]) == (1.0, 0.25)


@pytest.mark.parametrize(
    ("labels", "section", "message"),
    [
        ([CLICK], {"task_weights": "uncertainty"}, "uncertainty: there is one loss, binary_cross_entropy"),
        (
            [CLICK, STAY],
            {"task_weights": {"by": 1}},
            "model.task_weights.by: no such label",
        ),
        (
            [CLICK, STAY],
            {"loss": "esmm"},
            "needs two different labels of kind clicks, .* kind values",
        ),
        ([CLICK], {"loss": "esmm"}, "esmm is over two labels, and the data have 1: say which"),
        (
            [CLICK, BUY],
            {"loss": {"name": "esmm", "click": "clik"}},
            "model.loss.click=clik: no such label",
        ),
        (
            [CLICK, BUY],
            {"loss": {"name": "esmm", "clicks": "click"}},
            "model.loss.clicks: esmm has no such",
        ),
        (
            [CLICK, BUY],
            {"loss": {"name": "esmm", "click": "buy", "conversion": "buy"}},
            "needs two different labels",
        ),
        (
            [CLICK, BUY],
            {"loss": "esmm", "task_weights": {"buy": 2}},
            "task_weights.buy: no such label",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    labels: list[LabelColumn], section: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        of(OUTPUTS, labels, **section)
    assert "\n" not in str(refused.value)


# -- ESMM ------------------------------------------------------------------------------------


def test_esmm_is_the_papers_formula() -> None:
    """Values and gradients in float64; outputs are the three rates, and those that are large stay exact."""
    outputs = OUTPUTS.double()
    called = of(outputs, [CLICK, BUY], loss="esmm")
    loss, output = called(labelled(LABELS))
    x = outputs.clone().requires_grad_()
    ctr, cvr = torch.sigmoid(x[:, 0]), torch.sigmoid(x[:, 1])
    click, buy = LABELS.double().unbind(1)
    wanted = F.binary_cross_entropy(ctr, click) + F.binary_cross_entropy(ctr * cvr, buy)
    torch.testing.assert_close(loss, wanted)
    slopes = torch.autograd.grad(loss, called.module.outputs), torch.autograd.grad(wanted, x)
    torch.testing.assert_close(*slopes)
    rates = {name: torch.sigmoid(value) for name, value in output.items()}
    torch.testing.assert_close(rates, {"ctr": ctr, "cvr": cvr, "ctcvr": ctr * cvr})
    assert not torch.isclose(loss, of(outputs, [CLICK, BUY])(labelled(LABELS))[0])
    far = of(torch.tensor([[60.0, 60], [-60, -60], [60, -60]]), [CLICK, BUY], loss="esmm")
    value, output = far(labelled(torch.tensor([[1.0, 1], [0, 0], [1, 0]])))
    assert output["ctcvr"].isfinite().all()
    assert value.item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("named", ["labels", "rates"])
def test_esmm_takes_a_mapping(named: str) -> None:
    names = ("click", "buy") if named == "labels" else ("ctr", "cvr")

    class Named(Heads):
        def forward(self, batch: Any) -> Any:
            return dict(zip(names, self.outputs.unbind(1), strict=True))

    called = Called.of(Named(OUTPUTS), UserModel(target="a.B", loss="esmm"), [CLICK, BUY])
    assert torch.equal(
        called(labelled(LABELS))[0], of(OUTPUTS, [CLICK, BUY], loss="esmm")(labelled(LABELS))[0]
    )


def test_esmm_with_weights_and_in_parts() -> None:
    weights = torch.randint(0, 3, (9, 2), generator=torch.Generator().manual_seed(5)).float()
    whole = labelled(LABELS, weights).scaled()
    assert whole.weights is not None
    value, _ = of(OUTPUTS, [CLICK, BUY], loss="esmm")(whole)
    ctr, cvr = torch.sigmoid(OUTPUTS).unbind(1)
    each = [
        F.binary_cross_entropy(rate, LABELS[:, n], reduction="none")
        for n, rate in enumerate((ctr, ctr * cvr))
    ]
    wanted = sum((own * weights[:, n]).sum() / weights[:, n].sum() for n, own in enumerate(each))
    torch.testing.assert_close(value, wanted)
    parts = [
        of(OUTPUTS[s], [CLICK, BUY], loss="esmm")(labelled(whole.labels[s], whole.weights[s]))[0]
        for s in (slice(0, 4), slice(4, 9))
    ]
    torch.testing.assert_close(parts[0] * 4 / 9 + parts[1] * 5 / 9, value)


def test_the_rate_of_conversions_is_judged_on_clicks_and_learnt_by_the_product(
    file: Path, tmp_path: Path
) -> None:
    """Of three named outputs, in training, evaluation and prediction."""
    rows = pq.read_table(file)
    rng = np.random.default_rng(1)
    click = rng.integers(0, 2, len(rows)).astype(np.int8)
    rows = rows.set_column(0, "click", [click]).set_column(1, "buy", [click * rng.integers(0, 2, len(rows))])
    pq.write_table(rows, tmp_path / "rows.parquet")
    features = f"data.features={{labels: [click, buy], features: {FEATURES}}}"
    words = (*QUIET, features, *DLRM, "model.loss=esmm")
    with recpipe.train(None, tmp_path / "rows.parquet", *words, output=tmp_path / "out", quiet=True) as run:
        report = run.report
    assert [*report["quality_by_label"]] == ["ctr", "cvr", "ctcvr"]
    assert report["quality_by_label"]["cvr"]["loss"] is None
    weights = {name: own["weight"] for name, own in report["objective"].items()}
    assert weights == {"ctr": 1.0, "cvr": None, "ctcvr": 1.0}
    found = recpipe.evaluate(tmp_path / "out", None, "split=eval", quiet=True)["tasks"]
    held_out = rows.slice(256)
    assert found["ctr"]["samples"] == 64
    assert found["cvr"]["samples"] == found["ctr"]["positives"] == sum(held_out["click"].to_pylist())
    assert found["cvr"]["positives"] == found["ctcvr"]["positives"] == sum(held_out["buy"].to_pylist())
    for name, own in found.items():
        told = report["quality_by_label"][name]["logloss"]
        assert own["figures"]["logloss"]["value"] == pytest.approx(told, rel=1e-6), name
    target = tmp_path / "scores.parquet"
    recpipe.predict(tmp_path / "out", tmp_path / "rows.parquet", f"output={target}", quiet=True)
    scores = pq.read_table(target)
    assert scores.column_names == ["row", "ctr", "cvr", "ctcvr"]
    ctr, cvr, both = (scores[name].to_numpy() for name in ("ctr", "cvr", "ctcvr"))
    np.testing.assert_allclose(both, ctr * cvr, rtol=1e-5)


def test_gradients_of_parts_add_up_in_a_run(file: Path) -> None:
    """Of focal and Huber's losses under learnt weights, with samples' weights: four micro-batches a step."""
    labels = "[buy, {name: stay, kind: values, weight: trust}]"
    loss = "model.loss={buy: {name: focal, gamma: 1}, stay: {name: huber, delta: 0.5}}"
    words = (*DLRM, loss, "model.task_weights=uncertainty", "optim.tables.lr=1", "optim.dense.lr=0.3")
    whole = report_of(file, None, *words, labels=labels)
    parts = report_of(
        file, None, *words, "data.batch_size=8", "trainer.accumulate_grad_batches=4", labels=labels
    )
    for name in ("buy", "stay"):
        one, other = (run["objective"][name] for run in (whole, parts))
        assert one["arguments"] == other["arguments"]
        assert one["weight"] == pytest.approx(other["weight"], rel=1e-5)
        assert abs(one["weight"] - (0.5 if name == "stay" else 1.0)) > 1e-3
    assert parts["quality"]["loss"] == pytest.approx(whole["quality"]["loss"], rel=1e-5)
    other = report_of(file, None, *words, "data.batch_size=8", labels=labels)
    assert other["quality"]["loss"] != pytest.approx(whole["quality"]["loss"], rel=1e-4), (
        "smaller steps differ"
    )


class Classes(nn.Module):
    """Scores of three classes, by the item."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        table = EmbeddingBagConfig(name="item", embedding_dim=4, num_embeddings=30, feature_names=["item"])
        self.rows, self.head = EmbeddingBagCollection([table]), nn.Linear(4, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.head(self.rows(batch.sparse)["item"])


@pytest.mark.soak
def test_classes_with_weights_and_smoothing_are_learnt(file: Path, tmp_path: Path) -> None:
    rows = pq.read_table(file)
    classes = [item % 3 for item in rows["item"].to_pylist()]
    pq.write_table(rows.append_column("which", [classes]), tmp_path / "rows.parquet")
    loss = "model.loss={name: cross_entropy, class_weights: [1, 2, 1], label_smoothing: 0.1}"
    labels, rates = "[{name: which, kind: classes}]", ("optim.tables.lr=8", "optim.dense.lr=0.3")
    report = report_of(
        tmp_path / "rows.parquet", Classes(), loss, *rates, "trainer.max_epochs=6", labels=labels
    )
    assert report["objective"]["score"]["arguments"] == {
        "label_smoothing": 0.1,
        "class_weights": [1.0, 2.0, 1.0],
    }
    assert report["quality"]["loss"] < 1.0, "the mean of the weights times log 3 is 1.46"
