"""task=plan: the owners of parts, the order of chains and the bytes of each tier; nothing is built or
trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from recpipe.common.console import show
from recpipe.common.words import readable_bytes
from recpipe.config.task import PlanConfig
from recpipe.errors import UserError, printable
from recpipe.report import figures, terminal
from recpipe.report.files import ReportFiles
from recpipe.report.page import Head, Table, pairs
from recpipe.setup.ctx import RunResult, TaskContext
from recpipe.setup.planned import Planned
from recpipe.tables.owners import RESIDENT
from recpipe.tables.tiers.policies import BYTES_BESIDE

MOST_SHARDS = 25_000
"""Most tables times ranks that task=plan plans for; this takes about two minutes of one core.

TorchRec's planner estimates and copies every shard for every way to place a table. This takes 4 ms for each
rank and table, measured with 26 tables and 256 ranks."""


class Plan:
    """Where a run's rows would be and who decides it, for the running ranks or for ``task.ranks``."""

    def run(self, context: TaskContext) -> RunResult:
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
        return RunResult(plan.described)


def print_plan(plan: Mapping[str, Any], run_dir: Path) -> None:
    """Print the content of assembly.json as a table; ``run_dir`` has plan.json."""
    tiers, shards = plan["tiers"], plan["shards"]
    rows = [("plugin", f"{p['name']} ({p['distribution']} {p['version']})") for p in plan["plugins"]]
    rows += [
        (part, " -> ".join(plan[part]) or "-") for part in ("stream", "batch", "step", "callbacks", "report")
    ]
    rows += [(part, plan["parts"].get(part, "-")) for part in ("order", "splitter", "skipper", "planner")]
    rows.append(("resident rows", f"decided by {plan['cache']}"))
    for claim in ("cache", "cold", "storage", "codecs"):
        for part, decided in plan["parts"].get(claim, {}).items():
            rows.append((claim, f"{part} of {printable(', '.join(decided))}"))
    rows.append(("alters", ", ".join(plan["altered"]) or "nothing: equals the run without plugins"))
    count = len(plan["ranks"]["trainers"])
    trainers = "1 rank" if count == 1 else f"each of {count} ranks"
    if shards is not None:
        trainers = f"{shards['world']} ranks together"
    sizes = sorted({group["record_bytes"] for group in tiers["groups"]})
    kept = f"{tiers['resident_rows']:,} of {tiers['rows']:,} rows of {' or '.join(map(str, sizes))} bytes"
    rows.append(("resident tier", f"{readable_bytes(tiers['resident_bytes'])} on {trainers} ({kept})"))
    if tiers["store"]:
        sizes = sorted({g["cold_record_bytes"] for g in tiers["groups"] if g["cold_record_bytes"]})
        cold = f"{tiers['cold_rows']:,} rows of {' or '.join(map(str, sizes))} bytes"
        rows.append(("cold tier", f"{readable_bytes(tiers['cold_bytes'])} ({tiers['store']}, {cold})"))
        size, each = readable_bytes(tiers["beside_bytes"]), tiers["beside_bytes"] / tiers["cold_rows"]
        others = sorted({g["cache"] for g in tiers["groups"]} - {RESIDENT, *BYTES_BESIDE})
        own = f", and what {', '.join(others)} keeps" if others else ""
        line = f"{size} of host memory on {trainers} (row maps, policy, buffers: {each:.3g} bytes a row){own}"
        rows.append(("beside the tiers", line))
    else:
        rows.append(("cold tier", "-"))

    def draw(out: Console) -> None:
        out.print(terminal.drawn(pairs(rows)))
        if shards is not None:
            for table in shard_tables(shards):
                out.print(terminal.drawn(table))
            file = run_dir / "plan.json"
            terminal.print_lines(out, [f"plan: {file} (train by it: tiers.plan={file})"])

    show(draw)


def shard_tables(shards: Mapping[str, Any]) -> tuple[Table, Table]:
    """The shards of assembly.json, by table and by rank."""
    texts = [Head(title, number=False) for title in ("table", "sharding", "kernel", "ranks")]
    tables = [
        (
            printable(name),
            row["sharding"],
            row["kernel"],
            ", ".join(map(str, row["ranks"])),
            readable_bytes(row["bytes"]),
            figures.decimal(row["predicted_ms"], 3),
        )
        for name, row in shards["tables"].items()
    ]
    ranks = [
        (
            str(rank),
            readable_bytes(row["bytes"]),
            readable_bytes(row["tiered_bytes"]),
            figures.decimal(row["predicted_ms"], 3),
        )
        for rank, row in enumerate(shards["ranks"])
    ]
    sums = [Head(title) for title in ("rank", "bytes", "of them in tiers", "predicted ms")]
    return Table([*texts, Head("bytes"), Head("predicted ms")], tables), Table(sums, ranks)
