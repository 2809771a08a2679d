"""Finds a batch's lookups in the resident slots and in the slab, on a CPU; ``on_gpu`` does it on a GPU.

What is here is done for each lookup: in few passes, in several threads, and not at all for what most batches
do not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.spread import Spread
from recpipe.data.select import places_of
from recpipe.plugin.policy import RowIds, Slots

Offsets = NDArray[np.int64]
Weights = NDArray[np.float32]
Places = NDArray[np.int64]
DeviceBags = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What a TBE looks up: indices int64 [L], offsets int64 [F * B + 1] and, if ids have weights, these, float32
[L]."""


def found_at(where: Slots, rows: RowIds, spread: Spread) -> tuple[Slots, Places]:
    """``where[rows]`` (int32 [L]), and the positions at which it is below 0."""
    found = np.empty(len(rows), np.int32)

    def find(part: slice) -> Places:
        found[part] = where.take(rows[part])
        return _below_0(found, part)

    return found, np.concatenate(spread.map(find, spread.parts(len(rows))))


def _below_0(found: Slots, part: slice) -> Places:
    places: Places = np.flatnonzero(found[part] < 0) + part.start
    return places


def slots_in(found: Slots, spread: Spread) -> Slots:
    """Those of ``found`` that are not below 0, in their order."""

    def of(part: slice) -> Slots:
        slots: Slots = found[part][found[part] >= 0]
        return slots

    return np.concatenate(spread.map(of, spread.parts(len(found))))


@dataclass
class IndexBags:
    """A batch's lookups in one matrix of rows: bag i is ``indices[offsets[i] : offsets[i + 1]]``.

    The matrix is that of one group of tables (``table_bags``), or of the slots or the slab of its tiers.
    """

    indices: NDArray[np.int64]
    """Rows of the matrix, int64 [L]."""
    offsets: Offsets
    """Feature-major, int64 [F * B + 1]."""
    batch_size: int
    weights: Weights | None = None
    """Weights of the lookups, float32 [L]; None: each counts once."""
    times: ClassVar[None] = None
    """As ``GpuBags`` has them; here each lookup is there itself."""

    def __len__(self) -> int:
        return len(self.indices)

    def count(self, places: NDArray[np.int64]) -> int:
        """How many lookups ``indices[places]`` are."""
        return len(places)

    def parted(self, where: Slots, pooled: bool, spread: Spread) -> Parted:
        """As ``parting.parted``."""
        return parted(self, where, pooled, spread)

    def apart(self) -> IndexBags:
        """The same lookups, each as a bag of its own, with one feature."""
        lookups = len(self.indices)
        return IndexBags(self.indices, np.arange(lookups + 1), lookups)

    def permuted(self, order: NDArray[np.int64]) -> IndexBags:
        """The bags of the samples in ``order`` (int64 [n]), in that order."""
        places, offsets = places_of(self.offsets, self.batch_size, order)
        weights = None if self.weights is None else self.weights[places]
        return IndexBags(self.indices[places], offsets, len(order), weights)


@dataclass(frozen=True)
class Parted:
    """A batch's lookups in each tier.

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
    """For each sample, in the batch's own order, whether it looks up a row in the slab."""
    weights: Weights | None
    """The weights of ``indices``, float32, if ids have weights."""
    slab_weights: Weights | None
    """The weights of ``slab_indices``, float32, if ids have weights."""
    bags: Offsets | None
    """Where each feature's and sample's ids begin, int64 [F * B + 1]; None for pooled rows."""

    @property
    def slab_lookups(self) -> int:
        """How many lookups find their row in the slab."""
        return len(self.slab_indices)

    @property
    def distinct_slots(self) -> int:
        """How many slots are looked up."""
        return len(np.unique(self.indices))

    def tiers(self, slab_first: int = 0) -> tuple[DeviceBags, DeviceBags]:
        """The lookups in the resident slots and in the slab, in the arrays' memory."""
        assert slab_first == 0, "on a CPU each has a table"
        return (
            _tensors(self.indices, self.offsets, self.weights),
            _tensors(self.slab_indices, self.slab_offsets, self.slab_weights),
        )

    def permuted(self, order: NDArray[np.int64], cold_first: int) -> Parted:
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
        return Parted(
            samples,
            *(resident.indices, resident.offsets, slab.indices, slab_offsets, self.needs_cold),
            *(resident.weights, slab.weights, bags),
        )


def _tensors(indices: Places, offsets: Offsets, weights: Weights | None) -> DeviceBags:
    own = None if weights is None else torch.from_numpy(weights)
    return torch.from_numpy(indices), torch.from_numpy(offsets), own


def parted(bags: IndexBags, where: Slots, pooled: bool, spread: Spread) -> Parted:
    """The lookups of ``bags``, whose rows are in slot ``where[i]`` or, below ``IN_STORE``, in the slab at
    ``-2 - where[i]`` (int32 [L])."""
    size, own = bags.batch_size, bags.offsets if pooled else np.arange(len(where) + 1)
    of_ids = None if pooled else bags.offsets
    parts, weights = spread.parts(len(where)), bags.weights
    each = spread.map(lambda part: _below_0(where, part), parts)
    cold = np.concatenate(each)
    if not len(cold):
        indices = np.empty(len(where), np.int64)
        spread.map(lambda part: np.copyto(indices[part], where[part]), parts)
        return Parted(
            size,
            indices,
            own,
            np.empty(0, np.int64),
            np.zeros(len(own), np.int64),
            np.zeros(size, bool),
            weights,
            None if weights is None else weights[:0],
            of_ids,
        )
    earlier = np.cumsum([0, *map(len, each)]).tolist()  # in the slab before each part
    indices = np.empty(len(where) - len(cold), np.int64)
    before = np.zeros(len(where) + 1, np.int64)  # in the slab before each lookup

    def part_of(part: slice, start: int, end: int) -> None:
        resident, counts = where[part] >= 0, before[part.start + 1 : part.stop + 1]
        indices[part.start - start : part.stop - end] = where[part].compress(resident)
        np.cumsum(~resident, out=counts)
        if start:
            counts += start

    spread.map(part_of, parts, earlier[:-1], earlier[1:])
    of_bags = np.empty(len(bags.offsets), np.int64)
    slab_offsets = of_bags if pooled else before
    offsets = np.empty(len(own), np.int64)

    def bags_of(part: slice) -> None:
        of_bags[part] = before.take(bags.offsets[part])

    def resident_of(part: slice) -> None:
        np.subtract(own[part], slab_offsets[part], out=offsets[part])

    spread.map(bags_of, spread.parts(len(of_bags)))
    spread.map(resident_of, spread.parts(len(own)))
    bag_needs = (of_bags[1:] > of_bags[:-1]).reshape(-1, size)
    needs: NDArray[np.bool_] = np.any(bag_needs, axis=0)
    return Parted(
        size,
        indices,
        offsets,
        -2 - where[cold].astype(np.int64),
        slab_offsets,
        needs,
        None if weights is None else weights.compress(where >= 0),
        None if weights is None else weights[cold],
        of_ids,
    )
