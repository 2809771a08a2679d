"""By how much an answer differs from the model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.answers.figures import predictions

Floats = NDArray[np.float32]
Sizes = tuple[float, ...]
LATELY = 1000
"""About as many of the latest answers give the mean prediction."""


class ErrorOf:
    """The error of one answer to a request of N samples.

    ``score``: for each of the model's ``outputs`` the mean over the samples of \\|prediction - the
    model's\\|, as a share of the mean size of predictions lately; of several outputs the largest.
    ``top_k``: 1 if the ``k`` best samples by the first output are others, else 0; their order does not count.
    """

    def __init__(self, outputs: Sequence[Mapping[str, Any]], kind: str, k: int) -> None:
        self.kind, self.k = kind, k
        self._kinds = [output["kind"] for output in outputs]
        self._mean, self._answers = [0.0] * len(self._kinds), 0

    def size(self, scores: Floats) -> Sizes:
        """The mean size of the predictions of an answer, float32 [N] or [N, T], by output."""
        return tuple(np.abs(self.predictions(scores)).mean(axis=0).tolist())

    def gave(self, size: Sizes) -> None:
        """Take in the ``size`` of an answer that was given."""
        self._answers += 1
        for n, own in enumerate(size):
            self._mean[n] += (own - self._mean[n]) / min(self._answers, LATELY)

    def __call__(self, answer: Floats, model: Floats) -> float:
        """The error of an ``answer`` beside that of the ``model``."""
        if self.kind == "top_k":
            return float(_best(answer, self.k) != _best(model, self.k))
        return float(self.of_samples(answer, model).mean(axis=0).max())

    def of_samples(self, answer: Floats, model: Floats) -> NDArray[np.float64]:
        """How far each prediction of an ``answer`` is from the ``model``'s, as a share of the mean one, [N,
        T]."""
        off = np.abs(self.predictions(answer) - self.predictions(model))
        return np.where(off > 0, off / np.maximum(self._mean, 1e-300), 0.0)

    def predictions(self, scores: Floats) -> NDArray[np.float64]:
        """What ``scores`` float32 [N] or [N, T] mean, [N, T]."""
        columns = scores.reshape(len(scores), -1)
        if len(self._kinds) == 1:
            return predictions(self._kinds[0], columns)
        return np.stack([predictions(kind, columns[:, n]) for n, kind in enumerate(self._kinds)], axis=1)


def _best(scores: Floats, k: int) -> frozenset[int]:
    first = scores.reshape(len(scores), -1)[:, 0]
    return frozenset(np.argsort(-first, kind="stable")[:k].tolist())
