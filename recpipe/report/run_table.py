"""The short table at the end of a run, for an 80-column terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recpipe.common.console import show
from recpipe.report import figures, profiled
from recpipe.report.figures import VERDICT, labelled

_MAX_PLUGIN_ROWS = 12


def print_result(report: Mapping[str, Any], directory: Path, console: Console | None = None) -> None:
    """Print the result of a run; ``report`` is the content of report.json, which is in ``directory``."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, expand=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(report):
        table.add_row(name, Text(value))

    def draw(out: Console) -> None:
        out.print(table)
        if section := report.get("profile"):
            profiled.print_profile(section, directory, out)

    show(draw, console)


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "data", _data(report["data"])
    if resumed := report.get("resumed"):
        yield from _resumed(resumed, report["data"])
    if not report.get("profile"):
        yield "quality", _quality(report["quality"])
    yield from _speed(report["throughput"])
    yield "memory", _memory(report["memory"])
    if report["io"]["store"]:
        yield "cold tier", _io(report["io"])
        if report["ranks"]["emulate"] and report["ranks"]["world"] == 1:
            yield "", f"slowed by tiers.emulate: {figures.emulated(report['ranks']['emulate'])} in addition"
    if report["ranks"]["world"] > 1:
        yield "ranks", _ranks(report["ranks"])
    yield from _plugins(report["plugins"])
    if report["altered"]:
        yield "alters", ", ".join(report["altered"]) + " (need not equal the run without plugins)"


def _data(data: Mapping[str, Any]) -> str:
    train, held_out, rejected = (data[key] for key in ("train_samples", "eval_samples", "rejected_rows"))
    text = f"{figures.count(train)} samples trained, {figures.count(held_out)} held out"
    text += f", {figures.count(rejected)} bad rows left out" if rejected else ""
    dropped = data["dropped_samples"]
    return text + (f", {figures.count(dropped)} of a short last batch dropped" if dropped else "")


def _resumed(resumed: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    def extent(steps: str, samples: int | None) -> str:
        known = "samples unknown" if samples is None else f"{figures.count(samples)} samples"
        return f"{figures.count(resumed[steps])} steps, {known}"

    yield "resumed", f"from {resumed['checkpoint']}"
    yield "", f"before: {extent('step', resumed['samples'])}"
    yield "", f"this part: {extent('steps', data['train_samples'])}"
    yield "", f"whole run: {extent('total_steps', resumed['total_samples'])}"


def _quality(quality: Mapping[str, Any]) -> str:
    return "   ".join(f"{label} {figures.decimal(value)}" for label, value in labelled(quality))


def _speed(throughput: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    step = throughput["step_ms"]
    p50, p90, p99 = (figures.decimal(step[name], 2) for name in ("p50", "p90", "p99"))
    all_steps, steady, end_to_end = (
        figures.count(throughput[f"{kind}samples_per_second"]) for kind in ("", "steady_", "end_to_end_")
    )
    times = f"step p50/p90/p99 {p50}/{p90}/{p99} ms"
    if throughput["end_to_end_seconds"] is None:
        yield "speed", f"{all_steps} samples/s   {times}"
    else:
        yield "speed", f"{all_steps} samples/s over all steps   {steady} without the first ones"
        yield "", f"{end_to_end} from start to end   {times}"
    if warning := figures.disturbed(throughput["others_cpu_share"], "training"):
        yield "", f"{warning}: alone it is faster"


def _memory(memory: Mapping[str, Any]) -> str:
    peak, resident, cold = (
        figures.size(memory[f"{name}_bytes"]) for name in ("peak_rss", "resident", "cold")
    )
    overhead = figures.size(memory["tier_overhead_bytes"])
    beside = f" + {overhead} beside it" if memory["tier_overhead_bytes"] else ""
    on_gpu = memory.get("peak_gpu_bytes")
    gpu = "" if on_gpu is None else f"   peak of the GPU {figures.size(on_gpu)}"
    return f"peak RSS {peak}{gpu}   resident tier {resident}{beside}   cold tier {cold}"


def _io(io: Mapping[str, Any]) -> str:
    mode = {True: " (O_DIRECT)", False: " (buffered: no O_DIRECT here)"}.get(io["direct"], "")
    read = f"read {figures.count(io['rows_read'])} rows, {figures.size(io['bytes_read'])}"
    written = f"wrote {figures.count(io['rows_written'])} rows, {figures.size(io['bytes_written'])}"
    cold = "; cold start only: the cache was never full" if io["cold_start"] else ""
    return f"{io['store']}{mode}: {read}; {written}; waited {figures.decimal(io['wait_seconds'], 2)} s{cold}"


def _ranks(ranks: Mapping[str, Any]) -> str:
    roles = f"{len(ranks['trainers'])} training, {len(ranks['holders'])} holding rows, of {ranks['world']}"
    sent, received = figures.size(ranks["bytes_sent"]), figures.size(ranks["bytes_received"])
    text = f"{roles}; rank 0: {figures.count(ranks['messages'])} messages, sent {sent}, received {received}"
    return text + (f"; emulated network: {figures.emulated(ranks['emulate'])}" if ranks["emulate"] else "")


def _plugins(plugins: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each plugin's verdict and scalars; every plugin gets a share of the lines, so that the table stays
    short."""
    for name, values in plugins.items():
        scalars = [
            (key, value)
            for key, value in values.items()
            if key != VERDICT and not isinstance(value, list | dict)
        ]
        limit = max(1, _MAX_PLUGIN_ROWS // len(plugins))
        lines = [f"{figures.label(key)}: {figures.figure(key, value)}" for key, value in scalars[:limit]]
        if verdict := values.get(VERDICT):
            lines.insert(0, str(verdict))
        for index, line in enumerate(lines):
            yield name if index == 0 else "", line
        if len(scalars) > limit:
            yield "", f"and {len(scalars) - limit} more in the report"
