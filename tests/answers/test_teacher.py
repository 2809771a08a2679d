"""Distillation: the formula, and runs whose teacher is another run's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

import recpipe
from recpipe.answers import teacher
from recpipe.errors import UserError
from recpipe.model.loss import parse_loss
from recpipe.model.losses.distillation import Distillation
from tests.model.objectives import FEATURES, QUIET, report_of, written

DLRM = ("model.bottom=[8]", "model.top=[8]", "model.embedding_dim=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of rows.parquet, and of a teacher's run for buy and stay."""
    found = tmp_path_factory.mktemp("distillation")
    file = written(found)
    labels = "[buy, {name: stay, kind: values}]"
    features = f"data.features={{labels: {labels}, features: {FEATURES}}}"
    words = (*QUIET, features, *DLRM, "optim.tables.lr=1", "optim.dense.lr=0.2", "trainer.max_epochs=3")
    recpipe.train(None, file, *words, output=found / "teacher", quiet=True).close()
    return found


def loss_of(asked: torch.Tensor, **chosen: Any) -> Distillation:
    found = parse_loss({"name": "distillation", "teacher": "x", **chosen})
    assert isinstance(found, Distillation)
    found.asks = lambda batch: asked
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "chosen",
    [{}, {"temperature": 3, "weight": 0.8}, {"of_label": "mean_squared_error", "weight": 0.3}],
    ids=str,
)
def test_distillation_is_its_formula(chosen: dict[str, Any], weighted: bool) -> None:
    """In float64, with gradients; parts make the whole."""
    x, z = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 0, 0])
    weights = torch.tensor([0.0, 1, 2, 3, 0, 1, 2, 1, 1]) if weighted else None
    t, w = chosen.get("temperature", 1), chosen.get("weight", 0.5)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    if "of_label" in chosen:
        each = (1 - w) * (other - y) ** 2 + w * (other - z) ** 2
    else:
        s, soft = torch.sigmoid(other / t), torch.sigmoid(z / t)
        hard = F.binary_cross_entropy(torch.sigmoid(other), y.double(), reduction="none")
        each = (1 - w) * hard - w * t**2 * (soft * s.log() + (1 - soft) * (1 - s).log())
    wanted = (each * (1 if weights is None else weights)).mean()
    found = loss_of(z, **chosen)(one, y, weights)
    torch.testing.assert_close(found, wanted)
    slopes = torch.autograd.grad(found, one), torch.autograd.grad(wanted, other)
    torch.testing.assert_close(*slopes)
    parts = [
        loss_of(z[s], **chosen)(x[s], y[s], None if weights is None else weights[s])
        for s in (slice(0, 4), slice(4, 9))
    ]
    torch.testing.assert_close(parts[0] * 4 / 9 + parts[1] * 5 / 9, wanted.detach())
    assert loss_of(z[:0], **chosen)(x[:0], y[:0]) == 0
    assert not torch.isclose(found, loss_of(z + 1, **chosen)(x, y, weights)), "the teacher counts"


def test_a_student_learns_what_the_teacher_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its labels nothing, with weight 1; the teacher is opened once and its rows do not change."""
    opened: list[str] = []
    open_trained = teacher.open_trained
    monkeypatch.setattr(teacher, "open_trained", lambda path: opened.append(path) or open_trained(path))
    file, run = folder / "rows.parquet", folder / "teacher"
    before = {path: path.read_bytes() for path in sorted(run.rglob("checkpoints/*/*/*")) if path.is_file()}
    own = f"{{name: distillation, teacher: '{run}', weight: 1, output: OUTPUT}}"
    loss = f"model.loss={{buy: {own.replace('OUTPUT', 'buy')}, stay: {own.replace('OUTPUT', 'stay')}}}"
    loss = loss.replace("output: stay", "output: stay, of_label: mean_squared_error")
    words = ("optim.tables.lr=1", "optim.dense.lr=0.2", "trainer.max_epochs=6", *DLRM, "seed=9")
    labels = "[buy, {name: stay, kind: values}]"
    features = f"data.features={{labels: {labels}, features: {FEATURES}}}"
    target = folder / "student"
    with recpipe.train(None, file, *QUIET, features, loss, *words, output=target, quiet=True) as done:
        report = done.report
    assert len(opened) == 1
    assert before == {path: path.read_bytes() for path in before}
    told = report["objective"]["stay"]
    assert (told["loss"], told["kind"]) == ("distillation", "values")
    assert told["arguments"]["teacher"] == str(run)
    one, two = (recpipe.predict(each, file, "scores=raw", quiet=True) for each in (run, target))
    still = ("optim.tables.lr=1e-9", "optim.dense.lr=1e-9", "trainer.max_steps=1", *DLRM, "seed=9")
    recpipe.train(None, file, *QUIET, features, *still, output=folder / "other", quiet=True).close()
    other = recpipe.predict(folder / "other", file, "scores=raw", quiet=True)
    for n in range(2):
        assert np.square(one - two)[:, n].mean() < 0.5 * np.square(one - other)[:, n].mean()
    found = recpipe.evaluate(target, None, "split=eval", output=folder / "evaluated", quiet=True)
    assert found["loss"] is None, "the teacher is not asked any more"
    assert found["tasks"]["buy"]["figures"]["auc"]["value"] == pytest.approx(
        report["quality_by_label"]["buy"]["auc"]
    )


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("{name: distillation}", "name the teacher, model.loss={name: distillation, teacher: RUN}"),
        ("{name: distillation, teacher: nowhere}", "model.loss.teacher=nowhere: .*nowhere"),
        ("{name: distillation, teacher: TEACHER}", "has no output 'score', model.loss.output; choose"),
        ("{name: distillation, teacher: TEACHER, output: stay}", "predicts values, and model.loss.of_label="),
        ("{name: distillation, teacher: TEACHER, weight: 2}", "weight=2: must be less than or equal to 1"),
    ],
)
def test_a_teacher_that_does_not_fit_is_one_line(folder: Path, chosen: str, message: str) -> None:
    loss = f"model.loss={chosen}".replace("TEACHER", f"'{folder / 'teacher'}'")
    with pytest.raises(UserError, match=message) as refused:
        report_of(folder / "rows.parquet", None, loss, *DLRM, labels="[buy]")
    assert "\n" not in str(refused.value)


def test_a_teacher_of_other_features_is_one_line(folder: Path, tmp_path: Path) -> None:
    """By name, and by what preparation has learnt."""
    loss = f"model.loss={{name: distillation, teacher: '{folder / 'teacher'}', output: buy}}"
    fewer = "data.features={labels: [buy], features: [{name: user, ids: rows, rows: 30}]}"
    with pytest.raises(UserError, match="teacher=.*the data lacks item: the model was trained on 2 sparse"):
        recpipe.train(None, folder / "rows.parquet", *QUIET, fewer, loss, *DLRM, quiet=True)
    words = "data.features={labels: [buy], features: [{name: item, ids: vocabulary}]}"
    file, other = folder / "rows.parquet", tmp_path / "other.parquet"
    rows = pq.read_table(file)
    recpipe.train(None, file, *QUIET, words, *DLRM, output=tmp_path / "t", quiet=True).close()
    pq.write_table(rows.set_column(5, "item", [[30 + i for i in rows["item"].to_pylist()]]), other)
    loss = f"model.loss={{name: distillation, teacher: '{tmp_path / 't'}'}}"
    with pytest.raises(UserError, match="vocabularies, scales or edges were learnt from other"):
        recpipe.train(None, other, *QUIET, words, loss, *DLRM, quiet=True)
