"""How many bytes of a group's rows will be where, told before any of them is kept there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from recpipe.distributed.ranks import Ranks
from recpipe.plugin.quantizer import WORD
from recpipe.plugin.store import StoreLayout
from recpipe.plugin.tables import TableSet
from recpipe.tables.build import staging_bytes
from recpipe.tables.config import HOLDERS, TierConfig
from recpipe.tables.owners import RESIDENT, GroupOwner
from recpipe.tables.sharding.plan import ShardPlan
from recpipe.tables.stores import store_size
from recpipe.tables.stores.holders import part_layout
from recpipe.tables.tiers.policies import BYTES_BESIDE

ROW_BYTES, SLOT_BYTES = 4, 16
"""Host bytes of the maps that say which row is where, as planned and as trained: for each row of a group in
tiers, and for each of its rows that can be resident."""


@dataclass(frozen=True)
class GroupMemory:
    """How much of a group is resident, how much is in the cold tier, and the host memory beside both. If the
    group is sharded, these are sums over ranks; if not, they are one rank's, but for the cold tier's."""

    tiered_rows: int = 0
    resident_rows: int = 0
    resident_bytes: int = 0
    cold_bytes: Mapping[str, int] | None = None
    """What each table takes in the cold tier as its store lays it out; None: all rows are resident. Where
    holders have the rows of all tables together, they are divided by the tables' rows."""
    map_bytes: int = 0
    """Of the row maps and of recpipe's own policies; a plugin's policy comes on top."""
    buffer_bytes: int = 0
    """Of the stores' buffers; what a batch takes comes on top."""


def group_memory(
    tables: TableSet,
    owner: GroupOwner,
    tiers: TierConfig,
    ranks: Ranks,
    shards: ShardPlan | None,
    batch_size: int,
) -> GroupMemory:
    """What a group will take. In sharded groups, data-parallel tables are resident under any owner."""
    whole = tables.layout.total_rows
    if owner.name == RESIDENT:
        return GroupMemory(0, whole, tables.total_bytes)
    copied = [] if shards is None else [t for t in tables.tables if shards.tables[t.name].replicated]
    replicated = sum(table.rows for table in copied)
    tiered = whole - replicated
    slots = owner.slots * tiered // whole
    # The cold rows of tables that are not sharded are divided among the ranks that hold rows.
    on_holders = shards is None and (tiers.store == HOLDERS or ranks.world > 1)
    layout = replace(tables.layout, width=tables.cold_record_bytes // WORD)
    if shards is not None:
        layouts = _shard_layouts(tables, shards, {table.name for table in copied})
    elif on_holders:
        layouts = [part_layout(layout, replace(ranks, rank=rank)) for rank in ranks.holders]
    else:
        layouts = [layout]
    kind = tiers.holder_store if tiers.store == HOLDERS else tiers.store
    cold, buffers = Counter[str](), list[int]()
    for part in layouts:
        cold_bytes, buffer_bytes = store_size(kind, part, staging_bytes(batch_size * len(tables.features)))
        cold.update(dict(zip(part.tables, cold_bytes, strict=True)))
        buffers.append(buffer_bytes)
    if on_holders:
        cold = Counter({t.name: cold.total() * t.rows // whole for t in tables.tables})
    by_row, by_slot = BYTES_BESIDE.get(owner.name, (0, 0))
    return GroupMemory(
        tiered,
        slots + replicated,
        owner.resident_bytes * tiered // whole + replicated * tables.record_bytes,
        {name: cold[name] for name in tables.layout.tables},
        (ROW_BYTES + by_row) * tiered + (SLOT_BYTES + by_slot) * slots,
        max(buffers, default=0) if shards is None else sum(buffers),
    )


def _shard_layouts(tables: TableSet, shards: ShardPlan, replicated: Collection[str]) -> list[StoreLayout]:
    """The layout of each store that has a part of a sharded group's cold rows, by rank and width."""
    places: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for table in tables.tables:
        for shard in () if table.name in replicated else shards.tables[table.name].shards:
            if shard.rows:
                places.setdefault((shard.rank, shard.columns), []).append((table.name, shard.rows))
    layouts = []
    for (_, columns), parts in places.items():
        own = columns + tables.optimizer.state_width(columns)
        width = tables.cold_record_bytes // WORD if tables.codec else own
        layouts.append(StoreLayout(tuple(name for name, _ in parts), tuple(rows for _, rows in parts), width))
    return layouts
