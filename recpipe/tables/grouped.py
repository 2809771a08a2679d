"""Treats the collections of all groups of a model's tables as one: for checkpoints, exports, figures and
closing; and shows plugins which of their rows are resident, and their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from recpipe.common.meter import counting
from recpipe.common.saved import Damaged, entries
from recpipe.errors import UserError
from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import TableCollection, TierFigures
from recpipe.plugin.skipper import Mark, RowView
from recpipe.plugin.tables import Region, Values
from recpipe.tables.collection import SavedByRanks, SavesPlacement, ShowsRows
from recpipe.tables.dynamic.growing import GrowingTables
from recpipe.tables.group_rows import ByLookup, GroupTables
from recpipe.tables.groups import ModelTables

C = TypeVar("C")


class GroupedCollection(TableCollection, SavesPlacement, SavedByRanks):
    """One collection for each group, in order. Lookups go to those directly."""

    def __init__(
        self,
        tables: ModelTables,
        collections: Sequence[TableCollection],
        growing: GrowingTables | None = None,
    ) -> None:
        super().__init__()
        self.tables, self.growing = tables, growing
        # Kept in a tuple: proxies use the same collections, and no module may own their memory.
        self.collections = tuple(collections)
        self.groups: tuple[GroupTables, ...] = tuple(
            collection.offers(GroupTables) or ByLookup(collection, group.tables)
            for group, collection in zip(tables.groups, collections, strict=True)
        )
        """Each group as the pipeline drives it."""
        self._updated = [c for c in collections if type(c).update is not TableCollection.update]
        """Those that have something to do after a backward pass."""
        self._tiered = [c for c in collections if type(c).tier_figures is not TableCollection.tier_figures]
        self.threads = max(collection.threads for collection in collections)
        self.collectives = collections[0].collectives  # counted per process
        self._holder = {
            name: collection
            for group, collection in zip(tables.groups, collections, strict=True)
            for name in group.tables.layout.tables
        }

    @property
    def frozen(self) -> bool:
        """Whether no table is trained."""
        return all(group.tables.optimizer.frozen for group in self.tables.groups)

    def each(self, capability: type[C]) -> list[C]:
        """All collections with ``capability``; empty if one of them lacks it."""
        found = [collection.offers(capability) for collection in self.collections]
        return cast("list[C]", found) if all(one is not None for one in found) else []

    def offers(self, capability: type[C]) -> C | None:
        """What a single collection offers. With several, this object, if they offer it together.

        They offer ``SavesPlacement`` if one of them does, since the others have no rows that move.
        """
        if len(self.collections) == 1:
            return self.collections[0].offers(capability)
        if capability is SavesPlacement:
            return cast("C", self) if self._placed() else None
        return self if isinstance(self, capability) and self.each(capability) else None

    def train(self, mode: bool = True) -> GroupedCollection:
        for collection in self.collections:
            collection.train(mode)
        super().train(mode)
        return self

    # -- rows --------------------------------------------------------------------------------

    def regions(self) -> Iterator[Region]:
        return chain.from_iterable(collection.regions() for collection in self.collections)

    def read(self, region: Region) -> Values:
        return self._holder[region.table].read(region)

    def write(self, region: Region, values: Values) -> None:
        self._holder[region.table].write(region, values)

    def update(self) -> None:
        for collection in self._updated:
            collection.update()

    # -- figures -----------------------------------------------------------------------------

    def tier_figures(self) -> TierFigures | None:
        total = None
        for collection in self._tiered:
            own = collection.tier_figures()
            if own is not None:
                total = own if total is None else total.plus(own)
        return total

    # -- the end -----------------------------------------------------------------------------

    def serve(self) -> None:
        if len(self.collections) > 1:
            raise UserError(
                f"the model's tables are in {len(self.collections)} groups, and a rank that only holds rows "
                "serves one: leave topology.embedding_ranks out"
            )
        self.collections[0].serve()

    @counting("writing rows back")
    def write_back(self) -> None:
        for collection in self.collections:
            collection.write_back()

    @counting("closing the tables")
    def close(self) -> None:
        """Close all of them, even if one of them raises; the first fault is raised in the end."""
        faults = []
        for collection in self.collections:
            try:
                collection.close()
            except BaseException as fault:
                faults.append(fault)
        if faults:
            raise faults[0]

    # -- SavesPlacement, of several groups ------------------------------------------------------------

    def _placed(self) -> dict[str, SavesPlacement]:
        """The groups whose rows move, by number."""
        found = {str(number): part.offers(SavesPlacement) for number, part in enumerate(self.collections)}
        return {number: part for number, part in found.items() if part is not None}

    def placement_state(self) -> dict[str, Any]:
        """The state of each group, by its number."""
        return {number: part.placement_state() for number, part in self._placed().items()}

    def check_placement_state(self, state: Mapping[str, Any]) -> None:
        parts = self._placed()
        if len(state) != len(parts):
            raise Damaged(f"placement is of {len(state)} groups of tables, and there are {len(parts)}")
        found = entries(dict.fromkeys(parts, dict[str, Any]), state, "placement")
        for number, part in parts.items():
            part.check_placement_state(found[number])

    def load_placement_state(self, state: dict[str, Any] | None) -> bool:
        """Continue from ``state``; False if a group's state is from another policy or budget."""
        loaded = [p.load_placement_state(state and state[n]) for n, p in self._placed().items()]
        return all(loaded)

    # -- SavedByRanks, of several groups ------------------------------------------------------

    def save_tables(self, directory: Path) -> None:
        for part in self.each(SavedByRanks):
            part.save_tables(directory)

    def load_tables(self, directory: Path) -> None:
        for part in self.each(SavedByRanks):
            part.load_tables(directory)


class TablesView(RowView):
    """The rows of the model's ``tables``, as their ``collections`` show them to plugins."""

    def __init__(self, tables: ModelTables, collections: Sequence[TableCollection]) -> None:
        self._tables, self._collections, self._bases = tables, tuple(collections), tables.bases
        self.rows = tables.total_rows
        self.dim = max(group.tables.dim for group in tables.groups)

    @cached_property
    def _groups(self) -> list[ShowsRows]:
        shown = []
        for collection in self._collections:
            found = collection.offers(ShowsRows)
            if found is None:
                raise UserError(
                    f"a plugin asks which rows are resident, which {type(collection).__name__} does not show"
                    ": drop that plugin, or what keeps these tables another way"
                )
            shown.append(found)
        return shown

    @property
    def slots(self) -> int:
        return sum(group.slots for group in self._groups)

    @property
    def resident_count(self) -> int:
        return sum(group.resident_count for group in self._groups)

    def resident(self) -> RowIds:
        pairs = zip(self._groups, self._bases[:-1], strict=True)
        return np.concatenate([group.resident_rows() + base for group, base in pairs])

    def mark(self, rows: RowIds | None = None) -> Mark:
        rows = self.resident() if rows is None else rows
        weights = np.zeros((len(rows), self.dim), np.float32)
        cuts = np.searchsorted(rows, self._bases)
        for number, group in enumerate(self._groups):
            mine = slice(int(cuts[number]), int(cuts[number + 1]))
            found = group.resident_weights(rows[mine] - self._bases[number])
            weights[mine, : self._tables.groups[number].tables.dim] = found.cpu().numpy()
        return Mark(rows, weights)
