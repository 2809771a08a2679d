"""AUC, logloss and NE against brute force and TorchRec; the worker thread."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from recpipe.model import background as background_module
from recpipe.model.background import BackgroundQuality
from recpipe.model.calibrated import Calibration
from recpipe.model.calibrated import calibration as calibration_of
from recpipe.model.metrics import Interval, Judged, Quality, auc, judged
from recpipe.model.scores import Scores


def quality(labels: torch.Tensor, logits: torch.Tensor) -> Quality:
    return judged("clicks", labels, logits)


def calibration(*parts: torch.Tensor) -> Calibration | None:
    return calibration_of(Scores("clicks", *parts))


def brute_force_auc(labels: torch.Tensor, scores: torch.Tensor) -> float:
    difference = scores[labels > 0.5].double()[:, None] - scores[labels < 0.5].double()[None]
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())


def sample(size: int = 1500, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator)
    return (torch.rand(size, generator=generator) < logits.sigmoid()).float(), logits


@pytest.mark.parametrize("shape", ["continuous", "ties", "all tied", "large logits"])
def test_auc_equals_the_fraction_of_ordered_pairs(shape: str) -> None:
    labels, logits = sample()
    scores = {
        "continuous": logits,
        "ties": (logits * 3).round(),
        "all tied": torch.zeros_like(logits),
        "large logits": logits + 20,
    }[shape]
    assert auc(labels, scores) == pytest.approx(brute_force_auc(labels, scores), abs=1e-12)


def test_large_logits_are_where_torchmetrics_is_off() -> None:
    """Why auc is our own: if this fails, torchmetrics could do it."""
    labels, logits = sample()
    theirs = float(binary_auroc(logits + 20, labels.int()))
    assert abs(theirs - brute_force_auc(labels, logits)) > 0.1


def test_auc_takes_arrays_and_keeps_order() -> None:
    labels, scores = np.array([0, 0, 1, 1], np.float32), np.array([0.1, 0.4, 0.35, 0.8], np.float32)
    assert auc(labels, scores) == 0.75
    assert auc(labels, -scores) == 0.25


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_single_class_is_nan_and_not_a_crash(label: float) -> None:
    result = quality(torch.full((8,), label), torch.linspace(-1, 1, 8))
    assert math.isnan(result["auc"])
    assert math.isnan(result["ne"])
    assert math.isfinite(result["logloss"])


def test_no_samples_and_nan_scores_are_nan() -> None:
    assert quality(torch.empty(0), torch.empty(0)) == {}
    assert math.isnan(auc(torch.tensor([0.0, 1.0]), torch.tensor([math.nan, 1.0])))


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="3 labels, but 2 scores"):
        auc(torch.zeros(3), torch.zeros(2))


def test_logloss_and_ne_equal_torchrec() -> None:
    from torchrec.metrics.ne import compute_cross_entropy, compute_ne

    labels, logits = sample()
    weights = torch.ones_like(labels)
    bits = compute_cross_entropy(labels, logits.double().sigmoid(), weights, 1e-12).sum()
    clicks = labels.double().sum()
    ne = compute_ne(bits, weights.double().sum(), clicks, len(labels) - clicks, 1e-12)
    assert quality(labels, logits)["logloss"] == pytest.approx(
        float(bits) * math.log(2) / len(labels), rel=1e-9
    )
    assert quality(labels, logits)["ne"] == pytest.approx(float(ne), rel=1e-9)


def test_the_mean_label_has_normalized_entropy_one() -> None:
    labels, _ = sample()
    rate = labels.double().mean()
    assert quality(labels, torch.full_like(labels, float(torch.logit(rate))))["ne"] == pytest.approx(
        1, abs=1e-6
    )


def test_background_quality_equals_foreground_and_copies_what_it_keeps() -> None:
    background = BackgroundQuality()
    labels, logits = sample()
    for chunk in range(0, len(labels), 400):
        kept = logits[chunk : chunk + 400].clone().requires_grad_()
        background.add(kept.unsqueeze(1), labels[chunk : chunk + 400])
        with torch.no_grad():
            kept.zero_()  # the training's next step may reuse the memory
    first = background.submit()
    background.add(logits[:100], labels[:100])
    second = background.submit()
    for kept, part in ((first, slice(None)), (second, slice(100))):
        told = kept.result()
        assert math.isnan(told.pop("loss")), "none was added"
        assert told == quality(labels[part], logits[part])


def test_submit_does_not_wait_for_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, workers = threading.Event(), []

    def slow(*_: object) -> Judged:
        workers.append(threading.current_thread())
        assert gate.wait(10)
        return Judged(2, 1, {"auc": Interval(0.5)})

    monkeypatch.setattr(background_module, "judge", slow)
    background = BackgroundQuality()
    background.add(torch.zeros(2), torch.zeros(2))
    future = background.submit()
    assert not future.done()
    gate.set()
    assert future.result(10)["auc"] == 0.5
    assert workers != [threading.current_thread()]
    assert workers[0].daemon, "a run that was stopped must not wait for it"


def test_a_fault_in_the_thread_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "judge", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        BackgroundQuality().submit().result(10)


@pytest.mark.parametrize("count", [7, 1000, 200_001])
def test_calibration_bins_have_all_samples_and_about_equally_many(count: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(count)
    found = calibration((torch.rand(count) < logits.sigmoid()).float(), logits)
    assert found is not None
    assert sum(found.samples) == count
    assert len(found.samples) == min(count, 10)
    assert found.predicted == sorted(found.predicted)
    if count > 100:
        assert max(found.samples) < 1.1 * min(found.samples)
    weights = torch.tensor(found.samples, dtype=torch.float64) / count
    mean = float((weights * torch.tensor(found.predicted)).sum())
    assert mean == pytest.approx(float(logits.double().sigmoid().mean()))


def test_calibration_tells_true_rates_from_shifted_ones() -> None:
    torch.manual_seed(0)
    logits = torch.randn(100_000)
    labels = (torch.rand(100_000) < logits.sigmoid()).float()

    def off(shift: float) -> float:
        found = calibration(labels, logits + shift)
        assert found is not None
        return max(abs(p - o) for p, o in zip(found.predicted, found.observed, strict=True))

    assert off(0.0) < 0.02
    assert off(0.5) > 0.08


def test_equal_predictions_are_one_bin_and_other_labels_none() -> None:
    found = calibration(torch.tensor([1.0, 0, 0, 0]), torch.zeros(4))
    assert found == Calibration([0.5], [0.25], [4])
    assert calibration(torch.tensor([2.0]), torch.zeros(1)) is None
    assert calibration(torch.empty(0), torch.empty(0)) is None
    assert calibration(torch.ones(1), torch.tensor([math.nan])) is None


def test_only_clicks_are_calibrated() -> None:
    for kind, there in (("clicks", True), ("counts", False)):
        background = BackgroundQuality(kind)  # type: ignore[arg-type]
        background.add(torch.zeros(2), torch.ones(2))
        background.submit().result(10)
        assert (background.calibration is not None) == there
