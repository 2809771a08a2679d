"""Selects the figures that a report shows: of quality, those that fit the model's loss and labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

VERDICT = "verdict"
"""The figure of a plugin that says in a sentence whether it paid in this run, and why."""
ALTERED = "altered"
"""The figure of a plugin that says which of the invariants that it declares to alter it altered in this run:
their names with commas between, or ``nothing``."""
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
"""The main figures for each kind of prediction."""
Figures = Mapping[str, float | None]


def shown_figures(several: Iterable[Figures]) -> list[str]:
    """The names of the figures to show for ``several`` runs: AUC, logloss and NE for a run with a logloss,
    otherwise the loss and the other figures that it has. If no run has any, AUC, logloss and NE."""
    found = {name for figures in several for name in _shown(figures)}
    return [name for name in LABELS if name in found] or list(CLICKS)


def _shown(figures: Figures) -> Sequence[str]:
    there = [name for name in LABELS if not _absent(figures.get(name))]
    return CLICKS if "logloss" in there else there


def labelled(figures: Figures) -> list[tuple[str, float | None]]:
    """The figures to show for one run, with their labels."""
    return [(LABELS[name], figures.get(name)) for name in shown_figures([figures])]


def _absent(value: float | None) -> bool:
    return value is None or math.isnan(value)
