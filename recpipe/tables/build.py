"""From the recipe and the plugins' claims to the embedding module of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator
from torch import nn
from torchrec.modules.embedding_configs import DataType

from recpipe.common.run_dir import RunDir
from recpipe.common.sizes import parse_bytes
from recpipe.common.validation import FilePath, one_of
from recpipe.distributed.ranks import Emulation, Ranks
from recpipe.errors import UserError
from recpipe.plugin.assembly import Assembly
from recpipe.plugin.compose import Owned, overrides
from recpipe.plugin.errors import PluginConflict, PluginError
from recpipe.tables.capabilities import CAPABILITIES
from recpipe.tables.collection import TableCollection
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import Group, ModelTables
from recpipe.tables.inputs import Inputs
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.sharding.claims import stored_types
from recpipe.tables.sharding.collection import ShardedTables, join_group
from recpipe.tables.sharding.plan import ShardPlan, load_plan
from recpipe.tables.sharding.planning import KERNELS, Sharding
from recpipe.tables.specs import TableSet
from recpipe.tables.stores import KINDS, SsdStore, make_store
from recpipe.tables.stores.base import ColdStore, Fill, StoreLayout
from recpipe.tables.stores.sharded import HeldRows, ShardedStore
from recpipe.tables.tiers.parts import TierParts
from recpipe.tables.tiers.placement import Bags
from recpipe.tables.tiers.policies import POLICIES, RowSpace
from recpipe.tables.tiers.shared_rows import ReplicatedCollection
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from recpipe.tables.wrapped import WrappedCollection

MANY_IDS = 8.0
"""Ids per bag from which several TBEs pay: on 2 cores 0.8 times as fast at 1, level at 4, 1.4 times at 20."""
SHARDED = "sharded"
"""``tiers.store`` of rows partitioned over ranks."""
SCRATCH = "tiers"
"""Where a run's ssd store lies in the run directory when nobody has named a place; it goes with the run."""


def _tbes(value: int | str) -> int | str:
    if value != "auto" and (isinstance(value, str) or value < 1):
        raise ValueError("must be auto or a whole number of at least 1")
    return value


@dataclass(frozen=True)
class TierConfig:
    """``conf/tiers``: where rows live. ``resident_bytes`` counts weights and optimizer state."""

    policy: Annotated[str, one_of("resident", *POLICIES)]
    store: Annotated[str, one_of(*KINDS, SHARDED)]
    resident_bytes: int | float | str
    dir: FilePath | None
    prefetch: bool
    sharded: bool
    holder_store: Annotated[str, one_of(*KINDS)] = "host"
    emulate: Emulation = field(default_factory=Emulation)
    plan: FilePath | None = None
    kernel: Annotated[str, one_of(*KERNELS)] = "fused"
    split_rows: bool = False
    tbes: Annotated[int | str, AfterValidator(_tbes)] = "auto"

    def __post_init__(self) -> None:
        parse_bytes(self.resident_bytes, 0, "tiers.resident_bytes")

    def described_store(self, ranks: Ranks) -> str:
        """The cold store in words: its kind and, over ranks, what each holder keeps its part in."""
        if self.store != SHARDED and ranks.world == 1:
            return self.store
        return f"sharded ({self.holder_store if self.store == SHARDED else self.store})"

    def directory(self, run_dir: Path) -> Path:
        """Where ssd stores go: of several ranks each in a ``rank-N`` of its own there."""
        return Path(self.dir).expanduser() if self.dir else run_dir / SCRATCH

    def budget(self, tables: ModelTables) -> int:
        """Bytes of ``tiers.resident_bytes``, at most those of all tables."""
        return min(
            parse_bytes(self.resident_bytes, tables.total_bytes, "tiers.resident_bytes"), tables.total_bytes
        )

    def slots(self, tables: ModelTables, device_bytes: int = 0) -> list[int]:
        """Rows of each group that the budget holds, less what plugins keep (``device_bytes``): divided over
        the groups by the bytes of their tables."""
        budget = self.budget(tables) - device_bytes
        shares = (budget * g.tables.total_bytes // tables.total_bytes for g in tables.groups)
        return [
            max(0, share) // g.tables.record_bytes for share, g in zip(shares, tables.groups, strict=True)
        ]


def cache_owner(config: TierConfig, assembly: Assembly, tables: ModelTables) -> str:
    """Who decides which rows are resident: ``resident`` (all are), a built-in policy or a plugin's name.

    ``UserError`` where plugins and the recipe's ``tiers`` contradict each other.
    """
    owners = assembly.policies("cache")
    if not owners:
        _check_sharding(config, assembly, config.policy)
        return config.policy
    owner, claimed = owners[0]
    name = owner.origin.plugin
    if len(owners) > 1:
        names = " and ".join(o.origin.plugin for o, _ in owners)
        raise PluginConflict(
            f"{names} each want some tables' cache, but one policy owns it for all tables; drop one"
        )
    if len(claimed) < len(tables.tables):
        raise PluginConflict(
            f"plugin {owner.origin} claims the cache of {', '.join(claimed)} alone, but one policy owns it "
            "for all tables; it must claim '*'"
        )
    if config.policy != "resident":
        raise PluginConflict(
            f"plugin {owner.origin} decides which rows are resident, and so does "
            f"tiers.policy={config.policy}; drop one: leave tiers.policy out, or the plugin '{name}'"
        )
    _check_sharding(config, assembly, name)
    return name


def _check_sharding(config: TierConfig, assembly: Assembly, owner: str) -> None:
    """Tiers and sharding exclude each other; what is about sharded tables needs sharding."""
    if not is_sharded(config, assembly):
        for key, idle in (("kernel", "fused"), ("split_rows", False)):
            value = getattr(config, key)
            if value != idle:
                raise UserError(
                    f"tiers.{key}={str(value).lower()} is about sharded tables, and this run shards none: "
                    "leave it out, or shard them with tiers.sharded=true"
                )
    elif owner != "resident":
        placing = _placing(assembly)
        asked = "tiers.plan" if config.plan is not None else "tiers.sharded=true"
        who = f"plugin {placing[0].origin} shards tables and" if placing else asked
        raise PluginConflict(
            f"{who} keeps all rows resident, but {owner} decides which rows are. Drop one of the two"
        )
    elif config.emulate.active:
        raise UserError(
            "tiers.emulate delays recpipe's own messages and not TorchRec's collectives, by which sharded "
            "tables travel: leave it out"
        )


def _placing(assembly: Assembly) -> list[Owned[Any]]:
    """The plugins' parts that only TorchRec's sharded tables can carry out."""
    placed = [assembly.planner, *assembly.sharders.values(), *assembly.codecs.values()]
    placed += [policy for aspect in ("placement", "kernel") for policy, _ in assembly.policies(aspect)]
    placed += [owner for owner, kind in stored_types(assembly).values() if kind is not DataType.FP32]
    return [owned for owned in placed if owned is not None]


def is_sharded(config: TierConfig, assembly: Assembly) -> bool:
    """Whether TorchRec's planner places the tables: the recipe or a plugin asks for it."""
    return config.sharded or config.plan is not None or bool(_placing(assembly))


def plan_shards(
    tables: ModelTables,
    config: TierConfig,
    assembly: Assembly,
    device: torch.device,
    batch_size: int,
    ranks: Ranks,
    world: int,
) -> tuple[Sharding, ShardPlan]:
    """Where the tables' parts will lie on ``world`` ranks; takes no memory.

    All ranks call it; it plans alone where ``world`` is not the number of ranks that run.
    """
    if len(ranks.trainers) < ranks.world or len(ranks.holders) < ranks.world:
        raise UserError(
            "sharded tables lie on every rank that trains: leave topology.embedding_ranks and trainers null"
        )
    if config.kernel != "fused" and device.type != "cuda":
        raise UserError(
            f"tiers.kernel={config.kernel} needs a GPU, and this run is on a CPU: leave tiers.kernel=fused; "
            "tables larger than memory are what tiers.store=ssd with a caching policy is for"
        )
    sharding = Sharding(
        tables,
        assembly,
        device,
        world,
        -(-batch_size // world),
        config.split_rows,
        config.kernel,
        config.budget(tables) / tables.total_bytes,
    )
    sharding.data_types()  # these refuse what could not be carried out
    sharding.sharders()
    if config.plan is not None:
        plan = load_plan(Path(config.plan).expanduser())
        sharding.check(plan)
        return sharding, plan
    return sharding, sharding.plan(join_group(device, ranks) if world == ranks.world else None)


def build_embeddings(
    inputs: Inputs,
    config: TierConfig,
    assembly: Assembly,
    device: torch.device,
    run_dir: RunDir,
    batch_size: int,
    ranks: Ranks,
    shards: tuple[Sharding, ShardPlan] | None = None,
    ids_per_bag: Callable[[], float] = lambda: 1.0,
    model: nn.Module | None = None,
    roomy: Collection[str] = (),
) -> GroupedCollection:
    """The collections of tables that the recipe and the plugins ask for, filled with first values.

    ``shards``: as ``plan_shards`` gave it, where tables are sharded; then ``model`` is the one that holds the
    tables. ``ids_per_bag`` gives the data's mean pooling factor; ``roomy`` the paths of collections whose
    rows are wanted with room in front (``recpipe.tables.room``).
    """
    tables = inputs.tables
    owner = cache_owner(config, assembly, tables)
    if owner == "resident" and shards is None and len(ranks.trainers) < ranks.world:
        raise UserError(
            "topology.embedding_ranks names ranks that only hold rows, but tiers.policy=resident keeps "
            "all rows on every trainer; choose nocache, lru, lfu or a caching plugin"
        )
    slots = config.slots(tables, assembly.device_bytes)
    sharded = None if shards is None else ShardedTables(*shards, ranks, model)
    made: list[TableCollection] = []
    for number, group in enumerate(tables.groups):
        module: TableCollection
        if sharded is not None:
            module = sharded.collections[number]
        elif owner == "resident" and len(ranks.trainers) > 1:
            module = ReplicatedCollection(group.tables, device, ranks.channel())
        elif owner == "resident":
            tbes = tbe_count(config, group.tables, ids_per_bag, device)
            module = ResidentCollection(group.tables, device, tbes, group.path in roomy)
        else:
            lookups = partial(inputs.bags, group=number)
            # Of ids that the model makes nothing can be planned: their rows stay in the store.
            bound = inputs.bound(number)
            cached = owner if bound else "nocache"
            part = _Tier(number, group, cached, slots[number], len(tables.groups) > 1, lookups, bound)
            module = _tiered(part, config, assembly, device, run_dir, batch_size, ranks)
        names = group.tables.layout.tables
        made.append(_rewritten(module, assembly, ranks, names))
    return GroupedCollection(tables, made)


@dataclass(frozen=True)
class _Tier:
    """One group of tables that is to lie in tiers."""

    number: int
    group: Group
    owner: str
    slots: int
    several: bool
    """Whether there are more groups."""
    lookups: Callable[[Any], Bags]
    """A batch's lookups, as rows of the group."""
    bound: bool
    """Whether batches have its ids."""


def _rewritten(
    module: TableCollection, assembly: Assembly, ranks: Ranks, tables: Sequence[str]
) -> TableCollection:
    """``module``, which has ``tables``, as the policies that claim their precision or update want it, each
    asked once."""
    claimed = [(a, o, names) for a in ("precision", "update") for o, names in assembly.policies(a)]
    for owner in {id(owner.part): owner for _, owner, _ in claimed}.values():
        theirs = [(a, names) for a, o, names in claimed if o.part is owner.part]
        mine = [(a, name) for a, names in theirs for name in names if name in tables]
        if not mine:
            continue
        rewritten = owner.part.rewrite(module, tuple(dict.fromkeys(name for _, name in mine)))
        if not isinstance(rewritten, TableCollection):
            raise PluginError(
                f"plugin {owner.origin}: rewrite() must return a TableCollection, not "
                f"{type(rewritten).__name__}; checkpoints could not be written"
            )
        typed = overrides(owner.part, "data_type")
        undone = sorted({a for a, _ in mine if a == "update" or not typed})
        if rewritten is module and undone and ranks.trains:
            raise PluginError(
                f"plugin {owner.origin} claims the {' and '.join(undone)} of tables, but its rewrite() "
                "returned them as they were; return a collection of its own (around or instead of them), or "
                "drop the claim"
            )
        _check_wrapped(owner, module, rewritten)
        module = rewritten
    return module


def _check_wrapped(owner: Owned[Any], module: TableCollection, rewritten: TableCollection) -> None:
    """Refuse a rewrite that would turn off what the tables could do, or that training would go past."""
    lost = [c.__name__ for c in CAPABILITIES if module.offers(c) and not rewritten.offers(c)]
    name = type(rewritten).__name__
    if lost:
        raise PluginError(
            f"plugin {owner.origin}: rewrite() returned a {name} that cannot do what the tables could "
            f"({', '.join(lost)}): prefetching, micro-batches or checkpoints would be without effect. "
            "Derive it from recpipe.tables.wrapped.WrappedCollection"
        )
    left_out = rewritten.left_out() if isinstance(rewritten, WrappedCollection) else []
    if left_out:
        raise PluginError(
            f"plugin {owner.origin}: {name} changes forward(), but training looks rows up by "
            f"{' and '.join(left_out)} here; override {'them' if len(left_out) > 1 else 'it'} as well"
        )


def tbe_count(
    config: TierConfig, tables: TableSet, ids_per_bag: Callable[[], float], device: torch.device
) -> int:
    """How many TBEs resident tables are spread over (``tiers.tbes``), at most one for each table."""
    if config.tbes != "auto":
        count = int(config.tbes)
    else:
        count = torch.get_num_threads() if device.type == "cpu" and ids_per_bag() >= MANY_IDS else 1
    return min(count, len(tables.tables))


def _tiered(
    tier: _Tier,
    config: TierConfig,
    assembly: Assembly,
    device: torch.device,
    run_dir: RunDir,
    batch_size: int,
    ranks: Ranks,
) -> TableCollection:
    tables, owner = tier.group.tables, tier.owner
    slots = 0 if owner == "nocache" else tier.slots
    if slots < 1 and owner != "nocache":
        of_group = f" of {', '.join(tables.layout.tables)}" if tier.several else ""
        raise UserError(
            f"tiers.resident_bytes={config.resident_bytes} leaves not even one row{of_group}, of "
            f"{tables.record_bytes} bytes: raise it"
        )
    trainers = ranks.channel(ranks.trainers)
    store = _store(tier, config, device, run_dir, batch_size, ranks)
    space = RowSpace(tables.layout.bases, slots, tier.number)
    claimed = assembly.policies("cache") if tier.bound else []
    if claimed:
        owned = claimed[0][0].part
        if ranks.trains:
            store = owned.store(store)
        own = owned.collection(
            TierParts(tables, slots, store, device, config.prefetch, ranks, tier.lookups, tier.number)
        )
        if own is not None:
            return own
    if not ranks.trains:
        assert isinstance(store, ShardedStore)
        return HeldRows(store)
    policy = claimed[0][0].part.cache(space) if claimed else POLICIES[owner](space)
    return TieredEmbeddingBagCollection(
        tables, policy, slots, store, device, config.prefetch, ranks, trainers
    )


def _store(
    tier: _Tier, config: TierConfig, device: torch.device, run_dir: RunDir, batch_size: int, ranks: Ranks
) -> ColdStore:
    """The cold store; over the ranks where there are several, whatever each keeps its part in."""
    tables = tier.group.tables
    kind = config.holder_store if config.store == SHARDED else config.store
    top = config.directory(run_dir.path)
    if ranks.world > 1:
        top /= f"rank-{ranks.rank}"
    if tier.several:
        top /= f"group-{tier.number}"

    def local(layout: StoreLayout, fill: Fill) -> ColdStore:
        store = make_store(
            kind,
            layout,
            fill,
            directory=top,
            pinned=device.type == "cuda",
            staging_bytes=staging_bytes(batch_size * len(tables.features)),
            scratch=not config.dir,
        )
        if isinstance(store, SsdStore) and not config.dir:
            run_dir.at_end(store.remove)  # after an error nobody closes it
        return store

    if config.store == SHARDED or ranks.world > 1:
        return ShardedStore(tables.layout, tables.fill, ranks, local)
    return local(tables.layout, tables.fill)


def staging_bytes(lookups: int) -> int:
    """Blocks that an ssd store keeps from a fetch to the write-back of its rows, one batch later.

    A 4 KiB block for half of a batch's ``lookups``: what two batches fetch when three quarters of
    their lookups find a resident row. From 8 to 128 MiB.
    """
    return min(max(8 << 20, lookups // 2 * 4096), 128 << 20)
