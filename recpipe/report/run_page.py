"""report.html: a run's page, made only from the content of report.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recpipe.common.meter import counting
from recpipe.report import figures, html, plots, profiled
from recpipe.report.evaluated import evaluated
from recpipe.report.figures import VERDICT, labelled, qualities
from recpipe.report.page import Folded, Head, Line, Page, Part, Plot, Section, Table, environment, pairs
from recpipe.report.plots import Axis
from recpipe.report.run_plots import (
    LARGEST,
    calibration,
    cold_tier,
    folded,
    learning,
    memory,
    progressive,
    skew,
    span,
    speed,
)

SEVERAL = 4
"""Fewer keys with the same value than this have a row each."""
_TILES = {"AUC": "AUC", "logloss": "logloss (nats)", "NE": "normalized entropy"}
"""Longer labels for figures of quality."""


@counting("writing the report")
def write(report: Mapping[str, Any], directory: Path) -> Path:
    """Write ``directory/report.html`` for ``report`` (report.json's content) and return its path."""
    return html.write(page(report), directory / "report.html")


def page(report: Mapping[str, Any]) -> Page:
    """The page of ``report``, which is what ``RunReport.to_dict`` gives."""
    data, machine = report["data"], report["environment"]
    held_out = f"{figures.count(data['eval_samples'])} held out"
    if test := data.get("test_samples"):
        held_out += f", {figures.count(test)} for testing"
    if report.get("progressive"):
        held_out = "each judged before that"
    source = report["recipe"].get("data", {}).get("name", "")
    source = "batches given from Python" if source == "given" else source or "data"
    plugins = " + ".join(report["plugins"])
    title = f"{report['model'] or 'A model'} on {source}{f' with {plugins}' if plugins else ''}"
    resumed = " in this part of a resumed run" if report["resumed"] else ""
    profile = "A profile: " if report["task"] == "profile" else ""
    return Page(
        f"{title}: recpipe",
        title,
        f"{profile}{figures.count(data['train_samples'])} samples trained{resumed}, "
        f"{held_out} · {machine['cpu']}, {machine['threads']} threads",
        [section for section in _sections(report) if any(section.parts)],
        report["command"],
        list(_tiles(report)),
    )


def _tiles(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    windows = report.get("progressive")
    judged = f"latest {figures.count(windows[-1]['scored'])} samples" if windows else "held out"
    for name, quality in qualities(windows[-1] if windows else report).items():
        for number, (label, value) in enumerate(labelled(quality)):
            of = "" if number else f", {judged}"
            yield figures.decimal(value), f"{name} {_TILES.get(label, label)}{of}".lstrip()
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
        altered: Part = "Nothing: every plugin here reproduces the run without it."
        if names := ", ".join(report["altered"]):
            text = f"This run alters: {names}. Its figures need not equal those of a run without plugins."
            altered = Line(text, "warn")
        yield Section("What the recipe altered", [altered])
    if report.get("profile"):
        yield from profiled.sections(report["profile"])
    yield Section("Learning", [learning(report) + progressive(report) + calibration(report)])
    yield Section("Figures of the last evaluation, and their intervals", evaluated(report))
    yield Section("Speed", [speed(report)])
    for name, values in report["plugins"].items():
        yield Section(name, _plugin(values))
    yield Section("Memory and the cold tier", _tiers(report))
    if tables := report["memory"]["tables"]:
        rows = [table["rows"] for table in tables]
        noun = "table" if len(rows) == 1 else "tables"
        summary = f"{len(rows)} {noun}, {span(rows)} rows, {figures.count(sum(rows))} in all"
        yield Section("Memory by table", [summary, _tables(tables), memory(report)])
    if report["ranks"]["world"] > 1:
        yield Section("Ranks", _ranks(report["ranks"]))
    if shards := report["assembly"].get("shards"):
        yield Section("Sharding plan", [_shards(shards)])
    data, resumed = report["data"], report["resumed"]
    if resumed:
        counts = (
            ("before it", resumed["step"], resumed["samples"]),
            ("this part", resumed["steps"], data["train_samples"]),
            ("whole run", resumed["total_steps"], resumed["total_samples"]),
        )
        told = [(f"{of}, steps / samples", f"{figures.count(a)} / {figures.count(b)}") for of, a, b in counts]
        note = "Speed, memory, traffic and plugins' figures are those of this part."
        yield Section("A resumed run", [note, pairs([("went on from", resumed["checkpoint"]), *told])])
    samples = {
        "samples trained": "train_samples",
        "samples held out": "eval_samples",
        "ids looked up": "lookups",
        "input rows left out as bad": "rejected_rows",
        "samples of a short last batch left out": "dropped_samples",
    }
    told = [(name, figures.count(data[key])) for name, key in samples.items()]
    if test := data.get("test_samples"):
        told.insert(2, ("samples for testing", figures.count(test)))
    told += [(f"without a value of {name}", figures.count(n)) for name, n in data.get("missing", {}).items()]
    told += [
        (
            f"ids of {name}: rows / got / lost / lookups without",
            " / ".join(figures.count(own[k]) for k in ("occupied", "admitted", "evicted", "defaulted")),
        )
        for name, own in data.get("growing", {}).items()
    ]
    yield Section("Data", [pairs(told)])
    assembly = _assembly(report["assembly"])
    yield Section("Assembly: who owns what", [pairs(assembly)] if assembly else [])
    yield environment(report["environment"])
    yield Section("", [Folded("Recipe", OmegaConf.to_yaml(OmegaConf.create(dict(report["recipe"]))))])


def _warnings(report: Mapping[str, Any]) -> Iterator[str]:
    profile = report.get("profile") or {}
    for share, what in (
        (report["throughput"]["others_cpu_share"], "training"),
        (profile.get("others_cpu_share"), "the measurement of its limits"),
    ):
        if warning := figures.disturbed(share, what):
            yield f"{warning[0].upper()}{warning[1:]}: speeds and floors are those of a shared machine."
    if report["io"]["cold_start"]:
        yield "Cold start only: the cache was never full in this run."
    for fault in (report.get("unreported") or {}).values():
        yield f"Figures are missing: {fault}"


def _plugin(values: Mapping[str, Any]) -> list[Part]:
    """A plugin's verdict, its scalars as table rows and its lists of numbers or of pairs as curves."""
    drawn: list[Plot] = []
    rows: list[tuple[str, str]] = []
    texts: list[tuple[str, str]] = []
    for name, value in values.items():
        label = figures.label(name)
        if name == VERDICT:
            continue
        points = value if isinstance(value, list) else []
        if points and not any(isinstance(point, list) for point in points):
            points = [[index, point] for index, point in enumerate(points)]
        if points and all(_is_point(point) for point in points):
            curve = {label: ([x for x, _ in points], [y for _, y in points])}
            drawn.append(plots.curves(label, curve, Axis(), Axis()))
        else:
            (texts if isinstance(value, list | dict) else rows).append((label, figures.figure(name, value)))
    parts: list[Part] = [Line(values[VERDICT], "bold")] if values.get(VERDICT) else []
    parts += [pairs([*rows, *texts])] if rows or texts else []
    return [*parts, drawn]


def _is_point(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(n is None or (isinstance(n, int | float) and not isinstance(n, bool)) for n in value)
    )


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
    sharded = any(line["sharding"] for line in lines)
    heads = [Head("table", number=False)]
    heads += map(Head, ("rows", "dim", "weights", "optimizer state", "resident rows", "resident", "cold"))
    rows = [
        [
            *(line[key] for key in ("name", "rows", "dim")),
            figures.size(line["weight_bytes"]),
            figures.size(line["state_bytes"]),
            figures.count(line["resident_rows"]),
            figures.size(line["resident_bytes"]),
            figures.size(line["cold_bytes"]),
            *([line["sharding"]] if sharded else []),
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
    """The tables of a sharding plan, those with the same sharding, kernel and ranks in one row, and what they
    come to on each rank."""
    heads = [Head(title, number=False) for title in ("tables", "sharding", "kernel", "ranks")]
    alike: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = {}
    for name, table in plan["tables"].items():
        ranks = ", ".join(map(str, table["ranks"]))
        alike.setdefault((table["sharding"], table["kernel"], ranks), {})[name] = table
    rows = []
    for kind, tables in alike.items():
        times = [table["predicted_ms"] for table in tables.values()]
        size = figures.size(sum(table["bytes"] for table in tables.values()))
        predicted = None if None in times else sum(times)
        rows.append((_named(list(tables)), *kind, size, figures.decimal(predicted, 3)))
    for number, rank in enumerate(plan["ranks"]):
        size, predicted = figures.size(rank["bytes"]), rank["predicted_ms"]
        rows.append((f"rank {number}", "", "", "", size, figures.decimal(predicted, 3)))
    return Table([*heads, Head("bytes"), Head("predicted ms")], rows)


def _assembly(described: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys and values of the assembly without its shards, with the plugins' parts where plugins are named;
    the keys without a value are one row."""
    parts = described.get("parts", {})
    slots = {slot: part for slot, part in parts.items() if isinstance(part, str)}
    claims = {claim: decided for claim, decided in parts.items() if claim not in slots}
    told = {**described, **slots, "codecs": claims.pop("codecs", {}), "tables": claims}
    rows = flat({key: value for key, value in told.items() if key not in ("shards", "parts")})
    empty = ", ".join(name for name, value in rows if value == "-")
    return [row for row in rows if row[1] != "-"] + ([("nobody's", empty)] if empty else [])


def flat(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    """A nested mapping as rows of dotted key and value. Of ``SEVERAL`` or more keys with the same value, or
    of one number each, there is one row."""
    if isinstance(tree, Mapping) and tree:
        return _mapping(tree, prefix)
    if isinstance(tree, list) and any(isinstance(item, Mapping | list) for item in tree):
        return [row for index, item in enumerate(tree) for row in flat(item, f"{prefix}[{index}]")]
    if isinstance(tree, list):
        return [(prefix, _named([str(item) for item in tree]) or "-")]
    return [(prefix, "-" if tree in (None, {}, "") else str(tree))] if prefix else []


def _mapping(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    start = f"{prefix}." if prefix else ""
    numbers = [v for v in tree.values() if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(tree) > LARGEST and len(numbers) == len(tree):
        ends = (figures.figure(prefix, end) for end in (min(numbers), max(numbers)))
        return [(prefix or "all", f"{len(tree)}: {' to '.join(ends)}")]
    alike: dict[str, list[str]] = {}
    for key, value in tree.items():
        alike.setdefault(json.dumps(value, sort_keys=True, default=str), []).append(str(key))
    rows = []
    done: set[str] = set()
    for key, value in tree.items():
        keys = alike[json.dumps(value, sort_keys=True, default=str)]
        # Short values such as null are equal by chance; parts with keys of their own are of one kind.
        if len(keys) < SEVERAL or not isinstance(value, Mapping) or not value:
            rows += flat(value, f"{start}{key}")
        elif str(key) not in done:
            done.update(keys)
            rows += flat(value, f"{start}({_named(keys)})")
    return rows


def _named(names: Sequence[str]) -> str:
    """The names, or of more than ``LARGEST`` their number, the first two and the last."""
    if len(names) <= LARGEST:
        return ", ".join(names)
    return f"{len(names)}: {names[0]}, {names[1]} … {names[-1]}"
