"""Metrics by name: the kinds of predictions that each is for, what it is, which way it is better, and its
interval. What a loss does not judge has no figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

import torch

from recpipe.model import calibrated, ranked
from recpipe.model.config import MetricsConfig
from recpipe.model.grouped import ByGroup, OfGroups, ranking_at_k
from recpipe.model.scores import Kind, OfBlocks, Scores, Values

Quality = dict[str, float]
"""Figures by their names in report.json, ``loss`` among them; NaN: the figure fits, and these samples do not
define it."""
LOSS = "loss"
"""The model's own loss: a mean over batches, weighted by their samples."""


@dataclass(frozen=True)
class Interval:
    """A figure and its confidence interval, NaN where it is not defined."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, where NaN is null."""
        return {key: None if math.isnan(x) else x for key, x in asdict(self).items()}


@dataclass(frozen=True)
class _Named:
    name: str
    """In report.json; ``NAME@K`` of one at K."""
    label: str
    """For tables."""
    kinds: tuple[Kind, ...]
    better: Literal["higher", "lower", "near 1"]


@dataclass(frozen=True)
class Metric(_Named):
    """A metric of all samples."""

    value: Callable[[Scores], float]
    influence: Callable[[Scores, float], torch.Tensor | OfBlocks] | None = None
    """By how much more weight of each sample, a share of all, would change it: float64 [N], of mean 0. None:
    it has no interval."""
    main: bool = True
    """Whether short tables have it."""
    recalibrated: bool = False
    """Whether it is of ``metrics.recalibrate``."""

    def of(self, scores: Scores, level: float | None) -> Interval:
        """The figure, and its interval by the delta method: the variance of a figure is that of the mean of
        its samples' influences, or of their sums over groups, which may be dependent within."""
        value = self.value(scores)
        if level is None or self.influence is None or math.isnan(value):
            return Interval(value)
        squares, parts = _squares_of(self.influence(scores, value), scores)
        error, most = math.sqrt(squares) / scores.total, 1.0 if self.better == "higher" else math.inf
        return _around(value, error, parts, level, most)


@dataclass(frozen=True)
class GroupMetric(_Named):
    """A metric of each group of samples (``metrics.group``), and its mean over groups."""

    each: Callable[[ByGroup, int], OfGroups]
    """Of each group, at K."""
    at_k: bool = True
    """Whether it is of the first K of a group (``metrics.k``)."""

    def of(self, groups: ByGroup, k: int, level: float | None) -> Interval:
        """The mean and its interval; groups are taken for independent. NaN without any."""
        values, weights = self.each(groups, k)
        total = float(weights.sum())
        if not total:
            return Interval(math.nan)
        value = float((values * weights).sum()) / total
        if level is None:
            return Interval(value)
        apart = (weights * (values - value)).square().sum() * len(values) / max(1, len(values) - 1)
        return _around(value, float(apart.sqrt()) / total, len(values), level, 1.0)


def _squares_of(moved: torch.Tensor | OfBlocks, scores: Scores) -> tuple[float, int]:
    """The sum of squares of what samples, or groups of them, change; and how many there are."""
    if isinstance(moved, OfBlocks):
        if scores.weights is None and scores.clusters is None:
            return moved.squares(scores), len(scores)
        moved = moved.of_samples(scores)
    if scores.weights is not None:
        moved = moved * scores.weights
    if scores.clusters is not None:
        moved = torch.bincount(scores.clusters, weights=moved)
        return float(moved @ moved) * len(moved) / max(1, len(moved) - 1), len(moved)
    return float(moved @ moved), len(moved)


def _around(value: float, error: float, parts: int, level: float, most: float) -> Interval:
    """``value`` with the normal interval of that standard ``error``; none of fewer than two ``parts``."""
    if parts < 2 or not math.isfinite(error):
        return Interval(value)
    spread = NormalDist().inv_cdf(0.5 + level / 2) * error
    return Interval(value, max(0.0, value - spread), min(most, value + spread))


def _of_mean(values: Callable[[Scores], torch.Tensor]) -> tuple[Any, Any]:
    """The mean of each sample's ``values`` float64 [N], and its influence."""
    return lambda s: s.mean(values(s)), lambda s, value: values(s) - value


def _entropy(rate: float) -> float:
    return -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def _normalized_entropy(scores: Scores) -> float:
    """The logloss divided by that of always predicting the mean label (He et al., ADKDD 2014): below 1 is
    learning, NaN with labels of one class, where the divisor is 0."""
    if not 0 < scores.rate < 1:
        return math.nan
    return scores.mean(scores.losses) / _entropy(scores.rate)


def _normalized_entropy_influence(scores: Scores, value: float) -> torch.Tensor:
    rate = scores.rate
    entropy = _entropy(rate)
    of_rate = value * (math.log(1 - rate) - math.log(rate))
    return (scores.losses - value * entropy - of_rate * (scores.observed - rate)) / entropy


def _deviance(scores: Scores) -> torch.Tensor:
    """Twice the loss of log-likelihood compared with rates equal to the counts; NaN of one below 0."""
    label, raw = scores.observed, scores.raw.double()
    lost = 2 * (torch.xlogy(label, label) - label * raw - label + raw.exp())
    return torch.where(label < 0, math.nan, lost)


def _squares(scores: Scores) -> torch.Tensor:
    return (scores.expected - scores.observed).square()


def _root(scores: Scores) -> float:
    return math.sqrt(scores.mean(_squares(scores)))


def _root_influence(scores: Scores, value: float) -> torch.Tensor:
    return (_squares(scores) - value**2) / (2 * value or math.nan)


def _at(name: str) -> Callable[[ByGroup, int], OfGroups]:
    """Of each group with a positive; all count alike."""

    def each(groups: ByGroup, k: int) -> OfGroups:
        values = ranking_at_k(*groups.ranks, k)[name]
        return OfGroups(values, torch.ones_like(values))

    return each


_CLICKS: tuple[Kind, ...] = ("clicks",)
_VALUES: tuple[Kind, ...] = ("values",)
_ORDERED: tuple[Kind, ...] = ("clicks", "ranking")
_NE = (_normalized_entropy, _normalized_entropy_influence)
_RATIO = (calibrated.ratio, calibrated.ratio_influence)
METRICS: tuple[Metric | GroupMetric, ...] = (
    Metric("auc", "AUC", _CLICKS, "higher", ranked.auc, ranked.auc_influence),
    Metric("logloss", "logloss", _CLICKS, "lower", *_of_mean(lambda s: s.losses)),
    Metric("ne", "NE", _CLICKS, "lower", *_NE),
    Metric("mse", "MSE", _VALUES, "lower", *_of_mean(_squares)),
    Metric("rmse", "RMSE", _VALUES, "lower", _root, _root_influence),
    Metric("mae", "MAE", _VALUES, "lower", *_of_mean(lambda s: (s.expected - s.observed).abs())),
    Metric("poisson_deviance", "Poisson deviance", ("counts",), "lower", *_of_mean(_deviance)),
    GroupMetric("gauc", "GAUC", _ORDERED, "higher", lambda groups, _: groups.auc, at_k=False),
    *(GroupMetric(name, name.upper(), _ORDERED, "higher", _at(name)) for name in ("ndcg", "hr", "mrr")),
    GroupMetric("recall", "recall", _ORDERED, "higher", _at("recall")),
    Metric(
        "pr_auc",
        "PR-AUC",
        *(_CLICKS, "higher", ranked.average_precision, ranked.average_precision_influence),
        main=False,
    ),
    Metric("calibration", "calibration", ("clicks", "values", "counts"), "near 1", *_RATIO, main=False),
    Metric("ece", "ECE", _CLICKS, "lower", calibrated.expected_calibration_error, main=False),
    Metric("ne_recalibrated", "NE recalibrated", _CLICKS, "lower", *_NE, recalibrated=True),
    Metric("calibration_recalibrated", "calibration recal.", _CLICKS, "near 1", *_RATIO, False, True),
)
"""All metrics, in the order of tables. A new one is an entry here."""
_BY_NAME = {metric.name: metric for metric in METRICS}


def named(figure: str) -> Metric | GroupMetric | None:
    """The metric of a figure's name, such as ``auc`` or ``ndcg@10``; None if it is none's."""
    name, at, k = figure.partition("@")
    metric = _BY_NAME.get(name)
    of_k = isinstance(metric, GroupMetric) and metric.at_k
    return metric if (k.isdecimal() if of_k else not at) else None


def ordered(figures: Iterable[str]) -> list[str]:
    """Those names of ``figures`` that are metrics', each once, in the order of tables."""
    places = {name: place for place, name in enumerate(_BY_NAME)}
    parts = {name: name.partition("@") for name in figures if named(name) is not None}
    return sorted(parts, key=lambda name: (places[parts[name][0]], int(parts[name][2] or 0)))


@dataclass(frozen=True)
class Judged:
    """The figures of one label on some samples."""

    samples: int
    positives: int | None
    """Samples with label 1; None unless labels are clicks."""
    figures: dict[str, Interval]
    groups: dict[str, int] | None = None
    """How many there are, how many have no positive and how many one class alone, which their figures leave
    out, and how many samples are in none; None without groups."""

    @property
    def quality(self) -> Quality:
        """The figures without intervals."""
        return {name: found.value for name, found in self.figures.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        figures = {name: figure.to_dict() for name, figure in self.figures.items()}
        told = {"samples": self.samples, "positives": self.positives, "figures": figures}
        return told if self.groups is None else {**told, "groups": self.groups}


def judge(scores: Scores, asked: MetricsConfig | None = None) -> Judged:
    """The figures that fit the kind of ``scores``, with the intervals that are ``asked`` for; none without
    samples, nor of clicks whose labels are not all 0 or 1."""
    asked = asked or MetricsConfig()
    clicks = scores.kind == "clicks" and scores.binary
    positives = int((scores.labels == 1).sum()) if clicks else None
    if not len(scores) or (scores.kind in _ORDERED and not scores.binary):
        return Judged(len(scores), positives, {})
    fitting = [metric for metric in METRICS if scores.kind in metric.kinds]
    by_group = ByGroup(scores) if scores.groups is not None and scores.kind in _ORDERED else None
    figures = dict(_figures(fitting, scores, by_group, asked))
    return Judged(len(scores), positives, figures, None if by_group is None else by_group.counts)


def _figures(
    metrics: Sequence[Metric | GroupMetric], scores: Scores, by_group: ByGroup | None, asked: MetricsConfig
) -> Iterator[tuple[str, Interval]]:
    level, how = asked.intervals, asked.recalibrate
    other = calibrated.recalibrated(scores, how) if how and scores.kind == "clicks" else None
    for metric in metrics:
        if isinstance(metric, GroupMetric):
            if by_group is None:
                continue
            for k in asked.k if metric.at_k else (0,):
                yield f"{metric.name}@{k}" if metric.at_k else metric.name, metric.of(by_group, k, level)
        elif not metric.recalibrated:
            yield metric.name, metric.of(scores, level)
        elif how is not None:
            yield metric.name, Interval(math.nan) if other is None else metric.of(other, level)


def judged(kind: Kind, labels: Values, predictions: Values, weights: Values | None = None) -> Quality:
    """The figures that fit ``predictions`` [N] of ``labels`` [N], without intervals."""
    return judge(Scores(kind, labels, predictions, weights), MetricsConfig(intervals=None)).quality


def auc(labels: Values, scores: Values, weights: Values | None = None) -> float:
    """Exact area under the ROC curve of ``scores`` [N] (logits will do) for 0/1 ``labels`` [N]."""
    return ranked.auc(Scores("clicks", labels, scores, weights))
