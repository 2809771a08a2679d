"""The ``profile`` of a report, a step's time and the least it could take: on the terminal and on its page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console

from recpipe.common.console import Output
from recpipe.report import figures, plots, terminal
from recpipe.report.page import Head, Part, Section, Table, pairs


def phases(profile: Mapping[str, Any]) -> Table:
    """A row for each phase of the model and for the step; ``-`` if there is nothing to compare."""
    step_ms = profile["step_ms"]

    def row(name: str, ms: float | None, floor_ms: float) -> tuple[str, ...]:
        share = "-" if ms is None else f"{100 * ms / step_ms:.1f}%"
        times = "-" if ms is None or not floor_ms else f"{ms / floor_ms:.1f}"
        return name, figures.decimal(ms, 2), share, figures.decimal(floor_ms, 2) if floor_ms else "-", times

    rows = [row(name, p["ms"], p["floor_ms"]) for name, p in _there(profile).items()]
    heads = [Head("phase", number=False), *map(Head, ("ms", "share", "floor ms", "x floor"))]
    return Table(heads, [*rows, row("step", step_ms, profile["floor"]["ms"])], sums=True)


def _there(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The phases that took time or should have taken some."""
    return {name: p for name, p in profile["phases"].items() if p["ms"] is not None or p["floor_ms"]}


def limits(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The inputs of the floor, as pairs of name and figure."""
    floor, machine = profile["floor"], profile["machine"]
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] != 1 else "")
    gemm = ", ".join(f"{kind} {_rate(rate)}FLOP/s" for kind, rate in machine["gemm_flops_per_s"].items())
    copy, read, gather, alone = (
        f"{_rate(machine[f'{kind}_bytes_per_s{how}'])}B/s"
        for kind, how in (("copy", ""), ("read", ""), ("gather", ""), ("gather", "_one_thread"))
    )
    counted = f"{figures.count(floor['lookups'])} lookups of {figures.count(floor['distinct_rows'])} rows"
    doubts = [("stale limits", floor.get("stale")), ("checked again", profile.get("recheck"))]
    return [
        ("a batch", f"{figures.count(floor['samples'])} samples, {counted}, {_rate(floor['flops'])}FLOP"),
        ("matrix products", f"{gemm}; {threads}"),
        ("stream", f"copy {copy}, read {read}"),
        (f"random rows of {machine['row_bytes']} bytes", f"{gather}, one thread {alone}"),
        *((name, text) for name, text in doubts if text),
    ]


def _rate(value: float) -> str:
    """Three digits, a space and a decimal prefix: ``529 G``."""
    text = figures.short(value)
    return f"{text[:-1]} {text[-1]}" if text[-1].isalpha() else f"{text} "


def _slowed(profile: Mapping[str, Any]) -> str:
    """The cost of the profiler, in words."""
    return (
        f"A step takes {profile['step_ms']:.2f} ms; under the profiler, where the phases' shares are from, "
        f"{profile['profiled_step_ms']:.2f} ms"
    )


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


def predicted_parts(profile: Mapping[str, Any]) -> Table | None:
    """A row for each part of a step that takes time, and for the step; None if it was not predicted."""
    told = profile["predicted"]
    if "reason" in told:
        return None
    both = {part: (ms, told["measured_parts_ms"][part]) for part, ms in told["parts_ms"].items()}
    both = {part: pair for part, pair in both.items() if any(pair)}
    both["step"] = told["step_ms"][0], profile["step_ms"]
    heads = [Head("part", number=False), Head("predicted ms"), Head("measured ms")]
    return Table(heads, [(name, *(figures.decimal(ms, 2) for ms in pair)) for name, pair in both.items()])


def print_profile(profile: Mapping[str, Any], directory: Path, console: Console | None = None) -> None:
    """Print the table and the inputs of its floor, for an 80-column terminal."""
    out = console or Output()
    out.print(terminal.drawn(phases(profile)))
    terminal.print_lines(out, (f"{name}: {text}" for name, text in limits(profile)))
    if warning := figures.disturbed(profile["others_cpu_share"], "the measurement of its limits"):
        terminal.print_lines(out, [f"{warning}: floors are higher than on a quiet one."])
    trace = f"trace: {directory / profile['trace']} (open it in https://ui.perfetto.dev)"
    terminal.print_lines(out, [f"{_slowed(profile)}.", predicted(profile), trace])


def sections(profile: Mapping[str, Any]) -> list[Section]:
    """The page's sections on it."""
    parts = {name: [p["ms"] or 0.0, p["floor_ms"]] for name, p in _there(profile).items()}
    bars = plots.stacked("A step and its floor, by phase", ["achieved", "floor"], parts, "ms")
    where = Markup(
        "{}. The floor is the least that this machine could take for the same work; the phase "
        "“overhead” is what the step takes beyond the others. The trace, "
        '<a href="{}">{}</a>, opens in https://ui.perfetto.dev.'
    ).format(_slowed(profile), profile["trace"], profile["trace"])
    operators = [
        (each["name"], figures.decimal(each["ms"], 3), figures.decimal(each["calls"], 1))
        for each in profile["operators"]
    ]
    heads = [Head("operator", number=False), Head("ms per step, profiled"), Head("calls per step")]
    beside: list[Part] = [predicted(profile)]
    if (table := predicted_parts(profile)) is not None:
        told = profile["predicted"]
        beside += [
            "How long the training thread is in each part of a step; “input” is its wait for a batch and its "
            "rows. What other threads do meanwhile is in the timeline.",
            table,
            [
                plots.spans("Predicted steps", told["timeline"]),
                plots.bars(
                    "How busy each part is, predicted",
                    list(told["utilisation"]),
                    list(told["utilisation"].values()),
                    "of the step",
                    unit="share",
                ),
            ],
        ]
    return [
        Section("Where a step's time goes", [where, [bars], phases(profile)]),
        Section("Predicted against measured", beside),
        Section("What the floor rests on", [pairs(limits(profile))]),
        Section(
            "Operators with the longest time of their own, all threads together", [Table(heads, operators)]
        ),
    ]
