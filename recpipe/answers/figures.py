"""Figures of quality with 95% intervals, from all predictions and labels of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.model.metrics import Kind, judged

Float64 = NDArray[np.float64]
REPLICATES = 1000
GROUPS = 2000
"""Rows are resampled in so many groups, of every 2000th row each, or singly if there are fewer rows."""
CHUNK = 1 << 20
"""Rows of which sums are taken at a time."""
_Z95 = 1.959964
CALIBRATION = "calibration"


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


def judge(kind: Kind, labels: torch.Tensor, predictions: torch.Tensor, quick: bool = False) -> Judged:
    """The figures of ``predictions`` float32 [N] (logits for clicks) of ``labels`` float32 [N].

    They are those of training's reports, and the calibration: mean prediction / mean label. The interval of
    AUC is DeLong's; those of means and of their ratios (logloss, NE, calibration, MSE, RMSE, MAE) are
    percentiles of a bootstrap over groups of rows, with a fixed seed, whose draws take a tenth of a second.
    If ``quick``, they are by the jackknife over the same groups (Efron and Stein, Annals of Statistics 1981).
    """
    clicks = kind == "clicks" and bool(((labels == 0) | (labels == 1)).all())
    found = {
        name: value for name, value in asdict(judged(kind, labels, predictions)).items() if name != "loss"
    }
    sums = _group_sums(kind, labels, predictions)
    wanted = ("auc", "logloss", "ne") if clicks else tuple(n for n, v in found.items() if not math.isnan(v))
    figures: dict[str, Interval] = {}
    interval = _jackknifed if quick else _bootstrapped
    others = _left_out(sums) if quick else _resampled(sums)
    for name in wanted:
        if name == "auc":
            figures[name] = _delong(found[name], labels, predictions)
        else:
            figures[name] = interval(found[name], others, _OF_SUMS.get(name))
    total = sums.sum(axis=0, keepdims=True)
    if clicks or kind != "clicks":
        figures[CALIBRATION] = interval(float(_calibration(total)[0]), others, _calibration)
    positives = int((labels == 1).sum()) if clicks else None
    return Judged(labels.numel(), positives, figures)


_N, _LABEL, _PREDICTED, _LOSS, _SQUARE, _ABSOLUTE = range(6)


def _group_sums(kind: Kind, labels: torch.Tensor, predictions: torch.Tensor) -> Float64:
    """[groups, 6]: rows, and sums of labels, predictions, logloss, squared and absolute errors."""
    groups = max(1, min(GROUPS, labels.numel()))
    sums = np.zeros((groups, 6))
    for low in range(0, labels.numel(), CHUNK):
        label, raw = (part[low : low + CHUNK].double() for part in (labels, predictions))
        value = raw.sigmoid() if kind == "clicks" else raw.exp() if kind == "counts" else raw
        loss = torch.nn.functional.binary_cross_entropy_with_logits(raw, label, reduction="none")
        apart = value - label
        which = (np.arange(low, low + len(label))) % groups
        for column, part in enumerate(
            (torch.ones_like(label), label, value, loss, apart.square(), apart.abs())
        ):
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


def _resampled(sums: Float64) -> Float64:
    """The sums of ``REPLICATES`` samples of the groups, with replacement; none of a single group."""
    return _draws(len(sums), REPLICATES) @ sums if len(sums) > 1 else sums[:0]


@lru_cache(maxsize=1)
def _draws(groups: int, replicates: int) -> Float64:
    """How often each of ``groups`` is in each sample: float64 [replicates, groups]. They are the same for the
    slices of an evaluation."""
    drawn = np.random.default_rng(0).multinomial(groups, np.full(groups, 1 / groups), replicates)
    return drawn.astype(np.float64)


def _bootstrapped(value: float, resampled: Float64, figure: Callable[[Float64], Float64] | None) -> Interval:
    """``value`` with the percentiles of ``figure`` over ``resampled`` groups."""
    if figure is None or math.isnan(value):
        return Interval(value)
    found = figure(resampled)
    found = found[np.isfinite(found)]
    if not len(found):
        return Interval(value)
    low, high = np.percentile(found, [2.5, 97.5])
    return Interval(value, float(low), float(high))


def _left_out(sums: Float64) -> Float64:
    """The sums without each of the groups; none of a single group."""
    return sums.sum(axis=0) - sums if len(sums) > 1 else sums[:0]


def _jackknifed(value: float, left: Float64, figure: Callable[[Float64], Float64] | None) -> Interval:
    """``value`` and twice the spread of ``figure`` as each of the groups is ``left`` out."""
    if figure is None or math.isnan(value):
        return Interval(value)
    found = figure(left)
    found = found[np.isfinite(found)]
    if len(found) < 2:
        return Interval(value)
    spread = _Z95 * math.sqrt((len(found) - 1) * float(found.var()))
    return Interval(value, value - spread, value + spread)


def _delong(value: float, labels: torch.Tensor, scores: torch.Tensor) -> Interval:
    """``value``, the AUC, with the interval by its variance (DeLong et al., Biometrics 1988): that of the
    share of negatives below each positive, and of positives above each negative."""
    if math.isnan(value):
        return Interval(value)
    positive = labels > 0.5
    shares = []
    for own, others in ((positive, ~positive), (~positive, positive)):
        those = scores[others].sort().values
        mine = scores[own]
        below = torch.searchsorted(those, mine, right=False) + torch.searchsorted(those, mine, right=True)
        shares.append(below.double() / (2 * len(those)))
    if min(map(len, shares)) < 2:
        return Interval(value)
    spread = _Z95 * math.sqrt(sum(float(share.var()) / len(share) for share in shares))
    return Interval(value, max(0.0, value - spread), min(1.0, value + spread))
