"""The tables of benchmarks/scale_out.py, and whether its targets are met."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

Line = dict[str, Any]
SHARES = ("p50", "p95", "p99")
OURS, STATIC = "ours", ("capacity", "load", "net")
WITHIN, BETTER, AGREES = 1.05, 1.3, 0.10
COMMAND = "python benchmarks/scale_out.py --models MODEL --shards N"


def report(file: Path, directory: Path) -> int:
    """Write the results of the ``file``'s lines into ``directory``, and print what they come to."""
    if not file.exists():
        sys.exit(f"{file} is missing: nothing was measured yet")
    lines = latest(json.loads(text) for text in file.read_text().splitlines())
    found = [line for line in lines if line["measured"] is not None]
    if not found:
        sys.exit(f"{file} has no measured line")
    kept = f"each round's percentile; predictions of all rounds together, at {found[0]['rate']:g} requests/s"
    write(
        directory / "scale_out.json", "Packages cut into shards, beside one server", kept, *latencies(found)
    )
    write(
        directory / "scale_out_parts.json",
        "Where the time of a batch goes that asks shards",
        "means of all batches of all rounds; CPU time of each round",
        *parts(found),
    )
    write(
        directory / "scale_out_faster.json",
        "Faster links than were measured, predicted",
        "predicted from service times measured on this machine",
        *faster([line for line in lines if line["measured"] is None]),
    )
    for text in targets(found):
        print(text)
    return 0


def latest(lines: Iterator[Line]) -> list[Line]:
    """The last line of each kind, in order."""
    found = {(own["model"], own["shards"], own["plan"], own["gbit"], own["delay_us"]): own for own in lines}
    plans = ("capacity", "load", "net", "load main", OURS)
    return sorted(
        found.values(),
        key=lambda o: (o["model"], o["shards"], o["gbit"], o["delay_us"], plans.index(o["plan"])),
    )


def where(line: Line) -> list[Any]:
    """The cells that say what a line is of."""
    link = f"{line['gbit']:g} Gbit/s, {line['delay_us']:g} us"
    return [line["model"], link, line["shards"], line["plan"]]


WHERE = {"model": None, "links": None, "shards": "{}", "plan": None}


def latencies(lines: Sequence[Line]) -> tuple[dict[str, Any], list[list[Any]]]:
    """Columns and rows."""
    columns = {
        **WHERE,
        **{f"{share}, ms": "{:.2f}" for share in SHARES},
        **{f"{share} predicted": "{:.2f}" for share in SHARES},
        "largest error": "{:+.0%}",
        "p99 of one server": "{:.2f}",
        "predicted": "{:.2f}",
        "p99 over one server": "{:.2f}",
    }
    rows = []
    for line in lines:
        over = [own / one for own, one in zip(line["rounds"]["p99"], line["single"]["p99"], strict=True)]
        rows.append(
            [
                *where(line),
                *(span(line["rounds"][share]) for share in SHARES),
                *(line["predicted"][share] for share in SHARES),
                max((error(line, share) for share in SHARES), key=abs),
                median(line["single"]["p99"]),
                line["single_predicted"]["p99"],
                span(over),
            ]
        )
    return columns, rows


def parts(lines: Sequence[Line]) -> tuple[dict[str, Any], list[list[Any]]]:
    """Columns and rows."""
    names = ("main", "messages", "lookups", "network", "stragglers")
    columns = {
        **WHERE,
        "shards asked": "{}",
        **{f"{name}, ms": "{:.2f}" for name in names},
        "CPU of a request, ms": "{:.2f}",
        "of one server": "{:.2f}",
        "of the relay": "{:.2f}",
    }
    rows = [
        [
            *where(line),
            line["asked"],
            *(line["parts_ms"][name] for name in names),
            *(median(line[name]) for name in ("cpu_ms", "cpu_ms_single", "relay_ms")),
        ]
        for line in lines
    ]
    return columns, rows


def faster(lines: Sequence[Line]) -> tuple[dict[str, Any], list[list[Any]]]:
    """Columns and rows."""
    columns = {**WHERE, **{f"{share}, ms": "{:.2f}" for share in SHARES}}
    return columns, [[*where(line), *(line["predicted"][share] for share in SHARES)] for line in lines]


def span(rounds: Sequence[float]) -> Any:
    """A cell of all rounds."""
    return [median(rounds), min(rounds), max(rounds)]


def error(line: Line, share: str) -> float:
    """Of the prediction, as a share of what was measured."""
    return float(line["predicted"][share] / line["measured"][share] - 1)


def targets(lines: Sequence[Line]) -> Iterator[str]:
    """What the lines come to."""
    for share in SHARES:
        errors = sorted(abs(error(line, share)) for line in lines)
        good = sum(own <= AGREES for own in errors)
        yield (
            f"{share}: predictions are off by {median(errors):.1%} (median), {errors[-1]:.1%} at most; "
            f"{good} of {len(errors)} are within {AGREES:.0%}"
        )
    near, best, worst = [], [], []
    for at, several in groupby(lines, key=lambda own: where(own)[:3]):
        of_plan = {own["plan"]: own["measured"]["p99"] for own in several}
        static = {plan: of_plan[plan] for plan in STATIC if plan in of_plan}
        if OURS not in of_plan or not static:
            continue
        beside, ahead = of_plan[OURS] / min(static.values()), max(static.values()) / of_plan[OURS]
        near.append(beside)
        best.append(ahead)
        if beside > WITHIN:
            worst.append(f"{' '.join(map(str, at))} ({beside:.2f})")
        yield (
            f"{' '.join(map(str, at))}: p99 of ours is {beside:.2f} of the best static plan's, and the worst "
            f"one's {ahead:.2f} of it"
        )
    if near:
        missed = f"; not at {', '.join(worst)}" if worst else ""
        yield f"target: within {WITHIN} of the best static plan everywhere: {max(near):.2f} at most{missed}"
        reached = sum(own >= BETTER for own in best)
        yield (
            f"target: {BETTER} times better than the worst: at {reached} of {len(best)} places, "
            f"{max(best):.2f} at most"
        )


def write(file: Path, title: str, kept: str, columns: dict[str, Any], rows: list[list[Any]]) -> None:
    """A result, unless it has no rows."""
    if not rows:
        return
    from recpipe.report.environment import environment

    result = {
        "title": title,
        "command": COMMAND,
        "machine": f"{len(os.sched_getaffinity(0))} cores of {environment()['cpu']}",
        "commit": "",
        "date": date.today().isoformat(),
        "kept": kept,
        "columns": columns,
        "rows": rows,
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {file}")
