"""Ranges of codes that make the smallest squared error, not those between the smallest and the largest value.

After the L2 ranges of Facebook's DNNLOWP (Park et al. 2018): rare large values are cut off where a finer step
for all the others gains more than that costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.seams.int8 import LARGEST as LARGEST_WEIGHT_CODE

BINS = 4096
SHRINKS = np.geomspace(1.0, 1e-3, 73)
"""Shares of the whole range that are tried, for each side of it."""
ROW_SHRINKS = np.linspace(1.0, 0.4, 25)
"""The same for the weights of an output."""


@dataclass
class Inputs:
    """What a layer is given: first its range, then its histogram. Zeros count apart, since they are exact."""

    low: float = 0.0
    high: float = 0.0
    finite: bool = True
    counts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS))

    def widen(self, x: torch.Tensor) -> None:
        """See values for their range."""
        if x.numel():
            low, high = (float(end) for end in x.aminmax())
            self.finite = self.finite and np.isfinite(low) and np.isfinite(high)
            self.low, self.high = min(self.low, low), max(self.high, high)

    def count(self, x: torch.Tensor) -> None:
        """See the same values for their histogram."""
        if self.finite and self.high > self.low:
            found = torch.histc(x[x != 0].float(), BINS, self.low, self.high)
            self.counts += found.double().numpy()

    def coded(self, most: int) -> tuple[float, int]:
        """Scale and code of 0, so that codes 0 to ``most`` make the smallest squared error."""
        width = (self.high - self.low) / BINS
        if not width > 0:
            return 1.0, 0
        centres = (self.low + width * (np.arange(BINS) + 0.5)).astype(np.float64)
        best = (np.inf, 1.0, 0)
        for low in self.low * SHRINKS if self.low < 0 else [0.0]:
            for high in self.high * SHRINKS if self.high > 0 else [0.0]:
                scale = (high - low) / most
                if not scale > 0:
                    continue
                zero = int(np.clip(np.rint(-low / scale), 0, most))
                error = _error(self.counts, centres, -zero * scale, (most - zero) * scale, scale)
                best = min(best, (error, scale, zero))
        return best[1], best[2]


def _error(
    counts: NDArray[np.float64], centres: NDArray[np.float64], low: float, high: float, scale: float
) -> float:
    """Sum of squared errors: what is cut off, and a twelfth of a step's square for all others."""
    first, last = np.searchsorted(centres, (low, high))
    below, above = centres[:first] - low, centres[last:] - high
    cut = counts[:first] @ (below * below) + counts[last:] @ (above * above)
    return float(cut + counts[first:last].sum() * scale * scale / 12)


def weight_scales(weight: torch.Tensor) -> torch.Tensor:
    """For each output the scale of its codes that makes the smallest squared error: float32 [O] of ``weight``
    float32 [O, I]."""
    whole = weight.abs().amax(1) / LARGEST_WEIGHT_CODE
    whole = torch.where(whole > 0, whole, torch.ones_like(whole))
    best, least = whole, torch.full_like(whole, torch.inf)
    for shrink in ROW_SHRINKS:
        scales = whole * float(shrink)
        codes = (weight / scales[:, None]).round_().clamp_(-LARGEST_WEIGHT_CODE, LARGEST_WEIGHT_CODE)
        error = (codes.mul_(scales[:, None]) - weight).square_().sum(1)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best
