"""Averages of weights over the steps of a run, of which a row's own record is enough.

The average of a row is kept as its difference from the row's weights. While a row is not updated, its
weights stay the same, so that each averaging point multiplies the difference by a number that is known
without looking at the row: what has been missed is caught up with when the row is next updated or read. The
result is that of an average over all rows at every point, as long as float32 counts the points, up to 2**24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval

from recpipe.common.validation import one_of

KINDS = ("ema", "swa")
Points = tuple[int, int]
"""How many averaging points had passed before a step, and how many after it."""


@dataclass(frozen=True)
class Averaging:
    """What a run averages its weights by: the first point takes them as they are; at each later one,
    ``ema`` takes ``decay`` of the average and the rest of the weights, and ``swa`` is the mean of all points,
    as ``torch.optim.swa_utils.AveragedModel`` makes them."""

    kind: Annotated[str, one_of(*KINDS)]
    decay: Annotated[float, Interval(gt=0, lt=1)] | None = None
    """Of ``ema``; ``swa`` has none."""

    def kept(self, seen: torch.Tensor, points: int) -> torch.Tensor:
        """The share of a row's difference that is left after ``points``, if it was right when so many had
        passed as ``seen`` says: float32, in the shape of ``seen``."""
        if not points:
            return torch.zeros_like(seen)
        before = seen.double()
        share = before / points if self.decay is None else self.decay ** (points - before)
        return torch.where(before > 0, share, 0.0).float()

    def moved(
        self, before: torch.Tensor, after: torch.Tensor, state: torch.Tensor, points: Points
    ) -> torch.Tensor:
        """The average's ``state`` (float32 [n, D + 1]: the difference, and the points passed when it was
        right) after a step from the weights ``before`` to ``after``, float32 [n, D]."""
        first, last = points
        difference = self.kept(state[:, -1:], first) * state[:, :-1] + (before - after)
        left = self.kept(state.new_full((1, 1), first), last)
        return torch.cat((left * difference, torch.full_like(state[:, -1:], last)), dim=1)

    def averages(self, weights: torch.Tensor, state: torch.Tensor, points: int) -> torch.Tensor:
        """The averages after so many ``points`` of rows with these ``weights``, float32 [n, D]. ``state``:
        that of their records, of which the average's is the last D + 1 columns."""
        own = state[:, state.shape[1] - weights.shape[1] - 1 :]
        return weights + self.kept(own[:, -1:], points) * own[:, :-1]


@dataclass(eq=False)
class Clock:
    """Which averaging points the run has come to, for all tables of an optimizer."""

    points: Points = (0, 0)
    """Of the step in force."""
    shows: bool = False
    """Whether lookups without gradients give averages, as evaluations do."""
