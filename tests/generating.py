"""Generated clicks in the tests' own process: drawn once; a small run draws 40,000 samples to train 1,000.

A click model is calibrated on 32,768 samples, and a block has 8,192. Tests of the generator itself ask for
the fixture ``generated_anew``; a process of its own (``tests.processes``) draws anew, too.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from recpipe.data.columns import Columns, Float32
from recpipe.data.sources.synthetic import SyntheticDataset

FEATURES = SyntheticDataset._features
KEPT = 12
"""Draws of some MB each."""
_drawn: dict[tuple[Any, ...], tuple[Columns, Float32, Any]] = {}


def remember(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` ends."""
    patch.setattr(SyntheticDataset, "_features", features)


def forget(patch: pytest.MonkeyPatch) -> None:
    """Samples are drawn anew until ``patch`` ends."""
    patch.setattr(SyntheticDataset, "_features", FEATURES)


def features(dataset: SyntheticDataset, rng: np.random.Generator, size: int) -> tuple[Columns, Float32]:
    """As ``SyntheticDataset._features``, ``rng`` left as that leaves it."""
    state = rng.bit_generator.state
    key = (dataset.fingerprint, size, *state["state"]["counter"].tolist(), *state["state"]["key"].tolist())
    if key not in _drawn:
        while len(_drawn) >= KEPT:
            del _drawn[next(iter(_drawn))]
        _drawn[key] = (*FEATURES(dataset, rng, size), rng.bit_generator.state)
    columns, raw, rng.bit_generator.state = _drawn[key]
    return copy.deepcopy(columns), raw  # whoever alters a batch alters its own
