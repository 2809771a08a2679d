"""What a cache moves, by its own policy, run on the ids of the batches that were read.

Nothing is looked up or stored: the tiers' planner asks the policy batch by batch, as in training, and its
plans say which rows move. Rows are numbered by those that occur, so that a policy's arrays are no larger than
what was read, however large tables are. Policies cannot tell: numbers keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.bags import Bags, IndexBags, RowIds
from recpipe.plugin.policy import CachePolicy, RowSpace
from recpipe.tables.tiers.lookups import parted
from recpipe.tables.tiers.planner import TierPlanner
from recpipe_perf_model.statement import Moved

MOST = 1 << 24
"""Most lookups of a group that are kept: 64 MiB."""
MAPPED = 1 << 22
"""Tables with at most so many rows keep their rows' numbers."""
_FIELDS = tuple(field.name for field in fields(Moved))
Make = Callable[[RowSpace], CachePolicy]
"""Makes a group's policy; ``space.group`` is the group's number, and rows are numbered as in
``KeptLookups``."""


@dataclass(frozen=True, eq=False)
class KeptLookups:
    """The lookups of one group of tables in all batches that were read."""

    batches: Sequence[IndexBags]
    """Rows are numbered by those that occur: int32 or int64 [L]."""
    bases: RowIds
    """The number of each table's first row, and of the row after the last: int64 [T + 1]."""

    @classmethod
    def of(cls, batches: Sequence[IndexBags], bases: RowIds) -> KeptLookups:
        """Number the rows of ``batches`` anew; ``bases`` [T + 1] are the tables' in the numbers that they
        have."""
        if bases[-1] <= MAPPED:
            return cls(batches, bases)
        occur = np.unique(np.concatenate([np.unique(bags.indices) for bags in batches]))
        numbered = [
            IndexBags(np.searchsorted(occur, b.indices).astype(np.int32), b.offsets, b.batch_size)
            for b in batches
        ]
        return cls(numbered, np.searchsorted(occur, bases))

    @property
    def rows(self) -> int:
        """How many rows are numbered."""
        return int(self.bases[-1])

    def bags(self, number: int) -> IndexBags:
        """The lookups of a batch, int64 [L]."""
        bags = self.batches[number]
        return IndexBags(bags.indices.astype(np.int64), bags.offsets, bags.batch_size)

    def counts(self, chosen: Sequence[int]) -> NDArray[np.int32]:
        """How often the ``chosen`` batches look up each row: int32 [rows]."""
        found = np.zeros(self.rows, np.int32)
        for number in chosen:
            found += np.bincount(self.batches[number].indices, minlength=self.rows).astype(np.int32)
        return found


def joined_lookups(groups: Sequence[KeptLookups], number: int) -> Bags:
    """The lookups of a batch in all groups; the rows of one group are numbered after those of the groups
    before it."""
    found = [kept.bags(number) for kept in groups]
    rows = np.cumsum([0, *(kept.rows for kept in groups)])
    before = np.cumsum([0, *(len(bags.indices) for bags in found)])
    return Bags(
        np.concatenate([bags.indices + first for bags, first in zip(found, rows, strict=False)]),
        np.concatenate([[0], *(b.offsets[1:] + first for b, first in zip(found, before, strict=False))]),
        found[0].batch_size,
    )


@dataclass(frozen=True, eq=False)
class Replayed:
    """What moved for each of N batches, from empty caches on."""

    moved: NDArray[np.float64]
    """The fields of ``Moved`` by group and batch: [G, N, fields]."""
    cold: NDArray[np.float64]
    """The share of each batch's samples that need a row of the slab [N]."""
    filled: NDArray[np.bool_]
    """Whether the groups' slots were all taken when half of the batches had come [G]."""

    def mean(self, weights: NDArray[np.float64]) -> tuple[tuple[Moved, ...], float]:
        """What moves for an average batch of each group, and the share of samples that need no row of the
        slab; ``weights`` of batches [N]."""
        each = np.average(self.moved, axis=1, weights=weights)
        moved = tuple(Moved(**dict(zip(_FIELDS, group.tolist(), strict=True))) for group in each)
        return moved, 1 - float(np.average(self.cold, weights=weights))


def replay(groups: Sequence[KeptLookups], make: Make, slots: Sequence[int], carry: bool) -> Replayed:
    """Run a policy for each group with so many ``slots``; ``carry`` as in ``TierPlanner``."""
    spaces = [
        RowSpace(kept.bases, min(own, kept.rows), number)
        for number, (kept, own) in enumerate(zip(groups, slots, strict=True))
    ]
    planners = [TierPlanner(make(space), carry) for space in spaces]
    batches = min(len(kept.batches) for kept in groups)
    moved = np.zeros((len(groups), batches, len(_FIELDS)))
    cold, filled = np.zeros(batches), np.zeros(len(groups), bool)
    for number in range(batches):
        if number == batches // 2:
            filled = np.array([bool((space.residents.row_of_slot >= 0).all()) for space in spaces])
        needs = np.zeros(0, bool)
        for group, (kept, planner) in enumerate(zip(groups, planners, strict=True)):
            bags, slab = kept.bags(number), len(planner.slab_rows)
            plan = planner.plan(bags)
            planner.commit()
            stay = plan.carried_from >= 0
            stays, from_slab = (
                int(np.count_nonzero(some)) for some in (stay, stay & (plan.carried_from < slab))
            )
            rows = Moved(
                read=len(stay) - stays,
                returned=slab - from_slab,
                evicted=int(np.count_nonzero(plan.evicted >= 0)) - (stays - from_slab),
                placed=len(plan.placed),
                slab=len(plan.slab),
                slab_lookups=int(np.count_nonzero(plan.where < 0)),
                missed=plan.looked_up - plan.hits,
            )
            moved[group, number] = astuple(rows)
            cold_bags = parted(bags, plan.where, pooled=True).needs_cold
            needs = cold_bags if not len(needs) else needs | cold_bags
        cold[number] = needs.mean() if len(needs) else 0.0
    return Replayed(moved, cold, filled)
