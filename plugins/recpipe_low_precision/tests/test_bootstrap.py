"""Intervals of the paired bootstrap."""

from __future__ import annotations

import numpy as np
import pytest
from recpipe_low_precision.search import GROUPS, PairedBootstrap

from recpipe.model.metrics import auc


def losses(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).gamma(1.0, 0.4, samples)


def test_equal_losses_differ_by_nothing() -> None:
    base = losses(500)
    found = PairedBootstrap(500).relative(base, base)
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_a_loss_that_is_larger_everywhere_by_a_share_is_exact() -> None:
    base = losses(500)
    found = PairedBootstrap(500).relative(1.001 * base, base)
    assert [found.value, found.low, found.high] == pytest.approx([0.001] * 3, rel=1e-4)


@pytest.mark.parametrize("samples", [900, 3 * GROUPS + 5])
def test_interval_is_that_of_the_normal_approximation(samples: int) -> None:
    base = losses(samples)
    apart = 0.003 * np.random.default_rng(1).standard_normal(samples) + 2e-4
    found = PairedBootstrap(samples).relative(base + apart, base)
    mean, spread = apart.mean() / base.mean(), apart.std() / base.mean() / np.sqrt(samples)
    assert found.value == pytest.approx(mean)
    assert found.low == pytest.approx(mean - 1.96 * spread, abs=0.25 * spread)
    assert found.high == pytest.approx(mean + 1.96 * spread, abs=0.25 * spread)


def test_auc_is_the_exact_one_and_its_interval_holds_it() -> None:
    draw = np.random.default_rng(3)
    labels = (draw.random(800) < 0.3).astype(np.float32)
    base = np.round(labels + draw.standard_normal(800), 2)  # with ties
    worse = base + draw.standard_normal(800)
    found = PairedBootstrap(800).auc(labels, worse, base)
    assert found.value == pytest.approx(
        auc(labels, worse.astype(np.float32)) - auc(labels, base.astype(np.float32)), abs=1e-6
    )
    assert found.low < found.value < found.high < 0
