"""``scale.inference=true``: requests a second, latency, machines and watts of a model served by shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval, MinLen

from recpipe.common.validation import FilePath, Positive
from recpipe.errors import UserError
from recpipe_perf_model.queueing.costs import Costs
from recpipe_perf_model.scale.fleet import Fleet, NoRoom, Served, fleet, least_shards, server
from recpipe_perf_model.scale.machine import ASSUMED
from recpipe_perf_model.scale.model import PaperModel

CHECKED = (
    "The queueing model is the one that benchmarks/scale_out.py sets beside measured runs of 1 to 8 shards; "
    "constants of another machine, more shards and faster links are on paper. All candidates' lookups cost "
    "the same wherever their rows are, and every server of a kind is as fast as the others."
)
MOST_SHARDS = 4096
Shards = Annotated[int, Interval(ge=1, le=MOST_SHARDS)]
Rate = Annotated[float, Gt(0), Interval(le=1e9)]
Share = Annotated[float, Interval(ge=0, le=1)]


@dataclass(frozen=True)
class ServingConfig:
    """``scale.serving`` of conf/task/scale.yaml: what comes, and what answers it."""

    load: Rate = 1000.0
    """Requests a second."""
    candidates: Annotated[int, Interval(ge=1, le=100_000)] = 64
    shared: Share = 0.5
    """The share of the lookups that a request's candidates have in common: its user's."""
    shards: Annotated[list[Shards], MinLen(1)] = field(
        default_factory=lambda: [2, 4, 8, 16, 32, 64, 128, 200]
    )
    gbit: Annotated[list[Rate], MinLen(1)] = field(default_factory=lambda: [1.0, 10.0, 25.0, 100.0])
    """Of a machine's link, in each direction."""
    delay_us: Annotated[float, Ge(0), Interval(le=1e6)] = 50.0
    """Between two machines, in one direction."""
    server: FilePath = "cpu_spr"
    threads: Annotated[int, Interval(ge=1, le=1024)] = 1
    """Cores of a main server, on which the dense part runs in proportion faster."""
    costs: FilePath | None = None
    """What servers' work takes, as benchmarks/scale_out.py measures it; None: stated constants."""
    busy: Annotated[float, Gt(0), Interval(le=0.95)] = 0.6
    """The share of what servers and links can do that they are to do at most."""
    p99_ms: Annotated[float, Gt(0), Interval(le=1e6)] | None = None
    """Main servers and shards are added until p99 is so short; None: for the load alone."""
    machines: Positive | None = None
    """Most machines; None: as many as it takes."""
    years: Annotated[int, Interval(ge=0, le=20)] = 5
    growth: Annotated[float, Interval(ge=1, le=10)] = 1.5
    """How many times as many rows the model has after each of ``years``."""
    requests: Annotated[int, Interval(ge=200, le=1_000_000)] = 5000
    """That are played for each figure."""


def predicted(model: PaperModel, config: ServingConfig) -> dict[str, Any]:
    """What scale.json has; ``UserError`` if nothing that is asked for can be."""
    host = server(config.server)
    known = Costs() if config.costs is None else Costs.read(Path(config.costs).expanduser())
    if config.threads > host.constants.cores:
        raise UserError(
            f"scale.serving.threads={config.threads}: {host.name} has {host.constants.cores:g} cores"
        )

    def served(gbit: float) -> Served:
        return Served(
            model,
            host,
            known,
            config.load,
            config.candidates,
            config.shared,
            gbit,
            config.delay_us,
            config.busy,
            config.threads,
            None if config.p99_ms is None else config.p99_ms / 1e3,
            config.requests,
        )

    refused: list[dict[str, Any]] = []

    def tried(own: Served, shards: int, at: dict[str, Any], more: int = 0) -> list[dict[str, Any]]:
        try:
            found = _fleet(own, shards, more)
            if config.machines is not None and found.machines > config.machines:
                raise UserError(
                    f"a load of {config.load:,.6g} requests/s takes {found.machines:,} machines with "
                    f"{found.shards} shards at {own.gbit:g} Gbit/s, and scale.serving.machines="
                    f"{config.machines}"
                )
        except UserError as why:
            refused.append({**at, "why": str(why)})
            return []
        return [{**at, **_told(found)}]

    links, predictions, growth = sorted(set(config.gbit)), [], []
    for gbit in links:
        for shards in sorted(set(config.shards)):
            predictions += tried(served(gbit), shards, {"gbit": gbit, "shards": shards})
    if not predictions:
        raise UserError(refused[-1]["why"])
    for year in range(config.years + 1):
        for gbit in links:
            grown = served(gbit).grown(config.growth**year)
            shards = least_shards(grown)
            if shards > MOST_SHARDS:
                refused.append({"year": year, "why": f"year {year}: {shards:,} shards would be needed"})
                break
            # A piece may find no room on as few shards as have room for all rows together.
            growth += tried(grown, shards, {"year": year, "gbit": gbit}, more=-(-shards // 10))
    one = served(links[0])
    return {
        "inference": True,
        "model": {
            "name": model.name,
            "title": model.title,
            "tables": len(model.tables),
            "rows": sum(table.rows for table in model.tables),
            "bytes": one.bytes,
            "lookups": sum(table.pooling for table in model.tables),
            "dense_us": one.sample_us,
        },
        "server": {"name": host.name, "title": host.title, "sources": dict(host.sources)},
        "costs": known.content(),
        "load": config.load,
        "candidates": config.candidates,
        "shared": config.shared,
        "threads": config.threads,
        "delay_us": config.delay_us,
        "busy": config.busy,
        "predictions": predictions,
        "growth": growth,
        "yearly": config.growth,
        "refused": refused,
        "assumed": [name for name, source in host.sources.items() if source.startswith(ASSUMED)],
        "notes": list(model.notes),
        "checked": CHECKED,
    }


def _fleet(served: Served, shards: int, more: int) -> Fleet:
    """A fleet of so many shards; of ``more``, if its rows find no room on these."""
    try:
        return fleet(served, shards)
    except NoRoom:
        if not more:
            raise
        return fleet(served, shards + more)


def _told(each: Fleet) -> dict[str, Any]:
    answered = each.answered
    return {
        "gbit": each.served.gbit,
        "shards": each.shards,
        "cells": each.cells,
        "mains": each.mains,
        "machines": each.machines,
        "main_machines": each.main_machines,
        "shard_machines": each.shard_machines,
        "watts": each.watts,
        "requests_per_second": each.rate,
        "limit": each.limit,
        "model_bytes": each.served.bytes,
        "shard_bytes": each.shard_bytes,
        "p50": answered.percentile(50),
        "p95": answered.percentile(95),
        "p99": answered.percentile(99),
        "waited": answered.waited,
        "fetched": answered.fetched,
        "main_busy": answered.main_busy,
        "shard_busy": float(answered.shard_busy.max()),
    }
