"""Posteriors beside scipy's minimum of the same loss, and beside batch logistic regression."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from recpipe_lambda_learner.posterior import Events, Floats, Learning, Posteriors, unlearnt, updated
from scipy.optimize import minimize

from recpipe.common.loops import Spread

ENTITIES, WIDTH = 7, 4
HOW = Learning(ridge=3.0, keep=0.8)


def events(seed: int = 0, most: int = 40) -> Events:
    """Of each entity 1 to ``most`` events, with weights from 0 to 3."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, most, ENTITIES)
    size = int(counts.sum())
    inputs = rng.normal(size=(size, WIDTH))
    inputs[:, 0] = 1
    clicks = (rng.random(size) < 0.4).astype(np.float64)
    starts = np.append(0, np.cumsum(counts))
    return Events(inputs, clicks, rng.random(size) * 3, rng.normal(size=size), starts)


def prior(seed: int = 1) -> Posteriors:
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(ENTITIES, WIDTH, WIDTH))
    return Posteriors(rng.normal(size=(ENTITIES, WIDTH)), root @ root.transpose(0, 2, 1) + np.eye(WIDTH))


def loss(theta: Floats, own: Events, rows: slice, mean: Floats, precision: Floats, how: Learning) -> float:
    signs = 2 * own.clicks[rows] - 1
    logits = own.inputs[rows] @ theta + own.offsets[rows]
    past = (theta - mean) @ precision @ (theta - mean)
    lost = own.weights[rows] @ np.logaddexp(0, -signs * logits)
    return float(lost + (1 - how.keep) * how.ridge / 2 * theta @ theta + how.keep / 2 * past)


def slope(theta: Floats, own: Events, rows: slice, mean: Floats, precision: Floats, how: Learning) -> Floats:
    chance = 1 / (1 + np.exp(-(own.inputs[rows] @ theta + own.offsets[rows])))
    lost: Floats = own.inputs[rows].T @ (own.weights[rows] * (chance - own.clicks[rows]))
    return lost + (1 - how.keep) * how.ridge * theta + how.keep * precision @ (theta - mean)


def curvature(theta: Floats, own: Events, rows: slice, precision: Floats, how: Learning) -> Floats:
    chance = 1 / (1 + np.exp(-(own.inputs[rows] @ theta + own.offsets[rows])))
    inputs, curve = own.inputs[rows], own.weights[rows] * chance * (1 - chance)
    past: Floats = how.keep * precision + (1 - how.keep) * how.ridge * np.eye(WIDTH)
    return past + inputs.T @ (curve[:, None] * inputs)


def test_a_posterior_is_the_minimum_that_scipy_finds_and_the_hessian_there() -> None:
    own, before = events(), prior()
    found, unsettled = updated(before, own, HOW, Spread())
    assert unsettled == 0
    for e in range(ENTITIES):
        rows = slice(own.starts[e], own.starts[e + 1])
        arguments = (own, rows, before.means[e], before.precisions[e], HOW)
        wanted = minimize(loss, np.zeros(WIDTH), arguments, "BFGS", slope, options={"gtol": 1e-11}).x
        np.testing.assert_allclose(found.means[e], wanted, atol=1e-8)
        hessian = curvature(found.means[e], own, rows, before.precisions[e], HOW)
        np.testing.assert_allclose(found.precisions[e], hessian, rtol=1e-9)


def test_the_hessian_counts_weights() -> None:
    own = events()
    twice = own._replace(weights=2 * own.weights)
    how = replace(HOW, keep=1.0)
    one, _ = updated(unlearnt(ENTITIES, WIDTH, how), own, how, Spread())
    two, _ = updated(unlearnt(ENTITIES, WIDTH, how), twice, how, Spread())
    assert np.abs(one.precisions - two.precisions).max() > 0.1


def test_everything_kept_and_no_ridge_is_batch_logistic_regression() -> None:
    """Of the first batch exactly, since there is no past; what is learnt of two batches is near to both at
    once, for a quadratic stands for the first, and nearer than the second alone."""
    how = Learning(ridge=0.0, keep=1.0)
    first, then = events(2, 400), events(3, 400)
    nothing = unlearnt(ENTITIES, WIDTH, how)
    after_one, unsettled = updated(nothing, first, how, Spread())
    assert unsettled == 0
    after_two, _ = updated(after_one, then, how, Spread())
    alone, _ = updated(nothing, then, how, Spread())
    for e in range(ENTITIES):
        parts = [(own, slice(own.starts[e], own.starts[e + 1])) for own in (first, then)]
        columns = zip(*([c[rows] for c in own[:4]] for own, rows in parts), strict=True)
        joined = Events(*(np.concatenate(c) for c in columns), np.array([0]))  # type: ignore[call-arg]
        flat, everything = np.zeros((WIDTH, WIDTH)), slice(None)
        own, rows = parts[0]
        wanted = minimize(loss, np.zeros(WIDTH), (own, rows, flat[0], flat, how), "BFGS", slope).x
        np.testing.assert_allclose(after_one.means[e], wanted, atol=1e-4)
        both = minimize(loss, np.zeros(WIDTH), (joined, everything, flat[0], flat, how), "BFGS", slope).x
        assert np.abs(after_two.means[e] - both).max() < 0.1
        assert np.abs(after_two.means[e] - both).max() < np.abs(alone.means[e] - both).max()


@pytest.mark.parametrize("kind", ["diagonal", "identity"])
def test_what_is_kept_of_a_hessian(kind: str) -> None:
    own, how = events(), replace(HOW, precision=kind)
    start = unlearnt(ENTITIES, WIDTH, how)
    found, _ = updated(start, own, how, Spread())
    assert found.precisions.shape == (ENTITIES, WIDTH if kind == "diagonal" else 0)
    for e in range(ENTITIES):
        rows = slice(own.starts[e], own.starts[e + 1])
        before = (HOW.ridge if kind == "diagonal" else 1.0) * np.eye(WIDTH)
        arguments = (own, rows, np.zeros(WIDTH), before, HOW)
        wanted = minimize(loss, np.zeros(WIDTH), arguments, "BFGS", slope, options={"gtol": 1e-11}).x
        np.testing.assert_allclose(found.means[e], wanted, atol=1e-8)
        if kind == "diagonal":
            hessian = curvature(found.means[e], own, rows, before, HOW)
            np.testing.assert_allclose(found.precisions[e], np.diag(hessian), rtol=1e-9)


def test_separable_events_with_nothing_to_hold_them_are_counted() -> None:
    how = Learning(ridge=0.0, keep=1.0)
    own = Events(np.ones((3, 1)), np.ones(3), np.ones(3), np.zeros(3), np.array([0, 3]))
    found, unsettled = updated(unlearnt(1, 1, how), own, how, Spread())
    assert unsettled == 1 or found.means[0, 0] > 10
    assert np.isfinite(found.means).all()


def test_threads_give_the_same_bits() -> None:
    rng = np.random.default_rng(4)
    size = 5 * 400
    inputs = rng.normal(size=(size, WIDTH))
    own = Events(
        *(inputs, (rng.random(size) < 0.5).astype(np.float64), np.ones(size), rng.normal(size=size)),
        np.arange(0, size + 1, 5),
    )
    start, threads = unlearnt(400, WIDTH, HOW), Spread(3)
    one, _ = updated(start, own, HOW, Spread())
    three, _ = updated(start, own, HOW, threads)
    threads.close()
    for a, b in zip(one, three, strict=True):
        np.testing.assert_array_equal(a, b)
