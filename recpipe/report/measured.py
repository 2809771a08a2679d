"""Shows the ``profile`` of a report, a step's time and the least it could take, as table and bars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from recpipe.common.console import Output
from recpipe.report import figures, plots

COLUMNS = ("phase", "ms", "share", "floor ms", "x floor")


def rows(profile: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of ``COLUMNS`` for each phase of the model and for the step; ``-`` if there is nothing to
    compare."""
    step_ms = profile["step_ms"]
    phases = [_row(name, p["ms"], p["floor_ms"], step_ms) for name, p in _there(profile).items()]
    return [*phases, _row("step", step_ms, profile["floor"]["ms"], step_ms)]


def _there(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The phases that took time or should have taken some."""
    return {name: p for name, p in profile["phases"].items() if p["ms"] is not None or p["floor_ms"]}


def _row(name: str, ms: float | None, floor_ms: float, step_ms: float) -> tuple[str, ...]:
    share = "-" if ms is None else f"{100 * ms / step_ms:.1f}%"
    times = "-" if ms is None or not floor_ms else f"{ms / floor_ms:.1f}"
    return name, figures.decimal(ms, 2), share, figures.decimal(floor_ms, 2) if floor_ms else "-", times


def limits(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The inputs of the floor, as pairs of name and figure."""
    floor, machine = profile["floor"], profile["machine"]
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] != 1 else "")
    gemm = ", ".join(f"{kind} {_rate(rate)}FLOP/s" for kind, rate in machine["gemm_flops_per_s"].items())
    doubts = [("stale limits", floor.get("stale")), ("checked again", profile.get("recheck"))]
    counted = f"{figures.count(floor['lookups'])} lookups of {figures.count(floor['distinct_rows'])} rows"
    return [
        ("a batch", f"{figures.count(floor['samples'])} samples, {counted}, {_rate(floor['flops'])}FLOP"),
        ("matrix products", f"{gemm}; {threads}"),
        (
            "stream",
            f"copy {_rate(machine['copy_bytes_per_s'])}B/s, read {_rate(machine['read_bytes_per_s'])}B/s",
        ),
        (
            f"random rows of {machine['row_bytes']} bytes",
            f"{_rate(machine['gather_bytes_per_s'])}B/s, "
            f"one thread {_rate(machine['gather_bytes_per_s_one_thread'])}B/s",
        ),
        *((name, text) for name, text in doubts if text),
    ]


def _rate(value: float) -> str:
    """Three digits, a space and a decimal prefix: ``529 G``."""
    text = figures.short(value)
    return f"{text[:-1]} {text[-1]}" if text[-1].isalpha() else f"{text} "


def profiled(profile: Mapping[str, Any]) -> str:
    """The cost of the profiler, in words."""
    step, slowed = profile["step_ms"], profile["profiled_step_ms"]
    return (
        f"A step takes {step:.2f} ms; under the profiler, where the phases' shares are from, {slowed:.2f} ms"
    )


PREDICTED = ("part", "predicted ms", "measured ms")
"""The columns of ``predicted_rows``."""


def predicted(profile: Mapping[str, Any]) -> str:
    """The predicted step beside the measured one, or why there is none, in a sentence."""
    told = profile["predicted"]
    if "reason" in told:
        return f"Not predicted: {told['reason']}."
    (whole, low, high), measured = told["step_ms"], profile["step_ms"]
    return (
        f"Predicted from the machine's measurements: {whole:.2f} ms a step ({low:.2f}..{high:.2f}); measured "
        f"{measured:.2f}, an error of {figures.signed(100 * (whole / measured - 1), 0)}%."
    )


def predicted_rows(profile: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of ``PREDICTED`` for each part of a step that takes time, and for the step; empty if it was not
    predicted."""
    told = profile["predicted"]
    if "reason" in told:
        return []
    both = {part: (ms, told["measured_parts_ms"][part]) for part, ms in told["parts_ms"].items()}
    both = {part: pair for part, pair in both.items() if any(pair)}
    both["step"] = told["step_ms"][0], profile["step_ms"]
    return [(name, *(figures.decimal(ms, 2) for ms in pair)) for name, pair in both.items()]


def predicted_plots(profile: Mapping[str, Any]) -> list[plots.Plot]:
    """A timeline of the predicted steps, and how busy each thread is in them."""
    told = profile["predicted"]
    if "reason" in told:
        return []
    return [
        plots.spans("Predicted steps", told["timeline"]),
        plots.bars(
            "How busy each part is, predicted",
            list(told["utilisation"]),
            list(told["utilisation"].values()),
            "of the step",
            unit="share",
        ),
    ]


def print_profile(profile: Mapping[str, Any], directory: Path, console: Console | None = None) -> None:
    """Print the table and the inputs of its floor, for an 80-column terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    *phases, step = rows(profile)
    for row in phases:
        table.add_row(*row)
    table.add_section()
    table.add_row(*step, style="bold")
    out = console or Output()
    out.print(table)
    for name, text in limits(profile):
        out.print(f"{name}: {text}", soft_wrap=True, markup=False, highlight=False)
    if warning := figures.disturbed(profile["others_cpu_share"], "the measurement of its limits"):
        out.print(f"{warning}: floors are higher than on a quiet one.", soft_wrap=True, markup=False)
    trace = f"trace: {directory / profile['trace']} (open it in https://ui.perfetto.dev)"
    for line in (f"{profiled(profile)}.", predicted(profile), trace):
        out.print(line, soft_wrap=True, markup=False, highlight=False)


def phase_bars(profile: Mapping[str, Any]) -> list[plots.Plot]:
    """The step and its floor as two bars, made of their phases."""
    parts = {name: [p["ms"] or 0.0, p["floor_ms"]] for name, p in _there(profile).items()}
    return [plots.stacked("A step and its floor, by phase", ["achieved", "floor"], parts, "ms")]
