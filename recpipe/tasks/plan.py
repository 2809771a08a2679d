"""task=plan: the owners of parts, the order of chains and the bytes of each tier; nothing is built or
trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recpipe.common.console import show
from recpipe.common.words import readable_bytes
from recpipe.config.task import PlanConfig
from recpipe.errors import UserError, printable
from recpipe.report.files import ReportFiles
from recpipe.setup.ctx import TaskContext
from recpipe.setup.given import Outcome
from recpipe.setup.planned import Planned
from recpipe.tables.owners import RESIDENT
from recpipe.tables.tiers.policies import BYTES_BESIDE

MOST_SHARDS = 25_000
"""Most tables times ranks that task=plan plans for; this takes about two minutes of one core.

TorchRec's planner estimates and copies every shard for every way to place a table. This takes 4 ms for each
rank and table, measured with 26 tables and 256 ranks."""


class Plan:
    """Where a run's rows would be and who decides it, for the running ranks or for ``task.ranks``."""

    def run(self, context: TaskContext) -> Outcome:
        """Write assembly.json and plan.json, and print both as tables; ``UserError`` for too many ranks."""
        task, run = context.recipe.task, context.joined
        assert isinstance(task, PlanConfig)
        tables = len(run.unplaced.tables.tables)
        most = max(1, MOST_SHARDS // tables)
        if task.ranks is not None and task.ranks > most:
            raise UserError(
                f"task.ranks={task.ranks}: planning takes time for each rank and table; {tables} tables are "
                f"planned for at most {most} ranks"
            )
        plan = Planned.of(run, context.command_line, task.ranks)
        if run.leads:
            plan.write(ReportFiles(context.directory))
        print_plan(plan.described, context.directory)
        return Outcome(plan.described)


def print_plan(plan: Mapping[str, Any], run_dir: Path) -> None:
    """Print the content of assembly.json as a table; ``run_dir`` has plan.json."""
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


def print_shards(shards: Mapping[str, Any], console: Console) -> None:
    """Print the shards of assembly.json as two tables."""
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
