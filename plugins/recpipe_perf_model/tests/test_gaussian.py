"""A Gaussian process: smooth functions come back, noise is smoothed, twins are left out together."""

from __future__ import annotations

import numpy as np
import pytest
from recpipe_perf_model.kernels.models import NOISE, GaussianProcess


def places(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0, 8, (count, 2))


def wave(at: np.ndarray) -> np.ndarray:
    return 0.3 * np.sin(at[:, 0])


def test_a_smooth_function_comes_back_and_far_away_nothing_is_known() -> None:
    known, asked = places(80), places(40, 1)
    process = GaussianProcess(known, wave(known))
    errors = [process.at(place)[0] - float(wave(place[None])[0]) for place in asked]
    assert np.sqrt(np.mean(np.square(errors))) < 0.4 * NOISE
    value, deviation = process.at(np.array([1000.0, 1000.0]))
    assert value == pytest.approx(0.0, abs=1e-6)
    assert deviation > 3 * process.at(known[0])[1]


def test_noise_is_smoothed() -> None:
    known = places(300)
    noise = NOISE * np.random.default_rng(2).standard_normal(len(known))
    process = GaussianProcess(known, wave(known) + noise)
    errors = [process.at(place)[0] - float(wave(place[None])[0]) for place in places(40, 1)]
    assert np.sqrt(np.mean(np.square(errors))) < 0.6 * NOISE
    assert np.std(process.left_out(np.arange(len(known)))) == pytest.approx(1.0, rel=0.3)


def test_leaving_out_is_what_a_process_without_the_group_predicts() -> None:
    known = places(30)
    known[1] = known[0]
    values = wave(known) + 0.05 * np.random.default_rng(4).standard_normal(30)
    groups = np.arange(30)
    groups[1] = 0
    process = GaussianProcess(known, values)
    others = GaussianProcess(known[2:], values[2:])
    expected = [(values[i] - others.at(known[i])[0]) / others.at(known[i])[1] for i in (0, 1)]
    assert process.left_out(groups)[:2] == pytest.approx(expected, rel=1e-6)
    alone = process.left_out(np.arange(30))[:2]
    assert not np.allclose(alone, expected, rtol=0.05)
