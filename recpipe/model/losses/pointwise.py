"""Losses of each label by itself: clicks, classes, values and counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Interval, Lt, MinLen
from torch.nn import functional as F

from recpipe.errors import UserError, shown
from recpipe.model.losses.base import Pointwise

Smoothing = Annotated[float, Ge(0), Lt(1)]
"""The share of a label that is spread evenly over all classes (Szegedy et al., 2016)."""


@dataclass(frozen=True)
class BinaryCrossEntropy(Pointwise):
    """-(p y log s + (1 - y) log(1 - s)) of the probability s = sigmoid(x) of a logit x, where y is
    (1 - e) label + e / 2 for a ``label_smoothing`` of e, and p the ``positive_weight``."""

    label_smoothing: Smoothing = 0.0
    positive_weight: Annotated[float, Gt(0)] = 1.0
    name = "binary_cross_entropy"
    rates = True

    def of(self, prediction: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        """By torch's function, which takes logits."""
        return self.torchs(prediction, self.smoothed(labels), reduction)

    def weighted(self, prediction: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """By torch's function, which takes weights."""
        return self.torchs(prediction, self.smoothed(labels), "mean", weights)

    def torchs(
        self, x: torch.Tensor, labels: torch.Tensor, reduction: str, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss of a prediction ``x`` for smoothed ``labels``."""
        positive = None if self.positive_weight == 1 else x.new_full((), self.positive_weight)
        return F.binary_cross_entropy_with_logits(
            x, labels, weights, reduction=reduction, pos_weight=positive
        )

    def smoothed(self, labels: torch.Tensor) -> torch.Tensor:
        """The labels that are learnt."""
        share = self.label_smoothing
        return labels * (1 - share) + share / 2 if share else labels


@dataclass(frozen=True)
class BinaryCrossEntropyOfProbabilities(BinaryCrossEntropy):
    """``BinaryCrossEntropy`` of a model whose output is s; not finite if a prediction is not."""

    name = "binary_cross_entropy_of_probabilities"

    def torchs(
        self, x: torch.Tensor, labels: torch.Tensor, reduction: str, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """By torch's function, which bounds logarithms; ``UserError`` for what is no probability."""
        if bool(((x < 0) | (x > 1)).any()):
            raise UserError(
                f"model.loss={self.name}: the model's output is not within [0, 1]; "
                "model.loss=binary_cross_entropy takes logits"
            )
        if not bool(x.isfinite().all()):
            return x.sum()
        if self.positive_weight == 1:
            return F.binary_cross_entropy(x, labels, weights, reduction=reduction)
        of_positives = F.binary_cross_entropy(x, torch.ones_like(x), weights, reduction="none")
        of_others = F.binary_cross_entropy(x, torch.zeros_like(x), weights, reduction="none")
        return _reduced(self.positive_weight * labels * of_positives + (1 - labels) * of_others, reduction)

    def logits(self, prediction: torch.Tensor) -> torch.Tensor:
        """log(s / (1 - s)), finite also for 0 and 1."""
        return torch.logit(prediction.float(), eps=torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class Focal(Pointwise):
    """a (1 - t)^gamma times the binary cross-entropy of a logit (Lin et al., 2017), where t is the
    probability of what took place; a is ``alpha`` for clicks and 1 - ``alpha`` for others, 1 if null."""

    gamma: Annotated[float, Ge(0)] = 2.0
    alpha: Annotated[float, Interval(gt=0, lt=1)] | None = 0.25
    name = "focal"
    rates = True

    def of(self, prediction: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        """Labels between 0 and 1 give the mean of both cases' t and a, as torchvision's function does."""
        entropy = F.binary_cross_entropy_with_logits(prediction, labels, reduction="none")
        probability = prediction.sigmoid()
        missed = probability + labels - 2 * probability * labels
        # Bounded, for the slope of a power below 1 is not finite at 0.
        found = entropy * missed.clamp_min(1e-12) ** self.gamma
        if self.alpha is not None:
            found = found * (self.alpha * labels + (1 - self.alpha) * (1 - labels))
        return _reduced(found, reduction)


@dataclass(frozen=True)
class CrossEntropy(Pointwise):
    """-w_y log softmax(x)_y of scores x [B, classes] for the class y, where w are the ``class_weights``. With
    a ``label_smoothing`` of e, (1 - e) of that plus e times its mean over all classes as y.

    The mean is over samples, not over the sum of their class weights as in torch's: parts of a batch add up.
    """

    label_smoothing: Smoothing = 0.0
    class_weights: Annotated[tuple[Annotated[float, Ge(0)], ...], MinLen(2)] | None = None
    name = "cross_entropy"
    shapes = "classes"

    def of(self, prediction: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        """``UserError`` for a label that is none of the classes."""
        classes, weight = prediction.shape[1], None
        if self.class_weights is not None:
            if len(self.class_weights) != classes:
                raise UserError(
                    f"model.loss.class_weights: there are {len(self.class_weights)}, and the model's output "
                    f"has {classes} columns, one for each class; give one for each"
                )
            weight = _constant(self.class_weights, prediction.device).to(prediction.dtype)
        own = "mean" if weight is None else "none"
        try:
            found = F.cross_entropy(
                prediction,
                labels,
                weight,
                reduction=own if reduction == "mean" else reduction,
                label_smoothing=self.label_smoothing,
            )
        except IndexError as fault:
            raise UserError(
                f"model.loss=cross_entropy: a label is none of the classes 0 to {classes - 1}, of which "
                f"the model's output has a column each ({shown(fault)}); give it more columns"
            ) from fault
        return found if not found.dim() else _reduced(found, reduction)

    def logits(self, prediction: torch.Tensor) -> torch.Tensor:
        """The logit of class 1, where there are two."""
        two = prediction.dim() == 2 and prediction.shape[1] == 2
        return prediction[:, 1] - prediction[:, 0] if two else prediction


@dataclass(frozen=True)
class MeanSquaredError(Pointwise):
    """(x - y)^2."""

    name = "mean_squared_error"
    kind = "values"

    def of(self, prediction: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        """By torch's function."""
        return F.mse_loss(prediction, labels, reduction=reduction)


@dataclass(frozen=True)
class MeanAbsoluteError(Pointwise):
    """abs(x - y)."""

    name = "mean_absolute_error"
    kind = "values"

    def of(self, prediction: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        """By torch's function."""
        return F.l1_loss(prediction, labels, reduction=reduction)


@dataclass(frozen=True)
class Huber(Pointwise):
    """(x - y)^2 / 2 up to a distance of ``delta``, beyond which delta (abs(x - y) - delta / 2) (Huber,
    1964)."""

    delta: Annotated[float, Gt(0)] = 1.0
    name = "huber"
    kind = "values"

    def of(self, prediction: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        """By torch's function."""
        return F.huber_loss(prediction, labels, reduction=reduction, delta=self.delta)


@dataclass(frozen=True)
class Poisson(Pointwise):
    """exp(x) - y x: minus the log-likelihood of a count y of the rate exp(x), without what x does not
    change."""

    name = "poisson"
    kind = "counts"

    def of(self, prediction: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        """By torch's function."""
        return F.poisson_nll_loss(prediction, labels, reduction=reduction)


def _reduced(each: torch.Tensor, reduction: str) -> torch.Tensor:
    return each.mean() if reduction == "mean" else each


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Made once for each device: a copy to a GPU in every step would wait."""
    return torch.tensor(values, dtype=torch.float64, device=device)
