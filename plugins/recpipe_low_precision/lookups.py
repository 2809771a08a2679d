"""Measures how fast tables of each type are looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.kit import RowType, median_seconds, seconds_by_round
from recpipe_low_precision.choices import FLOAT, Assignment, Choice
from recpipe_low_precision.replay import Stub
from recpipe_low_precision.slices import Slice

LEAST_SECONDS = 0.02
"""The least time of one timing, for which the slice is looked up several times."""
FILLED = 0x3C
"""The byte that tables are filled with: float32 0.0115, float16 1.06. A lookup's time does not depend on
values, unless they are denormal or in pages that were never written."""
Run = Callable[[], object]


@dataclass(frozen=True)
class LookupSpeed:
    """Lookups of all tables, ids a second: medians of interleaved rounds."""

    float32: float
    low_precision: float
    ratio: float
    """Median over rounds of the ratio within a round."""
    least: float
    most: float
    """The smallest and the largest ratio of a round."""


def compare(slice_: Slice, assignment: Assignment) -> LookupSpeed:
    """Speed of looking up the slice's own ids in tables of full size: rows in float32, and by ``assignment``,
    through the same operator. Both are in memory at the same time."""
    ways = [
        [
            _lookups(
                stub, stub.configs, {name: chosen[table] for name, table in stub.tables.items()}, stub.asked
            )
            for stub in slice_.stubs
        ]
        for chosen in (dict.fromkeys(assignment, FLOAT), assignment)
    ]
    ids = sum(int(asked.values().numel()) for stub in slice_.stubs for asked in stub.asked)
    with torch.no_grad():
        before, after = seconds_by_round([_in_turn(way) for way in ways], least=LEAST_SECONDS)
    ratios = [float32 / low for float32, low in zip(before, after, strict=True)]
    return LookupSpeed(ids / median(before), ids / median(after), median(ratios), min(ratios), max(ratios))


def seconds_of(
    slice_: Slice, choices: Sequence[Choice], may: Callable[[str, Choice], bool]
) -> dict[tuple[str, Choice], float]:
    """Seconds that looking up the slice's ids takes for each table and each choice that it ``may`` have, in a
    table of full size."""
    found: dict[tuple[str, Choice], float] = {}
    for stub in slice_.stubs:
        first = 0
        for config in stub.configs:
            own = list(range(first, first + len(config.feature_names)))
            first += len(own)
            asked = [features.permute(own) for features in stub.asked]
            table = stub.tables[config.name]
            allowed = [choice for choice in choices if may(table, choice)]
            ways = [_lookups(stub, [config], {config.name: c}, asked) for c in allowed]
            with torch.no_grad():
                times = median_seconds(ways, least=LEAST_SECONDS)
            found |= {(table, c): time for c, time in zip(allowed, times, strict=True)}
    return found


def _lookups(
    stub: Stub, configs: Sequence[Any], choices: Mapping[str, Choice], asked: Sequence[KeyedJaggedTensor]
) -> Run:
    """Looks up all that was ``asked`` in new tables of the collection that ``stub`` stands for; pruned ones
    are taken as whole."""
    tables = stub.low_precision(
        configs, {config.name: RowType(choices[config.name].kind) for config in configs}
    )
    for config in configs:
        tables.rows_of(config.name).fill_(FILLED)

    def run() -> None:
        for features in asked:
            tables(features)

    return run


def _in_turn(runs: Sequence[Run]) -> Run:
    def run() -> None:
        for part in runs:
            part()

    return run
