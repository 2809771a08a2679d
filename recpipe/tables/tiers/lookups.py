"""A batch's lookups in the resident slots and in the slab; the CPU finds them here, a GPU in ``gpu_lookups``.

What is here is done for each lookup: in few passes, and not at all for what most batches do not have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.loops import compiled
from recpipe.plugin.bags import IndexBags, Offsets, Slots, Weights, places_of
from recpipe.tables.tiers.transfer import Sent

Places = NDArray[np.int64]
DeviceBags = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What a TBE looks up: indices int64 [L], offsets int64 [F * B + 1] and, if ids have weights, these, float32
[L]."""


class Lookups(ABC):
    """A batch's lookups in each tier."""

    needs_cold: NDArray[np.bool_]
    """For each sample, in the batch's own order, whether it looks up a row in the slab, bool [B]."""
    slab_lookups: int
    """How many lookups find their row in the slab."""
    distinct_slots: int
    """How many slots are looked up."""

    @abstractmethod
    def tiers(self, slab_first: int = 0) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What the tables of the resident slots and of the slab look up. ``slab_first``: the slab's first
        place in its table."""

    def prepare(self, slab_first: int, at_once: bool, also: Sequence[NDArray[np.int64]] = ()) -> Sent | None:
        """Begin to make what will be looked up, where that is made on a GPU. ``at_once``: in one table that
        has both tiers; ``also``: arrays to send with it. What they are ready by is returned."""
        return None

    @property
    def made(self) -> Sequence[torch.Tensor]:
        """What was made, on other streams than that of training."""
        return ()


@dataclass(frozen=True)
class CpuLookups(Lookups):
    """The lookups, each found by the CPU.

    Bags are feature-major as in a KJT: bag ``f * B + b``. The slab's are those of samples ``cold_first`` on.
    If rows are not pooled, every id is a bag of its own with its row in one of the two tiers; the slab's bags
    are then all of them.
    """

    batch_size: int
    indices: NDArray[np.int64]
    """Resident slots."""
    offsets: Offsets
    slab_indices: NDArray[np.int64]
    """Positions in the slab."""
    slab_offsets: Offsets
    needs_cold: NDArray[np.bool_]
    weights: Weights | None
    """The weights of ``indices``, float32, if ids have weights."""
    slab_weights: Weights | None
    """The weights of ``slab_indices``, float32, if ids have weights."""
    bags: Offsets | None
    """Where each feature's and sample's ids begin, int64 [F * B + 1]; None for pooled rows."""

    @property
    def slab_lookups(self) -> int:  # type: ignore[override]
        """How many lookups find their row in the slab."""
        return len(self.slab_indices)

    @property
    def distinct_slots(self) -> int:  # type: ignore[override]
        """How many slots are looked up."""
        return len(np.unique(self.indices))

    def tiers(self, slab_first: int = 0) -> tuple[DeviceBags, DeviceBags]:
        """The lookups in the resident slots and in the slab, in the arrays' memory."""
        assert slab_first == 0, "on a CPU each has a table"
        return (
            _tensors(self.indices, self.offsets, self.weights),
            _tensors(self.slab_indices, self.slab_offsets, self.slab_weights),
        )

    def permuted(self, order: NDArray[np.int64], cold_first: int) -> CpuLookups:
        """The lookups of the samples in ``order`` (int64 [n]), of which those before ``cold_first`` need no
        row of the slab."""
        size, samples, bags = self.batch_size, len(order), self.bags
        if bags is not None:  # of each id
            size = int(bags[-1])
            order, bags = places_of(bags, self.batch_size, order)
        resident = IndexBags(self.indices, self.offsets, size, self.weights).permuted(order)
        slab = IndexBags(self.slab_indices, self.slab_offsets, size, self.slab_weights).permuted(order)
        slab_offsets = slab.offsets
        if bags is None:
            features = (len(slab_offsets) - 1) // max(1, samples)
            starts = slab_offsets[:-1].reshape(features, samples)[:, cold_first:].ravel()
            slab_offsets = np.append(starts, len(slab.indices))
        return CpuLookups(
            samples,
            *(resident.indices, resident.offsets, slab.indices, slab_offsets, self.needs_cold),
            *(resident.weights, slab.weights, bags),
        )


def _tensors(indices: Places, offsets: Offsets, weights: Weights | None) -> DeviceBags:
    own = None if weights is None else torch.from_numpy(weights)
    return torch.from_numpy(indices), torch.from_numpy(offsets), own


def parted(bags: IndexBags, where: Slots, pooled: bool) -> CpuLookups:
    """The lookups of ``bags``, whose rows are in slot ``where[i]`` or, below ``IN_STORE``, in the slab at
    ``-2 - where[i]`` (int32 [L])."""
    size, own = bags.batch_size, bags.offsets if pooled else np.arange(len(where) + 1)
    of_ids = None if pooled else bags.offsets
    cold, needs = _needing(where, bags.offsets, size)
    weights = bags.weights
    if not cold:
        return CpuLookups(
            size,
            where.astype(np.int64),
            own,
            np.empty(0, np.int64),
            np.zeros(len(own), np.int64),
            needs,
            weights,
            None if weights is None else weights[:0],
            of_ids,
        )
    return CpuLookups(
        size,
        *_parted(where, own, cold),
        needs,
        None if weights is None else weights.compress(where >= 0),
        None if weights is None else weights.compress(where < 0),
        of_ids,
    )


@compiled
def _needing(where: Slots, offsets: Offsets, size: int) -> tuple[int, NDArray[np.bool_]]:
    """How many of the bags' lookups are in the slab, and whether any of each of the ``size`` samples' is."""
    needs = np.zeros(size, np.bool_)
    cold = 0
    for bag in range(len(offsets) - 1):
        before = cold
        for i in range(offsets[bag], offsets[bag + 1]):
            cold += where[i] < 0
        if cold > before:
            needs[bag % size] = True
    return cold, needs


@compiled
def _parted(where: Slots, bags: Offsets, cold: int) -> tuple[Places, Offsets, Places, Offsets]:
    """Slots and offsets of the bags' lookups in slots, and the same of the ``cold`` ones in the slab."""
    slots, slab = np.empty(len(where) - cold, np.int64), np.empty(cold, np.int64)
    offsets, slab_offsets = np.zeros(len(bags), np.int64), np.zeros(len(bags), np.int64)
    in_slots = in_slab = 0
    for bag in range(len(bags) - 1):
        for i in range(bags[bag], bags[bag + 1]):
            if where[i] >= 0:
                slots[in_slots] = where[i]
                in_slots += 1
            else:
                slab[in_slab] = -2 - where[i]
                in_slab += 1
        offsets[bag + 1], slab_offsets[bag + 1] = in_slots, in_slab
    return slots, offsets, slab, slab_offsets
