"""Which lookups a model makes of its tables, numbered alike by those who ask and those who answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Part = tuple[int, int, int]
"""A shard, and the rows of a table that it holds: the first one, and how many. The number after those of all
shards is the main server's."""
Parts = Mapping[str, Sequence[Part]]
"""Where the rows of each table are: parts that follow each other."""


class TableLookup(NamedTuple):
    """One way in which the model looks up a table."""

    table: str
    pooling: str
    """``sum`` or ``mean`` of a bag's rows; ``none``: a row for each id."""
    weighted: bool
    """Whether rows are multiplied by their ids' weights."""

    def of_part(self, whole: bool) -> TableLookup:
        """What a shard computes that has the ``whole`` table, or a part of its rows: there a mean is a sum,
        since the shard does not know how many rows of a bag are elsewhere."""
        return self if whole or self.pooling != "mean" else self._replace(pooling="sum")


def table_lookups(manifest: Mapping[str, Any]) -> list[TableLookup]:
    """All lookups of a package's model, each once; their numbers are their places."""
    found = [
        TableLookup(table, about["pooling"], bool(about.get("weighted")))
        for about in manifest["lookups"]
        for _, table in about["parts"]
    ]
    return list(dict.fromkeys(found))


def runs(lookups: Sequence[TableLookup], bags: Sequence[int]) -> Iterator[slice]:
    """The lookups of a request that are one matrix in its answer: those of one pooling that follow each other
    with as many ``bags``. Where rows are not pooled, each lookup is one."""
    return _alike(len(lookups), lambda a, b: bags[a] == bags[b] and _together(lookups[a], lookups[b]))


def together(lookups: Sequence[TableLookup]) -> Iterator[slice]:
    """The lookups of a request that one operator computes: those of one pooling that follow each other."""
    return _alike(len(lookups), lambda a, b: _together(lookups[a], lookups[b]))


def _alike(count: int, alike: Callable[[int, int], bool]) -> Iterator[slice]:
    """So many things in slices of those that follow each other and are like the first one of these."""
    begin = 0
    for at in range(1, count + 1):
        if at == count or not alike(begin, at):
            yield slice(begin, at)
            begin = at


def _together(one: TableLookup, other: TableLookup) -> bool:
    return one.pooling == other.pooling != "none" and one.weighted == other.weighted
