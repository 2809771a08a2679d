"""Measures how fast tables of each type are looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.timing import seconds_by_round
from recpipe_low_precision.bags import RowType
from recpipe_low_precision.row_types import FLOAT, Assignment, Choice
from recpipe_low_precision.slices import Slice, Stub

LEAST_SECONDS = 0.02
"""The least time of one timing, for which the slice is looked up several times."""
FILLED = 0x3C
"""The byte that rows are filled with: float32 0.0115, float16 1.06. A lookup's time does not depend on
values, unless they are denormal or in pages that were never written."""
LARGEST_BYTES = 128 << 20
"""Most bytes of the float32 tables that are looked up at a time. They are larger than what a processor keeps
of addresses and rows, and the ids, which say what it can keep, are the slice's own."""
CLEAR = 0.75
"""The share of the rounds in which one must be faster than the other to be taken as faster."""
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
    """Speed of looking up the slice's own ids: rows in float32, and by ``assignment``, through the same
    operator. Tables are as large as they are, or together ``LARGEST_BYTES`` in float32."""
    most = _largest([config for stub in slice_.stubs for config in stub.configs])
    cut = [(stub, *_cut(stub.configs, stub.asked, most)) for stub in slice_.stubs]
    ways = [
        [
            _lookups(stub, configs, {name: chosen[table] for name, table in stub.tables.items()}, asked)
            for stub, configs, asked in cut
        ]
        for chosen in (dict.fromkeys(assignment, FLOAT), assignment)
    ]
    ids = sum(int(asked.values().numel()) for stub in slice_.stubs for asked in stub.asked)
    with torch.no_grad():
        before, after = seconds_by_round(
            [partial(lambda runs: [run() for run in runs], way) for way in ways], least=LEAST_SECONDS
        )
    ratios = [float32 / low for float32, low in zip(before, after, strict=True)]
    return LookupSpeed(ids / median(before), ids / median(after), median(ratios), min(ratios), max(ratios))


Rounds = Mapping[tuple[str, Choice], Sequence[float]]
"""The seconds of several interleaved rounds, by table and how it is kept."""


def rounds_of(slice_: Slice, choices: Sequence[Choice], may: Callable[[str, Choice], bool]) -> Rounds:
    """Seconds that looking up the slice's ids takes for each table and each choice that it ``may`` have, in a
    table that is as large as it is, or ``LARGEST_BYTES`` in float32. Pruned ones are taken as whole."""
    found: dict[tuple[str, Choice], Sequence[float]] = {}
    for stub in slice_.stubs:
        first = 0
        for config in stub.configs:
            own = list(range(first, first + len(config.feature_names)))
            first += len(own)
            asked = [features.permute(own) for features in stub.asked]
            cut, asked = _cut([config], asked, _largest([config]))
            table = stub.tables[config.name]
            allowed = [choice for choice in choices if may(table, choice)]
            kinds = list(dict.fromkeys(choice.kind for choice in allowed))
            ways = [_lookups(stub, cut, {config.name: Choice(kind)}, asked) for kind in kinds]
            with torch.no_grad():
                times = dict(zip(kinds, seconds_by_round(ways, least=LEAST_SECONDS), strict=True))
            found |= {(table, choice): times[choice.kind] for choice in allowed}
    return found


def _largest(configs: Sequence[Any]) -> int:
    """Bytes of float32 rows that a table among ``configs`` may have, for all to have ``LARGEST_BYTES``."""
    left, sizes = LARGEST_BYTES, sorted(4 * c.num_embeddings * c.embedding_dim for c in configs)
    for before, size in enumerate(sizes):
        share = left // (len(sizes) - before)
        if size > share:
            return share
        left -= size
    return LARGEST_BYTES


def _cut(
    configs: Sequence[Any], asked: Sequence[KeyedJaggedTensor], most: int
) -> tuple[list[Any], list[KeyedJaggedTensor]]:
    """Tables of at most ``most`` bytes, with ids after the last row counted on from the first, so that ids
    that are looked up together are rows apart as before."""
    rows = [min(c.num_embeddings, max(1, most // (4 * c.embedding_dim))) for c in configs]
    per = torch.tensor([own for own, c in zip(rows, configs, strict=True) for _ in c.feature_names])
    found = []
    for ids in asked:
        sizes = torch.tensor(ids.length_per_key())
        folded = (ids.values() % per.repeat_interleave(sizes)).to(ids.values().dtype)
        found.append(
            KeyedJaggedTensor(ids.keys(), folded, ids.weights_or_none(), ids.lengths(), ids.offsets())
        )
    return [replace(c, num_embeddings=own) for c, own in zip(configs, rows, strict=True)], found


def ratios(rounds: Rounds, table: str, choice: Choice) -> list[float]:
    """How fast the table is looked up if it is kept so, over float32 rows, in each round."""
    return [float32 / low for float32, low in zip(rounds[table, FLOAT], rounds[table, choice], strict=True)]


def is_slower(rounds: Rounds, table: str, choice: Choice) -> bool:
    """Whether lookups are slower than of float32 rows in most rounds."""
    if choice.kind == FLOAT.kind:
        return False
    return sum(ratio < 1 for ratio in ratios(rounds, table, choice)) >= CLEAR * len(rounds[table, choice])


def seconds(rounds: Rounds, table: str, choice: Choice) -> float:
    """Median seconds. Of a choice that is not faster than float32 in most rounds, at least those of float32:
    what only seems to be faster saves no time."""
    own, float32 = median(rounds[table, choice]), median(rounds[table, FLOAT])
    faster = sum(ratio > 1 for ratio in ratios(rounds, table, choice)) >= CLEAR * len(rounds[table, choice])
    return own if faster or choice == FLOAT else max(own, float32)


def _lookups(
    stub: Stub, configs: Sequence[Any], choices: Mapping[str, Choice], asked: Sequence[KeyedJaggedTensor]
) -> Run:
    """Looks up all that was ``asked`` in new tables of the collection that ``stub`` stands for; pruned ones
    are taken as whole. Only the pages of rows that are looked up take memory."""
    tables = stub.low_precision(
        configs, {config.name: RowType(choices[config.name].kind) for config in configs}
    )
    for features in asked:
        parts = iter(features.values().split(features.length_per_key()))
        for config in configs:
            rows = tables.rows_of(config.name)
            for _ in config.feature_names:
                rows[next(parts)] = FILLED

    def run() -> None:
        for features in asked:
            tables(features)

    return run
