"""Plans, fetches and carries out a batch in the tiers of all groups of tables together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recpipe.data.parts import batch_size
from recpipe.plugin.collection import TableCollection
from recpipe.tables.capabilities import Planned
from recpipe.tables.inputs import GroupIds, Inputs
from recpipe.tables.tiers.placement import TierPlan, reorder
from recpipe.tables.tiers.shared_rows import share

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


Found = Mapping[int, Any]
"""What ``Planned.find`` returns, by group."""


@dataclass
class BatchPlan:
    """The plans of one batch for each group's tiers; None for a group whose ids the model makes."""

    groups: list[TierPlan | None]
    batch_size: int

    @cached_property
    def needs_cold(self) -> NDArray[np.bool_]:
        """For each sample, in the batch's own order, whether it looks up a row that is not resident yet, bool
        [B]. A GPU is waited for."""
        needs = np.zeros(self.batch_size, bool)
        for plan in self.planned:
            needs |= plan.needs_cold
        return needs

    @property
    def any_cold(self) -> bool:
        """Whether any sample does."""
        return any(len(plan.slab) for plan in self.planned)

    @property
    def planned(self) -> list[TierPlan]:
        """The plans that are not None."""
        return [plan for plan in self.groups if plan is not None]

    @property
    def fetches_residents(self) -> bool:
        """Whether lookups of resident rows must also wait for the store."""
        return any(plan.fetches_residents for plan in self.planned)

    def arrange(self, samples: NDArray[np.int64], cold_first: int, alone: bool) -> None:
        """Restrict the plans to this trainer's ``samples`` (int64 [n]), in this order; those from
        ``cold_first`` on may need the slab. ``alone``: ``samples`` are all of the batch."""
        for plan in self.planned:
            (reorder if alone else share)(plan, samples, cold_first)


class Tiers:
    """The tiers of all groups, as the pipeline drives them; see ``Planned`` for the calls and their order."""

    def __init__(self, inputs: Inputs, collections: Sequence[TableCollection]) -> None:
        self.inputs = inputs
        planned = {n: c.offers(Planned) for n, c in enumerate(collections) if inputs.bound(n)}
        self.groups = {number: tier for number, tier in planned.items() if tier is not None}
        self._count = len(collections)
        self.of_all = all(n in self.groups for n in range(len(collections)) if inputs.bound(n))
        """Whether they have the rows of all ids of a batch."""

    @property
    def prefetches(self) -> bool:
        """Whether to fetch rows while the batch before trains."""
        return any(tier.prefetches for tier in self.groups.values())

    @property
    def waited(self) -> float:
        """Seconds for which training has waited for rows so far."""
        return sum(tier.times.wait for tier in self.groups.values())

    @property
    def finds_ahead(self) -> bool:
        """Whether ``find`` has work to do."""
        return any(tier.finds_ahead for tier in self.groups.values())

    def find(self, each: GroupIds) -> Found:
        """What planning a batch of these ids needs and no other batch has a part in; from any thread."""
        return {number: tier.find(_there(each[number])) for number, tier in self.groups.items()}

    def plan(self, batch: object, each: GroupIds, found: Found | None = None) -> BatchPlan:
        """Decide where the lookups of ``batch`` go (``each``: its ids by group) and which rows move;
        ``DataError`` if an id has no row. ``found``: the result of ``find``."""
        plans: list[TierPlan | None] = [None] * self._count
        for number, tier in self.groups.items():
            plans[number] = tier.plan(_there(each[number]), (found or {}).get(number))
        return BatchPlan(plans, batch_size(batch))

    def prefetch(self, plan: BatchPlan) -> None:
        """Start fetching the plan's rows."""
        for number, tier in self.groups.items():
            if tier.prefetches:
                tier.prefetch(self._of(plan, number))

    def forget(self) -> None:
        """Undo a plan whose batch will not be trained."""
        for tier in self.groups.values():
            tier.forget()

    def begin(self, plan: BatchPlan) -> None:
        """Begin this batch: from now on the next one may be planned, and fetched after ``advance``."""
        for number, tier in self.groups.items():
            tier.begin(self._of(plan, number))

    def advance(self, plan: BatchPlan) -> None:
        """After the last batch's update: send away the rows that leave their tier."""
        for number, tier in self.groups.items():
            tier.advance(self._of(plan, number))

    def _of(self, plan: BatchPlan, number: int) -> TierPlan:
        found = plan.groups[number]
        assert found is not None, "planned by these tiers"
        return found


def _there(ids: KeyedJaggedTensor | None) -> KeyedJaggedTensor:
    assert ids is not None, "a group without ids in the batch is not planned"
    return ids
