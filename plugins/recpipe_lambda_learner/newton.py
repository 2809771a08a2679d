"""The minimum of each entity's loss by Newton's method, all entities of a mini-batch in one compiled loop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled

FLATTEST = 1e-30
"""A pivot of a Hessian below it is that of a direction in which the loss has no curvature."""
NEAR = 1e-9
"""From this decrement on, as a share of 1 + the loss, whole steps are taken."""
DEMANDED = 1e-4
"""The share of the fall that the slope promises which a step must bring (Armijo's rule)."""


@compiled
def minimize(
    inputs: NDArray[np.float64],
    clicks: NDArray[np.float64],
    weights: NDArray[np.float64],
    offsets: NDArray[np.float64],
    starts: NDArray[np.int64],
    means: NDArray[np.float64],
    priors: NDArray[np.float64],
    ridge: NDArray[np.float64],
    tolerance: NDArray[np.float64],
    limit: int,
    hessians: NDArray[np.float64],
    steps: NDArray[np.int64],
) -> None:
    """Take ``means`` to the minimum of

        sum w log(1 + exp(-s (x theta + o))) + ridge/2 |theta|^2 + 1/2 (theta - mean)' prior (theta - mean)

    entity by entity, s = +1 for a click and -1 without, and write the Hessian of that loss there.

    Args:
        inputs: x [N * D], of the first entity's events, then the second's.
        clicks: 0 or 1 [N].
        weights: [N], not negative.
        offsets: o [N], in logits.
        starts: where an entity's events begin [E + 1]; the last is N.
        means: [E * D], replaced by the minimum.
        priors: [E * D * D], symmetric.
        ridge: [1].
        tolerance: [1], of half the squared Newton decrement, which is how far the loss may still fall.
        limit: steps at most.
        hessians: [E * D * D], written.
        steps: [E], how many were taken; -1: not at the minimum after ``limit`` steps.
    """
    entities = len(starts) - 1
    width = len(means) // max(1, entities)
    theta, tried = np.empty(width), np.empty(width)
    slope, step, moved = np.empty(width), np.empty(width), np.empty(width)
    factor = np.empty(width * width)
    for e in range(entities):
        first, end = starts[e], starts[e + 1]
        mean = means[e * width : (e + 1) * width]
        prior = priors[e * width * width : (e + 1) * width * width]
        hessian = hessians[e * width * width : (e + 1) * width * width]
        theta[:] = mean
        loss = _loss(inputs, clicks, weights, offsets, first, end, theta, mean, prior, ridge[0], moved)
        steps[e] = -1
        for number in range(limit + 1):
            _bend(inputs, clicks, weights, offsets, first, end, theta, mean, prior, ridge[0], slope, hessian)
            factor[:] = hessian
            _solve(factor, slope, step)
            decrement = 0.0
            for i in range(width):
                decrement += slope[i] * step[i]
            if decrement <= 2 * tolerance[0] * (1 + abs(loss)):
                steps[e] = number
                break
            if number == limit:
                break
            length, found = 1.0, loss
            while length > 0:
                for i in range(width):
                    tried[i] = theta[i] - length * step[i]
                found = _loss(
                    inputs, clicks, weights, offsets, first, end, tried, mean, prior, ridge[0], moved
                )
                # So near to the minimum, rounding hides how the loss falls, and a whole step is right.
                if decrement < NEAR * (1 + abs(loss)) or found <= loss - DEMANDED * length * decrement:
                    break
                length /= 2
            theta[:] = tried
            loss = found
        mean[:] = theta


def _logit(inputs: Any, offsets: Any, n: Any, theta: Any) -> Any:
    """Of event ``n``."""
    width, z = len(theta), offsets[n]
    for i in range(width):
        z += inputs[n * width + i] * theta[i]
    return z


def _loss(
    inputs: Any,
    clicks: Any,
    weights: Any,
    offsets: Any,
    first: Any,
    end: Any,
    theta: Any,
    mean: Any,
    prior: Any,
    ridge: Any,
    moved: Any,
) -> Any:
    """``moved`` [D]: room for what it computes."""
    width, total = len(theta), 0.0
    for n in range(first, end):
        z = _logit(inputs, offsets, n, theta)
        z = -z if clicks[n] > 0.5 else z
        total += weights[n] * (max(z, 0.0) + math.log1p(math.exp(-abs(z))))
    moved[:] = 0.0
    for i in range(width):
        _add(moved, theta[i] - mean[i], prior[i * width : (i + 1) * width])
    for i in range(width):
        total += 0.5 * (theta[i] - mean[i]) * moved[i] + 0.5 * ridge * theta[i] * theta[i]
    return total


def _bend(
    inputs: Any,
    clicks: Any,
    weights: Any,
    offsets: Any,
    first: Any,
    end: Any,
    theta: Any,
    mean: Any,
    prior: Any,
    ridge: Any,
    slope: Any,
    hessian: Any,
) -> None:
    """The loss's gradient and Hessian at ``theta``, the latter's upper half first."""
    width = len(theta)
    hessian[:] = prior
    for i in range(width):
        slope[i] = ridge * theta[i]
        hessian[i * width + i] += ridge
    for i in range(width):  # by rows, which are the columns: a prior is symmetric
        _add(slope, theta[i] - mean[i], prior[i * width : (i + 1) * width])
    for n in range(first, end):
        z = _logit(inputs, offsets, n, theta)
        small = math.exp(-abs(z))
        p = 1 / (1 + small) if z >= 0 else small / (1 + small)
        pull, curve = weights[n] * (p - clicks[n]), weights[n] * small / ((1 + small) * (1 + small))
        given = inputs[n * width : (n + 1) * width]
        _add(slope, pull, given)
        for i in range(width):
            _add(hessian[i * width + i : (i + 1) * width], curve * given[i], given[i:])
    for i in range(width):
        for j in range(i):
            hessian[i * width + j] = hessian[j * width + i]


def _add(to: Any, factor: Any, of: Any) -> None:
    """``to += factor * of``: with indices from 0 on, it is made of vector instructions."""
    for i in range(len(to)):
        to[i] += factor * of[i]


def _solve(matrix: Any, right: Any, out: Any) -> None:
    """``matrix out = right`` by Cholesky's factor, which takes the matrix's place. A direction without
    curvature is left out: ``out`` is 0 there."""
    width = len(right)
    for i in range(width):
        for j in range(i):
            value = matrix[i * width + j]
            for k in range(j):
                value -= matrix[i * width + k] * matrix[j * width + k]
            pivot = matrix[j * width + j]
            matrix[i * width + j] = value / pivot if pivot > 0 else 0.0
        value = matrix[i * width + i]
        most = value
        for k in range(i):
            value -= matrix[i * width + k] * matrix[i * width + k]
        matrix[i * width + i] = math.sqrt(value) if value > max(FLATTEST, 1e-14 * most) else 0.0
    for i in range(width):
        value = right[i]
        for k in range(i):
            value -= matrix[i * width + k] * out[k]
        pivot = matrix[i * width + i]
        out[i] = value / pivot if pivot > 0 else 0.0
    for i in range(width - 1, -1, -1):
        value = out[i]
        for k in range(i + 1, width):
            value -= matrix[k * width + i] * out[k]
        pivot = matrix[i * width + i]
        out[i] = value / pivot if pivot > 0 else 0.0
