"""Quality of predictions by their kind: AUC, logloss and NE of clicks, errors of values and counts."""

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
Kind = Literal["clicks", "values", "counts"]
"""The kinds of predictions: the logit of a 0/1 label, a value, or the logarithm of a count's rate."""


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


def auc(labels: Values, scores: Values) -> float:
    """Exact area under the ROC curve of ``scores`` [N] (logits will do) for 0/1 ``labels`` [N].

    The rank statistic P(score of a positive > score of a negative) + P(equal) / 2, counted in integers,
    O(N log N). NaN when there is only one class or a score is NaN. torchmetrics is not used here: it maps
    logits through a float32 sigmoid, which ties all logits above 17, and returns 0 for a single class.
    """
    label, score = _vectors(labels, scores)
    if label.numel() == 0 or bool(score.isnan().any()):
        return math.nan
    ordered, order = torch.sort(score)
    # ``group`` numbers the distinct scores; within a group every positive ties with every negative.
    _, group = torch.unique_consecutive(ordered, return_inverse=True)
    total = torch.bincount(group)
    positive = torch.bincount(group[label[order] > 0.5], minlength=total.numel())
    negative = total - positive
    pairs = int(positive.sum()) * int(negative.sum())
    if pairs == 0:
        return math.nan
    below = negative.cumsum(0) - negative
    return int((positive * (2 * below + negative)).sum()) / (2 * pairs)


def logloss(labels: Values, logits: Values) -> float:
    """Mean binary cross-entropy in nats of ``logits`` [N] (before the sigmoid), summed in float64."""
    label, logit = _vectors(labels, logits)
    if label.numel() == 0:
        return math.nan
    return float(torch.nn.functional.binary_cross_entropy_with_logits(logit.double(), label.double()))


def quality(labels: Values, logits: Values) -> Quality:
    """AUC, logloss and normalized entropy of ``logits`` [N] for 0/1 ``labels`` [N].

    The latter is the logloss divided by that of always predicting the mean label (He et al., ADKDD 2014):
    below 1 is learning, NaN with labels of one class, where the divisor is 0.
    """
    label, logit = _vectors(labels, logits)
    loss = logloss(label, logit)
    ne, rate = math.nan, float(label.double().mean()) if label.numel() else 0.0
    if 0.0 < rate < 1.0:
        ne = loss / -(rate * math.log(rate) + (1.0 - rate) * math.log(1.0 - rate))
    return Quality(auc(label, logit), loss, ne)


def judged(kind: Kind, labels: Values, predictions: Values) -> Quality:
    """The figures that fit ``predictions`` [N] of ``labels`` [N]; for clicks, none if labels are not 0/1."""
    if kind == "clicks":
        label = torch.as_tensor(labels)
        return quality(labels, predictions) if bool(((label == 0) | (label == 1)).all()) else _NONE
    label, predicted = (part.double() for part in _vectors(labels, predictions))
    if not label.numel():
        return _NONE
    if kind == "counts":
        # Twice the mean loss of log-likelihood compared with rates equal to the counts.
        lost = torch.xlogy(label, label) - label * predicted - label + predicted.exp()
        deviance = math.nan if bool((label < 0).any()) else float(2 * lost.mean())
        return replace(_NONE, poisson_deviance=deviance)
    apart = predicted - label
    mse = float(apart.square().mean())
    return replace(_NONE, mse=mse, rmse=math.sqrt(mse), mae=float(apart.abs().mean()))


_NONE = Quality(math.nan, math.nan, math.nan)


def calibration(labels: Values, logits: Values) -> Calibration | None:
    """``logits`` [N] of 0/1 ``labels`` [N] in ``BINS`` bins, or fewer, with about equally many samples.

    Equal predictions are in one bin. None without samples, and if a label is not 0/1 or a prediction NaN.
    """
    label, logit = _vectors(labels, logits)
    clicks = bool(((label == 0) | (label == 1)).all())
    if label.numel() == 0 or not clicks or bool(logit.isnan().any()):
        return None
    some = logit[:: -(-logit.numel() // _EDGE_SAMPLE)].sort().values
    deciles = torch.arange(1, BINS) * some.numel() // BINS
    number = torch.bucketize(logit, torch.unique(some[deciles]), right=True)
    samples = torch.bincount(number)
    used = samples > 0
    predicted, clicked = (
        torch.bincount(number, weights=values.double())[used] / samples[used]
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
        the predictions and their labels. None: nowhere."""
        self._evaluations = 0
        self._loss, self._samples = 0.0, 0.0
        self._logits: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []
        self.calibration: Calibration | None = None
        """The calibration at the latest evaluation whose quality was computed; None unless its labels are
        clicks."""

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Keep float32 host copies of one batch's ``logits`` [B] and ``labels`` [B]."""
        for kept, values in ((self._logits, logits), (self._labels, labels)):
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
        promised: Future[Quality] = Future()
        file = None if self.folder is None else self.folder / f"{self._evaluations}.npy"
        self._evaluations += 1
        threading.Thread(
            target=self._judge,
            args=(promised, labels, logits, loss, file),
            name="recpipe-quality",
            daemon=True,
        ).start()
        return promised

    def _judge(
        self,
        promised: Future[Quality],
        labels: list[torch.Tensor],
        logits: list[torch.Tensor],
        loss: float,
        file: Path | None,
    ) -> None:
        empty = torch.empty(0)
        try:
            label, logit = torch.cat([empty, *labels]), torch.cat([empty, *logits])
            if file is not None:
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    np.save(file, torch.stack([logit, label]).numpy())
                except OSError as fault:
                    raise UserError(
                        f"cannot write task.export_predictions={file.parent}: {fault.strerror}; "
                        "choose another directory"
                    ) from fault
            found = judged(self.kind, label, logit)
            self.calibration = calibration(label, logit) if self.kind == "clicks" else None
            promised.set_result(replace(found, loss=loss))
        except BaseException as fault:
            promised.set_exception(fault)
