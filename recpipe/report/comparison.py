"""What task=compare leaves: compare.json (schema 1), two tables on the terminal, and compare.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from recpipe.report import figures, html, plots
from recpipe.report.record import plain, replace_file, write_json

_QUALITY = ("auc", "logloss", "ne")


@dataclass
class RowResult:
    """One row so far: the report of its first run, and the speed of each counted round."""

    name: str
    report: Mapping[str, Any] = field(default_factory=dict)
    speeds: list[float] = field(default_factory=list)
    max_parameter_difference: float | None = None

    @property
    def altered(self) -> list[str]:
        """Invariants its plugins alter; empty for an exact row."""
        return list(self.report.get("altered", ()))


def summarise(results: Sequence[RowResult]) -> list[dict[str, Any]]:
    """The ``rows`` of compare.json, in the order asked for; figures of rounds not yet run are None.

    ``ratio`` is the median over rounds of this row's speed divided by the first row's of the same round:
    what slows the machine for a while slows both. ``*_difference`` is to the first row.
    """
    rows = []
    for result in results:
        ratios = [speed / first for speed, first in zip(result.speeds, results[0].speeds, strict=False)]
        quality = result.report.get("quality", {})
        baseline = results[0].report.get("quality", {})
        rows.append(
            {
                "name": result.name,
                "samples_per_second": _spread(result.speeds),
                "ratio": median(ratios) if ratios else None,
                "ratio_spread": _spread(ratios),
                **{key: quality.get(key) for key in _QUALITY},
                **{f"{key}_difference": _minus(quality.get(key), baseline.get(key)) for key in _QUALITY},
                "max_parameter_difference": result.max_parameter_difference,
                "io": dict(result.report.get("io", {})),
                "memory": dict(result.report.get("memory", {})),
                "altered": result.altered,
                "train_samples": result.report.get("data", {}).get("train_samples"),
                "rounds": list(result.speeds),
            }
        )
    return rows


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "min": None, "max": None}
    return {"median": median(values), "min": min(values), "max": max(values)}


def _minus(value: float | None, baseline: float | None) -> float | None:
    return None if value is None or baseline is None else value - baseline


def write_result(content: Mapping[str, Any], path: Path) -> Path:
    """Write ``path``, compare.json, atomically."""
    return write_json(path, plain(content))


def print_result(content: Mapping[str, Any], console: Console) -> None:
    """The comparison as two tables of 80 columns: speed and traffic, then quality and parameters."""
    rows = content["rows"]
    if content["partial"]:
        console.print("stopped early: what is finished so far", markup=False)
    console.print(_speed_table(rows))
    console.print(_quality_table(rows))
    if any(row["altered"] for row in rows):
        for row in rows:
            if row["altered"]:
                console.print(
                    f"* {row['name']} alters {', '.join(row['altered'])}", markup=False, highlight=False
                )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        # Names may fold, numbers never: they would not be read as one.
        table.add_column(name, justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    return table


def _name(row: Mapping[str, Any]) -> str:
    return str(row["name"]) + ("*" if row["altered"] else "")


def _speed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("recipe", "samples/s", "min", "max", "ratio", "spread", "cold\nrows", "cold\nbytes")
    for row in rows:
        speed, ratio, io = row["samples_per_second"], row["ratio_spread"], row["io"]
        table.add_row(
            _name(row),
            *(figures.count(speed[key]) for key in ("median", "min", "max")),
            figures.decimal(row["ratio"], 3),
            f"{figures.decimal(ratio['min'], 2)}-{figures.decimal(ratio['max'], 2)}",
            figures.short(_moved(io, "rows")),
            figures.size(_moved(io, "bytes")),
        )
    return table


def _quality_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("recipe", "AUC", "diff", "logloss", "diff", "NE", "diff", "param\ndiff")
    for row in rows:
        cells = []
        for key in _QUALITY:
            cells += [figures.decimal(row[key]), figures.signed(row[f"{key}_difference"])]
        table.add_row(_name(row), *cells, difference(row["max_parameter_difference"]))
    return table


def difference(value: float | None) -> str:
    """A parameter difference in scientific notation; ``-`` where none is due (an altering row)."""
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _moved(io: Mapping[str, Any], unit: str) -> float | None:
    """Rows or bytes read and written together."""
    return io[f"{unit}_read"] + io[f"{unit}_written"] if io else None


def write_html(content: Mapping[str, Any], path: Path) -> Path:
    """Write ``path``, compare.html, which needs no other file."""
    rows = content["rows"]
    template = html.page("compare.html.j2")
    text = template.render(
        content=content, rows=rows, plots=_plots(rows), moved=_moved, difference=difference
    )
    return replace_file(path, text)


def _plots(rows: Sequence[Mapping[str, Any]]) -> list[plots.Plot]:
    done = [row for row in rows if row["rounds"]]
    if not done:
        return []
    names = [_name(row) for row in done]
    speeds = [row["samples_per_second"] for row in done]
    spread = [(speed["min"], speed["max"]) for speed in speeds]
    rounds = list(range(1, max(len(row["rounds"]) for row in done) + 1))
    curves = {
        f"{index + 1}. {row['name']}": [*row["rounds"], *[None] * (len(rounds) - len(row["rounds"]))]
        for index, row in enumerate(done)
    }
    mib = [(_moved(row["io"], "bytes") or 0) / 2**20 for row in done]
    drawn = [
        plots.bars(
            "Speed: median, lowest and highest", names, [s["median"] for s in speeds], "samples/s", spread
        ),
        plots.lines("Speed by round", rounds, curves, "round", "samples/s", from_zero=True),
        plots.bars(
            "Cold rows moved", names, [_moved(row["io"], "rows") for row in done], "rows read and written"
        ),
        plots.bars("Cold bytes moved", names, mib, "MiB read and written"),
    ]
    if any(row["auc"] is not None for row in done):
        drawn.append(
            plots.bars(
                "AUC on the held-out part", names, [row["auc"] for row in done], "AUC", from_zero=False
            )
        )
    return drawn
