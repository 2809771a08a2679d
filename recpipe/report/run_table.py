"""The short table at the end of a run, for an 80-column terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from recpipe.common.console import show
from recpipe.report import figures, profiled, terminal
from recpipe.report.figures import VERDICT, labelled, qualities
from recpipe.report.page import pairs

_MAX_PLUGIN_ROWS = 12


def print_result(report: Mapping[str, Any], directory: Path, console: Console | None = None) -> None:
    """Print the result of a run; ``report`` is the content of report.json, which is in ``directory``."""
    rows = [*_training(report), *_rows_kept(report), *_plugins(report["plugins"])]
    if report["altered"]:
        rows.append(("alters", f"{', '.join(report['altered'])} (need not equal the run without plugins)"))
    table = terminal.drawn(pairs(rows))

    def draw(out: Console) -> None:
        out.print(table)
        if section := report.get("profile"):
            profiled.print_profile(section, directory, out)

    show(draw, console)


def _training(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Samples, quality and speed."""
    data, resumed = report["data"], report.get("resumed")
    train, held_out, rejected, dropped = (
        figures.count(data[key])
        for key in ("train_samples", "eval_samples", "rejected_rows", "dropped_samples")
    )
    windows = report.get("progressive")
    text = f"{train} samples trained" + ("" if windows else f", {held_out} held out")
    if test := data.get("test_samples"):
        text += f", {figures.count(test)} for testing"
    text += f", {rejected} bad rows left out" if data["rejected_rows"] else ""
    text += f", {dropped} of a short last batch dropped" if data["dropped_samples"] else ""
    yield "data", text
    if resumed:
        yield "resumed", f"from {resumed['checkpoint']}"
        for part, steps, samples in (
            ("before", resumed["step"], resumed["samples"]),
            ("this part", resumed["steps"], data["train_samples"]),
            ("whole run", resumed["total_steps"], resumed["total_samples"]),
        ):
            known = "samples unknown" if samples is None else f"{figures.count(samples)} samples"
            yield "", f"{part}: {figures.count(steps)} steps, {known}"
    if not report.get("profile"):
        for name, quality in qualities(windows[-1] if windows else report).items():
            values = labelled(quality)
            text = "   ".join(f"{label} {figures.decimal(value)}" for label, value in values)
            yield f"quality {name}".rstrip(), text
    if windows:
        yield "", f"of the latest {figures.count(windows[-1]['scored'])} samples, before they were trained"
    throughput = report["throughput"]
    p50, p90, p99 = (figures.decimal(throughput["step_ms"][name], 2) for name in ("p50", "p90", "p99"))
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


def _rows_kept(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Memory, the cold tier and ranks."""
    memory, io, ranks = report["memory"], report["io"], report["ranks"]
    peak, resident, cold, overhead = (
        figures.size(memory[f"{name}_bytes"]) for name in ("peak_rss", "resident", "cold", "tier_overhead")
    )
    beside = f" + {overhead} beside it" if memory["tier_overhead_bytes"] else ""
    on_gpu = memory.get("peak_gpu_bytes")
    gpu = "" if on_gpu is None else f"   peak of the GPU {figures.size(on_gpu)}"
    yield "memory", f"peak RSS {peak}{gpu}   resident tier {resident}{beside}   cold tier {cold}"
    emulated = figures.emulated(ranks["emulate"]) if ranks["emulate"] else ""
    if io["store"]:
        mode = {True: " (O_DIRECT)", False: " (buffered: no O_DIRECT here)"}.get(io["direct"], "")
        read = f"read {figures.count(io['rows_read'])} rows, {figures.size(io['bytes_read'])}"
        written = f"wrote {figures.count(io['rows_written'])} rows, {figures.size(io['bytes_written'])}"
        cold = "; cold start only: the cache was never full" if io["cold_start"] else ""
        waited = f"waited {figures.decimal(io['wait_seconds'], 2)} s"
        yield "cold tier", f"{io['store']}{mode}: {read}; {written}; {waited}{cold}"
        if emulated and ranks["world"] == 1:
            yield "", f"slowed by tiers.emulate: {emulated} in addition"
    if ranks["world"] > 1:
        train, hold = len(ranks["trainers"]), len(ranks["holders"])
        sent, received = figures.size(ranks["bytes_sent"]), figures.size(ranks["bytes_received"])
        text = f"{train} training, {hold} holding rows, of {ranks['world']}; rank 0: "
        text += f"{figures.count(ranks['messages'])} messages, sent {sent}, received {received}"
        yield "ranks", text + (f"; emulated network: {emulated}" if emulated else "")


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
