"""The analytic model beside simulation: within two points of hit rate, inferences and errors."""

from __future__ import annotations

import numpy as np
import pytest
from recpipe_answer_cache.model import characteristic_time, predict, zipf
from recpipe_answer_cache.simulate import simulated

KEYS, REQUESTS = 1000, 20_000


@pytest.mark.parametrize("policy", ["lru", "ideal"])
@pytest.mark.parametrize(
    ("exponent", "capacity", "changes", "beta"),
    [
        (0.8, 50, 0.0, None),
        (1.1, 200, 1e-3, 3.0),
        (0.8, 200, 1e-3, 2.0),
        (1.1, 50, 5e-3, 1.5),
        (1.1, 1000, 1e-3, 4.0),
    ],
)
def test_the_model_is_within_two_points_of_simulation(
    policy: str, exponent: float, capacity: int, changes: float, beta: float | None
) -> None:
    popularity = zipf(KEYS, exponent)
    found = simulated(popularity, capacity, changes, beta, policy, REQUESTS)
    told = predict(popularity, capacity, changes, beta, policy)
    for name in ("hits", "inferred", "errors", "served"):
        assert getattr(told, name) == pytest.approx(getattr(found, name), abs=0.02), name
    if changes:
        # What it says is not what it would say of other drift, or of another interval: the test could fail.
        assert abs(predict(popularity, capacity, 0.0, beta, policy).errors - found.errors) > 0.02


def test_limits() -> None:
    popularity = zipf(100, 1.0)
    everything = predict(popularity, 100, 0.0, None)
    assert (everything.hits, everything.errors) == (1.0, 0.0)
    assert predict(popularity, 100, 1e-3, 1.0).errors == 0.0
    assert predict(popularity, 100, 1e-3, 1.0).inferred == pytest.approx(1.0)
    assert predict(popularity, 10, 0.0, None, "ideal").hits == pytest.approx(popularity[:10].sum())
    assert np.isinf(characteristic_time(popularity, 100))
    time = characteristic_time(popularity, 10)
    assert -np.expm1(-popularity * time).sum() == pytest.approx(10)
    rising = [predict(popularity, 30, 1e-3, beta).errors for beta in (1.2, 2.0, 8.0, None)]
    assert rising == sorted(rising)
