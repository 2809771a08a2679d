"""Non-negative linear models of times, fitted to relative errors.

Coefficients are times per unit of work. Fitted to relative errors, a short time matters as much as a long
one; never negative, they keep predictions plausible outside of what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from recpipe.profiling.limits import Sample

Vector = NDArray[np.float64]
At = Mapping[str, float | str]
Features = Callable[[At], Vector]
"""The amounts of work of each kind, from a sample's sizes."""


@dataclass(frozen=True)
class Linear:
    """A time as a sum of amounts of work, each times its coefficient."""

    features: Features
    coefficients: Vector
    spread: float
    """The standard deviation of the logarithm of measured over fitted times."""

    @classmethod
    def fit(cls, samples: Sequence[Sample], features: Features) -> Linear:
        """The model with the least relative errors on ``samples``."""
        amounts = np.array([features(sample.at) for sample in samples])
        seconds = np.array([sample.seconds for sample in samples])
        found = fitted(amounts, seconds)
        ratios = np.log(seconds / np.maximum(amounts @ found, 1e-12))
        return cls(features, found, float(np.sqrt(np.mean(ratios**2))))

    def seconds(self, at: At) -> float:
        """The predicted time of work of these sizes."""
        return float(self.features(at) @ self.coefficients)


def fitted(amounts: Vector, times: Sequence[float] | Vector) -> Vector:
    """Coefficients [n] with small relative errors of ``amounts @ coefficients``, for amounts [samples, n]."""
    scale = 1 / np.asarray(times)
    return _solved((amounts * scale[:, None]).tobytes(), amounts.shape).copy()


@lru_cache(maxsize=256)
def _solved(relative: bytes, shape: tuple[int, ...]) -> Vector:
    """Advice asks for the same fits again for each machine that it imagines."""
    return nnls(np.frombuffer(relative).reshape(shape), np.ones(shape[0]))


def nnls(a: Vector, b: Vector, sweeps: int = 3000) -> Vector:
    """x >= 0, float64 [n], that minimizes ``|a x - b|``, by coordinate descent on the normal equations."""
    size = np.sqrt((a * a).sum(axis=0))
    used = np.flatnonzero(size)
    scaled = a[:, used] / size[used]
    gram, slope = scaled.T @ scaled, scaled.T @ b
    x = [0.0] * len(used)
    for _ in range(sweeps):
        furthest = 0.0
        for j, row in enumerate(gram):
            step = max(-x[j], float(slope[j]))
            if step:  # most coefficients stay 0
                x[j] += step
                slope -= step * row
                furthest = max(furthest, abs(step))
        if furthest < 1e-9:
            break
    result = np.zeros(a.shape[1])
    result[used] = np.array(x) / size[used]
    return result


def hats(value: float, knots: Vector) -> Vector:
    """Weights (with sum 1) of the ``knots`` next to log2 of ``value``, for linear interpolation."""
    at = float(np.clip(np.log2(max(value, 1.0)), knots[0], knots[-1]))
    return np.array([np.interp(at, knots, knot) for knot in np.eye(len(knots))])
