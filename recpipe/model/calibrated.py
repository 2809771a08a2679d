"""Whether predictions are right on average: over all samples, in bins, and after a map fitted to some."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from recpipe.errors import UserError
from recpipe.model.scores import Scores

PLATT, ISOTONIC = "platt", "isotonic"
"""The values of ``metrics.recalibrate``: a logistic regression on the logit, or a monotonous function."""


@dataclass(frozen=True)
class Calibration:
    """Held-out samples in bins by their predicted click rate, lowest first."""

    predicted: list[float]
    """The mean predicted rate of each bin."""
    observed: list[float]
    """The share of clicks in each bin."""
    samples: list[int]


def calibration(scores: Scores) -> Calibration | None:
    """The bins of ``scores``, means weighted as its samples are; None unless they are clicks."""
    if scores.kind != "clicks" or not scores.binary or scores.bins is None:
        return None
    bins = scores.bins
    return Calibration(bins.expected.tolist(), bins.observed.tolist(), bins.samples.tolist())


def ratio(scores: Scores) -> float:
    """The mean prediction divided by the mean label; NaN where that is 0."""
    return scores.mean(scores.expected) / scores.rate if scores.rate else math.nan


def ratio_influence(scores: Scores, value: float) -> torch.Tensor:
    """float64 [N]."""
    return (scores.expected - value * scores.observed) / scores.rate


def expected_calibration_error(scores: Scores) -> float:
    """The mean over samples of the distance between predicted and observed rate of their bin (Naeini et al.,
    AAAI 2015, with bins of equally many samples)."""
    if scores.bins is None:
        return math.nan
    weight = scores.bins.weight
    return float(((scores.bins.expected - scores.bins.observed).abs() * weight).sum() / weight.sum())


def recalibrated(scores: Scores, how: str) -> Scores | None:
    """Every second sample of ``scores``, clicks, with logits mapped as fits the others best; None if one of
    the halves has one class alone, or a prediction is not finite."""
    halves = [
        Scores("clicks", *(part[start::2] for part in (scores.labels, scores.raw, *_weights(scores))))
        for start in (0, 1)
    ]
    if any(not 0 < half.rate < 1 or not bool(half.raw.isfinite().all()) for half in halves):
        return None
    return Scores("clicks", halves[1].labels, _fitted(halves[0], halves[1].raw, how), halves[1].weights)


def _weights(scores: Scores) -> list[torch.Tensor]:
    return [] if scores.weights is None else [scores.weights]


def _fitted(to: Scores, raw: torch.Tensor, how: str) -> torch.Tensor:
    """``raw`` logits [N] as the map that fits ``to`` best gives them."""
    try:
        from sklearn.isotonic import IsotonicRegression
        from sklearn.linear_model import LogisticRegression
    except ImportError as fault:
        raise UserError(
            f"metrics.recalibrate={how}: needs scikit-learn, of which null needs none: "
            "pip install 'recpipe[metrics]'"
        ) from fault
    weights = None if to.weights is None else to.weights.numpy()
    if how == PLATT:
        line = LogisticRegression(C=math.inf, tol=1e-8)
        line.fit(to.raw.double().numpy()[:, None], to.labels.numpy(), weights)
        return torch.from_numpy(line.decision_function(raw.double().numpy()[:, None]))
    # A step whose samples are all of one class would give a logit that is not finite.
    least = 0.5 / len(to)
    steps = IsotonicRegression(y_min=least, y_max=1 - least, out_of_bounds="clip")
    steps.fit(to.expected.numpy(), to.observed.numpy(), weights)
    return torch.from_numpy(steps.predict(raw.double().sigmoid().numpy())).logit()
