"""Folds many similar lines of a report into few: tables of the same kind, keys with the same value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recpipe.report import figures

LARGEST = 8
"""How many tables have a line of their own in a report."""
SEVERAL = 4
"""Fewer lines than this stay as they are."""


@dataclass(frozen=True)
class Fold:
    """One table, or several smaller ones together."""

    name: str
    rows: str
    dim: str
    weight_bytes: int
    state_bytes: int
    resident_rows: int | None
    resident_bytes: int | None
    cold_bytes: int
    sharding: str


def folded(tables: Sequence[Mapping[str, Any]], largest: int) -> list[Fold]:
    """The ``largest`` of ``memory.tables`` by bytes, largest first, and the others in one line if they are
    several."""
    ordered = sorted(tables, key=lambda table: -(table["weight_bytes"] + table["state_bytes"]))
    if len(ordered) <= largest + 1:
        largest = len(ordered)
    lines = [_fold([table], table["name"]) for table in ordered[:largest]]
    rest = ordered[largest:]
    return [*lines, _fold(rest, f"{len(rest)} smaller tables")] if rest else lines


def _fold(tables: Sequence[Mapping[str, Any]], name: str) -> Fold:
    def total(key: str) -> int | None:
        values = [table[key] for table in tables]
        return None if None in values else sum(values)

    return Fold(
        name,
        span([table["rows"] for table in tables]),
        span([table["dim"] for table in tables]),
        total("weight_bytes") or 0,
        total("state_bytes") or 0,
        total("resident_rows"),
        total("resident_bytes"),
        total("cold_bytes") or 0,
        ", ".join(dict.fromkeys(table["sharding"] for table in tables if table["sharding"])),
    )


def summary(tables: Sequence[Mapping[str, Any]]) -> str:
    """``26 tables, 3 to 200,000 rows``; '' without tables."""
    if not tables:
        return ""
    rows = [table["rows"] for table in tables]
    noun = "table" if len(rows) == 1 else "tables"
    return f"{len(rows)} {noun}, {span(rows)} rows, {figures.count(sum(rows))} in all"


def span(values: Sequence[float]) -> str:
    """``3 to 200,000``, or the one value."""
    low, high = figures.count(min(values)), figures.count(max(values))
    return low if low == high else f"{low} to {high}"


def flat(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    """A nested mapping as rows of dotted key and value. Of ``SEVERAL`` or more keys with the same value, or
    of one number each, there is one row."""
    if isinstance(tree, Mapping) and tree:
        return _mapping(tree, prefix)
    if isinstance(tree, list) and any(isinstance(item, Mapping | list) for item in tree):
        return [row for index, item in enumerate(tree) for row in flat(item, f"{prefix}[{index}]")]
    if isinstance(tree, list):
        return [(prefix, named([str(item) for item in tree]) or "-")]
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
            rows += flat(value, f"{start}({named(keys)})")
    return rows


def named(names: Sequence[str], most: int = LARGEST) -> str:
    """The names, or of more than ``most`` their number, the first two and the last."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{len(names)}: {names[0]}, {names[1]} … {names[-1]}"


def shards(tables: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tables of a sharding plan, those with the same sharding, kernel and ranks in one row."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, table in tables.items():
        ranks = ", ".join(map(str, table["ranks"]))
        alike.setdefault((table["sharding"], table["kernel"], ranks), []).append(name)
    return [
        {
            "names": named(names),
            "sharding": sharding,
            "kernel": kernel,
            "ranks": ranks,
            "bytes": sum(tables[name]["bytes"] for name in names),
            "predicted_ms": _sum([tables[name]["predicted_ms"] for name in names]),
        }
        for (sharding, kernel, ranks), names in alike.items()
    ]


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
