"""Intervals of figures: they hold the truth about as often as they should, and follow the size."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recpipe.answers.figures import judge
from recpipe.model.metrics import judged


def drawn(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels, and logits that are right about them."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1, 1, rows).astype(np.float32)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return torch.from_numpy(labels), torch.from_numpy(logits)


def test_values_are_those_of_training() -> None:
    labels, logits = drawn(5000, 1)
    found, wanted = judge("clicks", labels, logits), judged("clicks", labels, logits)
    for name in ("auc", "logloss", "ne"):
        figure = found.figures[name]
        assert figure.value == getattr(wanted, name)
        assert figure.low < figure.value < figure.high
    assert found.positives == int(labels.sum())
    assert found.figures["calibration"].value == pytest.approx(float(logits.sigmoid().mean() / labels.mean()))


@pytest.mark.parametrize("quick", [False, True])
def test_95_percent_hold_the_truth(monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    """Of 60 draws, at least 52, and of intervals of half the width fewer; the truth is that of 100,000
    rows."""
    monkeypatch.setattr("recpipe.answers.figures.REPLICATES", 200)
    truth = judge("clicks", *drawn(100_000, 0)).figures
    within, half = dict.fromkeys(truth, 0), dict.fromkeys(truth, 0)
    for seed in range(1, 61):
        for name, found in judge("clicks", *drawn(300, seed), quick=quick).figures.items():
            within[name] += found.low <= truth[name].value <= found.high
            half[name] += abs(found.value - truth[name].value) <= (found.high - found.low) / 4
    assert min(within.values()) >= 52, within
    assert max(half.values()) < min(within.values()), (within, half)


def test_few_rows_and_one_class() -> None:
    labels, logits = drawn(50, 1)
    ones = judge("clicks", torch.ones(50), logits).figures
    assert math.isnan(ones["auc"].value)
    assert math.isnan(ones["ne"].value)
    assert ones["logloss"].low < ones["logloss"].high
    single = judge("clicks", labels[:1], logits[:1])
    assert math.isnan(single.figures["logloss"].low)
    assert single.to_dict()["figures"]["auc"]["value"] is None
    assert not judge("clicks", labels[:0], logits[:0]).samples


def test_values_and_counts() -> None:
    labels, logits = drawn(500, 2)
    assert set(judge("values", labels, logits).figures) == {"mse", "rmse", "mae", "calibration"}
    assert set(judge("counts", labels, logits).figures) == {"poisson_deviance", "calibration"}
