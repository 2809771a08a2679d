"""Shows a sharding plan on the terminal: the cost of each table on its ranks, and each rank's sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recpipe.common.words import readable_bytes
from recpipe.errors import printable
from recpipe.plugin.tables import TableSet
from recpipe.tables.sharding.plan import Shard, ShardPlan


def shard_bytes(shard: Shard, tables: TableSet) -> int:
    """Bytes of a shard's weights and optimizer state on its rank."""
    state = 4 * tables.optimizer.state_width(shard.columns)
    return shard.rows * (tables.bytes_of_weights(shard.columns) + state)


def described_shards(
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
        sizes = [shard_bytes(s, groups[name]) for s in table.shards]
        for shard, size in zip(table.shards, sizes, strict=True):
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


def print_shards(shards: Mapping[str, Any], console: Console) -> None:
    """Print ``described_shards``'s result as two tables."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("table", "sharding", "kernel", "ranks", "bytes", "predicted ms"):
        table.add_column(title, justify="right" if title in ("bytes", "predicted ms") else "left")
    for name, row in shards["tables"].items():
        where = ", ".join(map(str, row["ranks"]))
        table.add_row(
            escape(printable(name)),
            row["sharding"],
            row["kernel"],
            where,
            readable_bytes(row["bytes"]),
            _ms(row["predicted_ms"]),
        )
    sums = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("rank", "bytes", "of them in tiers", "predicted ms"):
        sums.add_column(title, justify="right")
    for rank, row in enumerate(shards["ranks"]):
        sums.add_row(
            str(rank),
            readable_bytes(row["bytes"]),
            readable_bytes(row["tiered_bytes"]),
            _ms(row["predicted_ms"]),
        )
    console.print(table)
    console.print(sums)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
