"""Finds a batch's lookups in the resident slots and in the slab.

A batch of a GPU's size has millions of lookups, and what is here is done for each of them: in few passes, in
several threads, and not at all for what most batches do not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recpipe.common.spread import Spread
from recpipe.plugin.policy import RowIds, Slots

if TYPE_CHECKING:
    from recpipe.tables.tiers.placement import IndexBags, Offsets, Weights

Places = NDArray[np.int64]


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


@dataclass(frozen=True)
class Parted:
    """The lookups of each tier, as ``TierPlan`` has them."""

    indices: NDArray[np.int64]
    offsets: Offsets
    slab_indices: NDArray[np.int64]
    slab_offsets: Offsets
    needs_cold: NDArray[np.bool_]
    weights: Weights | None
    slab_weights: Weights | None


def parted(bags: IndexBags, where: Slots, pooled: bool, spread: Spread) -> Parted:
    """The lookups of ``bags``, whose rows are in slot ``where[i]`` or, below ``IN_STORE``, in the slab at
    ``-2 - where[i]`` (int32 [L])."""
    own = bags.offsets if pooled else np.arange(len(where) + 1)
    parts, weights = spread.parts(len(where)), bags.weights
    each = spread.map(lambda part: _below_0(where, part), parts)
    cold = np.concatenate(each)
    if not len(cold):
        indices = np.empty(len(where), np.int64)
        spread.map(lambda part: np.copyto(indices[part], where[part]), parts)
        return Parted(
            indices,
            own,
            np.empty(0, np.int64),
            np.zeros(len(own), np.int64),
            np.zeros(bags.batch_size, bool),
            weights,
            None if weights is None else weights[:0],
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
    bag_needs = (of_bags[1:] > of_bags[:-1]).reshape(-1, bags.batch_size)
    needs: NDArray[np.bool_] = np.any(bag_needs, axis=0)
    return Parted(
        indices,
        offsets,
        -2 - where[cold].astype(np.int64),
        slab_offsets,
        needs,
        None if weights is None else weights.compress(where >= 0),
        None if weights is None else weights[cold],
    )
