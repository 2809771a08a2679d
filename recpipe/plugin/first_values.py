"""What the first weights of tables are drawn from: each weight by itself, so that rows are made in blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = Callable[[int], NDArray[np.float32]]
"""Gives some rows' own uniform numbers in [-1, 1), float32 [n, columns] for so many ``columns``; the first of
these are the same for any number of them."""


@dataclass(frozen=True)
class Uniform:
    """Uniform in [low, high)."""

    low: float
    high: float

    @classmethod
    def usual(cls, rows: int) -> Uniform:
        """That of DLRM's tables and of TorchRec's collections: in +-sqrt(1 / rows)."""
        bound = float(np.sqrt(1.0 / rows))
        return cls(-bound, bound)

    def draw(self, generator: np.random.Generator, rows: int, dim: int) -> NDArray[np.float32]:
        """The weights of so many rows, float32 [rows, dim]."""
        return generator.random((rows, dim), np.float32) * (self.high - self.low) + self.low

    def made_of(self, numbers: Numbers, dim: int) -> NDArray[np.float32]:
        """Weights float32 [n, dim] of the rows' own ``numbers``."""
        half, middle = np.float32((self.high - self.low) / 2), np.float32((self.high + self.low) / 2)
        return numbers(dim) * half + middle


@dataclass(frozen=True)
class Normal:
    """Normal, with this mean and standard deviation."""

    mean: float
    std: float

    def draw(self, generator: np.random.Generator, rows: int, dim: int) -> NDArray[np.float32]:
        """As ``Uniform.draw``."""
        return generator.standard_normal((rows, dim), np.float32) * self.std + self.mean

    def made_of(self, numbers: Numbers, dim: int) -> NDArray[np.float32]:
        """As ``Uniform.made_of``: Box and Muller's cosine, of two numbers for each weight."""
        found = numbers(2 * dim).astype(np.float64)
        # (1 - x) / 2 of x in [-1, 1) is in (0, 1], which has a logarithm.
        length = np.sqrt(-2 * np.log((1 - found[:, :dim]) / 2))
        standard = length * np.cos(np.pi * found[:, dim:])
        weights: NDArray[np.float32] = (standard * self.std + self.mean).astype(np.float32)
        return weights


Drawn = Uniform | Normal
"""Of which first weights are drawn."""
