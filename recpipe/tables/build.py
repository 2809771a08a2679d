"""Builds the collection of each group of tables, for its owner, and fills it with first values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchrec.modules.embedding_configs import DataType

from recpipe.common.device import use_device
from recpipe.common.files import RunDir
from recpipe.common.loops import ALONE, Spread
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import TableCollection, TierParts
from recpipe.plugin.errors import PluginConflict
from recpipe.plugin.policy import Cache, RowSpace, no_policy
from recpipe.plugin.quantizer import Coding
from recpipe.plugin.store import ColdStore, Fill, StoreLayout
from recpipe.plugin.tables import TableSet
from recpipe.tables.config import HOLDERS, TierConfig
from recpipe.tables.dynamic.growing import GrowingTables
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import ModelTables
from recpipe.tables.inputs import Inputs
from recpipe.tables.owners import NOCACHE, RESIDENT, GroupOwner
from recpipe.tables.resident import ReplicatedCollection, ResidentCollection
from recpipe.tables.stores import make_store
from recpipe.tables.stores.holders import HeldRows, HoldersStore
from recpipe.tables.stores.local import EmulatedStore, MakeLocal, local_store
from recpipe.tables.stores.ssd import SsdStore
from recpipe.tables.tiers.gpu_lookups import Finder
from recpipe.tables.tiers.policies import POLICIES
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from recpipe.tables.tiers.transfer import Transfer

if TYPE_CHECKING:
    from recpipe.tables.sharding.plan import ShardPlan

MANY_IDS = 8.0
"""Ids per bag from which several TBEs are faster: on 2 cores 0.8 times as fast at 1, equal at 4, 1.4 times at
20."""
SLAB_BYTES = 512 << 20
"""The most memory that a slab takes on a GPU before a batch needs more."""
WIDEST = 2048
"""The most values of a row that FBGEMM's kernels for a GPU take. Those for a CPU take any number."""


@dataclass(frozen=True)
class Place:
    """What the tables of all groups in a run have in common."""

    config: TierConfig
    device: torch.device
    run_dir: RunDir
    ranks: Ranks
    batch_size: int
    """Samples of a whole batch."""
    ids_per_bag: Callable[[], float] = lambda: 1.0
    """The data's mean pooling factor (ids per bag)."""
    padded: Collection[str] = ()
    """Paths of collections whose pooled rows should have padding in front (``recpipe.tables.group_rows``)."""


def require_kernels(
    tables: ModelTables, device: torch.device, ranks: Ranks, plan: ShardPlan | None = None
) -> None:
    """``UserError`` if FBGEMM has no kernels for a table's rows on ``device``. ``plan``: of sharded tables,
    whose parts may be narrower than the tables."""
    if device.type != "cuda" or (plan is None and len(ranks.trainers) > 1):  # replicas use torch's operators
        return
    for group in tables.groups:
        for name in group.tables.layout.tables:
            shards = () if plan is None else plan.tables[name].shards
            width = max((shard.columns for shard in shards), default=group.tables.dim)
            if width > WIDEST:
                parts = "" if width == group.tables.dim else f", {width:,} of them in one shard"
                raise UserError(
                    f"table '{name}' has rows of {group.tables.dim:,} values{parts}, and FBGEMM's kernels "
                    f"for a GPU take at most {WIDEST:,}: lower its embedding_dim, let a planner cut its "
                    "columns (+plugin=neo plugins.neo.sharding=column_wise), or use trainer.device=cpu"
                )


def build_tables(inputs: Inputs, owners: Sequence[GroupOwner], place: Place) -> GroupedCollection:
    """Build a collection for each group of ``inputs``' tables, as its owner decides. ``shard_tables`` makes
    the rows of sharded tables."""
    ranks, made = place.ranks, list[TableCollection]()
    if len(ranks.trainers) < ranks.world and any(owner.name == RESIDENT for owner in owners):
        raise UserError(
            "topology.embedding_ranks names ranks that only hold rows, but tiers.policy=resident keeps "
            "all rows on every trainer; choose nocache, lru, lfu or a caching plugin"
        )
    for number, (group, owner) in enumerate(zip(inputs.tables.groups, owners, strict=True)):
        if owner.name != RESIDENT:
            made.append(_tiered(inputs, number, owner, place))
        elif len(ranks.trainers) > 1:
            made.append(ReplicatedCollection(group.tables, place.device, ranks.channel()))
        else:
            tbes = tbe_count(place.config, group.tables, place.ids_per_bag, place.device)
            padded = group.path in place.padded
            made.append(ResidentCollection(group.tables, place.device, tbes, padded))
    # A rank that only holds rows replaces those that trainers send it, and looks no ids up.
    growing = GrowingTables.of(inputs.growing, inputs.tables, made) if ranks.trains else None
    return GroupedCollection(inputs.tables, made, growing)


def tbe_count(
    config: TierConfig, tables: TableSet, ids_per_bag: Callable[[], float], device: torch.device
) -> int:
    """How many TBEs resident tables are spread over (``tiers.tbes``), at most one for each table; one on a
    GPU, whose kernels use all of it."""
    if device.type != "cpu":
        return 1
    if config.tbes != "auto":
        count = int(config.tbes)
    else:
        count = torch.get_num_threads() if ids_per_bag() >= MANY_IDS else 1
    return min(count, len(tables.tables))


def _tiered(inputs: Inputs, number: int, owner: GroupOwner, place: Place) -> TableCollection:
    """A collection over tiers for the group with this ``number``, or what its plugin makes in its place."""
    groups, ranks, prefetch = inputs.tables.groups, place.ranks, place.config.prefetch
    tables, bound = groups[number].tables, inputs.bound(number)
    # Ids that the model makes cannot be planned for, so that their rows stay in the store.
    name, cache = (owner.name, owner.cache) if bound else (NOCACHE, None)
    slots = owner.slots if name != NOCACHE else 0
    if slots < 1 and name != NOCACHE:
        raise no_row(tables, place, len(groups) > 1)
    trainers = ranks.channel(ranks.trainers)
    store = _store(inputs.tables, number, place)
    space = RowSpace(tables.layout.bases, slots, number, Spread.beside(place.device))
    if cache is not None:
        if ranks.trains:
            store = cache.make(Cache.store, store)
        lookups = partial(inputs.bags_of_rows, group=number)
        parts = (tables, slots, store, place.device, prefetch, ranks, lookups, number)
        own = cache.make(Cache.collection, TierParts(*parts, _finds(inputs, number, place.device)))
        if own is not None:
            if tables.storage is not DataType.FP32:
                raise PluginConflict(
                    f"{cache}, keeps rows of its own, in float32, but tables "
                    f"{', '.join(tables.layout.tables)} are to be stored in {tables.storage.value.lower()}: "
                    "drop one of the two"
                )
            return own
    if not ranks.trains:
        assert isinstance(store, HoldersStore)
        return HeldRows(store)
    policy = POLICIES[name](space) if cache is None else cache.call(Cache.policy, space, wrong=no_policy)
    return TieredEmbeddingBagCollection(
        tables, policy, store, place.device, prefetch, ranks, trainers, cache, slab_rows(tables, place)
    )


def _finds(inputs: Inputs, number: int, device: torch.device) -> Callable[[Any], RowIds] | None:
    """``TierParts.finds``."""
    if device.type != "cuda":
        return None
    finder = Finder(inputs.tables.groups[number].tables, Transfer(device), ALONE)

    def finds(batch: Any) -> RowIds:
        use_device(device)  # plugins read batches in threads of their own
        ids = inputs.ids(batch, number)
        assert ids is not None, "a plugin's cache has tables whose ids are in the batch"
        return finder.distinct(ids)

    return finds


def no_row(tables: TableSet, place: Place, several: bool) -> UserError:
    """The error if the budget of a group's ``tables`` does not hold a single row."""
    of_group = f" of {', '.join(tables.layout.tables)}" if several else ""
    return UserError(
        f"tiers.resident_bytes={place.config.resident_bytes} leaves not even one row{of_group}, of "
        f"{tables.record_bytes} bytes: raise it"
    )


def _store(tables: ModelTables, number: int, place: Place) -> ColdStore:
    """Make a group's cold store. With several ranks it is spread over them, and each keeps its part in a
    store of its own."""
    group, config, ranks = tables.groups[number].tables, place.config, place.ranks
    kind = config.holder_store if config.store == HOLDERS else config.store
    top: Path = config.directory(place.run_dir.path)
    if ranks.world > 1:
        top /= f"rank-{ranks.rank}"
    if len(tables.groups) > 1:
        top /= f"group-{number}"
    local = opens_store(place, kind, top, staging_bytes(place.batch_size * len(group.features)))
    coding = None if group.codec is None else Coding(group.codec)
    if config.store == HOLDERS or ranks.world > 1:
        return HoldersStore(group.layout, group.fill, ranks, local, coding)
    return local_store(group.layout, group.fill, coding, local)


def opens_store(place: Place, kind: str, directory: Path, staging: int) -> MakeLocal:
    """A function that makes this process's store in ``directory``. Unless ``tiers.dir`` is set, the store is
    removed at the end of the run."""

    def local(layout: StoreLayout, fill: Fill) -> ColdStore:
        scratch = not place.config.dir
        store = make_store(kind, layout, fill, directory=directory, staging_bytes=staging, scratch=scratch)
        if isinstance(store, SsdStore) and scratch:
            place.run_dir.at_end(store.remove)  # needed after an error, when nobody closes it
        # With several ranks the messages between them are delayed.
        if place.config.emulate.active and place.ranks.world == 1:
            return EmulatedStore(store, place.config.emulate)
        return store

    return local


def slab_rows(tables: TableSet, place: Place) -> int:
    """For how many rows a slab has room at first.

    On a GPU it is a quarter of what a batch of one id for each feature can need at most, since ids repeat and
    many of their rows are resident. A larger slab, made during training, stops the GPU and leaves a hole in
    its memory; it is made twice as large, so that this ends within the first steps. On a CPU one row: making
    it costs nothing.
    """
    if place.device.type != "cuda":
        return 1
    wanted = min(place.batch_size * len(tables.features) // 4, tables.layout.total_rows)
    return max(1, min(wanted, SLAB_BYTES // tables.record_bytes))


def staging_bytes(lookups: int) -> int:
    """Bytes for the blocks that an ssd store keeps between a fetch and the write-back of its rows, one batch
    later.

    A 4 KiB block for half of a batch's ``lookups``, which is what two batches fetch if three quarters of
    their lookups find a resident row; between 8 and 128 MiB.
    """
    return min(max(8 << 20, lookups // 2 * 4096), 128 << 20)
