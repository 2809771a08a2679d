"""One group of tables that are cut into parts over the ranks.

Every rank looks up its share of each batch: ids go to the ranks that hold their rows (``start``), rows come
back (``finish``), and the backward pass sends gradients to those ranks and updates the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recpipe import private_api
from recpipe.common.saved import entries
from recpipe.common.tensors import packed, unpacked
from recpipe.data.parts import require_ids
from recpipe.errors import UserError
from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import C, Rows, TableCollection, TierFigures, TierTimes
from recpipe.plugin.skipper import RowFilter
from recpipe.plugin.store import IoCounters
from recpipe.plugin.tables import Region, Values, row_chunks
from recpipe.private_api import module_name
from recpipe.tables.collection import TORCHREC_OPTIMIZERS, ReadsRows, SavesPlacement
from recpipe.tables.group_rows import GroupRows, GroupTables
from recpipe.tables.sharding.own import LocalShard, ShardsLookup, ShardTiers, filled_lookups
from recpipe.tables.sharding.plan import Shard
from recpipe.tables.sharding.sent import RowCache, Sent, ShardEnv
from recpipe.tables.skipping import FilteredLookups, by_feature
from recpipe.tables.tiers.planner import RANKS, of_whole
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection


class ShardedRows(GroupRows):
    """A batch's rows in tables that are sharded: its ids are sent to the ranks that hold them."""

    def __init__(self, tables: ShardedCollection, ids: KeyedJaggedTensor) -> None:
        super().__init__(tables, ids)
        self._start = tables.start
        self.sent: Sent | None = None
        """The ids on their way; None: the lookup sends them."""

    def send(self) -> None:
        self.sent = self._start(self.ids)

    def send_ids(self) -> None:
        if self.sent is not None:
            self.sent.send_ids()

    def fetch_rows(self) -> None:
        if self.sent is not None:
            self.sent.fetch_rows()


class ShardedCollection(TableCollection, GroupTables, SavesPlacement, ReadsRows):
    """Group ``number`` of the tables of ``env``, run by TorchRec's sharded module and its fused optimizer.

    ``tiers``: the tiers with its rows, if they are not all in memory.
    """

    sends = True

    def __init__(self, env: ShardEnv, number: int, module: Any, tiers: ShardTiers | None = None) -> None:
        super().__init__()
        self.env, self.number, self.collectives = env, number, env.collectives
        self.tables = tables = env.sharding.tables.groups[number].tables
        self.shards = {name: env.plan.tables[name] for name in tables.layout.tables}
        """The plan for each of its tables."""
        self.sharded = module
        """TorchRec's sharded module."""
        self.cache = RowCache(private_api.fused_lookups(module) if env.prefetches else [])
        if env.prefetches and tables.optimizer.frozen:
            raise UserError(
                f"table '{tables.layout.tables[0]}' is frozen, and tiers.kernel=uvm_caching keeps rows that "
                "it fetches until their update, which never comes: use tiers.kernel=uvm, or train the table"
            )
        self._under = "embedding_bags" if tables.pooled else "embeddings"
        weights = [self._weight(name) for name, table in self.shards.items() if table.replicated]
        optimizer, self._replicated = tables.optimizer, None
        if weights and not optimizer.frozen:
            self._replicated = TORCHREC_OPTIMIZERS[optimizer.name](weights, **optimizer.knobs)
        for lookup in private_api.fused_lookups(module):
            optimizer.rate.follow(lookup.tbe)
        self._filter: RowFilter | None = None
        self.own = frozenset(n for n, t in self.shards.items() if n in env.sharding.own and not t.replicated)
        """Its tables that recpipe looks up on the ranks that hold their rows."""
        self.in_tiers = self.own & env.sharding.tiered
        """Those whose rows are in tiers."""
        lookups = private_api.own_lookups_in(module)
        assert tiers is not None or not self.in_tiers, "who shards tables to be tiered brings their tiers"
        filled = nn.ModuleList(filled_lookups(number, tables, lookups, env.sharding.device, tiers))
        self.lookups = cast("Sequence[ShardsLookup]", filled)
        """The lookups of these tables on this rank."""
        self.tiers = [
            own
            for lookup in self.lookups
            for _, own in lookup.each
            if isinstance(own, TieredEmbeddingBagCollection)
        ]
        """The tiers among them."""
        self._fetches = any(own.prefetches for own in self.tiers)
        self.local = {table.name: self._shards_here(table.name) for table in tables.tables}
        """Each table's shards on this rank; those in memory share it."""

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.tables.configs()

    # -- lookups -----------------------------------------------------------------------------

    def forward(self, sparse: KeyedJaggedTensor) -> Rows:
        """Look up this rank's share; rows by feature name."""
        return self.finish(self.start(sparse))

    def input_dist(self, ids: KeyedJaggedTensor, found: Any = None) -> ShardedRows:
        """Take in the ids of a batch; ``ShardedRows.send`` begins to send them."""
        require_ids(ids, self.tables.rows_of_features)
        return ShardedRows(self, ids)

    def compute(self, rows: ShardedRows, warm: bool, cold: bool) -> tuple[torch.Tensor, None]:
        """This rank's share: the other ranks' rows come back."""
        sent = self.start(rows.ids) if rows.sent is None else rows.sent
        return self.joined(self.finish(sent)), None

    def start(self, sparse: KeyedJaggedTensor) -> Sent:
        """Begin to send the ids of a batch that will be looked up later; all ranks do so together."""
        return Sent(self.env, self.sharded, sparse, self.tables.weighted, self._fetches, self.cache)

    def finish(self, sent: Sent) -> Rows:
        """The rows for the ids that ``start`` sent: pooled, float32 [B, F * D] in the order of the result's
        keys, or by feature one row for each id."""
        found: Rows = sent.looked_up().wait()
        size = sent.samples
        if not isinstance(found, KeyedTensor):  # the appended samples have no ids
            return {
                n: JaggedTensor(rows.values(), lengths=rows.lengths()[:size]) for n, rows in found.items()
            }
        if found.values().shape[0] == size:
            return found
        return KeyedTensor(found.keys(), found.length_per_key(), found.values()[:size])

    def _weight(self, table: str) -> torch.nn.Parameter:
        """The weight of a data-parallel table."""
        weight: torch.nn.Parameter = self.sharded.get_parameter(f"{self._under}.{module_name(table)}.weight")
        return weight

    def _shards_here(self, table: str) -> Sequence[LocalShard]:
        if table in self.own:
            return [shard for lookup in self.lookups for shard in lookup.shards(table)]
        found = private_api.local_shards(self.sharded, table, self._under)
        if self._replicated is None or not self.shards[table].replicated:
            return found
        weight = self._weight(table)
        state = self._replicated.state[weight].get("sum")
        return found if state is None else [replace(found[0], state=state.view(len(weight), -1))]

    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows out of updates. Each rank decides about its own rows; for data-parallel tables, all
        ranks do.

        ``UserError`` if a row's gradient is split over ranks, or if rows are fetched before their lookups.
        """
        if self.env.prefetches:
            raise UserError(
                "a plugin leaves rows out of updates, which looks them up once more, and "
                "tiers.kernel=uvm_caching fetches them ahead for one lookup: use tiers.kernel=uvm, or drop it"
            )
        self._filter = rows
        for own in self.lookups:
            own.filter_updates(rows)
        layout = self.tables.layout
        base = dict(zip(map(module_name, layout.tables), layout.bases.tolist(), strict=False))
        for lookup in private_api.fused_lookups(self.sharded):
            firsts = np.array([base[table] + row for table, row in lookup.features], np.int64)
            rows_of, pooled = by_feature(firsts), self.tables.pooled
            lookup.tbe.forward = FilteredLookups(lookup.tbe, rows, rows_of, len(firsts), pooled)

    def update(self) -> None:
        if self._replicated is None:
            return
        layout = self.tables.layout
        for name, base in zip(layout.tables, layout.bases.tolist(), strict=False):
            gradient = self._weight(name).grad if self.shards[name].replicated else None
            if self._filter is None or gradient is None:
                continue
            here = torch.nonzero(gradient.any(dim=1)).view(-1)
            stay = self._filter.stay(here.cpu().numpy() + base, gradient[here])
            if stay is not None:
                # With every optimizer here, a zero gradient changes neither weights nor state.
                gradient[here[~stay]] = 0.0
        for group in self._replicated.param_groups:
            group["lr"] = self.tables.optimizer.rate.value
        self._replicated.step()
        self._replicated.zero_grad()

    # -- rows, for checkpoints ---------------------------------------------------------------

    def regions(self) -> Iterator[Region]:
        """All rows of all tables, in chunks, on every rank."""
        yield from row_chunks(self.tables)

    def regions_here(self) -> list[Region]:
        """The regions of which this rank has rows."""
        return [region for region in self.regions() if self.pieces(region, self.env.rank)]

    def pieces(self, region: Region, rank: int) -> list[tuple[Shard, slice]]:
        """The shards of ``rank`` that have rows of ``region``, and the numbers of those rows in the table."""
        found = []
        for shard in self.shards[region.table].shards:
            low, high = max(shard.row, region.start), min(shard.row + shard.rows, region.stop)
            if shard.rank == rank and low < high:
                found.append((shard, slice(low, high)))
        return found

    def _part(self, table: str, shard: Shard, rows: slice) -> tuple[LocalShard, int, int]:
        """A shard on this rank, and the positions in it of ``rows`` (numbered in the table)."""
        local = next(
            s for s in self.local[table] if (s.row, s.column) == (shard.row, shard.column) and s.shape[0]
        )
        return local, rows.start - shard.row, rows.stop - shard.row

    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``, on every rank; all ranks call it together.

        If columns are on different ranks, row-wise Adagrad's state is the ranks' mean, weighted by their
        columns; the state of the whole row would be the same.
        """
        replicated, rank = self.shards[region.table].replicated, self.env.rank
        self.empty_cache(forget=False)
        readers = (rank,) if replicated else tuple(range(self.env.plan.world))
        mine = []
        for shard, part in self.pieces(region, rank):
            local, low, high = self._part(region.table, shard, part)
            mine += [values.reshape(-1) for values in local.read(low, high)]
        flat = np.concatenate([*mine, np.empty(0, np.float32)])
        received = [flat] if replicated else self.env.channel.gather(flat)
        width = self.tables.layout.width - self.tables.dim
        rows = region.stop - region.start
        weights = np.empty((rows, self.tables.dim), np.float32)
        state = np.zeros((rows, width), np.float32)
        row_wise = not self.tables.optimizer.state_by_column
        for reader, flat in zip(readers, received, strict=True):
            at = 0
            for shard, part in self.pieces(region, reader):
                count = part.stop - part.start
                here = slice(part.start - region.start, part.stop - region.start)
                columns = slice(shard.column, shard.column + shard.columns)
                weights[here, columns] = flat[at : at + count * shard.columns].reshape(count, -1)
                at += count * shard.columns
                wide = width if row_wise else shard.columns if width else 0
                value = flat[at : at + count * wide].reshape(count, wide)
                at += count * wide
                if row_wise and shard.columns < self.tables.dim:
                    state[here] += value * np.float32(shard.columns / self.tables.dim)
                elif row_wise:
                    state[here] = value
                elif width:
                    state[here, columns] = value
        return weights, state

    def weights_of(self, rows: RowIds) -> NDArray[np.float32]:
        """See ``ReadsRows``; each rank sends the others what it has of these rows."""
        layout, rank, world = self.tables.layout, self.env.rank, self.env.plan.world
        self.empty_cache(forget=False)
        cuts = np.searchsorted(rows, layout.bases)
        found = np.empty((len(rows), self.tables.dim), np.float32)
        for index, table in enumerate(layout.tables):
            first = int(cuts[index])
            own = rows[first : int(cuts[index + 1])] - layout.bases[index]
            if not len(own):
                continue
            shards, replicated = self.shards[table].shards, self.shards[table].replicated
            parts = [(shard, *np.searchsorted(own, (shard.row, shard.row + shard.rows))) for shard in shards]
            mine = [np.empty(0, np.float32)]
            for shard, low, high in parts:
                if (replicated or shard.rank == rank) and low < high:
                    local, _, _ = self._part(table, shard, slice(shard.row, shard.row))
                    mine.append(local.weights_of(own[low:high] - shard.row).reshape(-1))
            flat = np.concatenate(mine)
            received = {rank: flat} if replicated else dict(enumerate(self.env.channel.gather(flat)))
            at = dict.fromkeys(range(world), 0)
            for shard, low, high in parts:
                sender = rank if replicated else shard.rank
                count = (high - low) * shard.columns
                values = received[sender][at[sender] : at[sender] + count].reshape(high - low, -1)
                here = slice(first + int(low), first + int(high))
                found[here, shard.column : shard.column + shard.columns] = values
                at[sender] += count
        return found

    def write(self, region: Region, values: Values) -> None:
        """Replace this rank's part of the weights and optimizer state of ``region``."""
        row_wise = not self.tables.optimizer.state_by_column
        self.empty_cache(forget=True)
        for shard, rows in self.pieces(region, self.env.rank):
            here = slice(rows.start - region.start, rows.stop - region.start)
            columns = slice(shard.column, shard.column + shard.columns)
            local, low, high = self._part(region.table, shard, rows)
            state = values[1][here] if row_wise else values[1][here, columns]
            local.write(low, high, (values[0][here, columns], state))

    def renew(self, rows: RowIds, records: torch.Tensor) -> None:
        """Replace this rank's part of the records of distinct, sorted ``rows``."""
        self.empty_cache(forget=True)
        layout, dim = self.tables.layout, self.tables.dim
        row_wise = not self.tables.optimizer.state_by_column
        cuts = np.searchsorted(rows, layout.bases)
        for index, table in enumerate(layout.tables):
            mine = slice(int(cuts[index]), int(cuts[index + 1]))
            own = rows[mine] - layout.bases[index]
            for shard in self.local[table] if len(own) else ():
                low, high = np.searchsorted(own, (shard.row, shard.row + shard.shape[0]))
                if low == high:
                    continue
                here = records[mine][low:high]
                columns = slice(shard.column, shard.column + shard.shape[1])
                state = here[:, dim:] if row_wise else here[:, dim:][:, columns]
                shard.replace(own[low:high] - shard.row, here[:, :dim][:, columns], state)

    def empty_cache(self, forget: bool) -> None:
        """Write back what a GPU's cache (``tiers.kernel=uvm_caching``) has of rows in host memory, before
        these are read; ``forget``: also empty it, before they are replaced.

        The cache must not be emptied between a batch's fetch and its update, which would be lost.
        """
        for lookup in self.cache.lookups:
            lookup.tbe.flush()
            if forget:
                lookup.tbe.reset_cache_states()

    # -- tiers -------------------------------------------------------------------------------

    def offers(self, capability: type[C]) -> C | None:
        """``SavesPlacement`` where rows lie in tiers, or would under another plan."""
        resident = self.env.sharding.tiered.isdisjoint(self.shards)
        return None if capability is SavesPlacement and resident else super().offers(capability)

    def tier_figures(self) -> TierFigures | None:
        if not self.in_tiers:
            return None
        if not self.tiers:  # of its tables in tiers, this rank has no shards
            return TierFigures(IoCounters(), TierTimes(), None, 0, 0, 0, False, 0, 0)
        return reduce(TierFigures.plus, (tiers.tier_figures() for tiers in self.tiers))

    def placement_state(self) -> dict[str, Any]:
        """The placements of all ranks' tiers, on rank 0, which saves them; all ranks call it."""
        sent = packed({_shards_of(tiers): tiers.placement_state() for tiers in self.tiers})
        channel = self.env.channel
        received = channel.exchange([sent if member == 0 else sent[:0] for member in range(channel.size)])
        if channel.index:
            return {}
        return {RANKS: {str(rank): unpacked(part) for rank, part in enumerate(received)}}

    def _own_placements(
        self, state: Mapping[str, Any]
    ) -> list[tuple[TieredEmbeddingBagCollection, dict[str, Any]]]:
        """This rank's tiers with what ``placement_state`` has of them; none where it is of other ranks or
        shards, or of tables that were whole."""
        if of_whole(state):
            return []
        ranks = entries({RANKS: dict[str, dict[str, Any]]}, state, "placement")[RANKS]
        saved = ranks.get(str(self.env.channel.index), {})
        mine = {_shards_of(tiers): tiers for tiers in self.tiers}
        if len(ranks) != self.env.channel.size or saved.keys() != mine.keys():
            return []
        found = entries(dict.fromkeys(mine, dict[str, Any]), saved, "placement")
        return [(tiers, found[shards]) for shards, tiers in mine.items()]

    def check_placement_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` if this rank's part of ``state`` cannot be a result of ``placement_state``; what is of
        other ranks or shards, or of whole tables, is not looked at."""
        for tiers, saved in self._own_placements(state):
            tiers.check_placement_state(saved)

    def load_placement_state(self, state: dict[str, Any] | None) -> bool:
        """Continue from ``state``; False if it is of another policy or budget, of other ranks or shards, or
        of whole tables."""
        own = [] if state is None else self._own_placements(state)
        loaded = [tiers.load_placement_state(saved) for tiers, saved in own]
        return bool(loaded) and all(loaded)

    def write_back(self) -> None:
        for tiers in self.tiers:
            tiers.write_back()

    def close(self) -> None:
        """Close the tiers, all of them even if one raises."""
        with ExitStack() as stack:
            for tiers in self.tiers:
                stack.callback(tiers.close)


def _shards_of(tiers: TieredEmbeddingBagCollection) -> str:
    """A description of the tables' parts that the tiers hold."""
    tables = tiers.tables
    return " ".join(f"{table.name}:{table.rows}x{tables.dim}" for table in tables.tables)
