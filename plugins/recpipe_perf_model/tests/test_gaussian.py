"""A Gaussian process: smooth functions come back, noise is smoothed, disturbed samples are left out."""

from __future__ import annotations

import numpy as np
import pytest
from recpipe_perf_model.kernels.models import NOISE, GaussianProcess


def places(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0, 8, (count, 2))


def wave(at: np.ndarray) -> np.ndarray:
    return 0.3 * np.sin(at[:, 0])


def far_off(process: GaussianProcess) -> float:
    """The root mean square of its errors at places that it does not know."""
    errors = [process.at(place) - float(wave(place[None])[0]) for place in places(40, 1)]
    return float(np.sqrt(np.mean(np.square(errors))))


def test_a_smooth_function_comes_back_and_far_away_nothing_is_known() -> None:
    known = places(80)
    process = GaussianProcess(known, wave(known))
    assert far_off(process) < 0.4 * NOISE
    assert process.at(np.array([1000.0, 1000.0])) == pytest.approx(0.0, abs=1e-6)


def test_noise_is_smoothed() -> None:
    known = places(300)
    noise = NOISE * np.random.default_rng(2).standard_normal(len(known))
    assert far_off(GaussianProcess(known, wave(known) + noise)) < 0.6 * NOISE


def test_a_sample_far_above_what_the_others_say_is_left_out() -> None:
    known = places(80)
    disturbed = wave(known)
    disturbed[7] += 10 * NOISE
    process, without = (
        GaussianProcess(known, disturbed),
        GaussianProcess(np.delete(known, 7, 0), np.delete(disturbed, 7)),
    )
    assert process.at(known[7]) == pytest.approx(without.at(known[7]), abs=1e-12)
    low = wave(known)
    low[7] -= 10 * NOISE  # nothing makes a machine faster than it is
    assert GaussianProcess(known, low).at(known[7]) < without.at(known[7]) - NOISE
