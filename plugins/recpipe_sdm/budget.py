"""Which tables and rows are in DRAM, under one budget of bytes for all tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recpipe.plugin import RowIds, UserError
from recpipe_sdm.admission import counter_bytes
from recpipe_sdm.index import index_bytes

PLACE_BYTES = 4
"""In memory for each id of a table whose rows were pruned: its place among those kept."""


@dataclass(frozen=True)
class Size:
    """A table of ``rows`` ids. ``kept``: the ids that have a row, ascending; None: all of them. ``copies``:
    how many there are in DRAM of a table that is there as a whole."""

    rows: int
    row_bytes: int
    kept: RowIds | None = None
    copies: int = 1

    @property
    def nbytes(self) -> int:
        """What it takes as a whole."""
        if self.kept is None:
            return self.copies * self.rows * self.row_bytes
        return self.copies * len(self.kept) * self.row_bytes + PLACE_BYTES * self.rows


class Lookups(NamedTuple):
    """``rows`` (distinct, ascending, int64 [n]) that were looked up, and how often (int64 [n])."""

    rows: RowIds
    counts: RowIds


Counts = Mapping[str, Lookups]
"""By table."""


@dataclass(frozen=True)
class Plan:
    """``whole``: tables that are in DRAM. ``hot``: rows of each other one that are there at first, sorted.
    ``hits``: the share of the known lookups that finds its row in DRAM; None: none are known."""

    whole: list[str]
    hot: dict[str, RowIds]
    hits: float | None


@dataclass(frozen=True)
class Beside:
    """DRAM beside the rows: of the index for the rows of all tables on the SSD, and of the index and the
    counts of lookups for each slot."""

    adapts: bool
    """Whether rows that are looked up more take the slots of others."""

    def of_rows(self, sizes: Iterable[Size]) -> int:
        """For all ``sizes``; the rows of all tables have one index."""
        sizes = list(sizes)
        pruned = any(size.kept is not None for size in sizes)
        return index_bytes(sum(size.rows for size in sizes), 0, self.adapts, pruned) if sizes else 0

    @property
    def of_slot(self) -> int:
        """For each slot."""
        return index_bytes(0, 1, self.adapts) + (counter_bytes(1) if self.adapts else 0)


def planned(sizes: Mapping[str, Size], counts: Counts, budget: int, adapts: bool = True) -> Plan:
    """Share ``budget`` bytes among tables that may be on the SSD.

    Rows with the most lookups a byte come first (SDM, section 4: bandwidth density). A table that takes no
    more as a whole than its chosen rows and index do is in DRAM as a whole, which leaves its index's bytes to
    others. ``UserError`` if the budget is smaller than the index.
    """
    beside = Beside(adapts)
    whole: list[str] = []
    while True:
        cold = {name: size for name, size in sizes.items() if name not in whole}
        hot = hot_rows(cold, counts, budget - sum(sizes[name].nbytes for name in whole), adapts)
        better = [
            name
            for name, size in cold.items()
            if size.nbytes <= beside.of_rows([size]) + len(hot[name]) * (size.row_bytes + beside.of_slot)
        ]
        if not better:
            break
        whole += better
    total = found = 0
    for name, own in counts.items():
        number = int(own.counts.sum())
        total += number
        if name in whole:
            found += number
        elif name in hot:
            found += int(own.counts[np.isin(own.rows, hot[name], assume_unique=True)].sum())
    return Plan(whole, hot, found / total if total else None)


def hot_rows(
    sizes: Mapping[str, Size], counts: Counts, budget: int, adapts: bool = True
) -> dict[str, RowIds]:
    """The rows of each table to keep in DRAM at first, sorted, int64.

    ``budget``: bytes for rows and index. Rows with the most lookups a byte come first, then those that were
    not looked up, of small tables first. ``UserError`` if the budget is smaller than the index.
    """
    beside = Beside(adapts)
    left = budget - beside.of_rows(sizes.values())
    if left < 0:
        rows, static = sum(size.rows for size in sizes.values()), Beside(False).of_rows(sizes.values())
        less = f"plugins.sdm.admission=static, with which it takes {static:,}, " if adapts else ""
        raise UserError(
            f"plugins.sdm.dram leaves {max(0, budget):,} bytes for tables on the SSD: the index of {rows:,} "
            f"rows alone takes {budget - left:,}; give more, {less}or fewer tables (plugins.sdm.tables)"
        )
    widths = {name: size.row_bytes + beside.of_slot for name, size in sizes.items()}
    chosen, left = _counted(sizes, widths, counts, left)
    for name in sorted(sizes, key=lambda name: sizes[name].nbytes):
        size, own, most = sizes[name], chosen[name], left // widths[name]
        if most > 0:
            near = most + len(own)
            ids = np.arange(min(size.rows, near)) if size.kept is None else size.kept[:near]
            more = ids[~np.isin(ids, own, assume_unique=True)][:most]
            left -= len(more) * widths[name]
            own = np.concatenate((own, more))
        chosen[name] = np.sort(own)
    return chosen


def _counted(
    sizes: Mapping[str, Size], each: Mapping[str, int], counts: Counts, left: int
) -> tuple[dict[str, RowIds], int]:
    """Of the rows that were looked up, those with the most lookups a byte in ``left`` bytes, where a row of a
    table takes ``each``; and what is left then."""
    known: dict[str, Lookups] = {}
    for name, size in sizes.items():
        if name in counts:
            rows, times = counts[name]
            has = slice(None) if size.kept is None else np.isin(rows, size.kept, assume_unique=True)
            known[name] = Lookups(rows[has], times[has])
    if not known:
        return {name: np.empty(0, np.int64) for name in sizes}, left
    lengths = [len(own.rows) for own in known.values()]
    widths = np.repeat([each[name] for name in known], lengths)
    density = np.concatenate([own.counts for own in known.values()]) / widths
    order = np.argsort(-density, kind="stable")
    used = np.cumsum(widths[order])
    fits = order[used <= left]
    chosen = np.zeros(len(order), bool)
    chosen[fits] = True
    parts = np.split(chosen, np.cumsum(lengths)[:-1])
    found = {name: own.rows[part] for (name, own), part in zip(known.items(), parts, strict=True)}
    left -= int(used[len(fits) - 1]) if len(fits) else 0
    return {name: found.get(name, np.empty(0, np.int64)) for name in sizes}, left
