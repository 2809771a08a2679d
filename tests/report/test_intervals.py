"""95% intervals against what is known of them."""

from __future__ import annotations

import numpy as np
import pytest

from recpipe.report.compared import mean_interval, median_interval, width


def test_few_values_have_none() -> None:
    assert median_interval([1.0, 2.0]) is None
    assert mean_interval([1.0, 2.0]) is None
    assert width(None, 1.0) == float("inf")


def test_the_mean_is_covered_as_often_as_promised() -> None:
    samples = np.random.default_rng(1).normal(3.0, 2.0, (2000, 5))
    found = [mean_interval(values) for values in samples.tolist()]
    covered = np.mean([low <= 3.0 <= high for low, high in filter(None, found)])
    assert covered == pytest.approx(0.95, abs=0.015)


def test_the_medians_interval_narrows_with_rounds_and_is_the_same_each_time() -> None:
    values = np.random.default_rng(2).normal(1.0, 0.1, 40).tolist()
    few, many = median_interval(values[:5]), median_interval(values)
    assert few is not None
    assert many is not None
    assert few[0] <= np.median(values[:5]) <= few[1]
    assert width(many, 1.0) < width(few, 1.0)
    assert many == median_interval(values)
    assert median_interval([0.9, 0.9, 0.9]) == (0.9, 0.9)
