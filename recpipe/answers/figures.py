"""How the scores and ids of two sets of samples differ: histograms, population stability, saturation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recpipe.model.scores import Kind

Float64 = NDArray[np.float64]
BINS = 20
"""Bins of a reference histogram, with about equally many samples each."""
SATURATED = 1e-4
"""A probability nearer than this to 0 or 1 is saturated."""
_SATURATED_LOGIT = float(np.log((1 - SATURATED) / SATURATED))
_SMALLEST = 0.5
"""Added to every bin's count, so that an empty bin gives a finite figure."""


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
