"""Which figures of quality a report shows: those that fit the model's loss and labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

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
FIRST = ("auc", "rmse", "poisson_deviance")
"""By which predictions of each kind are judged first."""
Figures = Mapping[str, float | None]


def shown_figures(several: Iterable[Figures]) -> list[str]:
    """Names of the figures to show of ``several``: of each one AUC, logloss and NE where it has a logloss,
    else the loss and what it has besides; AUC, logloss and NE where nobody has anything."""
    found = {name for figures in several for name in _shown(figures)}
    return [name for name in LABELS if name in found] or list(CLICKS)


def _shown(figures: Figures) -> Sequence[str]:
    there = [name for name in LABELS if not _absent(figures.get(name))]
    return CLICKS if "logloss" in there else there


def labelled(figures: Figures) -> list[tuple[str, float | None]]:
    """The figures to show of one, by label."""
    return [(LABELS[name], figures.get(name)) for name in shown_figures([figures])]


def _absent(value: float | None) -> bool:
    return value is None or math.isnan(value)
