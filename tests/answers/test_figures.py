"""Intervals of figures hold the truth about as often as they should."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recpipe.model.metrics import judge, judged
from recpipe.model.scores import Scores


def drawn(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels, and logits that are right about them."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1, 1, rows).astype(np.float32)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return torch.from_numpy(labels), torch.from_numpy(logits)


def test_values_are_those_of_training() -> None:
    labels, logits = drawn(5000, 1)
    found, wanted = judge(Scores("clicks", labels, logits)), judged("clicks", labels, logits)
    assert found.quality == wanted
    for name in found.figures.keys() - {"ece"}:
        figure = found.figures[name]
        assert figure.low < figure.value < figure.high, name
    assert found.positives == int(labels.sum())
    assert found.figures["calibration"].value == pytest.approx(float(logits.sigmoid().mean() / labels.mean()))


def test_95_percent_hold_the_truth() -> None:
    """Of 60 draws, at least 52, and of intervals of half the width fewer; the truth is that of 100,000
    rows."""
    truth = judge(Scores("clicks", *drawn(100_000, 0))).figures
    within = {name: 0 for name, found in truth.items() if not math.isnan(found.low)}
    half = dict(within)
    for seed in range(1, 61):
        figures = judge(Scores("clicks", *drawn(300, seed))).figures
        for name in within:
            found = figures[name]
            within[name] += found.low <= truth[name].value <= found.high
            half[name] += abs(found.value - truth[name].value) <= (found.high - found.low) / 4
    assert within.keys() == {"auc", "pr_auc", "logloss", "ne", "calibration"}
    assert min(within.values()) >= 52, within
    assert max(half.values()) < min(within.values()), (within, half)


def test_few_rows_and_one_class() -> None:
    labels, logits = drawn(50, 1)
    ones = judge(Scores("clicks", torch.ones(50), logits)).figures
    assert math.isnan(ones["auc"].value)
    assert math.isnan(ones["pr_auc"].value)
    assert math.isnan(ones["ne"].value)
    assert ones["logloss"].low < ones["logloss"].high
    single = judge(Scores("clicks", labels[:1], logits[:1]))
    assert math.isnan(single.figures["logloss"].low)
    assert single.to_dict()["figures"]["auc"]["value"] is None
    nothing = judge(Scores("clicks", labels[:0], logits[:0]))
    assert (nothing.samples, nothing.figures) == (0, {})


def test_values_and_counts() -> None:
    labels, logits = drawn(500, 2)
    assert {*judge(Scores("values", labels, logits)).figures} == {"mse", "rmse", "mae", "calibration"}
    assert {*judge(Scores("counts", labels, logits)).figures} == {"poisson_deviance", "calibration"}
