"""What FAE states of its mini-batches, beside counting them one by one."""

from __future__ import annotations

import numpy as np
import pytest
from recpipe_fae.costs import separated, statement
from recpipe_perf_model import KeptLookups
from recpipe_perf_model.testing import sample_facts

from recpipe.plugin import Bags

SIZE, FEATURES, ROWS, BATCHES = 16, 3, 40, 12


def lookups() -> list[np.ndarray]:
    """Samples by features, skewed: [SIZE, FEATURES] each."""
    random = np.random.default_rng(3)
    return [(ROWS * random.random((SIZE, FEATURES)) ** 3).astype(np.int64) for _ in range(BATCHES)]


def kept(batches: list[np.ndarray]) -> KeptLookups:
    offsets = np.arange(SIZE * FEATURES + 1)
    bags = [Bags(each.T.ravel(), offsets, SIZE) for each in batches]
    return KeptLookups(bags, np.array([0, ROWS]))


@pytest.mark.parametrize("carries", [True, False])
def test_cold_mini_batches_are_counted(carries: bool) -> None:
    batches, hot = lookups(), np.arange(ROWS) < 12
    share, (moved,) = separated([kept(batches)], [hot], SIZE, carries)
    samples = np.concatenate(batches)
    cold = samples[~hot[samples].all(axis=1)]
    assert share == pytest.approx(1 - len(cold) / len(samples))
    read = rows = missed = 0
    before: set[int] = set()
    for first in range(0, len(cold), SIZE):
        looked_up = cold[first : first + SIZE].ravel()
        own = {int(row) for row in looked_up if not hot[row]}
        rows += len(own)
        read += len(own - before) if carries else len(own)
        missed += int((~hot[looked_up]).sum())
        before = own
    mini = len(cold) / SIZE
    assert (moved.read, moved.slab, moved.missed) == pytest.approx((read / mini, rows / mini, missed / mini))
    assert moved.returned == moved.read


def test_mini_batches_are_separated_where_the_runs_estimate_says_so() -> None:
    facts, rule = sample_facts(), (0.5, None)
    asked, auto = (statement(facts, phases, *rule) for phases in ("always", "auto"))
    assert len(asked.phases) == 2
    assert asked.instead is None
    assert len(auto.phases) == 1, "hardly a sample is hot, and little would be gained"
    assert "not separated" in auto.why
    never = statement(facts, "never", *rule)
    assert never.phases == auto.phases
