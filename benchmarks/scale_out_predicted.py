"""What is predicted of a cut by the queueing model (recpipe_perf_model/queueing), from traces of its servers.

Service times are measured where hardly anything waits: requests come at regular times, one or several at
once, over one link. From these follow lines through the number of requests of a batch,
the time on the wire, and how many times as long as usual work takes. Rates and delays of links, waiting and
the slowest of the shards are the model's. ``measured_costs`` makes the same into constants of lookups and
bytes, for other cuts and machines.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recpipe_perf_model import Line, Link, Servers, ServiceCosts, Shard, nnls

Trace = dict[str, Any]
Span = tuple[float, float]
FACTORS = 101
"""Quantiles of how many times as long as usual work takes."""
KIB = 1024


@dataclass
class Traced:
    """The batches of a cut, or of a single server, each with its shards' answers."""

    batches: list[Trace]

    @classmethod
    def read(cls, main: Path, shards: Sequence[Path] = ()) -> Traced:
        """From the files of ``scale_out_traces``."""
        batches = _lines(main)
        answers = [_lines(file) for file in shards]
        begins = [[line["begin"] for line in own] for own in answers]
        for batch in batches:
            for own in batch["shards"]:
                at = bisect_left(begins[own["number"]], batch["begin"])
                if at < len(begins[own["number"]]) and begins[own["number"]][at] < batch["end"]:
                    own["work"] = answers[own["number"]][at]
            batch["whole"] = all("work" in own and "there" in own for own in batch["shards"])
        return cls([batch for batch in batches if batch["whole"]])

    def within(self, spans: Sequence[Span]) -> Traced:
        """Those of some times."""
        return Traced(
            [b for b in self.batches if any(low <= b["begin"] and b["end"] <= high for low, high in spans)]
        )


def _lines(file: Path) -> list[Trace]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def line(counts: Sequence[float], values: Sequence[float]) -> Line:
    """Through the means by number of requests, neither part of it below 0."""
    n, v = np.asarray(counts, np.float64), np.asarray(values, np.float64)
    first, each = nnls(np.column_stack([np.ones_like(n), n]), v).tolist()
    return Line(first, each)


def factors(values: Sequence[float], usual: Sequence[float]) -> tuple[float, ...]:
    """Quantiles of values beside what is usual of them, whose mean is 1."""
    ratio = np.asarray(values) / np.maximum(usual, 1e-9)
    found = np.quantile(ratio, (np.arange(FACTORS) + 0.5) / FACTORS)
    return tuple((found / found.mean()).tolist())


def servers_of(quiet: Traced, front: float, most: int, over: Link) -> Servers:
    """The servers of these batches, at which hardly anything waited. ``front``: seconds of a request besides;
    ``most``: requests of a batch; ``over``: the links."""
    # Of a main server that has the hottest rows itself some batches may ask nobody.
    batches = [batch for batch in quiet.batches if batch["shards"]] or quiet.batches
    n = [batch["n"] for batch in batches]
    if not batches[0]["shards"]:
        spent = [batch["end"] - batch["begin"] for batch in batches]
        rest = line(n, spent)
        return Servers(
            Line(), rest, front=front, most=most, main_factors=factors(spent, [rest.of(k) for k in n])
        )
    asking = [batch["ask"] - batch["begin"] for batch in batches]
    resting = [batch["end"] - batch["came"] for batch in batches]
    ask, rest = line(n, asking), line(n, resting)
    call = fmean((batch["sent"] - batch["ask"]) / len(batch["shards"]) for batch in batches)
    beside = line(n, [batch["waits"] - batch["sent"] for batch in batches])
    shards, ratios = [], []
    for number in sorted({own["number"] for batch in batches for own in batch["shards"]}):
        own = [(b["n"], s) for b in batches for s in b["shards"] if s["number"] == number]
        counts = [count for count, _ in own]
        work = line(counts, [s["work"]["end"] - s["work"]["begin"] for _, s in own])
        taken = [s["there"] - s["sent"] for _, s in own]
        moved = [on_link(s, over) for _, s in own]
        wire = max(0.0, fmean(taken) - fmean(work.of(count) for count in counts) - fmean(moved))
        asked, answered = (line(counts, [s[key] for _, s in own]) for key in ("asked", "answered"))
        shards.append(Shard(work, asked, answered, wire))
        ratios.append((np.subtract(taken, moved).tolist(), [work.of(count) + wire for count in counts]))
    spent = [a + b for a, b in zip(asking, resting, strict=True)]
    return Servers(
        ask,
        rest,
        call,
        beside,
        front,
        tuple(shards),
        most=most,
        main_factors=factors(spent, [ask.of(k) + rest.of(k) for k in n]),
        shard_factors=factors(*(np.concatenate([each[side] for each in ratios]).tolist() for side in (0, 1))),
    )


def link(gbit: float, delay_us: float, burst: float) -> Link:
    """Of a server."""
    return Link(gbit * 1e9 / 8, delay_us * 1e-6, burst)


def on_link(call: Trace, over: Link) -> float:
    """Seconds that a question and its answer are on a link that is theirs alone."""
    sent = sum(max(0.0, call[key] - over.burst) / over.rate for key in ("asked", "answered"))
    return 2 * over.delay + sent


def parts_of(loaded: Traced) -> dict[str, float]:
    """Milliseconds of a batch, on average: ``messages``: making questions and answers into messages and back,
    at both ends of the slowest shard; ``lookups`` there; ``network``: between a question that was sent and
    its answer, without the shard's own time, the mean of all shards; ``stragglers``: from the mean answer to
    the last one; ``main``: what else the main server does."""
    found: dict[str, list[float]] = {}
    for batch in loaded.batches:
        own = batch["shards"]
        if not own:
            continue
        last = max(own, key=lambda s: s["there"])
        looked = last["work"].get("looked", 0.0)
        served = [s["work"]["end"] - s["work"]["begin"] for s in own]
        waits = [s["there"] - s["sent"] for s in own]
        parts = {
            "messages": batch["wrote"] + (last["work"]["end"] - last["work"]["begin"]) - looked,
            "lookups": looked,
            "network": fmean(wait - work for wait, work in zip(waits, served, strict=True)),
            "stragglers": last["there"] - fmean(s["there"] for s in own),
            "main": batch["ask"] - batch["begin"] + batch["end"] - batch["came"] - batch["wrote"],
        }
        for name, seconds in parts.items():
            found.setdefault(name, []).append(1e3 * seconds)
    return {name: fmean(values) for name, values in found.items()}


@dataclass
class Known:
    """A cut whose quiet batches count for ``measured_costs``."""

    quiet: Traced
    front: float
    line_bytes: int
    """Of memory that is read for a row."""
    samples: int
    """Of a request."""
    over: Link
    """Of its shard."""


def measured_costs(cuts: Sequence[Known]) -> ServiceCosts:
    """Constants that fit the batches of some cuts, each of one shard: then nothing runs at the same time."""
    asks, rests, works = _Fit(), _Fit(), _Fit()
    calls, wires, waits, spent = [], [], _Fit(), []
    for cut in cuts:
        for batch in cut.quiet.batches:
            own, n = batch["shards"], batch["n"]
            lookups = sum(s["work"]["lookups"] for s in own)
            sums = sum(s["work"]["answered"] for s in own) / KIB
            asks.add(batch["ask"] - batch["begin"], 1.0, n, lookups)
            rests.add(batch["end"] - batch["came"], 1.0, n * cut.samples, sums)
            calls.append((batch["sent"] - batch["ask"]) / len(own))
            for s in own:
                work = s["work"]
                kib = (work["ids"] * cut.line_bytes + work["answered"]) / KIB
                works.add(work["end"] - work["begin"], 1.0, work["lookups"], kib)
                taken = s["there"] - s["sent"] - on_link(s, cut.over)
                wires.append(max(0.0, taken - work["end"] + work["begin"]))
                waits.add(taken, 1.0, work["lookups"], kib)
            spent.append(batch["ask"] - batch["begin"] + batch["end"] - batch["came"])
    ask, rest, work = asks.solved(), rests.solved(), works.solved()
    micro = 1e6
    wire = fmean(wires)
    usual = asks.usual(ask) + rests.usual(rest)
    return ServiceCosts(
        batch_us=micro * (ask[0] + rest[0]),
        request_us=micro * ask[1],
        sample_us=micro * rest[1],
        call_us=micro * fmean(calls),
        lookup_us=micro * ask[2],
        answer_kib_us=micro * rest[2],
        own_kib_us=micro * work[2],
        shard_call_us=micro * work[0],
        shard_lookup_us=micro * work[1],
        shard_kib_us=micro * work[2],
        wire_us=micro * wire,
        front_us=micro * fmean(cut.front for cut in cuts),
        main_factors=factors(spent, usual.tolist()),
        shard_factors=factors(waits.values, (works.usual(work) + wire).tolist()),
    )


class _Fit:
    """Least squares, no coefficient below 0."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []
        self.values: list[float] = []

    def add(self, value: float, *row: float) -> None:
        """A value, and what it is made of."""
        self.values.append(value)
        self.rows.append(row)

    def solved(self) -> list[float]:
        """The coefficients."""
        found: list[float] = nnls(np.array(self.rows, np.float64), np.array(self.values)).tolist()
        return found

    def usual(self, coefficients: Sequence[float]) -> NDArray[np.float64]:
        """What the values would be by these."""
        return np.array(self.rows, np.float64) @ np.array(coefficients)
