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
from recpipe.plugin.bags import Bags, Offsets, Slots, distinct, places_of
from recpipe.tables.rows import RowBags
from recpipe.tables.tiers.transfer import Sent

Places = NDArray[np.int64]
DeviceBags = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What a TBE looks up: indices int64 [L], offsets int64 [F * B + 1] and, if ids have weights, these, float32
[L]."""
Touched = NDArray[np.int64]
"""The distinct slots that at least one trainer looks up in a batch, sorted, int64 [U]; the same on every
trainer."""


class Lookups(ABC):
    """A batch's lookups in each tier."""

    needs_cold: NDArray[np.bool_]
    """For each sample, in the batch's own order, whether it looks up a row in the slab, bool [B]."""
    made: Sequence[torch.Tensor] = ()
    """What was made for the tables, on other streams than that of training."""

    @abstractmethod
    def tiers(self, slab_first: int = 0) -> tuple[Any, ...]:
        """What the tables of the resident slots and of the slab look up. ``slab_first``: the slab's first
        place in its table."""

    def prepare(self, slab_first: int, at_once: bool, also: Sequence[NDArray[np.int64]] = ()) -> Sent | None:
        """Begin to make what will be looked up, where that is made on a GPU. ``at_once``: in one table that
        has both tiers; ``also``: arrays to send with it. What they are ready by is returned."""
        return None


@dataclass(frozen=True)
class CpuLookups(Lookups):
    """The lookups, each found by the CPU.

    Bags are feature-major as in a KJT: bag ``f * B + b``. The slab's are those of samples ``cold_first`` on.
    If rows are not pooled, every id is a bag of its own with its row in one of the two tiers; the slab's bags
    are then all of them.
    """

    batch_size: int
    resident: Bags
    """Lookups of resident slots."""
    slab: Bags
    """Lookups of positions in the slab."""
    needs_cold: NDArray[np.bool_]
    bags: Offsets | None
    """Where each feature's and sample's ids begin, int64 [F * B + 1]; None for pooled rows."""

    def tiers(self, slab_first: int = 0) -> tuple[DeviceBags, DeviceBags]:
        """The lookups in the resident slots and in the slab, in the arrays' memory."""
        assert slab_first == 0, "on a CPU each has a table"
        found: list[DeviceBags] = []
        for bags in (self.resident, self.slab):
            weights = None if bags.weights is None else torch.from_numpy(bags.weights)
            found.append((torch.from_numpy(bags.rows), torch.from_numpy(bags.offsets), weights))
        return found[0], found[1]

    def permuted(self, order: NDArray[np.int64], cold_first: int) -> CpuLookups:
        """The lookups of the samples in ``order`` (int64 [n]), of which those before ``cold_first`` need no
        row of the slab."""
        samples, bags = len(order), self.bags
        if bags is not None:  # of each id
            order, bags = places_of(bags, self.batch_size, order)
        resident, slab = self.resident.permuted(order), self.slab.permuted(order)
        if bags is None:
            features = (len(slab.offsets) - 1) // max(1, samples)
            starts = slab.offsets[:-1].reshape(features, samples)[:, cold_first:].ravel()
            offsets = np.append(starts, len(slab.rows))
            slab = Bags(slab.rows, offsets, samples - cold_first, slab.weights)
        return CpuLookups(samples, resident, slab, self.needs_cold, bags)


def parted(bags: Bags, where: Slots, pooled: bool) -> CpuLookups:
    """The lookups of ``bags``, whose rows are in slot ``where[i]`` or, below ``IN_STORE``, in the slab at
    ``-2 - where[i]`` (int32 [L])."""
    size, weights = bags.batch_size, bags.weights
    cold, needs = _needing(where, bags.offsets, size)
    # Without pooling, each id is a bag.
    own, count = (bags.offsets, size) if pooled else (np.arange(len(where) + 1), len(where))
    if cold:
        slots, offsets, slab, slab_offsets = _parted(where, own, cold)
    else:
        slots, offsets = where.astype(np.int64), own
        slab, slab_offsets = np.empty(0, np.int64), np.zeros(len(own), np.int64)
    of_slots, of_slab = weights, None if weights is None else weights[:0]
    if cold and weights is not None:
        of_slots, of_slab = weights.compress(where >= 0), weights.compress(where < 0)
    return CpuLookups(
        size,
        Bags(slots, offsets, count, of_slots),
        Bags(slab, slab_offsets, count, of_slab),
        needs,
        None if pooled else bags.offsets,
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


class SharedLookups(Lookups):
    """One trainer's lookups of a batch in each tier, by slot, and the slots that any trainer touches.

    ``whole``: all trainers' lookups, of which ``samples`` (int64 [n], in this order) are this trainer's;
    those from ``cold_first`` on may need the slab, which has ``slab_rows``.
    """

    def __init__(
        self, whole: CpuLookups, samples: NDArray[np.int64], cold_first: int, slab_rows: int
    ) -> None:
        own = whole.permuted(samples, cold_first)
        self.needs_cold = whole.needs_cold
        self._tiers = (
            (RowBags.of(own.resident), distinct(whole.resident.rows)),
            (RowBags.of(own.slab), np.arange(slab_rows)),
        )

    def tiers(self, slab_first: int = 0) -> tuple[tuple[RowBags, Touched], tuple[RowBags, Touched]]:
        """The lookups in each tier's ``SharedTable``."""
        return self._tiers
