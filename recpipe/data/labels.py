"""The kinds of labels that files may have, and the check of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class LabelKind:
    """What labels float64 [n] must be: ``fits`` tells for each, ``fault`` is said of one that does not. Each
    kind must be finite as float32 too."""

    fits: Callable[[NDArray[np.float64]], Bools]
    fault: str


def _clicks(labels: NDArray[np.float64]) -> Bools:
    return np.isin(labels, (0, 1))


def _counts(labels: NDArray[np.float64]) -> Bools:
    return np.greater_equal(labels, 0)


def _classes(labels: NDArray[np.float64]) -> Bools:
    """Whole numbers that float32 holds exactly."""
    whole: Bools = labels == np.floor(labels)
    return whole & (labels >= 0) & (labels < 2**24)


LABEL_KINDS = {
    "clicks": LabelKind(
        _clicks, "is neither 0 nor 1 (data.label_kind=values takes any number, for a loss that does)"
    ),
    "values": LabelKind(np.isfinite, "is not a finite float32 number"),
    "counts": LabelKind(_counts, "is not a finite float32 number of at least 0"),
    "classes": LabelKind(_classes, "is no class: a whole number from 0 on"),
}
"""The values of ``data.label_kind``."""
