"""task=plan: the owners of parts, the order of chains and the bytes of each tier; nothing is built or
trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recpipe.common.console import show
from recpipe.common.words import readable_bytes
from recpipe.config.task import PlanConfig, TaskConfig
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError, printable
from recpipe.plugin.api import Invariant
from recpipe.plugin.assembly import Assembly
from recpipe.tables.config import TierConfig
from recpipe.tables.groups import ModelTables
from recpipe.tables.kept import GroupKept
from recpipe.tables.owners import RESIDENT, GroupOwner, owner_names
from recpipe.tables.sharding.plan import ShardPlan
from recpipe.tables.sharding.planning import Sharding
from recpipe.tables.tiers.policies import BYTES_BESIDE
from recpipe.tasks.plan_shards import described_shards, print_shards

MOST_SHARDS = 25_000
"""Most tables times ranks that task=plan plans for; this takes about two minutes of one core.

TorchRec's planner estimates and copies every shard for every way to place a table. This takes 4 ms for each
rank and table, measured with 26 tables and 256 ranks."""


def planned_ranks(task: TaskConfig, tables: int) -> int | None:
    """The number of ranks in ``task.ranks``; None: the running ones. ``UserError`` if there are too many."""
    ranks = task.ranks if isinstance(task, PlanConfig) else None
    most = max(1, MOST_SHARDS // tables)
    if ranks is not None and ranks > most:
        raise UserError(
            f"task.ranks={ranks}: planning takes time for each rank and table; {tables} tables are planned "
            f"for at most {most} ranks"
        )
    return ranks


def describe(
    assembly: Assembly,
    tables: ModelTables,
    tiers: TierConfig,
    owners: Sequence[GroupOwner],
    ranks: Ranks,
    batch_size: int,
    shards: tuple[Sharding, ShardPlan] | None = None,
    rounded: bool = False,
) -> dict[str, Any]:
    """The content of assembly.json: the plugins' parts with their owners and order, and the tiers' bytes."""
    plan = None if shards is None else shards[1]
    kept = [
        GroupKept.of(group.tables, owner, tiers, ranks, plan, batch_size)
        for group, owner in zip(tables.groups, owners, strict=True)
    ]
    store = tiers.described_store(ranks) if shards is None else tiers.store
    records = [group.tables.record_bytes for group in tables.groups]
    if tiers.plan is not None:
        assembly = replace(assembly, planner=None)  # the file says where tables go
    parts, own = assembly.to_dict(), sorted(_altered(shards, rounded))
    return {
        **parts,
        "altered": sorted({*parts["altered"], *own}),
        "altered_by": {**parts["altered_by"], **({"recpipe": own} if own else {})},
        "cache": owner_names(owners),
        "sharded": shards is not None,
        "shards": None
        if shards is None
        else described_shards(shards[1], shards[0].group_of, shards[0].tiered),
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


def _altered(shards: tuple[Sharding, ShardPlan] | None, rounded: bool) -> set[str]:
    """The invariants that the recipe itself breaks, in addition to those of plugins."""
    splits = shards is not None and shards[0].splits_states(shards[1])
    return {Invariant.EXACT_GRADIENT.name} if splits or rounded else set()


def print_plan(plan: Mapping[str, Any], run_dir: Path) -> None:
    """Print ``describe``'s result as a table; ``run_dir`` has plan.json."""
    tiers = plan["tiers"]
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for plugin in plan["plugins"]:
        table.add_row("plugin", f"{plugin['name']} ({plugin['distribution']} {plugin['version']})")
    for part in ("stream", "batch", "step", "callbacks", "report"):
        table.add_row(part, " -> ".join(plan[part]) or "-")
    for part in ("order", "splitter", "skipper", "planner"):
        table.add_row(part, plan["parts"].get(part, "-"))
    table.add_row("resident rows", f"decided by {plan['cache']}")
    for claim in ("cache", "cold", "storage", "codecs"):
        for part, decided in plan["parts"].get(claim, {}).items():
            table.add_row(claim, f"{part} of {escape(printable(', '.join(decided)))}")
    table.add_row("alters", ", ".join(plan["altered"]) or "nothing: equals the run without plugins")
    count = len(plan["ranks"]["trainers"])
    trainers = "1 rank" if count == 1 else f"each of {count} ranks"
    if plan["shards"] is not None:
        trainers = f"{plan['shards']['world']} ranks together"
    sizes = sorted({group["record_bytes"] for group in tiers["groups"]})
    rows = f"{tiers['resident_rows']:,} of {tiers['rows']:,} rows of {' or '.join(map(str, sizes))} bytes"
    table.add_row("resident tier", f"{readable_bytes(tiers['resident_bytes'])} on {trainers} ({rows})")
    cold = "-"
    if tiers["store"]:
        sizes = sorted({g["cold_record_bytes"] for g in tiers["groups"] if g["cold_record_bytes"]})
        rows = f"{tiers['cold_rows']:,} rows of {' or '.join(map(str, sizes))} bytes"
        cold = f"{readable_bytes(tiers['cold_bytes'])} ({tiers['store']}, {rows})"
    table.add_row("cold tier", cold)
    if tiers["store"]:
        size, each = readable_bytes(tiers["beside_bytes"]), tiers["beside_bytes"] / tiers["cold_rows"]
        others = sorted({g["cache"] for g in tiers["groups"]} - {RESIDENT, *BYTES_BESIDE})
        own = f", and what {', '.join(others)} keeps" if others else ""
        line = f"{size} of host memory on {trainers} (row maps, policy, buffers: {each:.3g} bytes a row){own}"
        table.add_row("beside the tiers", line)

    def draw(out: Console) -> None:
        out.print(table)
        if plan["shards"] is not None:
            print_shards(plan["shards"], out)
            file = run_dir / "plan.json"
            line = f"plan: {file} (train by it: tiers.plan={file})"
            out.print(line, soft_wrap=True, markup=False, highlight=False)

    show(draw)
