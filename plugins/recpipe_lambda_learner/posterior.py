"""``Posteriors``: what is believed of each entity's coefficients, a Gaussian; ``updated``: what is believed
after more events.

The loss of an entity's batch is, with the prior's mean m and precision H,

    sum w log(1 + exp(-s (x theta + o))) + (1 - d) l/2 |theta|^2 + d/2 (theta - m)' H (theta - m)

(Ramanath et al., "Lambda Learner: Fast Incremental Learning on Data Streams", KDD 2021, equation 6): o is the
score of the fixed effect, l the ridge, d the share of the past that is kept. Its minimum is the new mean, its
Hessian there the new precision: Laplace's approximation of the posterior.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import Spread
from recpipe_lambda_learner.newton import minimize

Floats = NDArray[np.float64]
Precision = Literal["full", "diagonal", "identity"]
STEPS = 100


@dataclass(frozen=True)
class Learning:
    """How entities learn."""

    ridge: float = 1.0
    """l: what pulls coefficients towards 0."""
    keep: float = 0.8
    """d, the paper's forgetting factor: 1 forgets nothing, 0 all that was learnt before."""
    precision: Precision = "full"
    """What is kept of a Hessian: all of it, its diagonal, or nothing (the identity takes its place)."""
    tolerance: float = 1e-20
    """How much further an entity's loss could fall where it stops, as a share of 1 + the loss."""

    def kept(self, width: int) -> int:
        """How many numbers of a precision are kept beside ``width`` coefficients."""
        return {"full": width * (width + 1) // 2, "diagonal": width, "identity": 0}[self.precision]


class Events(NamedTuple):
    """N events of E entities, sorted by entity."""

    inputs: Floats
    """float64 [N, D]."""
    clicks: Floats
    """0 or 1, float64 [N]."""
    weights: Floats
    """float64 [N], not negative."""
    offsets: Floats
    """The fixed effect's logits, float64 [N]."""
    starts: NDArray[np.int64]
    """Where each entity's events begin, int64 [E + 1]; the last is N."""


class Posteriors(NamedTuple):
    """Gaussians of E entities."""

    means: Floats
    """float64 [E, D]."""
    precisions: Floats
    """float64 [E, D, D], [E, D] or [E, 0], by ``Learning.precision``."""


def unlearnt(entities: int, width: int, how: Learning) -> Posteriors:
    """The prior of an entity without events: mean 0, precision ``ridge`` in each direction."""
    full = how.ridge * np.broadcast_to(np.eye(width), (entities, width, width))
    return Posteriors(np.zeros((entities, width)), _kept(full, how.precision))


def updated(prior: Posteriors, events: Events, how: Learning, threads: Spread) -> tuple[Posteriors, int]:
    """The posteriors after ``events``, and of how many entities the minimum was not found in ``STEPS`` steps
    (their data are separable, and nothing pulls their coefficients towards the prior)."""
    entities, width = prior.means.shape
    means = np.ascontiguousarray(prior.means, np.float64).copy()
    priors = how.keep * _full(prior.precisions, width, how.precision)
    hessians, steps = np.empty((entities, width, width)), np.empty(entities, np.int64)
    ridge, tolerance = np.array([(1 - how.keep) * how.ridge]), np.array([how.tolerance])

    def part(own: slice) -> None:
        starts = events.starts[own.start : own.stop + 1]
        rows = slice(int(starts[0]), int(starts[-1]))
        minimize(
            np.ascontiguousarray(events.inputs[rows]).reshape(-1),
            np.ascontiguousarray(events.clicks[rows]),
            np.ascontiguousarray(events.weights[rows]),
            np.ascontiguousarray(events.offsets[rows]),
            starts - starts[0],
            means[own].reshape(-1),
            priors[own].reshape(-1),
            ridge,
            tolerance,
            STEPS,
            hessians[own].reshape(-1),
            steps[own],
        )

    threads.map(part, threads.parts(entities, 64))
    return Posteriors(means, _kept(hessians, how.precision)), int((steps < 0).sum())


def added(means: Floats, inputs: Floats) -> Floats:
    """The product of each event's inputs and its entity's coefficients, float64 [N], for both [N, D]: summed
    from the first input to the last, which ``recpipe.answers.score`` does as well, to the same bits."""
    total = np.zeros(len(inputs))
    for number in range(inputs.shape[1]):
        total += means[:, number] * inputs[:, number]
    return total


def packed(precisions: Floats) -> Floats:
    """Precisions as rows of a table, float64 [E, P]: of a symmetric matrix one half, row by row."""
    if precisions.ndim == 2:
        return precisions
    first, second = np.tril_indices(precisions.shape[1])
    return np.ascontiguousarray(precisions[:, first, second])


def unpacked(rows: Floats, width: int, kind: Precision) -> Floats:
    """The precisions that ``packed`` made ``rows`` of; ``width``: D."""
    if kind != "full":
        return rows
    first, second = np.tril_indices(width)
    whole = np.empty((len(rows), width, width))
    whole[:, first, second] = whole[:, second, first] = rows
    return whole


def _full(precisions: Floats, width: int, kind: Precision) -> Floats:
    """float64 [E, D, D]."""
    if kind == "full":
        return np.ascontiguousarray(precisions, np.float64)
    eye = np.eye(width)
    if kind == "identity":
        return np.repeat(eye[None], len(precisions), 0)
    return precisions[:, :, None] * eye


def _kept(full: Floats, kind: Precision) -> Floats:
    if kind == "full":
        return np.ascontiguousarray(full)
    if kind == "identity":
        return np.empty((len(full), 0))
    return np.ascontiguousarray(np.diagonal(full, axis1=1, axis2=2))
