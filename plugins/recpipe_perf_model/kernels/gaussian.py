"""Gaussian processes: values between samples, from how alike those are, with how unsure each one is.

Values are a smooth function of places plus noise (Rasmussen and Williams, Gaussian Processes for Machine
Learning, 2006, chapters 2, 4.2 and 5.4). How fast the function changes along each size, how far it goes and
how large the noise is maximize the probability of the samples, times that of the usual values below.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
LENGTH, FAR, NOISE = 3.0, 0.3, 0.08
"""Usual values: the distance over which values stay alike, the function's and the noise's deviations."""
SURE = (1.0, 1.0, 0.7)
"""The standard deviations of the logarithms of these three among all kinds of operators."""
STEPS = 30
FIRST, LEAST, MOST = 0.3, 0.01, 0.8
"""The size of steps (of the logarithms) by which the parameters are searched."""
ENOUGH = 160
"""Samples from which the parameters are searched; of more, evenly chosen ones are taken."""


class Process:
    """A Gaussian process with mean 0, Matern's covariance (5/2), and a length for each dimension."""

    def __init__(self, places: Vector, values: Vector) -> None:
        """``places``: [samples, dimensions]; ``values``: [samples]."""
        chosen = np.unique(np.linspace(0, len(values) - 1, min(len(values), ENOUGH)).astype(int))
        parameters = _likeliest(places[chosen], values[chosen])
        self.parameters = len(parameters)
        self._near, self._spread, self._noise = _spread(parameters)
        self._keep(places, values)

    def _keep(self, places: Vector, values: Vector) -> None:
        """Prepare predictions from these samples."""
        self._places = places * self._near
        covariance = self._spread * _matern(_apart(self._places, self._places))[0]
        self._inverse = np.linalg.inv(covariance + self._noise * np.eye(len(values)))
        self._weights = self._inverse @ values

    def at(self, place: Vector) -> tuple[float, float]:
        """The value at a place and the standard deviation of a sample there."""
        near = self._spread * _matern(_apart((place * self._near)[None], self._places))[0][0]
        variance = self._spread + self._noise - near @ self._inverse @ near
        return float(near @ self._weights), float(np.sqrt(max(variance, self._noise)))

    def left_out(self, groups: NDArray[np.int64]) -> Vector:
        """The errors of predictions of each sample by the samples of other groups, in standard deviations."""
        errors = np.zeros(len(groups))
        for group in np.unique(groups):
            own = np.flatnonzero(groups == group)
            block = np.linalg.inv(self._inverse[np.ix_(own, own)])
            errors[own] = (block @ self._weights[own]) / np.sqrt(np.diag(block))
        return errors


def _likeliest(places: Vector, values: Vector) -> Vector:
    """The logarithms of the lengths, of the function's and of the noise's deviation, by resilient descent."""
    count = places.shape[1]
    usual = np.log([*[LENGTH] * count, FAR, NOISE])
    sure = np.array([*[SURE[0]] * count, *SURE[1:]])
    squares = ((places[:, None] - places[None]) ** 2).reshape(-1, count)
    found, best, least = usual, usual, np.inf
    step, last = np.full(count + 2, FIRST), np.zeros(count + 2)
    for _ in range(STEPS):
        badness, slope = _badness(found, squares, values)
        badness += float(0.5 * (((found - usual) / sure) ** 2).sum())
        slope = slope + (found - usual) / sure**2
        if badness < least:
            least, best = badness, found
        same = np.sign(slope) * last
        step = np.clip(np.where(same > 0, 1.3 * step, np.where(same < 0, 0.5 * step, step)), LEAST, MOST)
        last = np.where(same < 0, 0.0, np.sign(slope))
        found = found - last * step
    return best


def _badness(parameters: Vector, squares: Vector, values: Vector) -> tuple[float, Vector]:
    """Minus the logarithm of the samples' likelihood, and its slopes; ``squares``: the squared distances of
    all pairs along each dimension [samples ** 2, dimensions]."""
    size = len(values)
    near, spread, noise = _spread(parameters)
    like, falls = _matern((squares @ near**2).reshape(size, size))
    covariance = spread * like + noise * np.eye(size)
    inverse = np.linalg.inv(covariance)
    weights = inverse @ values
    half = np.linalg.slogdet(covariance)[1] / 2
    left = np.outer(weights, weights) - inverse
    by_length = (left * falls * spread).reshape(-1) @ squares * near**2
    by_spread, by_noise = -spread * float((left * like).sum()), -noise * float(np.trace(left))
    return float(values @ weights / 2 + half), np.array([*by_length, by_spread, by_noise])


def _spread(parameters: Vector) -> tuple[Vector, float, float]:
    """What places are multiplied by, and the variances of the function and of the noise."""
    return np.exp(-parameters[:-2]), float(np.exp(2 * parameters[-2])), float(np.exp(2 * parameters[-1]))


def _matern(squares: Vector) -> tuple[Vector, Vector]:
    """The covariance at squared distances, and its slope there."""
    distance = np.sqrt(5 * squares)
    faded = np.exp(-distance)
    return (1 + distance + distance**2 / 3) * faded, -5 / 6 * (1 + distance) * faded


def _apart(places: Vector, others: Vector) -> Vector:
    """Squared distances [n, m]."""
    found: Vector = ((places[:, None] - others[None]) ** 2).sum(axis=2)
    return found
