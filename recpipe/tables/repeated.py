"""A lookup that a graph of kernels makes again for each batch, with other indices in the same memory.

Kernels that are repeated get no other sizes, so that this is a lookup of as many ids in each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RepeatedLookup:
    """A batch's lookup of one id in each bag, in a table whose backward pass makes the update."""

    table: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Looks up indices and offsets: float32 ``shape``."""
    indices: torch.Tensor
    """int64 [L]; the current stream may read them."""
    offsets: torch.Tensor
    """int64 [L + 1]: 0, 1, ... L. They are the same in each batch of as many ids."""
    shape: tuple[int, int]
    memory: Hashable
    """Where the table is: kernels that were recorded read and write the same place."""

    @property
    def form(self) -> Hashable:
        """What must be the same of two batches' lookups for one graph to make both."""
        return self.shape, len(self.indices), self.memory
