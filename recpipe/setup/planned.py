"""What a run will build: the plugins' parts, the owner of every table's rows, and the plan that says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from recpipe.common.console import log
from recpipe.common.meter import counting
from recpipe.common.own_cache import default_cache_dir
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.pipeline.splitting import EqualParts
from recpipe.plugin.api import Invariant, Plugin
from recpipe.plugin.assembly import Assembly, assemble, gather
from recpipe.plugin.calls import Origin, Owned
from recpipe.plugin.context import Context, GroupInfo
from recpipe.plugin.errors import PluginConflict
from recpipe.plugin.load import activate
from recpipe.plugin.tables import TableSet
from recpipe.report.files import ReportFiles
from recpipe.setup.ctx import Joined
from recpipe.setup.placing import Unplaced
from recpipe.tables.group_memory import group_memory
from recpipe.tables.groups import ModelTables
from recpipe.tables.inputs import Inputs
from recpipe.tables.owners import (
    RESIDENT,
    GroupOwner,
    check_quantized,
    group_owners,
    is_sharded,
    owner_names,
    quantized,
    warn_of_unused,
)
from recpipe.tables.sharding.claims import ShardClaims
from recpipe.tables.sharding.plan import ShardPlan
from recpipe.tables.sharding.planning import Sharding, plan_shards
from recpipe.training.callbacks import check_callbacks

ALTERED_BY_GROWTH = frozenset({Invariant.ID_SPACE, Invariant.TABLE_LAYOUT})
"""What tables alter whose ids get rows as they come: rows are given in training, and given again."""


@dataclass(frozen=True)
class Planned:
    """The parts that plugins bring to a run, and where each group's rows will be. No memory is taken yet.

    ``unplaced``: the model, with its tables in the groups that the plugins ask for. ``owners``: of each
    group's rows. ``shards``: None unless tables are sharded. ``described``: the content of assembly.json.
    """

    assembly: Assembly
    unplaced: Unplaced
    owners: Sequence[GroupOwner]
    shards: tuple[Sharding, ShardPlan] | None
    described: dict[str, Any]

    @classmethod
    def of(cls, run: Joined, command_line: Sequence[str] | None = None, world: int | None = None) -> Planned:
        """Merge the plugins' parts for ``run``; ``PluginError`` if they clash.

        ``command_line``: for a warning of keys that change nothing. ``world``: plan for so many ranks; None:
        for those of the run.
        """
        cfg, device, ranks = run.recipe, run.device, run.ranks
        log.info("planning: plugins %s", ", ".join(cfg.plugins) or "none")
        assembly, unplaced = assemble_plugins(cfg, run.dataset, run.unplaced, device, run.steps, ranks)
        if assembly.plugins:
            log.info("plugins' parts: %s", ", ".join(assembly.points()) or "none")
        check_callbacks(assembly.callbacks)
        batch_size = cfg.data.batch_size
        if batch_size > run.micro_batch:
            key = "trainer.accumulate_grad_batches"
            if assembly.splitter is not None:
                raise UserError(
                    f"{key}: {assembly.splitter}, cuts batches by itself, and only one can: leave one of "
                    "them out, or set a larger data.batch_size"
                )
            assembly = replace(assembly, splitter=Owned(key, Origin(key), EqualParts(run.micro_batch)))
        tables, tiers = unplaced.tables, cfg.tiers
        owners, sharded, shards = group_owners(tiers, assembly, tables), is_sharded(tiers, assembly), None
        if not sharded:
            warn_of_unused(command_line or (), owners)
        check_quantized(assembly.quantizing, tables, owners, sharded, device, ranks)
        if sharded:
            claims, world = ShardClaims.of(assembly), world or ranks.world
            shards = plan_shards(tables, tiers, claims, device, batch_size, ranks, world, owners)
        growing = bool(unplaced.inputs.growing)
        described = _described(cfg, ranks, assembly, tables, owners, shards, growing)
        return cls(assembly, unplaced, owners, shards, described)

    def write(self, files: ReportFiles) -> None:
        """Write assembly.json and, if tables are sharded, plan.json; ``UserError`` if that fails."""
        files.write_json("assembly.json", self.described)
        if self.shards is not None:
            files.write_json("plan.json", self.shards[1].to_dict())
        files.check()


def _described(
    cfg: Recipe,
    ranks: Ranks,
    assembly: Assembly,
    tables: ModelTables,
    owners: Sequence[GroupOwner],
    shards: tuple[Sharding, ShardPlan] | None,
    growing: bool,
) -> dict[str, Any]:
    """The content of assembly.json: the plugins' parts with their owners and order, and the tiers' bytes."""
    tiers, plan = cfg.tiers, None if shards is None else shards[1]
    kept = [
        group_memory(group.tables, owner, tiers, ranks, plan, cfg.data.batch_size)
        for group, owner in zip(tables.groups, owners, strict=True)
    ]
    store = tiers.described_store(ranks) if shards is None else tiers.store
    records = [group.tables.record_bytes for group in tables.groups]
    if tiers.plan is not None:
        assembly = replace(assembly, planner=None)  # the file says where tables go
    parts: Mapping[str, Any] = assembly.to_dict()
    splits = shards is not None and shards[0].splits_states(shards[1])
    rounded = cfg.model.precision != "float32"
    own = [Invariant.EXACT_GRADIENT.name] if splits or rounded else []
    own += sorted(invariant.name for invariant in ALTERED_BY_GROWTH) if growing else []
    return {
        **parts,
        "altered": sorted({*parts["altered"], *own}),
        "altered_by": {**parts["altered_by"], **({"recpipe": own} if own else {})},
        "cache": owner_names(owners),
        "sharded": shards is not None,
        "shards": None
        if shards is None
        else _described_shards(shards[1], shards[0].group_of, shards[0].tiered),
        "ranks": {"trainers": list(ranks.trainers), "holders": list(ranks.holders)},
        "tiers": {
            "store": store if any(group.tiered_rows for group in kept) else None,
            "record_bytes": max(records),
            "rows": tables.total_rows,
            "resident_bytes": sum(group.resident_bytes for group in kept),
            "resident_rows": sum(group.resident_rows for group in kept),
            "cold_bytes": sum(sum((group.cold_bytes or {}).values()) for group in kept),
            "cold_rows": sum(group.tiered_rows for group in kept),
            "beside_bytes": sum(group.map_bytes + group.buffer_bytes for group in kept),
            "map_bytes": sum(group.map_bytes for group in kept),
            "table_bytes": tables.bytes_of_tables(),
            "groups": [
                {
                    "collection": group.path,
                    "tables": list(group.tables.layout.tables),
                    "dim": group.tables.dim,
                    "optimizer": asdict(group.tables.optimizer),
                    "record_bytes": group.tables.record_bytes,
                    "cold_record_bytes": None if owner.name == RESIDENT else group.tables.cold_record_bytes,
                    "storage": group.tables.storage.value.lower(),
                    "cache": owner.name,
                    "resident_rows": here.resident_rows,
                    "cold_bytes": here.cold_bytes,
                }
                for group, owner, here in zip(tables.groups, owners, kept, strict=True)
            ],
        },
    }


def _described_shards(
    plan: ShardPlan, groups: Mapping[str, TableSet], tiered: Collection[str] = ()
) -> dict[str, Any]:
    """The plan for assembly.json: each table's type, ranks, bytes and predicted milliseconds, and each rank's
    sums.

    ``groups``: the group of each table. Bytes are those of all rows; a rank's ``tiered_bytes`` are those of
    rows in tiers. These are the rows of the ``tiered`` tables, except for data-parallel ones.
    """
    by_table = {}
    ranks = [{"bytes": 0, "tiered_bytes": 0, "predicted_ms": 0.0} for _ in range(plan.world)]
    known = all(s.predicted_ms is not None for t in plan.tables.values() for s in t.shards)
    for name, table in plan.tables.items():
        group, sizes = groups[name], []
        for shard in table.shards:
            state = 4 * group.optimizer.state_width(shard.columns)
            size = shard.rows * (group.bytes_of_weights(shard.columns) + state)
            sizes.append(size)
            ranks[shard.rank]["bytes"] += size
            ranks[shard.rank]["tiered_bytes"] += size if name in tiered and not table.replicated else 0
            ranks[shard.rank]["predicted_ms"] += shard.predicted_ms or 0.0
        by_table[name] = {
            "sharding": table.sharding,
            "kernel": table.kernel,
            "ranks": sorted({s.rank for s in table.shards if s.rows}),
            "bytes": sum(sizes),
            "predicted_ms": max(s.predicted_ms or 0.0 for s in table.shards) if known else None,
        }
    return {
        "world": plan.world,
        "tables": by_table,
        "ranks": ranks if known else [{**r, "predicted_ms": None} for r in ranks],
    }


@counting("planning")
def assemble_plugins(
    cfg: Recipe, dataset: Dataset, unplaced: Unplaced, device: torch.device, steps: int, ranks: Ranks
) -> tuple[Assembly, Unplaced]:
    """Load the recipe's plugins and merge their contributions; raises ``PluginError`` if they clash.

    If tables of a group have caches with different owners, or are stored differently, the group is split. If
    that changes what plugins were told, they are asked again.
    """
    active = activate(cfg.plugins)
    if unplaced.inputs.growing:
        _require_growable(active, unplaced.inputs.growing)
    prefer = {slot: name for slot, name in cfg.compose.prefer.items() if name}

    def merged(given: Unplaced) -> tuple[Assembly, ModelTables]:
        context = context_of(cfg, dataset, given.inputs, device, steps, ranks)
        assembly = assemble(gather(active, context), context.tables, prefer=prefer)
        caches = assembly.caches
        split = given.tables.split(lambda table: id(caches[table].part) if table in caches else 0)
        return assembly, quantized(split, assembly.quantizing)

    assembly, tables = merged(unplaced)
    before, after = (
        [(group.tables.layout.tables, group.tables.record_bytes) for group in each.groups]
        for each in (unplaced.tables, tables)
    )
    if before != after:
        assembly, tables = merged(unplaced.grouped(tables))
    return assembly, unplaced if tables == unplaced.tables else unplaced.grouped(tables)


def _require_growable(active: Sequence[tuple[Origin, Plugin]], growing: Collection[str]) -> None:
    """``PluginConflict`` if a plugin relies on what tables that grow alter."""
    for origin, plugin in active:
        broken = plugin.relies_on & ALTERED_BY_GROWTH
        if broken and not plugin.takes_rows:
            what = " and ".join(sorted(invariant.value for invariant in broken))
            raise PluginConflict(
                f"plugin '{origin.plugin}' relies on this: {what}. The tables of {', '.join(growing)} grow "
                "(rows: dynamic), which alters it. State their rows, or drop the plugin"
            )


def context_of(
    cfg: Recipe, dataset: Dataset, inputs: Inputs, device: torch.device, steps: int, ranks: Ranks
) -> Context:
    """What plugins are told about a run."""
    tables, tiers = inputs.tables, cfg.tiers
    return Context(
        tables=tables.infos(),
        device=str(device),
        batch_size=cfg.data.batch_size,
        resident_bytes=tiers.budget(tables),
        groups=[
            GroupInfo(group.tables.layout.tables, group.tables.record_bytes, slots)
            for group, slots in zip(tables.groups, tiers.slots(tables), strict=True)
        ],
        lookups=inputs.lookups,
        seed=cfg.seed,
        data_fingerprint=dataset.fingerprint,
        steps=steps,
        trainers=len(ranks.trainers),
        cache_dir=Path(getattr(cfg.data, "cache_dir", None) or default_cache_dir()).expanduser(),
        epoch_samples=dataset.size("train"),
        held_out=lambda first: map(inputs.spread, dataset.batches("eval", cfg.data.batch_size, first)),
        batches=lambda first: map(inputs.spread, dataset.batches("train", cfg.data.batch_size, first)),
    )
