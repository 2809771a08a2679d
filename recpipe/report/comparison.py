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
from recpipe.report.exactness import FACTOR, Difference, limit
from recpipe.report.quality import LABELS, shown_figures
from recpipe.report.record import as_json, replace_file, write_json
from recpipe.report.remarks import marked_name, notes


@dataclass
class RowResult:
    """One row so far: the report of its first run, and the speed of each counted round."""

    name: str
    report: Mapping[str, Any] = field(default_factory=dict)
    speeds: list[float] = field(default_factory=list)
    difference: Difference | None = None
    """Of an exact row's parameters, to those of the first exact row."""
    not_comparable: str | None = None
    """Why an exact row has no ``difference``."""
    failed: str | None = None
    """The fault of the run after which it was left out."""

    @property
    def altered(self) -> list[str]:
        """Invariants its plugins alter; empty for an exact row."""
        return list(self.report.get("altered", ()))


def summarise(results: Sequence[RowResult], rounding: RowResult | None = None) -> list[dict[str, Any]]:
    """The ``rows`` of compare.json, in the order asked for; figures of rounds not yet run are None.

    ``ratio`` is the median over rounds of this row's speed divided by the first row's of the same round:
    what slows the machine for a while slows both. ``*_difference`` is to the first row, of parameters to
    the first exact row. ``exact_as_declared`` is judged by ``rounding``; None of a row that declares nothing
    of the kind or has not been judged.
    """
    rows = []
    for result in results:
        ratios = [speed / first for speed, first in zip(result.speeds, results[0].speeds, strict=False)]
        quality = result.report.get("quality", {})
        baseline = results[0].report.get("quality", {})
        apart = result.difference
        rows.append(
            {
                "name": result.name,
                "samples_per_second": _spread(result.speeds),
                "ratio": median(ratios) if ratios else None,
                "ratio_spread": _spread(ratios),
                **{key: quality.get(key) for key in LABELS},
                **_quality_differences(quality, baseline),
                "max_parameter_difference": apart.largest if apart else None,
                "rms_parameter_difference": apart.rms if apart else None,
                "exact_as_declared": _as_declared(result, rounding),
                "not_comparable": result.not_comparable,
                "failed": result.failed,
                "io": dict(result.report.get("io", {})),
                "memory": dict(result.report.get("memory", {})),
                "altered": result.altered,
                "train_samples": result.report.get("data", {}).get("train_samples"),
                "rounds": list(result.speeds),
            }
        )
    return rows


def _as_declared(result: RowResult, rounding: RowResult | None) -> bool | None:
    if result.not_comparable is not None:
        return False
    return result.difference.within(rounding.difference if rounding else None) if result.difference else None


def rounding(
    results: Sequence[RowResult], base: int | None, rounded: RowResult | None
) -> dict[str, Any] | None:
    """``rounding`` of compare.json: how far the ``base`` row's run is from that with its first weights
    moved by one float32, and what exact rows may differ by; None where it was not run."""
    if base is None or rounded is None:
        return None
    apart = rounded.difference
    assert apart is not None, "the run has exported its parameters"
    quality, baseline = (result.report.get("quality", {}) for result in (rounded, results[base]))
    return {
        "name": rounded.name,
        **_quality_differences(quality, baseline),
        "max_parameter_difference": apart.largest,
        "rms_parameter_difference": apart.rms,
        "factor": FACTOR,
        "allowed_max_parameter_difference": limit(apart.largest),
        "allowed_rms_parameter_difference": limit(apart.rms),
    }


def _quality_differences(quality: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, float | None]:
    return {f"{key}_difference": _minus(quality.get(key), baseline.get(key)) for key in LABELS}


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "min": None, "max": None}
    return {"median": median(values), "min": min(values), "max": max(values)}


def _minus(value: float | None, baseline: float | None) -> float | None:
    return None if value is None or baseline is None else value - baseline


def write_result(content: Mapping[str, Any], path: Path) -> Path:
    """Write ``path``, compare.json, atomically."""
    return write_json(path, as_json(content))


def print_result(content: Mapping[str, Any], console: Console) -> None:
    """The comparison as two tables of 80 columns: speed and traffic, then quality and parameters."""
    rows = content["rows"]
    if content["partial"]:
        console.print("stopped early: what is finished so far", markup=False)
    console.print(_speed_table(rows))
    console.print(_quality_table(rows))
    for note in notes(content):
        console.print(note, markup=False, highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        # Names may fold, numbers never: they would not be read as one.
        table.add_column(name, justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    return table


def _speed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("recipe", "samples/s", "min", "max", "ratio", "spread", "cold\nrows", "cold\nbytes")
    for row in rows:
        speed, ratio, io = row["samples_per_second"], row["ratio_spread"], row["io"]
        table.add_row(
            marked_name(row),
            *(figures.count(speed[key]) for key in ("median", "min", "max")),
            figures.decimal(row["ratio"], 3),
            f"{figures.decimal(ratio['min'], 2)}-{figures.decimal(ratio['max'], 2)}",
            figures.short(_moved(io, "rows")),
            figures.size(_moved(io, "bytes")),
        )
    return table


def _quality_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = shown_figures(rows)
    columns = (column for name in names for column in (LABELS[name], "diff"))
    table = _table("recipe", *columns, "param\ndiff")
    for row in rows:
        cells = []
        for key in names:
            cells += [figures.decimal(row[key]), figures.signed(row[f"{key}_difference"])]
        table.add_row(marked_name(row), *cells, figures.scientific(row["max_parameter_difference"]))
    return table


def _moved(io: Mapping[str, Any], unit: str) -> float | None:
    """Rows or bytes read and written together."""
    return io[f"{unit}_read"] + io[f"{unit}_written"] if io else None


def write_html(content: Mapping[str, Any], path: Path) -> Path:
    """Write ``path``, compare.html, which needs no other file."""
    rows = content["rows"]
    template = html.page("compare.html.j2")
    text = template.render(
        content=content,
        rows=rows,
        notes=notes(content),
        name=marked_name,
        plots=_plots(rows),
        moved=_moved,
        quality=[(name, LABELS[name]) for name in shown_figures(rows)],
    )
    return replace_file(path, text)


def _plots(rows: Sequence[Mapping[str, Any]]) -> list[plots.Plot]:
    done = [row for row in rows if row["rounds"]]
    if not done:
        return []
    names = [marked_name(row) for row in done]
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
    return drawn + html.quality_bars(names, done)
