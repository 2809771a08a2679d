"""Figures on the held-out part by what a model predicts: clicks, values, counts, or nothing that is known."""

from __future__ import annotations

import io
import json
import math
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torchmetrics.functional import (
    mean_absolute_error,
    mean_squared_error,
    tweedie_deviance_score,
)
from torchmetrics.functional.classification import binary_auroc
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.errors import UserError
from recpipe.model.background import BackgroundQuality
from recpipe.model.metrics import judged
from recpipe.report import html, run_page, run_table, sweep
from recpipe.report.compared import Rounds, RowResult, Run, summarise
from recpipe.report.comparison import print_result, write_html
from recpipe.report.figures import CLICKS, labelled, shown_figures

QUIET = ("trainer.progress=false",)
OTHERS = {"mse", "rmse", "mae", "poisson_deviance"}


@dataclass
class Visits:
    ids: KeyedJaggedTensor
    clicked: torch.Tensor
    seconds: torch.Tensor
    pages: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Visits:
        return Visits(*(part.to(device) for part in vars(self).values()))


def visits(count: int, seed: int, size: int = 32) -> list[Visits]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(0, 40, (size,), generator=generator)
        rate = ids.float() / 40
        clicked = (torch.rand(size, generator=generator) < rate).float()
        pages = torch.poisson(2 * rate, generator=generator)
        kjt = KeyedJaggedTensor(["item"], ids, lengths=torch.ones(size, dtype=torch.long))
        found.append(Visits(kjt, clicked, 3 * rate, pages))
    return found


class Visitor(nn.Module):
    """Returns what ``gives`` makes of one value for each sample, [B]."""

    def __init__(self, gives=lambda values, batch: values) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.gives = gives
        table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=40, feature_names=["item"])
        self.rows, self.over = EmbeddingBagCollection([table]), nn.Linear(4, 1)

    def forward(self, batch):
        return self.gives(self.over(self.rows(batch.ids).values()).squeeze(1), batch)


HELD_OUT = visits(3, seed=9)


def trained(model: nn.Module, *words: str, **more) -> tuple[dict, torch.Tensor]:
    """The report, and the predictions of the held-out part."""
    with recpipe.train(
        model, visits(6, seed=1), *QUIET, *words, held_out=HELD_OUT, quiet=True, **more
    ) as run:
        return run.report, torch.cat([run.predict(batch) for batch in HELD_OUT])


def held_out(name: str) -> torch.Tensor:
    return torch.cat([getattr(batch, name) for batch in HELD_OUT])


@pytest.mark.parametrize("loss", ["mean_squared_error", "mean_absolute_error", "huber"])
def test_of_values(loss) -> None:
    report, predicted = trained(Visitor(), f"model.loss={loss}", "model.labels=seconds")
    quality, labels = report["quality"], held_out("seconds")
    assert quality["mse"] == pytest.approx(float(mean_squared_error(predicted, labels)), rel=1e-5)
    assert quality["rmse"] == pytest.approx(quality["mse"] ** 0.5)
    assert quality["mae"] == pytest.approx(float(mean_absolute_error(predicted, labels)), rel=1e-5)
    if loss == "mean_squared_error":
        assert quality["loss"] == pytest.approx(quality["mse"], rel=1e-5)
    assert [*quality] == ["mse", "rmse", "mae", "calibration", "loss"]
    assert report["history"][-1]["rmse"] == quality["rmse"]
    assert report["history"][-1]["eval_loss"] == quality["loss"]


def test_of_counts() -> None:
    report, predicted = trained(Visitor(), "model.loss=poisson", "model.labels=pages")
    quality, labels = report["quality"], held_out("pages")
    theirs = tweedie_deviance_score(predicted.exp(), labels, power=1)
    assert quality["poisson_deviance"] == pytest.approx(float(theirs), rel=1e-5)
    log_likelihood = nn.functional.poisson_nll_loss(predicted, labels)
    assert quality["loss"] == pytest.approx(float(log_likelihood), rel=1e-5)
    assert [*quality] == ["poisson_deviance", "calibration", "loss"]


def with_loss(label: str):
    def gives(values, batch):
        return (values - getattr(batch, label)).square().mean(), values

    return gives


def test_of_clicks_whose_loss_is_the_models_own() -> None:
    report, predicted = trained(Visitor(with_loss("clicked")), "model.labels=clicked")
    quality, labels = report["quality"], held_out("clicked")
    assert quality["auc"] == pytest.approx(float(binary_auroc(predicted, labels.int())), abs=1e-4)
    assert quality["logloss"] is not None
    assert quality["loss"] == pytest.approx(float((predicted - labels).square().mean()), rel=1e-5)
    assert not OTHERS & {*quality}


def only_the_loss(report: dict) -> float:
    assert [*report["quality"]] == ["loss"]
    return report["quality"]["loss"]


@pytest.mark.parametrize(
    ("words", "gives"),
    [
        (("model.labels=seconds",), with_loss("seconds")),
        ((), with_loss("seconds")),
        ((), lambda values, batch: (values.square().mean(), {"a": values, "b": values})),
        ((), lambda values, batch: (values.square().mean(), torch.stack([values] * 3, dim=1))),
    ],
    ids=["labels that are not 0/1", "no labels", "two outputs", "three values a sample"],
)
def test_else_the_loss_alone(words, gives) -> None:
    report, *_ = trained_only(Visitor(gives), *words)
    assert only_the_loss(report) > 0


def test_two_losses_have_figures_of_each() -> None:
    gives = lambda values, batch: {"clicked": values, "seconds": values}  # noqa: E731
    words = ("model.loss={clicked: binary_cross_entropy, seconds: huber}", "model.labels=__dict__")
    report, *_ = trained(Visitor(gives), *words)
    clicked, seconds = (report["quality_by_label"][name] for name in ("clicked", "seconds"))
    assert report["quality"] == {**clicked, "loss": clicked["loss"] + seconds["loss"]}
    assert clicked["auc"] is not None
    assert ("auc" in seconds, seconds["mse"] > 0) == (False, True)


def trained_only(model: nn.Module, *words: str) -> tuple[dict]:
    with recpipe.train(model, visits(4, seed=1), *QUIET, *words, held_out=HELD_OUT, quiet=True) as run:
        assert "loss" in repr(run)
        return (run.report,)


def test_a_prediction_that_the_recipe_names_and_the_output_lacks_is_refused() -> None:
    """In the middle of an epoch, whose threads end although the error is kept."""
    gives = lambda values, batch: (values.square().mean(), {"a": values, "b": values})  # noqa: E731
    before = threading.enumerate()
    with pytest.raises(
        UserError, match=r"model.prediction='?c'?: the model's output has no such part"
    ) as kept:
        trained(Visitor(gives), "model.prediction=c", "model.labels=clicked", "trainer.eval_every=2")
    assert threading.enumerate() == before, kept.value


def test_a_loss_that_sums_is_told_by_batch_as_in_training() -> None:
    def gives(values, batch):
        return (values - batch.seconds).square().sum(), values

    report, predicted = trained(Visitor(gives), "model.labels=seconds", "optim.tables.lr=1e-3")
    apart = (predicted - held_out("seconds")).square().sum() / len(HELD_OUT)
    assert only_the_loss(report) == pytest.approx(float(apart), rel=1e-4)


def test_what_a_run_leaves_shows_what_fits(tmp_path: Path) -> None:
    model = Visitor()
    report, _ = trained(
        model, "model.loss=mean_squared_error", "model.labels=seconds", "trainer.logger=csv", output=tmp_path
    )
    page = html.render(run_page.page(report))
    assert "RMSE on the held-out part" in page
    assert "AUC" not in page.partition("<h2>Recipe")[0]
    console = Console(file=io.StringIO(), record=True, width=100)
    run_table.print_result(report, tmp_path, console)
    line = next(line for line in console.export_text().splitlines() if line.strip().startswith("quality"))
    assert line.split()[1::2] == ["loss", "MSE", "RMSE", "MAE"]
    logged = (tmp_path / "logs" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {name for name in logged if name.startswith("val/")} == {
        "val/loss",
        "val/mse",
        "val/rmse",
        "val/mae",
        "val/calibration",
    }
    assert json.loads((tmp_path / "report.json").read_text())["quality"].keys() == report["quality"].keys()


def test_a_comparison_of_such_runs(tmp_path: Path) -> None:
    report, _ = trained(Visitor(), "model.loss=poisson", "model.labels=pages")
    results = [RowResult("one"), RowResult("two")]
    for result in results:
        result.runs.append(Run(round=0, seed=1, counts=True, report=report))
    rows = summarise(results, Rounds(warmup=0, finished=1), {})
    assert rows[1]["poisson_deviance_difference"] == 0
    content = {"rows": rows, "partial": False, "rounding": None, "environment": report["environment"]}
    content |= {"overrides": {}, "repetitions": 1, "warmup": 0, "seeds": 1}
    content |= {"counted": 1, "precision": None, "precise": None, "minutes": None, "out_of_time": False}
    console = Console(file=io.StringIO(), record=True, width=100)
    print_result(content, console)
    text = console.export_text()
    assert "Poisson deviance" in text.replace("\n", " ") or "Poisson" in text
    assert "AUC" not in text
    page = write_html(content, tmp_path / "compare.html").read_text()
    assert "Poisson deviance on the held-out part" in page
    assert '<th class="n">Poisson deviance</th>' in page


def test_a_sweep_of_such_runs(tmp_path: Path) -> None:
    reports = [
        trained(Visitor(), f"model.loss={loss}", "model.labels=seconds", output=tmp_path / str(number))[0]
        for number, loss in enumerate(("mean_squared_error", "huber"))
    ]
    console = Console(file=io.StringIO(), record=True, width=80)
    jobs = sweep.report(tmp_path, console)
    text = console.export_text()
    assert all(f"{report['quality']['rmse']:.4f}" in text for report in reports)
    assert [job.quality for job in jobs] == [report["quality"] for report in reports]
    assert "AUC" not in text


# -- the figures themselves ------------------------------------------------------------------------


def test_clicks_need_labels_of_0_and_1() -> None:
    scores = torch.tensor([0.1, 0.2])
    assert judged("clicks", torch.tensor([0.0, 1.0]), scores)["auc"] == 1
    for labels in (torch.tensor([0.0, 2.0]), torch.tensor([0.5, 1.0])):
        assert judged("clicks", labels, scores) == {}


def test_counts_below_zero_have_no_deviance() -> None:
    assert math.isnan(judged("counts", torch.tensor([-1.0]), torch.tensor([0.0]))["poisson_deviance"])
    assert judged("counts", torch.tensor([0.0]), torch.tensor([0.0]))["poisson_deviance"] == 2


def test_the_loss_is_a_mean_over_samples_of_unequal_batches() -> None:
    background = BackgroundQuality("values")
    background.add_loss(6.0, 3)
    background.add_loss(4.0, 1)
    assert background.submit().result(10)["loss"] == 2.5
    background.add_loss(1.0, 1)
    assert background.submit().result(10)["loss"] == 1


def test_which_figures_are_shown() -> None:
    nothing = dict.fromkeys(CLICKS)
    assert shown_figures([nothing]) == list(CLICKS)
    assert shown_figures([nothing, {"loss": 1.0}]) == ["loss"]
    assert shown_figures([{"loss": 1.0, "rmse": 2.0}, {"loss": 1.0, "logloss": 0.5}]) == [
        *CLICKS,
        "loss",
        "rmse",
    ]
    assert shown_figures([{"loss": 1.0, "auc": None, "logloss": 0.5, "ne": None}]) == list(CLICKS)
    assert labelled({"loss": 1.0, "rmse": 2.0, "mae": float("nan")}) == [("loss", 1.0), ("RMSE", 2.0)]
