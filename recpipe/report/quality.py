"""Which figures of quality a report shows: those that fit the model's loss and labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

CLICKS = ("auc", "logloss", "ne")
LABELS = {
    "auc": "AUC",
    "logloss": "logloss",
    "ne": "NE",
    "loss": "loss",
    "mse": "MSE",
    "rmse": "RMSE",
    "mae": "MAE",
    "poisson_deviance": "Poisson deviance",
}
"""All figures of quality, by their names in report.json."""
Figures = Mapping[str, float | None]


def shown(several: Iterable[Figures]) -> list[str]:
    """Names of the figures to show of ``several``: AUC, logloss and NE where one has a logloss, or nobody has
    anything; else the loss and what any of them has besides."""
    there = {name for figures in several for name in LABELS if not _absent(figures.get(name))}
    if "logloss" in there or not there:
        return list(CLICKS)
    return [name for name in LABELS if name in there]


def told(figures: Figures) -> list[tuple[str, float | None]]:
    """The figures to show of one, by label."""
    return [(LABELS[name], figures.get(name)) for name in shown([figures])]


def _absent(value: float | None) -> bool:
    return value is None or math.isnan(value)
