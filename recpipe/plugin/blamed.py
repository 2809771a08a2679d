"""The parts of plugins as core calls them: their faults name the plugin, and what they return is checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from recpipe.plugin.api import Invariant
from recpipe.plugin.calls import Origin, Owned, blamed, blaming
from recpipe.plugin.errors import PluginError
from recpipe.plugin.planner import Planner
from recpipe.plugin.policy import Cache, CachePolicy
from recpipe.plugin.skipper import Skipper, overridden
from recpipe.plugin.splitter import Splitter, wrong_split

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torchrec.distributed.planner.types import ParameterConstraints, Topology
    from torchrec.distributed.types import ShardingPlanner

    from recpipe.plugin.bags import RowIds
    from recpipe.plugin.batch import Batch
    from recpipe.plugin.collection import TableCollection, TierParts
    from recpipe.plugin.context import GroupInfo, TableInfo
    from recpipe.plugin.policy import RowSpace
    from recpipe.plugin.skipper import RowView
    from recpipe.plugin.splitter import Split
    from recpipe.plugin.store import ColdStore


class BlamedCache(Cache):
    """A cache whose faults, and those of its policies, name the plugin."""

    def __init__(self, origin: Origin, label: str, cache: Cache) -> None:
        self.origin, self.label, self.cache = origin, label, cache
        self.tables, self.fallback, self.by_shards = cache.tables, cache.fallback, cache.by_shards

    def policy(self, space: RowSpace) -> CachePolicy:
        """As ``Cache``."""
        with blaming(self.origin, f"{self.label}.policy"):
            policy = self.cache.policy(space)
        if not isinstance(policy, CachePolicy):
            raise PluginError(
                f"plugin {self.origin}, part {self.label}: policy() returned no CachePolicy: {policy!r}"
            )
        return policy

    def beside(self, group: GroupInfo) -> int:
        """As ``Cache``; ``PluginError`` if the budget does not have so many bytes."""
        with blaming(self.origin, f"{self.label}.beside"):
            kept = self.cache.beside(group)
        budget = group.slots * group.record_bytes
        if not 0 <= kept <= budget:
            raise PluginError(
                f"plugin {self.origin}, part {self.label}, keeps {kept:,} bytes beside the rows of "
                f"{', '.join(group.tables)}, of a budget of {budget:,}"
            )
        return kept

    def store(self, store: ColdStore) -> ColdStore:
        """As ``Cache``."""
        with blaming(self.origin, f"{self.label}.store"):
            made = self.cache.store(store)
        return made if made is store else blamed(self.origin, f"{self.label}.store", made)

    def collection(self, parts: TierParts) -> TableCollection | None:
        """As ``Cache``."""
        with blaming(self.origin, f"{self.label}.collection"):
            made = self.cache.collection(parts)
        return None if made is None else blamed(self.origin, f"{self.label}.collection", made)


class BlamedPlanner(Planner):
    """A planner whose faults name the plugin."""

    def __init__(self, origin: Origin, label: str, planner: Planner) -> None:
        self.origin, self.label, self.planner = origin, label, planner

    def constrain(self, table: TableInfo) -> ParameterConstraints | None:
        """As ``Planner``."""
        with blaming(self.origin, f"{self.label}.constrain"):
            return self.planner.constrain(table)

    def make(
        self, topology: Topology, constraints: Mapping[str, ParameterConstraints]
    ) -> ShardingPlanner | None:
        """As ``Planner``."""
        with blaming(self.origin, f"{self.label}.make"):
            made = self.planner.make(topology, constraints)
        return None if made is None else blamed(self.origin, f"{self.label}.make", made)


class BlamedSplitter(Splitter):
    """A splitter whose faults name the plugin."""

    def __init__(self, origin: Origin, label: str, splitter: Splitter) -> None:
        self.origin, self.label, self.splitter = origin, label, splitter

    @property
    def optional(self) -> bool:  # type: ignore[override]
        """As ``Splitter``."""
        with blaming(self.origin, f"{self.label}.optional"):
            return self.splitter.optional

    def split(self, batch: Batch, needs_cold: NDArray[np.bool_]) -> Split:
        """As ``Splitter``; ``PluginError`` if the result does not split the batch."""
        with blaming(self.origin, f"{self.label}.split"):
            made = self.splitter.split(batch, needs_cold)
        wrong = wrong_split(made, len(needs_cold))
        if wrong:
            raise PluginError(f"plugin {self.origin}, part {self.label}: split() returned {wrong}")
        return made


class BlamedSkipper(Skipper):
    """A skipper whose faults name the plugin; it knows which methods the plugin overrides."""

    def __init__(self, origin: Origin, label: str, skipper: Skipper) -> None:
        self.origin, self.label, self.skipper = origin, label, skipper
        self.keeps = overridden(skipper, "keep")
        """Whether it leaves samples out."""
        self.updates = overridden(skipper, "update")
        """... and rows out of updates."""
        self.looks = overridden(skipper, "begin")
        """Whether it is shown which rows are resident."""

    def begin(self, view: RowView) -> None:
        with blaming(self.origin, f"{self.label}.begin"):
            self.skipper.begin(view)

    def keep(self, batch: Batch, number: int) -> NDArray[np.bool_] | None:
        with blaming(self.origin, f"{self.label}.keep"):
            return self.skipper.keep(batch, number)

    def update(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor | None:
        with blaming(self.origin, f"{self.label}.update"):
            return self.skipper.update(rows, gradients)


def blame_skipper(owned: Owned[Skipper], alters: Collection[Invariant]) -> Owned[BlamedSkipper]:
    """Wrap a skipper for core. ``PluginError`` if it overrides nothing, or if its plugin, which ``alters``
    so much, does not declare what it alters."""
    blamed = BlamedSkipper(owned.origin, owned.label, owned.part)
    if not blamed.keeps and not blamed.updates:
        raise PluginError(
            f"{owned}, a skipper, overrides neither keep() nor update(), so that it would leave nothing out; "
            "bring one of them, or leave Contribution.skipper out"
        )
    altered = {Invariant.EXACT_GRADIENT}
    if blamed.keeps:
        altered |= {Invariant.SAMPLE_SET, Invariant.BATCH_SIZE}
    unsaid = sorted(invariant.name for invariant in altered.difference(alters))
    if unsaid:
        what = "samples out of batches" if blamed.keeps else "rows out of updates"
        raise PluginError(
            f"{owned}, leaves {what}, and the plugin's 'alters' lacks {' and '.join(unsaid)}; add "
            f"{', '.join(f'Invariant.{invariant}' for invariant in unsaid)}"
        )
    return Owned(owned.label, owned.origin, blamed)
