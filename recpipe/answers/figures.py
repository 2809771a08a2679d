"""Figures of quality with 95% intervals, from all predictions and labels of an evaluation, and how the scores
and ids of two sets of samples differ: histograms, population stability, saturation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.model.metrics import Kind, judged, known

Float64 = NDArray[np.float64]
REPLICATES = 1000
GROUPS = 2000
"""Rows are resampled in so many groups, of every 2000th row each, or singly if there are fewer rows."""
CHUNK = 1 << 20
"""Rows of which sums are taken at a time."""
_Z95 = 1.959964
CALIBRATION = "calibration"
BINS = 20
"""Bins of a reference histogram, with about equally many samples each."""
SATURATED = 1e-4
"""A probability nearer than this to 0 or 1 is saturated."""
_SATURATED_LOGIT = float(np.log((1 - SATURATED) / SATURATED))
_SMALLEST = 0.5
"""Added to every bin's count, so that an empty bin gives a finite figure."""


@dataclass(frozen=True)
class Interval:
    """A figure and its 95% interval, NaN where it is not defined."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, where NaN is null."""
        return {key: None if math.isnan(x) else x for key, x in asdict(self).items()}


@dataclass(frozen=True)
class Judged:
    """The figures of one task on some rows."""

    samples: int
    positives: int | None
    """Rows with label 1; None unless labels are clicks."""
    figures: dict[str, Interval]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        figures = {name: figure.to_dict() for name, figure in self.figures.items()}
        return {"samples": self.samples, "positives": self.positives, "figures": figures}


def judge(
    kind: Kind,
    labels: torch.Tensor,
    predictions: torch.Tensor,
    quick: bool = False,
    weights: torch.Tensor | None = None,
) -> Judged:
    """The figures of ``predictions`` float32 [N] (logits for clicks) of ``labels`` float32 [N], with
    ``weights`` [N] weighted ones, of the rows whose weight is above 0.

    They are those of training's reports, and the calibration: mean prediction / mean label. The interval of
    AUC is DeLong's; those of means and of their ratios (logloss, NE, calibration, MSE, RMSE, MAE) are
    percentiles of a bootstrap over groups of rows, with a fixed seed, whose draws take a tenth of a second.
    If ``quick``, they are by the jackknife over the same groups (Efron and Stein, Annals of Statistics 1981).
    """
    labels, predictions, weights = known(labels, predictions, weights)
    clicks = kind == "clicks" and bool(((labels == 0) | (labels == 1)).all())
    found = asdict(judged(kind, labels, predictions, weights))
    sums = _group_sums(kind, labels, predictions, weights)
    if len(sums) == 1:
        others = sums[:0]
    else:
        others = sums.sum(axis=0) - sums if quick else _draws(len(sums), REPLICATES) @ sums
    wanted = [name for name, value in found.items() if name != "loss" and not math.isnan(value)]
    figures: dict[str, Interval] = {}
    for name in ("auc", "logloss", "ne") if clicks else wanted:
        if name == "auc":
            figures[name] = _delong(found[name], labels, predictions, weights)
        else:
            figures[name] = _interval(found[name], others, _OF_SUMS.get(name), quick)
    if clicks or kind in ("values", "counts"):
        total = float(_calibration(sums.sum(axis=0, keepdims=True))[0])
        figures[CALIBRATION] = _interval(total, others, _calibration, quick)
    positives = int((labels == 1).sum()) if clicks else None
    return Judged(labels.numel(), positives, figures)


_N, _LABEL, _PREDICTED, _LOSS, _SQUARE, _ABSOLUTE = range(6)


def _group_sums(
    kind: Kind, labels: torch.Tensor, predictions: torch.Tensor, weights: torch.Tensor | None
) -> Float64:
    """[groups, 6]: weights, 1 where there are none, and sums of weight times label, prediction, logloss,
    squared and absolute error."""
    groups = max(1, min(GROUPS, labels.numel()))
    sums = np.zeros((groups, 6))
    for low in range(0, labels.numel(), CHUNK):
        label, raw = (part[low : low + CHUNK].double() for part in (labels, predictions))
        value = raw.sigmoid() if kind == "clicks" else raw.exp() if kind == "counts" else raw
        loss = torch.nn.functional.binary_cross_entropy_with_logits(raw, label, reduction="none")
        apart = value - label
        which = (np.arange(low, low + len(label))) % groups
        parts = [torch.ones_like(label), label, value, loss, apart.square(), apart.abs()]
        if weights is not None:
            parts = [part * weights[low : low + CHUNK].double() for part in parts]
        for column, part in enumerate(parts):
            sums[:, column] += np.bincount(which, weights=part.numpy(), minlength=groups)
    return sums


def _calibration(sums: Float64) -> Float64:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sums[:, _LABEL] != 0, sums[:, _PREDICTED] / sums[:, _LABEL], np.nan)


def _normalized_entropy(sums: Float64) -> Float64:
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = sums[:, _LABEL] / sums[:, _N]
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        return sums[:, _LOSS] / sums[:, _N] / entropy


_OF_SUMS: dict[str, Callable[[Float64], Float64]] = {
    "logloss": lambda sums: sums[:, _LOSS] / sums[:, _N],
    "ne": _normalized_entropy,
    "mse": lambda sums: sums[:, _SQUARE] / sums[:, _N],
    "rmse": lambda sums: np.sqrt(sums[:, _SQUARE] / sums[:, _N]),
    "mae": lambda sums: sums[:, _ABSOLUTE] / sums[:, _N],
}


@lru_cache(maxsize=1)
def _draws(groups: int, replicates: int) -> Float64:
    """How often each of ``groups`` is in each of so many samples with replacement: float64
    [replicates, groups]. They are the same for the slices of an evaluation."""
    drawn = np.random.default_rng(0).multinomial(groups, np.full(groups, 1 / groups), replicates)
    return drawn.astype(np.float64)


def _interval(
    value: float, others: Float64, figure: Callable[[Float64], Float64] | None, quick: bool
) -> Interval:
    """``value`` with the percentiles of ``figure`` over ``others``, resampled groups, or, if ``quick``, with
    twice its spread as each of the groups is left out."""
    if figure is None or math.isnan(value):
        return Interval(value)
    found = figure(others)
    found = found[np.isfinite(found)]
    if len(found) < (2 if quick else 1):
        return Interval(value)
    if quick:
        spread = _Z95 * math.sqrt((len(found) - 1) * float(found.var()))
        return Interval(value, value - spread, value + spread)
    low, high = np.percentile(found, [2.5, 97.5])
    return Interval(value, float(low), float(high))


def _delong(
    value: float, labels: torch.Tensor, scores: torch.Tensor, weights: torch.Tensor | None
) -> Interval:
    """``value``, the AUC, with the interval by its variance (DeLong et al., Biometrics 1988): that of the
    share of negatives below each positive, and of positives above each negative. With weights, shares are of
    weight, and the variance of their weighted mean is sum((weight * difference)^2) / sum(weight)^2."""
    if math.isnan(value):
        return Interval(value)
    positive, variance = labels > 0.5, 0.0
    if min(int(positive.sum()), int((~positive).sum())) < 2:
        return Interval(value)
    for own, others in ((positive, ~positive), (~positive, positive)):
        those, order = scores[others].sort()
        mine = scores[own]
        ends = [torch.searchsorted(those, mine, right=side) for side in (False, True)]
        if weights is None:
            share = (ends[0] + ends[1]).double() / (2 * len(those))
            variance += float(share.var()) / len(share)
            continue
        running = torch.cat([torch.zeros(1, dtype=torch.float64), weights[others][order].double().cumsum(0)])
        share, weight = (running[ends[0]] + running[ends[1]]) / (2 * running[-1]), weights[own].double()
        apart = share - (share * weight).sum() / weight.sum()
        variance += float((weight * apart).square().sum() / weight.sum() ** 2)
    spread = _Z95 * math.sqrt(variance)
    return Interval(value, max(0.0, value - spread), min(1.0, value + spread))


def predictions(kind: Kind, scores: NDArray[np.float32]) -> Float64:
    """What raw ``scores`` mean: the probability of logits, the rate of its logarithm, or the value itself."""
    raw = scores.astype(np.float64)
    with np.errstate(over="ignore"):
        if kind == "clicks":
            return 1 / (1 + np.exp(-raw))
        return np.exp(raw) if kind == "counts" else raw


def edges(scores: NDArray[np.float32]) -> list[float]:
    """The inner edges of ``BINS`` bins with about equally many of the finite ``scores`` [N] each; fewer where
    scores are equal."""
    finite = scores[np.isfinite(scores)]
    if not len(finite):
        return []
    inner = np.quantile(finite, np.arange(1, BINS) / BINS, method="higher")
    return [float(edge) for edge in np.unique(inner)]


def histogram(scores: NDArray[np.float32], inner: Sequence[float]) -> NDArray[np.int64]:
    """How many ``scores`` [N] are in each of the ``len(inner) + 1`` bins; scores that are no number are left
    out."""
    there = scores[~np.isnan(scores)]
    bins = np.searchsorted(np.asarray(inner, np.float32), there, side="right")
    return np.bincount(bins, minlength=len(inner) + 1)


def stability(counts: Sequence[float] | NDArray[np.int64], reference: Sequence[float]) -> float:
    """The population stability index of two histograms over the same bins: the sum over bins of
    (p - q) * log(p / q), for shares p and q. 0 if they are alike; NaN without samples.

    Two samples of N and M of one distribution give about (bins - 1) * (1 / N + 1 / M).
    """
    found, known = np.asarray(counts, np.float64), np.asarray(reference, np.float64)
    if not found.sum() or not known.sum():
        return float("nan")
    p, q = ((part + _SMALLEST) / (part.sum() + _SMALLEST * len(part)) for part in (found, known))
    return float(((p - q) * np.log(p / q)).sum())


def saturated(scores: NDArray[np.float32]) -> int:
    """How many of the logits ``scores`` give a probability within ``SATURATED`` of 0 or 1."""
    return int((np.abs(scores) > _SATURATED_LOGIT).sum())


def ids_with_row(
    row: int, ids: NDArray[np.int64], weights: NDArray[np.int64] | int, each: NDArray[np.int64]
) -> Float64:
    """For each feature, how many of its ids are this ``row``; float64 [F].

    ``ids``: by feature, ``each`` [F] of them; ``weights``: how many times each id counts.
    """
    running = np.concatenate([[0], np.cumsum((ids == row) * weights)])
    ends = np.cumsum(each)
    found: Float64 = (running[ends] - running[ends - each]).astype(np.float64)
    return found
