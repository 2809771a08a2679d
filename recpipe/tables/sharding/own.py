"""Rows of shards that recpipe looks up: those in tiers, and those whose optimizer FBGEMM does not have.

TorchRec sends ids to a shard's rank and returns rows from there. On that rank rows in tiers are resident, in
the slab or in the cold store, under the rank's own policy.

A batch's ids are known here once they have arrived. Where they are sent ahead, that is while the batch before
trains, which hides the fetch of their rows; else rows are planned and fetched in the lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe import private_api
from recpipe.common.loops import Spread
from recpipe.plugin.policy import Cache, RowSpace, no_policy
from recpipe.plugin.quantizer import Coding
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.tables import FirstValues, Region, SavedRows, Table, TableSet, Values
from recpipe.private_api import LocalPart, OwnLookup, module_name
from recpipe.tables.build import Place, no_row, opens_store, slab_rows, staging_bytes
from recpipe.tables.group_rows import GroupRows
from recpipe.tables.owners import NOCACHE, RESIDENT, GroupOwner
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.skipping import FilterWithin
from recpipe.tables.stores.local import local_store
from recpipe.tables.tiers.policies import POLICIES
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection


@dataclass(frozen=True)
class ShardTiers:
    """What the tiers of shards are made of."""

    owners: Sequence[GroupOwner]
    """The owner of each group; groups with all rows resident have no tiers."""
    place: Place

    def holds(self, number: int) -> bool:
        """Whether the rows of group ``number`` are in tiers."""
        return self.owners[number].name != RESIDENT

    def tiers(
        self, parts: Sequence[LocalPart], tables: TableSet, number: int, folder: Path
    ) -> TieredEmbeddingBagCollection:
        """The tiers of ``parts`` of one width. Their share of the group's budget is proportional to their
        bytes, at least one row."""
        owner, place, cache = self.owners[number], self.place, self.owners[number].cache
        if owner.slots < 1 and owner.name != NOCACHE:
            raise no_row(tables, place, len(self.owners) > 1)
        local = local_tables(parts, tables)
        slots = max(1, owner.resident_bytes * local.layout.total_rows // tables.total_bytes)
        slots = 0 if owner.name == NOCACHE else slots
        space = RowSpace(local.layout.bases, slots, number, Spread.beside(place.device))
        top = place.config.directory(place.run_dir.path) / f"rank-{place.ranks.rank}" / folder
        kind = place.config.store if local.layout.total_rows else "host"
        staging = staging_bytes(place.batch_size * len(local.features))
        coding = None if local.codec is None else Coding(local.codec)
        store = local_store(local.layout, local.fill, coding, opens_store(place, kind, top, staging))
        if cache is None:
            policy = POLICIES[owner.name](space)
        else:
            store, policy = cache.make(Cache.store, store), cache.call(Cache.policy, space, wrong=no_policy)
        device, prefetch, slab = place.device, place.config.prefetch, slab_rows(local, place)
        return TieredEmbeddingBagCollection(
            local, policy, store, device, prefetch, owner=cache, slab_rows=slab
        )


def local_tables(parts: Sequence[LocalPart], tables: TableSet) -> TableSet:
    """Make ``parts`` of ``tables``, all of one width, into separate tables with the same first values, or
    saved rows."""
    whole = {module_name(table.name): table for table in tables.tables}
    row_wise = not tables.optimizer.state_by_column

    def first(name: str, part: LocalPart) -> FirstValues:
        def values(start: int, stop: int) -> NDArray[np.float32]:
            records = tables.fill(name, part.row + start, part.row + stop)
            return records[:, part.column : part.column + part.columns]

        return values

    def saved(rows: SavedRows, part: LocalPart) -> SavedRows:
        def values(start: int, stop: int) -> Values:
            weights, state = rows(part.row + start, part.row + stop)
            columns = slice(part.column, part.column + part.columns)
            return weights[:, columns], state if row_wise else state[:, columns]

        return values

    made = []
    for part in parts:
        table = whole[part.table]
        own = f"{table.name}@{part.row},{part.column}"
        features = tuple(f"{own}.{index}" for index in range(part.features))
        rows = None if table.saved is None else saved(table.saved, part)
        made.append(Table(own, part.rows, features, first(table.name, part), rows))
    return replace(tables, tables=tuple(made), dim=parts[0].columns, numbers=())


class ResidentShards(ResidentCollection):
    """Parts of tables with all rows in memory, driven as tiers are."""

    def look_up_now(self, rows: GroupRows) -> torch.Tensor:
        """The rows of a batch that has been taken in."""
        return self.compute(rows, True, True)[0]

    def read_now(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """The current rows, without gradient."""
        return self.lookup(sparse)


MakeShards = Callable[[Sequence[LocalPart], Path], "TieredEmbeddingBagCollection | ResidentShards"]
"""Makes the rows of parts of one width; a folder is theirs for files."""


def filled_lookups(
    number: int,
    tables: TableSet,
    lookups: Sequence[OwnLookup],
    device: torch.device,
    tiers: ShardTiers | None = None,
) -> list[ShardsLookup]:
    """Give the ``lookups`` of group ``number`` the rows that each looks up on this rank: in their tiers, or
    in the memory of ``device``."""
    made = []
    for index, lookup in enumerate(lookups):
        folder = Path(f"group-{number}", f"lookup-{index}")

        def rows_of(parts: Sequence[LocalPart], own: Path) -> TieredEmbeddingBagCollection | ResidentShards:
            if tiers is not None and tiers.holds(number):
                return tiers.tiers(parts, tables, number, own)
            return ResidentShards(local_tables(parts, tables), device, padded=False)

        lookup.look_up = ShardsLookup(lookup.parts, tables, rows_of, folder)
        made.append(lookup.look_up)
    return made


class ShardsLookup(nn.Module):
    """The rows of one TorchRec lookup, apart for each width among its parts."""

    def __init__(self, parts: Sequence[LocalPart], tables: TableSet, make: MakeShards, folder: Path) -> None:
        super().__init__()
        self.group = tables
        self.each: list[tuple[list[LocalPart], TieredEmbeddingBagCollection | ResidentShards]] = []
        """The parts of each width, and what holds their rows."""
        self._places: list[list[int]] = []
        """The positions of their features among the lookup's."""
        widths = [part.columns for part in parts for _ in range(part.features)]
        for width in dict.fromkeys(part.columns for part in parts):
            own = [part for part in parts if part.columns == width]
            self.each.append((own, make(own, folder / str(width))))
            self._places.append([place for place, columns in enumerate(widths) if columns == width])
        self.tiers = nn.ModuleList(tiers for _, tiers in self.each)
        self._ahead: tuple[KeyedJaggedTensor, list[Any]] | None = None
        """Ids that are looked up next, and their rows in each of the tiers, which are planned."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Rows of ids that count from each part's first row, as ``OwnLookup`` gives them."""
        # Not by ``training``: who restores modes after an evaluation does not know TorchRec's lookups.
        if torch.is_grad_enabled():
            taken = self._planned(features)
            found = [tiers.look_up_now(rows) for (_, tiers), rows in zip(self.each, taken, strict=True)]
        else:
            named = self._named(features)
            found = [tiers.read_now(ids) for (_, tiers), ids in zip(self.each, named, strict=True)]
        if len(found) == 1:
            return found[0]
        columns: dict[int, torch.Tensor] = {}
        for places, rows in zip(self._places, found, strict=True):
            columns |= dict(zip(places, torch.split(rows, rows.shape[1] // len(places), 1), strict=True))
        return torch.cat([columns[place] for place in sorted(columns)], dim=1)

    def fetch_ahead(self, features: KeyedJaggedTensor) -> None:
        """Plan these ids, which are looked up next, and start to fetch their rows."""
        self._forget()
        taken = self._take_in(features)
        for (_, tiers), rows in zip(self.each, taken, strict=True):
            tiers.prefetch(rows)
        self._ahead = features, taken

    def _planned(self, features: KeyedJaggedTensor) -> list[Any]:
        """The rows of these ids in each of the tiers: those planned ahead, or now."""
        if self._ahead is not None:
            ids, taken = self._ahead
            # The same ids of the same samples, not just equal ones: those planned are still in use, so that
            # no other ids can lie where they are.
            pairs = ((ids.values(), features.values()), (ids.lengths(), features.lengths()))
            if all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in pairs):
                self._ahead = None
                return taken
        self._forget()
        return self._take_in(features)

    def _take_in(self, features: KeyedJaggedTensor) -> list[Any]:
        pairs = zip(self.each, self._named(features), strict=True)
        return [tiers.input_dist(ids) for (_, tiers), ids in pairs]

    def _named(self, features: KeyedJaggedTensor) -> Iterator[KeyedJaggedTensor]:
        """What each of the tiers looks up; TorchRec has one name for all features of a table's parts."""
        for (_, tiers), places in zip(self.each, self._places, strict=True):
            mine = features if len(self.each) == 1 else features.permute(places)
            weights = mine.weights() if tiers.tables.weighted else None
            names = list(tiers.tables.features)
            yield KeyedJaggedTensor(names, mine.values(), weights, lengths=mine.lengths())

    def _forget(self) -> None:
        """Take back plans of ids that were not looked up: their epoch was left early."""
        if self._ahead is not None:
            self._ahead = None
            for _, tiers in self.each:
                tiers.forget()

    def shards(self, table: str) -> list[TieredShard]:
        """The parts of ``table``."""
        return [
            TieredShard(part, tiers, tiers.tables.layout.tables[index])
            for parts, tiers in self.each
            for index, part in enumerate(parts)
            if part.table == module_name(table)
        ]

    def filter_updates(self, rows: RowFilter) -> None:
        layout = self.group.layout
        base = dict(zip(map(module_name, layout.tables), layout.bases.tolist(), strict=False))
        for parts, tiers in self.each:
            firsts = np.array([base[part.table] + part.row for part in parts])
            tiers.filter_updates(FilterWithin(rows, tiers.tables.layout.bases[:-1], firsts))


class TieredShard:
    """A shard on this rank that recpipe looks up, whose rows may be in tiers, and never in one piece of
    memory."""

    def __init__(
        self, part: LocalPart, tiers: TieredEmbeddingBagCollection | ResidentShards, table: str
    ) -> None:
        self.row, self.column, self.shape = part.row, part.column, (part.rows, part.columns)
        self._tiers, self._table = tiers, table

    def read(self, low: int, high: int) -> Values:
        """Weights and optimizer state of its rows [low, high)."""
        return self._tiers.read(Region(self._table, low, high, 0, self.shape[1]))

    def write(self, low: int, high: int, values: Values) -> None:
        """Replace weights and optimizer state of its rows [low, high)."""
        self._tiers.write(Region(self._table, low, high, 0, self.shape[1]), values)

    def weights_of(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """A copy of the weights of its distinct ``rows``, float32 [n, columns]."""
        return self._tiers.weights_of(rows + self._base)

    def replace(self, rows: NDArray[np.int64], weights: torch.Tensor, state: torch.Tensor) -> None:
        """Replace weights and optimizer state of its distinct ``rows``."""
        self._tiers.renew(rows + self._base, torch.cat((weights, state), 1))

    @property
    def _base(self) -> int:
        """The number of its row 0 in the tiers."""
        layout = self._tiers.tables.layout
        return int(layout.bases[layout.tables.index(self._table)])


LocalShard = private_api.LocalShard | TieredShard
"""A shard on this rank: in memory, or in tiers."""
