"""By how much an answer differs from the model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled

Floats = NDArray[np.float32]
Sizes = tuple[float, ...]
LATELY = 1000
"""About as many of the latest answers give the mean prediction."""
VALUES, CLICKS, COUNTS = range(3)
KINDS = {"clicks": CLICKS, "counts": COUNTS}
"""What a raw score means, see ``predictions``; any other kind is the value itself."""
_LEAST = 1e-300


class ErrorOf:
    """The error of one answer to a request of N samples.

    ``score``: for each of the model's ``outputs`` the mean over the samples of \\|prediction - the
    model's\\|, as a share of the mean size of predictions lately; of several outputs the largest.
    ``top_k``: 1 if the ``k`` best samples by the first output are others, else 0; their order does not count.
    """

    def __init__(self, outputs: Sequence[Mapping[str, Any]], kind: str, k: int) -> None:
        self.kind, self.k = kind, k
        self._kinds = np.array([KINDS.get(output["kind"], VALUES) for output in outputs])
        self._mean, self._answers = [0.0] * len(outputs), 0

    def size(self, scores: Floats) -> Sizes:
        """The mean size of the predictions of an answer, float32 [N] or [N, T], by output."""
        means = np.empty(len(self._kinds))
        mean_sizes(_flat(scores), self._kinds, means)
        return tuple(means.tolist())

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
        found = np.empty((len(model), len(self._kinds)))
        distances(_flat(answer), _flat(model), self._kinds, np.array(self._mean), found.reshape(-1))
        return found

    def predictions(self, scores: Floats) -> NDArray[np.float64]:
        """What ``scores`` float32 [N] or [N, T] mean, [N, T]: the probability of logits, the rate of its
        logarithm, or the value itself."""
        found = np.empty((len(scores), len(self._kinds)))
        predictions(_flat(scores), self._kinds, found.reshape(-1))
        return found


def _flat(scores: Floats) -> Floats:
    """All scores in a row, in memory that may be written to: the loops are compiled for no other."""
    flat = scores.reshape(-1)
    return flat if flat.flags.writeable and flat.flags.c_contiguous else flat.copy()


def _best(scores: Floats, k: int) -> frozenset[int]:
    first = scores.reshape(len(scores), -1)[:, 0]
    return frozenset(np.argsort(-first, kind="stable")[:k].tolist())


def _meant(score: Any, kind: Any) -> Any:
    """What a raw score means."""
    raw = np.float64(score)
    if kind == CLICKS:
        return 1 / (1 + np.exp(-raw))
    return np.exp(raw) if kind == COUNTS else raw


@compiled
def predictions(scores: NDArray[np.float32], kinds: NDArray[np.int64], out: NDArray[np.float64]) -> None:
    """Write what ``scores`` [N * T] mean, by the ``kinds`` [T] of the outputs."""
    for n in range(len(scores)):
        out[n] = _meant(scores[n], kinds[n % len(kinds)])


@compiled
def mean_sizes(scores: NDArray[np.float32], kinds: NDArray[np.int64], out: NDArray[np.float64]) -> None:
    """Write the mean size of the predictions of each output [T]; arguments as of ``predictions``."""
    outputs = len(kinds)
    samples = len(scores) // outputs
    for output in range(outputs):
        total = 0.0
        for n in range(samples):
            total += abs(_meant(scores[n * outputs + output], kinds[output]))
        out[output] = total / samples


@compiled
def distances(
    answer: NDArray[np.float32],
    model: NDArray[np.float32],
    kinds: NDArray[np.int64],
    means: NDArray[np.float64],
    out: NDArray[np.float64],
) -> None:
    """Write how far each prediction of an ``answer`` [N * T] is from the ``model``'s, as a share of the
    output's mean one [T]."""
    for n in range(len(out)):
        output = n % len(kinds)
        off = abs(_meant(answer[n], kinds[output]) - _meant(model[n], kinds[output]))
        out[n] = off / max(means[output], _LEAST) if off > 0 else 0.0
