"""Decides how tables are kept: all rows resident, in tiers under a policy, or in shards over the ranks; and
how their weights are stored and their cold records encoded.

Judged of the recipe and of all plugins together, and so of the whole ``Assembly``: a cache of one may
contradict the planner of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torchrec.modules.embedding_configs import DataType

from recpipe.common.console import log
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.plugin.assembly import Assembly
from recpipe.plugin.calls import Owned
from recpipe.plugin.compose import Quantizing
from recpipe.plugin.context import GroupInfo
from recpipe.plugin.errors import PluginConflict
from recpipe.plugin.policy import Cache
from recpipe.plugin.quantizer import RecordLayout
from recpipe.plugin.skipper import Skipper, overrides
from recpipe.tables.config import HOLDERS, TierConfig
from recpipe.tables.groups import ModelTables
from recpipe.tables.stores.codecs import COLD

RESIDENT, NOCACHE = "resident", "nocache"
OF_TIERS = ("tiers.resident_bytes=", "tiers.store=", "tiers=host", "tiers=ssd")
"""Overrides that change nothing while all rows are resident."""
STORED = {"fp32": DataType.FP32, "fp16": DataType.FP16}
"""FBGEMM's type for each name that ``Quantizer.storage`` may return."""


@dataclass(frozen=True)
class GroupOwner:
    """The owner of one group of tables, which decides what rows are resident."""

    name: str
    """``resident`` (all rows are), the name of a built-in policy, or a plugin's name."""
    slots: int
    """How many rows can be resident; for ``resident``, all of the group's."""
    resident_bytes: int
    """The bytes that resident rows may take."""
    cache: Owned[Cache] | None = None
    """The plugin's part; None: recpipe's own."""


def group_owners(config: TierConfig, assembly: Assembly, tables: ModelTables) -> list[GroupOwner]:
    """The owner of each group. Either one plugin has claimed all of a group's tables or none has
    (``ModelTables.split``).

    ``UserError`` if plugins and the recipe's ``tiers`` contradict each other.
    """
    if config.policy != RESIDENT and len(assembly.caches) == len(tables.tables):
        owner = next(iter(assembly.caches.values()))
        raise PluginConflict(
            f"{owner}, decides which rows are resident, and so does "
            f"tiers.policy={config.policy}; drop one: leave tiers.policy out, or the plugin "
            f"'{owner.origin.plugin}'"
        )
    shares = zip(tables.groups, config.shares(tables), config.slots(tables), strict=True)
    owners = []
    for group, share, slots in shares:
        cache = assembly.caches.get(group.tables.layout.tables[0])
        name = config.policy if cache is None else cache.origin.plugin
        if name == RESIDENT:
            share, slots = group.tables.total_bytes, group.tables.layout.total_rows
        elif name == NOCACHE:
            share, slots = 0, 0
        elif cache is not None and not is_sharded(config, assembly):
            info = GroupInfo(group.tables.layout.tables, group.tables.record_bytes, slots)
            kept = cache.call(Cache.beside, info, wrong=partial(_over_budget, info))
            slots -= -(-kept // info.record_bytes)
        owners.append(GroupOwner(name, slots, share, cache))
    _check_sharding(config, assembly, owners)
    return owners


def _over_budget(group: GroupInfo, kept: int) -> str | None:
    """What is wrong with the bytes that a cache keeps beside the group's slots."""
    budget = group.slots * group.record_bytes
    if 0 <= kept <= budget:
        return None
    tables = ", ".join(group.tables)
    return f", keeps {kept:,} bytes beside the rows of {tables}, of a budget of {budget:,}"


def warn_of_unused(overrides: Sequence[str], owners: Sequence[GroupOwner]) -> None:
    """Say which ``overrides`` ask for tiers if no group of tables has any."""
    asked = [word for word in overrides if word.startswith(OF_TIERS)]
    if asked and all(owner.name == RESIDENT for owner in owners):
        log.warning(
            "%s changes nothing, since all rows stay in memory: tiers.policy=lru, lfu or nocache, or a "
            "plugin such as hotline, keeps them in tiers",
            " ".join(asked),
        )


def owner_names(owners: Sequence[GroupOwner]) -> str:
    """The owners in words: one name, or several."""
    return ", ".join(dict.fromkeys(owner.name for owner in owners))


def is_sharded(config: TierConfig, assembly: Assembly) -> bool:
    """Whether TorchRec's planner places the tables: the recipe or a plugin asks for it."""
    return config.sharded or config.plan is not None or bool(_placing(assembly))


def _placing(assembly: Assembly) -> list[Owned[Any]]:
    """The plugins' parts that need TorchRec's sharded tables."""
    placed: list[Owned[Any] | None] = [assembly.planner, *assembly.quantizing.codecs.values()]
    return [owned for owned in placed if owned is not None]


def _check_sharding(config: TierConfig, assembly: Assembly, owners: Sequence[GroupOwner]) -> None:
    """Refuse policies that cannot work on a rank's own shards, and options for sharded tables without
    sharding."""
    tiered = [owner for owner in owners if owner.name != RESIDENT]
    if not is_sharded(config, assembly):
        for key, idle in (("kernel", "fused"), ("split_rows", False)):
            value = getattr(config, key)
            if value != idle:
                raise UserError(
                    f"tiers.{key}={str(value).lower()} is about sharded tables, and this run shards none: "
                    "leave it out, or shard them with tiers.sharded=true"
                )
        return
    placing = _placing(assembly)
    asked = "tiers.plan" if config.plan is not None else "tiers.sharded=true"
    who = f"{placing[0]}," if placing else asked
    for owner in tiered:
        if owner.cache is not None and not owner.cache.part.by_shards:
            raise PluginConflict(
                f"{who} shards tables, but {owner.cache}, a cache, decides about whole "
                "tables (by_shards is not set), and no rank has them. Drop one of the two, or keep the "
                "shards' rows by tiers.policy=lru or lfu"
            )
    skipper = assembly.skipper
    if skipper is not None and overrides(skipper.part, Skipper.begin):
        raise PluginConflict(
            f"{who} shards tables, but {skipper}, a skipper, looks at which rows are "
            "resident (it overrides begin()), and each rank knows that of its own shards alone. Drop one of "
            "the two, or keep tables whole, by tiers.policy=lru without sharding"
        )
    if tiered and (config.store == HOLDERS or config.kernel != "fused"):
        key = "store" if config.store == HOLDERS else "kernel"
        raise UserError(
            f"tiers.{key}={getattr(config, key)} is another way to keep rows than tiers of shards under "
            f"{owner_names(tiered)}: use tiers.{key}={'host or ssd' if key == 'store' else 'fused'}"
        )
    if config.emulate.active:
        raise UserError(
            "tiers.emulate delays recpipe's own messages and not TorchRec's collectives, by which sharded "
            "tables travel: leave it out"
        )


def quantized(tables: ModelTables, quantizing: Quantizing) -> ModelTables:
    """Split ``tables`` into groups with one storage type and one codec, and set these.

    Rows of 16 bits have the same bits in the cold tier as in their slots, unless a quantizer asks for another
    format.
    """

    def asked(table: str) -> tuple[str, int]:
        storage, cold = quantizing.storage.get(table), quantizing.cold.get(table)
        return "fp32" if storage is None else storage.part, 0 if cold is None else id(cold.part)

    groups = []
    for group in tables.split(asked).groups:
        own, first = group.tables, group.tables.layout.tables[0]
        stored, codec = quantizing.storage.get(first), quantizing.cold.get(first)
        storage = "fp32" if stored is None else stored.part
        if codec is not None and own.optimizer.average is not None:
            raise UserError(
                f"trainer.{own.optimizer.average.kind}: {codec.label} rounds the rows of table '{first}' in "
                "the cold tier, of which no average is exact: leave the key or that out"
            )
        if stored is not None and codec is None and storage != "fp32":
            codec = Owned(stored.label, stored.origin, COLD[storage](RecordLayout(own.dim, own.layout.width)))
        groups.append(replace(group, tables=replace(own, storage=STORED[storage], codec=codec)))
    return ModelTables(tuple(groups))


def check_quantized(
    quantizing: Quantizing,
    tables: ModelTables,
    owners: Sequence[GroupOwner],
    sharded: bool,
    device: torch.device,
    ranks: Ranks,
) -> None:
    """``PluginConflict``, or ``UserError`` for the recipe's own, if a request cannot be carried out or would
    have no effect."""
    for group in tables.groups:
        if not group.tables.optimizer.stochastic_rounding:
            continue
        which = f"optimizer of table '{group.tables.layout.tables[0]}': stochastic_rounding=true"
        if device.type == "cpu":
            raise UserError(
                f"{which}, but FBGEMM's CPU kernels round to the nearest value; leave it false, or train on "
                "a GPU"
            )
        if group.tables.storage is DataType.FP32:
            raise UserError(
                f"{which}, but its weights are stored in fp32 and not rounded; leave it false, or store "
                "them in 16 bits (+plugin=quantize)"
            )
    for table, stored in quantizing.storage.items():
        if stored.part != "fp32" and not sharded and len(ranks.trainers) > 1:
            raise PluginConflict(
                f"{stored}: stores table '{table}' in {stored.part}, but each of "
                f"{len(ranks.trainers)} trainers keeps replicas of rows in float32; shard the tables, "
                "tiers.sharded=true, or store them in fp32"
            )
    groups = zip(tables.groups, owners, strict=True)
    tiered = {name for g, owner in groups if owner.name != RESIDENT for name in g.tables.layout.tables}
    for origin in {owned.origin: None for owned in quantizing.cold.values()}:
        if not any(owned.origin == origin and table in tiered for table, owned in quantizing.cold.items()):
            raise PluginConflict(
                f"plugin {origin} is to quantize cold rows, but all rows of its tables are resident in this "
                "run: put them in tiers, for example by tiers.policy=lru or +plugin=[hotline,"
                f"{origin.plugin}], or set its cold rows to fp32"
            )
