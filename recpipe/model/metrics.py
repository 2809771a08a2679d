"""Quality of predictions by their kind: AUC, logloss and NE of clicks, errors of values and counts. Means are
weighted where the labels have weights, and labels of weight 0 are left out."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from recpipe.errors import UserError

Values = torch.Tensor | npt.NDArray[np.float32]
Kind = Literal["clicks", "values", "counts", "ranking"]
"""The kinds of predictions: the logit of a 0/1 label, a value, the logarithm of a count's rate, or a score
that only compares candidates."""


@dataclass(frozen=True)
class Quality:
    """Figures on the held-out part; NaN if one is undefined or does not fit the kind of prediction."""

    auc: float
    """Area under the ROC curve, for clicks."""
    logloss: float
    """In nats, for clicks."""
    ne: float
    """Normalized entropy, for clicks."""
    loss: float = math.nan
    """The model's own loss: a mean over batches, weighted by their samples."""
    mse: float = math.nan
    rmse: float = math.nan
    mae: float = math.nan
    """Mean squared error, for values."""
    poisson_deviance: float = math.nan
    """For counts; a mean over samples."""


@dataclass(frozen=True)
class Calibration:
    """Held-out samples in bins by their predicted click rate, lowest first."""

    predicted: list[float]
    """The mean predicted rate of each bin."""
    observed: list[float]
    """The share of clicks in each bin."""
    samples: list[int]


BINS = 10
_EDGE_SAMPLE = 1 << 16
"""From how many predictions the bins' edges are taken; to sort all of them would take as long as the AUC."""


def auc(labels: Values, scores: Values, weights: Values | None = None) -> float:
    """Exact area under the ROC curve of ``scores`` [N] (logits will do) for 0/1 ``labels`` [N].

    The rank statistic P(score of a positive > score of a negative) + P(equal) / 2, counted in integers,
    O(N log N); with ``weights`` [N], a pair counts as their product, summed in float64. NaN when there is
    only one class or a score is NaN. torchmetrics is not used here: it maps logits through a float32 sigmoid,
    which ties all logits above 17, and returns 0 for a single class.
    """
    label, score = _vectors(labels, scores)
    if label.numel() == 0 or bool(score.isnan().any()):
        return math.nan
    ordered, order = torch.sort(score)
    # ``group`` numbers the distinct scores; within a group every positive ties with every negative.
    _, group = torch.unique_consecutive(ordered, return_inverse=True)
    clicked, size, own = label[order] > 0.5, int(group[-1]) + 1, None
    if weights is not None:
        own = torch.as_tensor(weights).double()[order]
    positive, negative = (
        torch.bincount(group[those], None if own is None else own[those], minlength=size)
        for those in (clicked, ~clicked)
    )
    pairs = positive.sum().item() * negative.sum().item()
    if pairs == 0:
        return math.nan
    below = negative.cumsum(0) - negative
    return float((positive * (2 * below + negative)).sum().item() / (2 * pairs))


def logloss(labels: Values, logits: Values, weights: Values | None = None) -> float:
    """Mean binary cross-entropy in nats of ``logits`` [N] (before the sigmoid), summed in float64."""
    label, logit = _vectors(labels, logits)
    if label.numel() == 0:
        return math.nan
    losses = torch.nn.functional.binary_cross_entropy_with_logits
    if weights is None:
        return float(losses(logit.double(), label.double()))
    return _mean(losses(logit.double(), label.double(), reduction="none"), weights)


def _mean(values: torch.Tensor, weights: Values | None) -> float:
    """The mean of ``values`` [N], or sum(weight * value) / sum(weight)."""
    if weights is None:
        return float(values.mean())
    own = torch.as_tensor(weights).double()
    return float((values * own).sum() / own.sum())


def quality(labels: Values, logits: Values, weights: Values | None = None) -> Quality:
    """AUC, logloss and normalized entropy of ``logits`` [N] for 0/1 ``labels`` [N].

    The latter is the logloss divided by that of always predicting the mean label (He et al., ADKDD 2014):
    below 1 is learning, NaN with labels of one class, where the divisor is 0.
    """
    label, logit = _vectors(labels, logits)
    loss = logloss(label, logit, weights)
    ne, rate = math.nan, _mean(label.double(), weights) if label.numel() else 0.0
    if 0.0 < rate < 1.0:
        ne = loss / -(rate * math.log(rate) + (1.0 - rate) * math.log(1.0 - rate))
    return Quality(auc(label, logit, weights), loss, ne)


def known(
    labels: torch.Tensor, predictions: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Labels, predictions and weights [N] without those of weight 0; no weights if all are 1."""
    if weights is None:
        return labels, predictions, None
    there = weights > 0
    labels, predictions, weights = labels[there], predictions[there], weights[there]
    return labels, predictions, None if bool((weights == 1).all()) else weights


def judged(kind: Kind, labels: Values, predictions: Values, weights: Values | None = None) -> Quality:
    """The figures that fit ``predictions`` [N] of ``labels`` [N]; for clicks, none if labels are not 0/1; for
    a ranking none, since its loss does not judge a score by its label."""
    label, raw = _vectors(labels, predictions)
    if kind == "ranking":
        return _NONE
    label, raw, weights = known(label, raw, None if weights is None else torch.as_tensor(weights))
    if kind == "clicks":
        return quality(label, raw, weights) if bool(((label == 0) | (label == 1)).all()) else _NONE
    label, predicted = label.double(), raw.double()
    if not label.numel():
        return _NONE
    if kind == "counts":
        # Twice the mean loss of log-likelihood compared with rates equal to the counts.
        lost = torch.xlogy(label, label) - label * predicted - label + predicted.exp()
        deviance = math.nan if bool((label < 0).any()) else 2 * _mean(lost, weights)
        return replace(_NONE, poisson_deviance=deviance)
    apart = predicted - label
    mse = _mean(apart.square(), weights)
    return replace(_NONE, mse=mse, rmse=math.sqrt(mse), mae=_mean(apart.abs(), weights))


_NONE = Quality(math.nan, math.nan, math.nan)


def calibration(labels: Values, logits: Values, weights: Values | None = None) -> Calibration | None:
    """``logits`` [N] of 0/1 ``labels`` [N] in ``BINS`` bins, or fewer, with about equally many samples.

    The means of a bin are weighted by ``weights`` [N]. Equal predictions are in one bin. None without
    samples, and if a label is not 0/1 or a prediction NaN.
    """
    label, logit = _vectors(labels, logits)
    label, logit, own = known(label, logit, None if weights is None else torch.as_tensor(weights))
    clicks = bool(((label == 0) | (label == 1)).all())
    if label.numel() == 0 or not clicks or bool(logit.isnan().any()):
        return None
    some = logit[:: -(-logit.numel() // _EDGE_SAMPLE)].sort().values
    deciles = torch.arange(1, BINS) * some.numel() // BINS
    number = torch.bucketize(logit, torch.unique(some[deciles]), right=True)
    samples = torch.bincount(number)
    used = samples > 0
    counted = torch.ones_like(logit, dtype=torch.float64) if own is None else own.double()
    total = torch.bincount(number, weights=counted)[used]
    predicted, clicked = (
        torch.bincount(number, weights=values.double() * counted)[used] / total
        for values in (logit.double().sigmoid(), label)
    )
    return Calibration(predicted.tolist(), clicked.tolist(), samples[used].tolist())


def _vectors(labels: Values, scores: Values) -> tuple[torch.Tensor, torch.Tensor]:
    label = torch.as_tensor(labels).detach().reshape(-1)
    score = torch.as_tensor(scores).detach().reshape(-1)
    if label.shape != score.shape:
        raise ValueError(f"{label.numel()} labels, but {score.numel()} scores")
    return label, score


class BackgroundQuality:
    """Collects an evaluation's predictions, of a ``kind``, and computes their quality in a thread.

    A thread is used because sorting millions of predictions takes seconds, in which signals must be handled.
    The thread ends with the process, finished or not.
    """

    def __init__(self, kind: Kind = "clicks") -> None:
        self.kind = kind
        self.folder: Path | None = None
        """Where the predictions of each evaluation are written: ``0.npy`` of the first one, float32 [2, N],
        the predictions and their labels, or [3, N] with weights. None: nowhere."""
        self._evaluations = 0
        self._loss, self._samples = 0.0, 0.0
        self._logits: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self.calibration: Calibration | None = None
        """The calibration at the latest evaluation whose quality was computed; None unless its labels are
        clicks."""

    def add(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Keep float32 host copies of one batch's ``logits`` [B], ``labels`` [B] and, if all batches have
        them, ``weights`` [B]."""
        for kept, values in ((self._logits, logits), (self._labels, labels), (self._weights, weights)):
            if values is not None:
                kept.append(values.detach().reshape(-1).to("cpu", torch.float32, copy=True))

    def add_loss(self, total: float, samples: float) -> None:
        """Add one batch's loss, weighted by its ``samples``."""
        self._loss += total
        self._samples += samples

    def submit(self) -> Future[Quality]:
        """Start to compute the quality of what was added since the last call."""
        loss = self._loss / self._samples if self._samples else math.nan
        self._loss, self._samples = 0.0, 0.0
        logits, self._logits = self._logits, []
        labels, self._labels = self._labels, []
        weights, self._weights = self._weights, []
        promised: Future[Quality] = Future()
        file = None if self.folder is None else self.folder / f"{self._evaluations}.npy"
        self._evaluations += 1
        threading.Thread(
            target=self._judge,
            args=(promised, labels, logits, weights, loss, file),
            name="recpipe-quality",
            daemon=True,
        ).start()
        return promised

    def _judge(
        self,
        promised: Future[Quality],
        labels: list[torch.Tensor],
        logits: list[torch.Tensor],
        weights: list[torch.Tensor],
        loss: float,
        file: Path | None,
    ) -> None:
        empty = torch.empty(0)
        try:
            label, logit = torch.cat([empty, *labels]), torch.cat([empty, *logits])
            weight = torch.cat(weights) if weights else None
            if file is not None:
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    rows = [logit, label] if weight is None else [logit, label, weight]
                    np.save(file, torch.stack(rows).numpy())
                except OSError as fault:
                    raise UserError(
                        f"cannot write task.export_predictions={file.parent}: {fault.strerror}; "
                        "choose another directory"
                    ) from fault
            found = judged(self.kind, label, logit, weight)
            self.calibration = calibration(label, logit, weight) if self.kind == "clicks" else None
            promised.set_result(replace(found, loss=loss))
        except BaseException as fault:
            promised.set_exception(fault)
