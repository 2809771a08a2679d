"""The tables of a package in one buffer: whole ones, and the slots of those whose rows are on the SSD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.kit import ALIGNMENT, Amount, SsdStore, StoreLayout, Tables, tensors
from recpipe.plugin import RowIds, UserError
from recpipe_sdm.admission import Admission
from recpipe_sdm.budget import Size, hot_rows
from recpipe_sdm.rows import ROOMS, TieredRows

STAGING_BYTES = 1 << 20
"""Of a store's buffer for blocks on their way."""
MOST_MISSED = 1 << 20
"""Rows that a batch can miss at most, where there are more on the SSD."""


@dataclass(frozen=True)
class Tiering:
    """What of a package is on the SSD."""

    directory: Path
    """Where its rows are put."""
    dram: Amount
    """For all rows and the index; a share is one of what the tables take in float32."""
    tables: str = "*"
    """A pattern: tables whose rows are on the SSD."""
    adapts: bool = True
    """Whether rows that are looked up more take the slots of others."""
    counts: Mapping[str, NDArray[np.int64]] | None = None
    """Lookups of each row before, by table, int64 [rows]."""


@dataclass(frozen=True)
class Group:
    """Tables whose rows have the same size, in one tier; ``base``: the number of each one's row 0."""

    base: Mapping[str, int]
    tier: TieredRows


class TieredTables(Tables):
    """What ``Lookup`` reads, and the tiers: ``rows`` are whole tables, then the slots and rooms of each
    group, ``starts`` where each table begins, or its group's slots. ``whole_bytes``: of the tables in
    DRAM."""

    def __init__(
        self,
        about: dict[str, Any],
        rows: torch.Tensor,
        starts: dict[str, int],
        places: dict[str, torch.Tensor],
        groups: list[Group],
        whole_bytes: int,
    ) -> None:
        self.about, self.rows, self.starts, self.places = about, rows, starts, places
        self.groups, self.whole_bytes = groups, whole_bytes

    def group_of(self, table: str) -> int:
        """The index of the table's group; -1 if its rows are all in DRAM."""
        return next((i for i, group in enumerate(self.groups) if table in group.base), -1)


@dataclass(frozen=True)
class _Part:
    """Tables whose rows have ``width`` bytes, and the rows of each that are in DRAM at first."""

    width: int
    rows: Mapping[str, torch.Tensor]
    hot: Mapping[str, RowIds]

    @property
    def layout(self) -> StoreLayout:
        return StoreLayout(tuple(self.rows), tuple(len(r) for r in self.rows.values()), self.width // 4)

    @property
    def slots(self) -> int:
        return sum(map(len, self.hot.values()))

    @property
    def room(self) -> int:
        return min(MOST_MISSED, self.layout.total_rows - self.slots)

    @property
    def places(self) -> int:
        return self.slots + ROOMS * self.room

    def group(self, how: Tiering, buffer: torch.Tensor) -> Group:
        """Put the rows on the SSD, and the first ones into ``buffer``."""
        layout = self.layout

        def fill(table: str, start: int, stop: int) -> NDArray[np.float32]:
            words: NDArray[np.float32] = self.rows[table][start:stop].numpy().view(np.float32)
            return words

        place = how.directory / f"rows-of-{self.width}-bytes"
        store = SsdStore.create(layout, fill, place, staging_bytes=STAGING_BYTES, scratch=True)
        base = dict(zip(layout.tables, layout.bases.tolist(), strict=False))
        first = np.concatenate([rows + base[name] for name, rows in self.hot.items()])
        admission = Admission(layout.total_rows) if how.adapts else None
        return Group(base, TieredRows(store, first, self.room, admission, buffer))


def tiered_tables(directory: Path, about: dict[str, Any], how: Tiering) -> TieredTables:
    """Put the package's tables into DRAM and onto the SSD. ``UserError`` if they do not fit."""
    found = {name: tensors(directory / table["file"]) for name, table in about.items()}
    rows = {name: table["rows"] for name, table in found.items()}
    cold = [name for name in found if fnmatchcase(name, how.tables) and _fits(found[name])]
    if not cold:
        raise UserError(
            f"plugins.sdm.tables={how.tables}: no table can be on the SSD; tables: {', '.join(found)}"
        )
    whole = [name for name in found if name not in cold]
    whole_bytes = sum(rows[name].nbytes for name in whole)
    float32 = sum(4 * table["rows"] * table["dimension"] for table in about.values())
    sizes = {name: Size(*rows[name].shape) for name in cold}
    hot = hot_rows(sizes, how.counts or {}, how.dram.of(float32) - whole_bytes, how.adapts)
    parts = [
        _Part(width, {n: rows[n] for n in own}, {n: hot[n] for n in own})
        for width in sorted({size.row_bytes for size in sizes.values()})
        for own in [[name for name in cold if sizes[name].row_bytes == width]]
    ]
    lengths = [rows[name].nbytes for name in whole] + [part.places * part.width for part in parts]
    begins = list(accumulate((-(-n // ALIGNMENT) * ALIGNMENT for n in lengths), initial=0))
    buffer = torch.empty(begins[-1], dtype=torch.uint8)  # pages that no row is put into take no memory
    starts = dict(zip(whole, begins, strict=False))
    for name in whole:
        buffer[starts[name] :][: rows[name].nbytes] = rows[name].reshape(-1)
    groups = []
    for part, begin in zip(parts, begins[len(whole) :], strict=False):
        starts |= dict.fromkeys(part.rows, begin)
        slots = buffer[begin:][: part.places * part.width].view(part.places, part.width)
        groups.append(part.group(how, slots))
    kept = {name: table["places"].clone() for name, table in found.items() if "places" in table}
    return TieredTables(about, buffer, starts, kept, groups, whole_bytes)


def _fits(table: Mapping[str, torch.Tensor]) -> bool:
    """Rows on the SSD are whole words; a table with pruned rows has few and stays in DRAM."""
    return table["rows"].shape[1] % 4 == 0 and "places" not in table
