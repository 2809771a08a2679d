"""Rows of shards in tiers. TorchRec sends ids to a shard's rank and returns rows from there. On that rank the
rows are resident, in the slab or in the cold store, under the rank's own policy.

A batch's ids are known here once they have arrived. Where they are sent ahead, that is while the batch before
trains, which hides the fetch of their rows; else rows are planned and fetched in the lookup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe import private_api
from recpipe.common.loops import Spread
from recpipe.common.saved import entries
from recpipe.common.tensors import packed, unpacked
from recpipe.distributed.ranks import Channel
from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import TierFigures, TierTimes
from recpipe.plugin.policy import Cache, RowSpace, no_policy
from recpipe.plugin.quantizer import Coding
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.store import IoCounters
from recpipe.plugin.tables import FirstValues, Region, SavedRows, Table, TableSet, Values
from recpipe.private_api import LocalPart, OwnLookup, given_to_own, module_name
from recpipe.tables.build import Place, no_row, opens_store, slab_rows, staging_bytes
from recpipe.tables.owners import NOCACHE, GroupOwner
from recpipe.tables.stores.front import local_store
from recpipe.tables.tiers.engine import TieredRows
from recpipe.tables.tiers.policies import POLICIES
from recpipe.tables.tiers.saved_placement import RANKS, of_whole
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection


@dataclass(frozen=True)
class ShardTiers:
    """What the tiers of shards are made of."""

    owners: Sequence[GroupOwner]
    """The owner of each group; groups with all rows resident have no tiers."""
    place: Place

    def fill(self, number: int, tables: TableSet, lookups: Sequence[OwnLookup]) -> list[TieredLookup]:
        """Give the ``lookups`` of group ``number`` their tiers, with the rows that each looks up on this
        rank."""
        owner, made = self.owners[number], []
        if lookups and owner.slots < 1 and owner.name != NOCACHE:
            raise no_row(tables, self.place, len(self.owners) > 1)
        for index, lookup in enumerate(lookups):
            folder = Path(f"group-{number}", f"lookup-{index}")
            tiered = TieredLookup(lookup.parts, tables, self, number, folder)
            lookup.look_up = tiered
            made.append(tiered)
        return made

    def tiers(
        self, parts: Sequence[LocalPart], tables: TableSet, number: int, folder: Path
    ) -> TieredEmbeddingBagCollection:
        """The tiers of ``parts`` of one width. Their share of the group's budget is proportional to their
        bytes, at least one row."""
        owner, place = self.owners[number], self.place
        local = local_tables(parts, tables)
        slots = max(1, owner.resident_bytes * local.layout.total_rows // tables.total_bytes)
        slots = 0 if owner.name == NOCACHE else slots
        space = RowSpace(local.layout.bases, slots, number, Spread.beside(place.device))
        cache = owner.cache
        top = place.config.directory(place.run_dir.path) / f"rank-{place.ranks.rank}" / folder
        kind = place.config.store if local.layout.total_rows else "host"
        staging = staging_bytes(place.batch_size * len(local.features))
        coding = None if local.codec is None else Coding(local.codec)
        store = local_store(local.layout, local.fill, coding, opens_store(place, kind, top, staging))
        if cache is None:
            policy = POLICIES[owner.name](space)
        else:
            store, policy = cache.make(Cache.store, store), cache.call(Cache.policy, space, wrong=no_policy)
        return TieredEmbeddingBagCollection(
            local,
            policy,
            store,
            place.device,
            place.config.prefetch,
            owner=cache,
            slab_rows=slab_rows(local, place),
        )


def local_tables(parts: Sequence[LocalPart], tables: TableSet) -> TableSet:
    """Make ``parts`` of ``tables``, all of one width, into separate tables with the same first values, or
    saved rows."""
    whole = {module_name(table.name): table for table in tables.tables}
    row_wise = tables.optimizer.name == "rowwise_adagrad"

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


class TieredLookup(nn.Module):
    """The rows of one TorchRec lookup, with tiers for each width among its parts."""

    def __init__(
        self, parts: Sequence[LocalPart], tables: TableSet, made_of: ShardTiers, number: int, folder: Path
    ) -> None:
        super().__init__()
        self.parts = parts
        self.group = tables
        widths = list(dict.fromkeys(part.columns for part in parts))
        self._of_width = [[p for p in parts if p.columns == width] for width in widths]
        self.tiers = nn.ModuleList(
            made_of.tiers(some, tables, number, folder / str(width))
            for some, width in zip(self._of_width, widths, strict=True)
        )
        features = [part for part in parts for _ in range(part.features)]
        self._places = [[i for i, p in enumerate(features) if p.columns == width] for width in widths]
        self._ahead: tuple[KeyedJaggedTensor, list[TieredRows]] | None = None
        """Ids that are looked up next, and their rows in each of the tiers, which are planned."""

    def each(self) -> Iterator[tuple[list[LocalPart], TieredEmbeddingBagCollection]]:
        """The tiers and the parts whose rows they hold."""
        for parts, tiers in zip(self._of_width, self.tiers, strict=True):
            assert isinstance(tiers, TieredEmbeddingBagCollection)
            yield parts, tiers

    def shards(self, table: str) -> list[TieredShard]:
        """The parts of ``table``."""
        return [
            TieredShard(part, tiers, index)
            for parts, tiers in self.each()
            for index, part in enumerate(parts)
            if part.table == module_name(table)
        ]

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Rows of ids that count from each part's first row, as ``OwnLookup`` gives them."""
        each = [tiers for _, tiers in self.each()]
        # Not by ``training``: who restores modes after an evaluation does not know TorchRec's lookups.
        if torch.is_grad_enabled():
            pairs = zip(each, self._taken(features), strict=True)
            found = [tiers.look_up_now(rows) for tiers, rows in pairs]
        else:
            pairs_now = zip(each, self._named(features), strict=True)
            found = [tiers.read_now(named) for tiers, named in pairs_now]
        if len(found) == 1:
            return found[0]
        columns: dict[int, torch.Tensor] = {}
        for places, rows in zip(self._places, found, strict=True):
            columns |= dict(zip(places, torch.split(rows, rows.shape[1] // len(places), 1), strict=True))
        return torch.cat([columns[place] for place in sorted(columns)], dim=1)

    def _named(self, features: KeyedJaggedTensor) -> Iterator[KeyedJaggedTensor]:
        """What each of the tiers looks up; TorchRec has one name for all features of a table's parts."""
        for (_, tiers), places in zip(self.each(), self._places, strict=True):
            mine = features if len(self.tiers) == 1 else features.permute(places)
            weights = mine.weights() if tiers.tables.weighted else None
            names = list(tiers.tables.features)
            yield KeyedJaggedTensor(names, mine.values(), weights, lengths=mine.lengths())

    def fetch_ahead(self, features: KeyedJaggedTensor) -> None:
        """Plan these ids, which are looked up next, and start to fetch their rows."""
        self._forget()
        taken = self._take(features)
        for (_, tiers), rows in zip(self.each(), taken, strict=True):
            tiers.prefetch(rows)
        self._ahead = features, taken

    def _taken(self, features: KeyedJaggedTensor) -> list[TieredRows]:
        """The rows of these ids in each of the tiers: those planned ahead, or now."""
        if self._ahead is not None and _same_memory(self._ahead[0], features):
            taken, self._ahead = self._ahead[1], None
            return taken
        self._forget()
        return self._take(features)

    def _take(self, features: KeyedJaggedTensor) -> list[TieredRows]:
        pairs = zip(self.each(), self._named(features), strict=True)
        return [tiers.input_dist(named) for (_, tiers), named in pairs]

    def _forget(self) -> None:
        """Take back plans of ids that were not looked up: their epoch was left early."""
        if self._ahead is not None:
            self._ahead = None
            for _, tiers in self.each():
                tiers.forget()

    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows, numbered in the group, out of updates."""
        layout = self.group.layout
        base = dict(zip(map(module_name, layout.tables), layout.bases.tolist(), strict=False))
        for parts, tiers in self.each():
            firsts = np.array([base[part.table] + part.row for part in parts])
            tiers.filter_updates(_OfShards(rows, tiers.tables.layout.bases, firsts))


def _same_memory(one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> bool:
    """Whether both are the same ids of the same samples, not just equal ones; the first is still in use, so
    that no other ids can lie where its are."""
    pairs = ((one.values(), other.values()), (one.lengths(), other.lengths()))
    return all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in pairs)


def fetch_ahead(sharded: Any, arrived: Any) -> None:
    """Start to fetch rows of ids that have ``arrived`` at a sharded module and are looked up next."""
    for lookup, features in given_to_own(sharded, arrived):
        assert isinstance(lookup.look_up, TieredLookup)
        lookup.look_up.fetch_ahead(features)


class GroupTiers(nn.Module):
    """The tiers of one group's shards on this rank; empty if it has no such shards."""

    def __init__(self, lookups: Iterable[TieredLookup]) -> None:
        super().__init__()
        self.lookups = nn.ModuleList(lookups)

    @property
    def prefetches(self) -> bool:
        """Whether rows of ids that are sent ahead are to be fetched ahead."""
        return any(tiers.prefetches for tiers in self.each())

    def _lookups(self) -> Iterator[TieredLookup]:
        for lookup in self.lookups:
            assert isinstance(lookup, TieredLookup)
            yield lookup

    def each(self) -> list[TieredEmbeddingBagCollection]:
        """All tiers of the group."""
        return [tiers for lookup in self._lookups() for _, tiers in lookup.each()]

    def shards(self, table: str) -> list[TieredShard]:
        """The parts of ``table``."""
        return [shard for lookup in self._lookups() for shard in lookup.shards(table)]

    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows, numbered in the group, out of updates."""
        for lookup in self._lookups():
            lookup.filter_updates(rows)

    def figures(self) -> TierFigures:
        """The sums of their figures."""
        nothing = TierFigures(IoCounters(), TierTimes(), None, 0, 0, 0, False, 0, 0)
        found = [tiers.tier_figures() for tiers in self.each()]
        return reduce(TierFigures.plus, found) if found else nothing

    def gathered(self, channel: Channel) -> dict[str, Any]:
        """The placements of all ranks, on the channel's first member, which saves them; all members call
        it."""
        own = {_shards_of(tiers): tiers.placement_state() for tiers in self.each()}
        sent = packed(own)
        received = channel.exchange([sent if member == 0 else sent[:0] for member in range(channel.size)])
        if channel.index:
            return {}
        return {RANKS: {str(rank): unpacked(part) for rank, part in enumerate(received)}}

    def own(
        self, channel: Channel, state: Mapping[str, Any]
    ) -> list[tuple[TieredEmbeddingBagCollection, dict[str, Any]]]:
        """Tiers with what ``gathered`` has of them; none where it is of other ranks or shards, or of tables
        that were whole.

        ``Damaged`` if ``state`` cannot be a result of ``gathered``.
        """
        if of_whole(state):
            return []
        ranks = entries({RANKS: dict[str, dict[str, Any]]}, state, "placement")[RANKS]
        saved = ranks.get(str(channel.index), {})
        mine = {_shards_of(tiers): tiers for tiers in self.each()}
        if len(ranks) != channel.size or saved.keys() != mine.keys():
            return []
        found = entries(dict.fromkeys(mine, dict[str, Any]), saved, "placement")
        return [(tiers, found[shards]) for shards, tiers in mine.items()]

    def write_back(self) -> None:
        """Write the rows of all of them back."""
        for tiers in self.each():
            tiers.write_back()

    def close(self) -> None:
        """Close all of them, even if one of them raises; the first fault is raised in the end."""
        with ExitStack() as stack:
            for tiers in self.each():
                stack.callback(tiers.close)


def _shards_of(tiers: TieredEmbeddingBagCollection) -> str:
    """A description of the tables' parts that the tiers hold."""
    tables = tiers.tables
    return " ".join(f"{table.name}:{table.rows}x{tables.dim}" for table in tables.tables)


class _OfShards(RowFilter):
    """A group's filter for rows that are numbered within some of its shards."""

    def __init__(self, rows: RowFilter, bases: RowIds, firsts: RowIds) -> None:
        self._rows, self._bases, self._shift = rows, bases[1:-1], firsts - bases[:-1]

    def stay(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor | None:
        """Ask the group's filter, with the numbers that the rows have there."""
        return self._rows.stay(rows + self._shift[np.searchsorted(self._bases, rows, "right")], gradients)


class TieredShard:
    """A shard on this rank whose rows are in tiers, and therefore never in one piece of memory."""

    def __init__(self, part: LocalPart, tiers: TieredEmbeddingBagCollection, index: int) -> None:
        self.row, self.column, self.shape = part.row, part.column, (part.rows, part.columns)
        self._tiers, self._table = tiers, tiers.tables.layout.tables[index]

    def read(self, low: int, high: int) -> Values:
        """Weights and optimizer state of its rows [low, high)."""
        return self._tiers.read(self._region(low, high))

    def write(self, low: int, high: int, values: Values) -> None:
        """Replace weights and optimizer state of its rows [low, high)."""
        self._tiers.write(self._region(low, high), values)

    def _region(self, low: int, high: int) -> Region:
        return Region(self._table, low, high, 0, self.shape[1])


LocalShard = private_api.LocalShard | TieredShard
"""A shard on this rank: in memory, or in tiers."""
