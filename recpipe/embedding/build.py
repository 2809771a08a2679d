"""From the recipe and the plugins' claims to the embedding module of a run."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from recpipe.embedding.collection import TableCollection
from recpipe.embedding.parts import TierParts
from recpipe.embedding.policies import POLICIES, RowSpace
from recpipe.embedding.resident import ResidentCollection
from recpipe.embedding.shard import ShardedCollection, join_group
from recpipe.embedding.shard_plan import ShardPlan, load_plan
from recpipe.embedding.sharding import KERNELS, Sharding
from recpipe.embedding.shared_rows import ReplicatedCollection
from recpipe.embedding.stores import KINDS, SsdStore, make_store, unknown_store
from recpipe.embedding.stores.base import ColdStore, Fill, StoreLayout
from recpipe.embedding.stores.sharded import HeldRows, ShardedStore
from recpipe.embedding.tables import TableSet
from recpipe.embedding.tiered import TieredEmbeddingBagCollection
from recpipe.errors import UserError
from recpipe.plugin.assembly import Assembly
from recpipe.plugin.compose import Owned
from recpipe.plugin.errors import PluginConflict, PluginError
from recpipe.ranks import Emulation, Ranks
from recpipe.run_dir import RunDir
from recpipe.sizes import parse_bytes, readable_bytes

MANY_IDS = 8.0
"""Ids per bag from which several TBEs pay: on 2 cores 0.8 times as fast at 1, level at 4, 1.4 times at 20."""
SHARDED = "sharded"
"""``tiers.store`` of rows partitioned over ranks."""
SCRATCH = "tiers"
"""Where a run's ssd store lies in the run directory when nobody has named a place; it goes with the run."""


@dataclass(frozen=True)
class TierConfig:
    """``conf/tiers``: where rows live. ``resident_bytes`` counts weights and optimizer state."""

    policy: str
    store: str
    resident_bytes: Any
    dir: str | None
    prefetch: bool
    sharded: bool
    holder_store: str = "host"
    emulate: dict[str, Any] = field(default_factory=dict)
    plan: str | None = None
    kernel: str = "fused"
    split_rows: bool = False
    tbes: Any = "auto"

    def __post_init__(self) -> None:
        names = ["resident", *POLICIES]
        if self.policy not in names:
            near = difflib.get_close_matches(self.policy, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}"
            raise UserError(f"tiers.policy={self.policy} is unknown; {hint}")
        for key, value, kinds in (
            ("store", self.store, (*KINDS, SHARDED)),
            ("holder_store", self.holder_store, KINDS),
        ):
            if value not in kinds:
                raise unknown_store(f"tiers.{key}", value, kinds)
        if self.kernel not in KERNELS:
            raise UserError(f"tiers.kernel={self.kernel} is unknown; choose one of {', '.join(KERNELS)}")
        if self.tbes != "auto" and (type(self.tbes) is not int or self.tbes < 1):
            raise UserError(f"tiers.tbes={self.tbes} must be auto or a whole number of at least 1")
        unknown = set(self.emulate) - {"latency_us", "gbit_per_s"}
        if unknown:
            raise UserError(
                f"no 'tiers.emulate.{min(unknown)}' in the recipe; there are latency_us, gbit_per_s"
            )

    @property
    def emulation(self) -> Emulation:
        """``emulate`` as the channels take it."""
        return Emulation(self.emulate.get("latency_us") or 0.0, self.emulate.get("gbit_per_s"))

    def described_store(self, ranks: Ranks) -> str:
        """The cold store in words: its kind and, over ranks, what each holder keeps its part in."""
        if self.store != SHARDED and ranks.world == 1:
            return self.store
        return f"sharded ({self.holder_store if self.store == SHARDED else self.store})"

    def directory(self, run_dir: Path) -> Path:
        """Where ssd stores go: of several ranks each in a ``rank-N`` of its own there."""
        return Path(self.dir).expanduser() if self.dir else run_dir / SCRATCH

    def budget(self, tables: TableSet) -> int:
        """Bytes of ``tiers.resident_bytes``, at most those of all tables."""
        return min(
            parse_bytes(self.resident_bytes, tables.total_bytes, "tiers.resident_bytes"), tables.total_bytes
        )


def cache_owner(config: TierConfig, assembly: Assembly) -> str:
    """Who decides which rows are resident: ``resident`` (all are), a built-in policy or a plugin's name."""
    owners = assembly.policies("cache")
    if not owners:
        _check_sharding(config, assembly, config.policy)
        return config.policy
    owner, tables = owners[0]
    name = owner.origin.plugin
    if len(owners) > 1 or len(tables) < sum(1 for _, aspect in assembly.claims if aspect == "cache"):
        names = " and ".join(o.origin.plugin for o, _ in owners)
        raise PluginConflict(
            f"{names} each want some tables' cache, but one policy owns it for all tables; drop one"
        )
    if config.policy != "resident":
        raise PluginConflict(
            f"plugin {owner.origin} decides which rows are resident, and so does "
            f"tiers.policy={config.policy}; drop one: leave tiers.policy out, or the plugin '{name}'"
        )
    _check_sharding(config, assembly, name)
    return name


def _check_sharding(config: TierConfig, assembly: Assembly, owner: str) -> None:
    """Tiers and sharding exclude each other; planners and their like need sharding."""
    if owner != "resident" and is_sharded(config, assembly):
        placing = _placing(assembly)
        who = f"plugin {placing[0].origin} shards tables and" if placing else "tiers.sharded=true"
        raise PluginConflict(
            f"{who} keeps all rows resident, but {owner} decides which rows are. Drop one of the two"
        )


def _placing(assembly: Assembly) -> list[Owned[Any]]:
    """The plugins' parts that go through TorchRec's planner."""
    placed = [assembly.planner, *assembly.sharders.values(), *assembly.codecs.values()]
    placed += [policy for aspect in ("placement", "kernel") for policy, _ in assembly.policies(aspect)]
    return [owned for owned in placed if owned is not None]


def is_sharded(config: TierConfig, assembly: Assembly) -> bool:
    """Whether TorchRec's planner places the tables: the recipe or a plugin asks for it."""
    return config.sharded or config.plan is not None or bool(_placing(assembly))


def plan_shards(
    tables: TableSet,
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
    if config.plan is not None:
        plan = load_plan(Path(config.plan).expanduser())
        sharding.check(plan)
        return sharding, plan
    return sharding, sharding.plan(join_group(device, ranks) if world == ranks.world else None)


def sends_ahead(config: TierConfig, embeddings: TableCollection) -> bool:
    """Whether the next batch's ids travel while a batch trains; ``UserError`` where they cannot."""
    if not config.prefetch:
        return False
    if not isinstance(embeddings, ShardedCollection):
        raise UserError(
            f"the tables are a {type(embeddings).__qualname__}, which cannot send the next batch's ids "
            "while a batch trains (it is no ShardedCollection): set tiers.prefetch=false to train without "
            "that, or drop the plugin that rewrites the sharded tables"
        )
    return True


def build_embeddings(
    tables: TableSet,
    config: TierConfig,
    assembly: Assembly,
    device: torch.device,
    run_dir: RunDir,
    batch_size: int,
    ranks: Ranks,
    shards: tuple[Sharding, ShardPlan] | None = None,
    ids_per_bag: Callable[[], float] = lambda: 1.0,
) -> TableCollection:
    """The collection of tables that the recipe and the plugins ask for, filled with first values.

    ``shards``: as ``plan_shards`` gave it, where tables are sharded. ``ids_per_bag``
    gives the data's mean pooling factor.
    """
    owner = cache_owner(config, assembly)
    several = len(ranks.trainers) > 1
    module: TableCollection
    if shards is not None:
        module = ShardedCollection(*shards, ranks)
    elif owner == "resident":
        if len(ranks.trainers) < ranks.world:
            raise UserError(
                "topology.embedding_ranks names ranks that only hold rows, but tiers.policy=resident keeps "
                "all rows on every trainer; choose nocache, lru, lfu or a caching plugin"
            )
        if several:
            module = ReplicatedCollection(tables, device, ranks.channel())
        else:
            module = ResidentCollection(tables, device, tbe_count(config, tables, ids_per_bag, device))
    else:
        module = _tiered(tables, config, assembly, device, run_dir, owner, batch_size, ranks)
    for aspect in ("precision", "update"):
        for policy, names in assembly.policies(aspect):
            rewritten = policy.part.rewrite(module, names)
            if not isinstance(rewritten, TableCollection):
                raise PluginError(
                    f"plugin {policy.origin}: rewrite() must return a TableCollection, not "
                    f"{type(rewritten).__name__}; checkpoints could not be written"
                )
            module = rewritten
    return module


def tbe_count(
    config: TierConfig, tables: TableSet, ids_per_bag: Callable[[], float], device: torch.device
) -> int:
    """How many TBEs resident tables are spread over (``tiers.tbes``), at most one for each table."""
    if config.tbes != "auto":
        count = int(config.tbes)
    else:
        count = torch.get_num_threads() if device.type == "cpu" and ids_per_bag() >= MANY_IDS else 1
    return min(count, len(tables.features))


def _tiered(
    tables: TableSet,
    config: TierConfig,
    assembly: Assembly,
    device: torch.device,
    run_dir: RunDir,
    owner: str,
    batch_size: int,
    ranks: Ranks,
) -> TableCollection:
    budget = config.budget(tables) - assembly.device_bytes
    slots = 0 if owner == "nocache" else budget // tables.record_bytes
    if slots < 1 and owner != "nocache":
        raise UserError(
            f"tiers.resident_bytes={config.resident_bytes} leaves {readable_bytes(max(0, budget))} for rows "
            f"of {tables.record_bytes} bytes: not even one; raise it"
        )
    trainers = ranks.channel(ranks.trainers)
    store = _store(tables, config, device, run_dir, batch_size, ranks)
    space = RowSpace(tables.layout.bases, slots)
    claimed = assembly.policies("cache")
    if claimed:
        owned = claimed[0][0].part
        if ranks.trains:
            store = owned.store(store)
        own = owned.collection(TierParts(tables, slots, store, device, config.prefetch, ranks))
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
    tables: TableSet, config: TierConfig, device: torch.device, run_dir: RunDir, batch_size: int, ranks: Ranks
) -> ColdStore:
    """The cold store; over the ranks where there are several, whatever each keeps its part in."""
    kind = config.holder_store if config.store == SHARDED else config.store
    top = config.directory(run_dir.path)

    def local(layout: StoreLayout, fill: Fill) -> ColdStore:
        store = make_store(
            kind,
            layout,
            fill,
            directory=top if ranks.world == 1 else top / f"rank-{ranks.rank}",
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
