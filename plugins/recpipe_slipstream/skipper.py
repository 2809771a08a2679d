"""Slipstream's skipper: leaves stale inputs out of a batch and, if asked for, stale rows out of its
update."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.plugin import Batch, RowIds, RowView, Skipper
from recpipe_slipstream.callback import StaleInputs
from recpipe_slipstream.classifier import STALE


class Stale(Skipper):
    """Leaves out the inputs that ``inputs`` classifies as stale."""

    def __init__(self, inputs: StaleInputs) -> None:
        self.inputs = inputs

    def begin(self, view: RowView) -> None:
        """Start, before the first batch is read."""
        self.inputs.start(view)

    def keep(self, batch: Batch, number: int) -> NDArray[np.bool_] | None:
        """Which inputs are not stale."""
        return self.inputs.classifier.keep(batch, number)


class Frozen(Stale):
    """The strict variant: a stale row keeps every bit while its mark is in force."""

    def update(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor | None:
        """Which rows are not stale."""
        start = perf_counter()
        marks = self.inputs.classifier.in_force(self.inputs.done)
        stay = None if marks is None else torch.from_numpy(marks.codes[rows] != STALE)
        self.inputs.totals.freeze_seconds += perf_counter() - start
        return stay
