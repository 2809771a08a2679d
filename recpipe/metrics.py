"""Quality (AUC, logloss, NE) of predicted clicks, and the memory probes."""

from __future__ import annotations

import math
import resource
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

Values = torch.Tensor | npt.NDArray[np.float32]


@dataclass(frozen=True)
class Quality:
    """Area under the ROC curve, logloss in nats, and normalized entropy; NaN where a figure is undefined."""

    auc: float
    logloss: float
    ne: float


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


def normalized_entropy(labels: Values, logits: Values) -> float:
    """Logloss divided by that of always predicting the mean label (He et al., ADKDD 2014).

    Below 1 is learning. NaN when the labels hold only one class: the divisor is then 0.
    """
    label, _ = _vectors(labels, logits)
    return _normalized(logloss(labels, logits), label)


def quality(labels: Values, logits: Values) -> Quality:
    """All three figures of ``logits`` [N] for 0/1 ``labels`` [N]."""
    label, logit = _vectors(labels, logits)
    loss = logloss(label, logit)
    return Quality(auc(label, logit), loss, _normalized(loss, label))


def _normalized(loss: float, label: torch.Tensor) -> float:
    if label.numel() == 0:
        return math.nan
    rate = float(label.double().mean())
    if not 0.0 < rate < 1.0:
        return math.nan
    return loss / -(rate * math.log(rate) + (1.0 - rate) * math.log(1.0 - rate))


def _vectors(labels: Values, scores: Values) -> tuple[torch.Tensor, torch.Tensor]:
    label = torch.as_tensor(labels).detach().reshape(-1)
    score = torch.as_tensor(scores).detach().reshape(-1)
    if label.shape != score.shape:
        raise ValueError(f"{label.numel()} labels, but {score.numel()} scores")
    return label, score


class BackgroundQuality:
    """Collects an evaluation's predictions and computes their quality in a thread.

    In a thread, because sorting millions of them takes seconds, in which a signal must be heard. It ends
    with the process, whether or not it is done.
    """

    def __init__(self) -> None:
        self._logits: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Keep float32 host copies of one batch's ``logits`` [B] and ``labels`` [B]."""
        self._logits.append(_host_copy(logits))
        self._labels.append(_host_copy(labels))

    def submit(self) -> Future[Quality]:
        """Start computing the quality of all that was added since the last call."""
        logits, self._logits = self._logits, []
        labels, self._labels = self._labels, []
        promised: Future[Quality] = Future()
        threading.Thread(
            target=_keep, args=(promised, labels, logits), name="recpipe-quality", daemon=True
        ).start()
        return promised


def _keep(promised: Future[Quality], labels: list[torch.Tensor], logits: list[torch.Tensor]) -> None:
    empty = torch.empty(0)
    try:
        promised.set_result(quality(torch.cat([empty, *labels]), torch.cat([empty, *logits])))
    except BaseException as fault:
        promised.set_exception(fault)


def _host_copy(values: torch.Tensor) -> torch.Tensor:
    return values.detach().reshape(-1).to("cpu", torch.float32, copy=True)


def peak_rss_bytes() -> int:
    """Largest resident set of this process in bytes since its start or the last ``reset_peak_rss``."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Sandboxes and macOS lack VmHWM; getrusage counts KiB on Linux and bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_rss() -> bool:
    """Start ``peak_rss_bytes`` anew from the present size; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
