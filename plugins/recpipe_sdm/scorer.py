"""``TieredScorer``: scores a package whose large tables are on the SSD, with the bits of all rows in DRAM."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.errors import UserError
from recpipe.inference.score import ALIGNMENT, Lookup, Scorer, tensors
from recpipe.kit import SsdStore, StoreLayout
from recpipe_sdm.admission import Admission
from recpipe_sdm.budget import Size, hot_rows
from recpipe_sdm.rows import ROOMS, TieredRows

STAGING_BYTES = 1 << 20
"""Of a store's buffer for blocks on their way."""


@dataclass(frozen=True)
class Tiering:
    """What of a package is on the SSD.

    ``directory``: where its rows are put. ``dram``: bytes for all rows and the index. ``tables``: a pattern.
    ``room``: rows that a batch can miss. ``adapts``: whether rows that are looked up more take the slots of
    others. ``counts``: lookups of each row before, by table, int64 [rows].
    """

    directory: Path
    dram: int
    tables: str = "*"
    room: int = 65_536
    adapts: bool = True
    counts: Mapping[str, NDArray[np.int64]] | None = None


@dataclass
class Group:
    """Tables of one row size, in one tier; ``base``: the number of each one's row 0."""

    base: dict[str, int]
    tier: TieredRows


@dataclass
class TieredTables:
    """The tables of a package in one buffer: whole ones, and the slots and rooms of those on the SSD.

    What ``Lookup`` reads: ``about``, ``rows``, ``starts``, ``places``.
    """

    about: Mapping[str, Mapping[str, object]]
    rows: torch.Tensor
    starts: dict[str, int]
    places: dict[str, torch.Tensor]
    groups: list[Group]

    def group_of(self, table: str) -> int:
        """The index of the table's group; -1 if its rows are all in DRAM."""
        return next((i for i, group in enumerate(self.groups) if table in group.base), -1)


def tiered_tables(directory: Path, about: Mapping[str, Mapping[str, object]], how: Tiering) -> TieredTables:
    """Put the package's tables into DRAM and onto the SSD. ``UserError`` if they do not fit."""
    found = {name: tensors(directory / str(table["file"])) for name, table in about.items()}
    cold = [name for name in found if fnmatchcase(name, how.tables) and _fits(found[name])]
    if not cold:
        raise UserError(f"plugins.sdm.tables={how.tables}: no table can be on the SSD; tables: {', '.join(found)}")
    whole = [name for name in found if name not in cold]
    sizes = {name: Size(*found[name]["rows"].shape) for name in cold}
    budget = how.dram - sum(found[name]["rows"].nbytes for name in whole)
    hot = hot_rows(sizes, how.counts or {}, budget)
    starts, end = {}, 0
    for name in whole:
        starts[name], end = end, _aligned(end + found[name]["rows"].nbytes)
    widths = sorted({size.row_bytes for size in sizes.values()})
    members = {width: [name for name in cold if sizes[name].row_bytes == width] for width in widths}
    slots = {width: sum(len(hot[name]) for name in members[width]) for width in widths}
    begins = {}
    for width in widths:
        begins[width], end = end, _aligned(end + (slots[width] + ROOMS * how.room) * width)
    rows = torch.empty(end, dtype=torch.uint8)  # pages that no row is put into take no memory
    for name in whole:
        rows[starts[name] :][: found[name]["rows"].nbytes] = found[name]["rows"].reshape(-1)
    groups = []
    for width in widths:
        starts |= dict.fromkeys(members[width], begins[width])
        places = slots[width] + ROOMS * how.room
        buffer = rows[begins[width] :][: places * width].view(places, width)
        layout = StoreLayout(tuple(members[width]), tuple(sizes[n].rows for n in members[width]), width // 4)

        def fill(table: str, start: int, stop: int) -> NDArray[np.float32]:
            return found[table]["rows"][start:stop].numpy().view(np.float32)

        place = how.directory / f"rows-of-{width}-bytes"
        store = SsdStore.create(layout, fill, place, staging_bytes=STAGING_BYTES, scratch=True)
        base = dict(zip(layout.tables, layout.bases.tolist(), strict=False))
        first = np.concatenate([hot[name] + base[name] for name in members[width]])
        admission = Admission(layout.total_rows) if how.adapts else None
        groups.append(Group(base, TieredRows(store, first, how.room, admission, buffer)))
    kept = {name: table["places"].clone() for name, table in found.items() if "places" in table}
    return TieredTables(about, rows, starts, kept, groups)


def _fits(table: Mapping[str, torch.Tensor]) -> bool:
    """Rows on the SSD are whole words; a table with pruned rows has few and stays in DRAM."""
    return table["rows"].shape[1] % 4 == 0 and "places" not in table


def _aligned(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT


class TieredLookup(Lookup):
    """One lookup, some of whose tables are on the SSD."""

    def __init__(self, found: dict, manifest: dict, tables: TieredTables) -> None:  # type: ignore[type-arg]
        super().__init__(found, manifest, tables)
        self.groups = tables.groups
        own = [table for _, table in found["parts"]]
        self.group_of = [tables.group_of(table) for table in own]
        self.base = torch.tensor([self.groups[g].base[t] if g >= 0 else 0 for t, g in zip(own, self.group_of, strict=True)])

    def announce(self, ids: torch.Tensor, offsets: torch.Tensor) -> list[tuple[torch.Tensor, Future[torch.Tensor]]]:
        """Begin to read the rows of ``ids`` that are not in DRAM."""
