"""report.html: a run's page, made only from the content of report.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recpipe.common.meter import counting
from recpipe.report import figures, folding, html, plots, profiled
from recpipe.report.figures import VERDICT, labelled
from recpipe.report.folding import LARGEST, folded
from recpipe.report.page import Folded, Head, Line, Page, Part, Section, Table, environment, pairs
from recpipe.report.plots import Plot
from recpipe.report.run_plots import calibration, cold_tier, learning, memory, skew, speed

_TILES = {"AUC": "AUC, held out", "logloss": "logloss (nats)", "NE": "normalized entropy"}
"""Longer labels for figures of quality."""


@counting("writing the report")
def write(report: Mapping[str, Any], directory: Path) -> Path:
    """Write ``directory/report.html`` for ``report`` (report.json's content) and return its path."""
    return html.write(page(report), directory / "report.html")


def page(report: Mapping[str, Any]) -> Page:
    """The page of ``report``, which is what ``RunReport.to_dict`` gives."""
    data, machine = report["data"], report["environment"]
    resumed = " in this part of a resumed run" if report["resumed"] else ""
    title, profile = _title(report), "A profile: " if report["task"] == "profile" else ""
    return Page(
        f"{title}: recpipe",
        title,
        f"{profile}{figures.count(data['train_samples'])} samples trained{resumed}, "
        f"{figures.count(data['eval_samples'])} later ones held out · {machine['cpu']}, "
        f"{machine['threads']} threads",
        [section for section in _sections(report) if any(section.parts)],
        report["command"],
        list(_tiles(report)),
    )


def _title(report: Mapping[str, Any]) -> str:
    """The run's model, data and plugins."""
    data = report["recipe"].get("data", {}).get("name", "")
    data = "batches given from Python" if data == "given" else data or "data"
    plugins = " + ".join(report["plugins"])
    return f"{report['model'] or 'A model'} on {data}{f' with {plugins}' if plugins else ''}"


def _tiles(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for label, value in labelled(report["quality"]):
        yield figures.decimal(value), _TILES.get(label, label)
    speed, step, memory = report["throughput"], report["throughput"]["step_ms"], report["memory"]
    yield figures.count(speed["samples_per_second"]), "samples/s over all steps"
    if speed["end_to_end_seconds"] is not None:
        yield figures.count(speed["steady_samples_per_second"]), "samples/s without the first steps"
        whole = figures.count(speed["end_to_end_samples_per_second"])
        yield whole, "samples/s from process start to rows written back"
    yield figures.decimal(step["p50"], 2), f"ms per step (p50; p99 {figures.decimal(step['p99'], 2)})"
    yield figures.decimal(speed["first_step_seconds"], 1), "s from start to the first step's end"
    yield figures.size(memory["peak_rss_bytes"]), "peak resident set"
    if memory["peak_gpu_bytes"]:
        yield figures.size(memory["peak_gpu_bytes"]), "peak memory of the GPU"


def _sections(report: Mapping[str, Any]) -> Iterator[Section]:
    """All sections; those that this run has nothing for are empty."""
    yield Section("", [Line(warning, "warn") for warning in _warnings(report)])
    if report["plugins"]:
        yield Section("What the recipe altered", [_altered(report["altered"])])
    if report.get("profile"):
        yield from profiled.sections(report["profile"])
    yield Section("Learning", [learning(report) + calibration(report)])
    yield Section("Speed", [speed(report)])
    for name, values in report["plugins"].items():
        yield Section(name, _plugin(values))
    yield Section("Memory and the cold tier", _tiers(report))
    if tables := report["memory"]["tables"]:
        yield Section("Memory by table", [folding.summary(tables), _tables(tables), memory(report)])
    if report["ranks"]["world"] > 1:
        yield Section("Ranks", _ranks(report["ranks"]))
    if shards := report["assembly"].get("shards"):
        yield Section("Sharding plan", [_shards(shards)])
    if report["resumed"]:
        yield Section("A resumed run", _resumed(report))
    data = report["data"]
    rows = {
        "samples trained": "train_samples",
        "samples held out": "eval_samples",
        "ids looked up": "lookups",
        "input rows left out as bad": "rejected_rows",
        "samples of a short last batch left out": "dropped_samples",
    }
    yield Section("Data", [pairs([(name, figures.count(data[key])) for name, key in rows.items()])])
    assembly = _assembly(report["assembly"])
    yield Section("Assembly: who owns what", [pairs(assembly)] if assembly else [])
    yield environment(report["environment"])
    yield Section("", [Folded("Recipe", OmegaConf.to_yaml(OmegaConf.create(dict(report["recipe"]))))])


def _warnings(report: Mapping[str, Any]) -> list[str]:
    profile = report.get("profile") or {}
    disturbed = (
        figures.disturbed(report["throughput"]["others_cpu_share"], "training"),
        figures.disturbed(profile.get("others_cpu_share"), "the measurement of its limits"),
    )
    found = [
        f"{warning[0].upper()}{warning[1:]}: speeds and floors are those of a shared machine."
        for warning in disturbed
        if warning
    ]
    if report["io"]["cold_start"]:
        found.append("Cold start only: the cache was never full in this run.")
    return found + [f"Figures are missing: {fault}" for fault in (report.get("unreported") or {}).values()]


def _altered(names: Sequence[str]) -> Part:
    if not names:
        return "Nothing: every plugin here reproduces the run without it."
    text = "Its figures need not equal those of a run without plugins."
    return Line(f"This run alters: {', '.join(names)}. {text}", "warn")


def _plugin(values: Mapping[str, Any]) -> list[Part]:
    """A plugin's verdict, its scalars as table rows and its lists as curves."""
    drawn = {n: v for n, v in values.items() if n != VERDICT and isinstance(v, list) and _drawable(v)}
    told = {n: v for n, v in values.items() if n != VERDICT and n not in drawn}
    texts = {name: value for name, value in told.items() if isinstance(value, list | dict)}
    rows = [(figures.label(n), figures.figure(n, v)) for n, v in told.items() if n not in texts]
    rows += [(figures.label(n), figures.figure(n, v)) for n, v in texts.items()]
    parts: list[Part] = [Line(values[VERDICT], "bold")] if values.get(VERDICT) else []
    parts += [pairs(rows)] if rows else []
    return [*parts, [_curve(name, value) for name, value in drawn.items()]]


def _drawable(values: list[Any]) -> bool:
    def number(value: Any) -> bool:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))

    def pair(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(map(number, value))

    return bool(values) and (all(map(number, values)) or all(map(pair, values)))


def _curve(name: str, values: list[Any]) -> Plot:
    both = values if isinstance(values[0], list) else [[index, value] for index, value in enumerate(values)]
    title = figures.label(name)
    return plots.lines(title, [x for x, _ in both], {title: [y for _, y in both]}, "")


def _tiers(report: Mapping[str, Any]) -> list[Part]:
    io, tiers = report["io"], report["memory"]
    resident = figures.size(tiers["resident_bytes"])
    rows = [("all rows resident", resident)]
    if io["store"]:
        rows = [
            ("resident tier", resident),
            ("beside it: row maps, policy, slab, buffers", figures.size(tiers["tier_overhead_bytes"])),
            ("cold tier", f"{figures.size(tiers['cold_bytes'])}, {io['store']}"),
            ("O_DIRECT", {True: "yes", False: "no: buffered by the page cache"}.get(io["direct"], "-")),
            *(
                (f"{unit} read / written", f"{show(io[f'{unit}_read'])} / {show(io[f'{unit}_written'])}")
                for unit, show in (("rows", figures.count), ("bytes", figures.size))
            ),
            *(
                (name, f"{figures.decimal(io[f'{key}_seconds'], 2)} s")
                for name, key in (
                    ("training waited for it", "wait"),
                    ("fetching took, in the I/O thread", "fetch"),
                    ("writing took, in the I/O thread", "write"),
                )
            ),
        ]
    parts: list[Part] = [pairs(rows), cold_tier(report) + skew(report)]
    if report["skew"]:
        note = "The skew is that of the sample: rows that it lacks count as never looked up, so that the "
        parts.append(Line(f"{note}curves of large tables reach 100% too early.", "soft"))
    return parts


def _tables(tables: Sequence[Mapping[str, Any]]) -> Table:
    """The largest tables, and the others together."""
    lines = folded(tables, LARGEST)
    sharded = any(line.sharding for line in lines)
    heads = [Head("table", number=False)]
    heads += map(Head, ("rows", "dim", "weights", "optimizer state", "resident rows", "resident", "cold"))
    rows = [
        [
            line.name,
            line.rows,
            line.dim,
            figures.size(line.weight_bytes),
            figures.size(line.state_bytes),
            figures.count(line.resident_rows),
            figures.size(line.resident_bytes),
            figures.size(line.cold_bytes),
            *([line.sharding] if sharded else []),
        ]
        for line in lines
    ]
    return Table([*heads, Head("sharding", number=False)] if sharded else heads, rows)


def _ranks(ranks: Mapping[str, Any]) -> list[Part]:
    slow = ranks["emulate"]
    network = (
        f"{slow['latency_us']} us a message, {slow['gbit_per_s'] or 'unlimited'} Gbit/s" if slow else "none"
    )
    sent, received = figures.size(ranks["bytes_sent"]), figures.size(ranks["bytes_received"])
    parts: list[Part] = [
        pairs(
            [
                ("ranks that train", ", ".join(map(str, ranks["trainers"]))),
                ("ranks that hold rows", ", ".join(map(str, ranks["holders"]))),
                ("emulated network", network),
                ("messages of rank 0", figures.count(ranks["messages"])),
                ("sent / received", f"{sent} / {received}"),
            ]
        )
    ]
    if ranks["collectives"]:
        heads = [Head("collective", number=False)]
        heads += map(Head, ("calls", "sent", "received", "waited for it"))
        rows = [
            (
                name,
                figures.count(of["calls"]),
                figures.size(of["bytes_sent"]),
                figures.size(of["bytes_received"]),
                f"{figures.decimal(of['wait_seconds'], 2)} s",
            )
            for name, of in ranks["collectives"].items()
        ]
        parts.append(Table(heads, rows))
    return parts


def _shards(plan: Mapping[str, Any]) -> Table:
    heads = [Head(title, number=False) for title in ("tables", "sharding", "kernel", "ranks")]
    lines = [
        (*(row[key] for key in ("names", "sharding", "kernel", "ranks")), row)
        for row in folding.shards(plan["tables"])
    ]
    lines += [(f"rank {number}", "", "", "", rank) for number, rank in enumerate(plan["ranks"])]
    rows = [
        (*texts, figures.size(of["bytes"]), figures.decimal(of["predicted_ms"], 3)) for *texts, of in lines
    ]
    return Table([*heads, Head("bytes"), Head("predicted ms")], rows)


def _resumed(report: Mapping[str, Any]) -> list[Part]:
    resumed = report["resumed"]
    counts = (
        ("before it", resumed["step"], resumed["samples"]),
        ("this part", resumed["steps"], report["data"]["train_samples"]),
        ("whole run", resumed["total_steps"], resumed["total_samples"]),
    )
    rows = [(f"{of}, steps / samples", f"{figures.count(a)} / {figures.count(b)}") for of, a, b in counts]
    return [
        "Speed, memory, traffic and plugins' figures are those of this part.",
        pairs([("went on from", resumed["checkpoint"]), *rows]),
    ]


def _assembly(described: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys and values of the assembly without its shards, with the plugins' parts where plugins are named;
    the keys without a value are one row."""
    parts = described.get("parts", {})
    slots = {slot: part for slot, part in parts.items() if isinstance(part, str)}
    claims = {claim: decided for claim, decided in parts.items() if claim not in slots}
    told = {**described, **slots, "codecs": claims.pop("codecs", {}), "tables": claims}
    rows = folding.flat({key: value for key, value in told.items() if key not in ("shards", "parts")})
    empty = ", ".join(name for name, value in rows if value == "-")
    return [row for row in rows if row[1] != "-"] + ([("nobody's", empty)] if empty else [])
