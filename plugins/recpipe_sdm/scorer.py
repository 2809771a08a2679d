"""``TieredScorer``: scores a package whose large tables are on the SSD, with the bits of all rows in DRAM."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.kit import ALIGNMENT, Amount, Lookup, Scorer, SsdStore, StoreLayout, tensors
from recpipe.plugin import UserError
from recpipe_sdm.admission import Admission
from recpipe_sdm.budget import Size, hot_rows
from recpipe_sdm.rows import ROOMS, TieredRows

STAGING_BYTES = 1 << 20
"""Of a store's buffer for blocks on their way."""
MOST_MISSED = 1 << 20
"""Rows that a batch can miss at most, where there are more on the SSD."""


@dataclass(frozen=True)
class Tiering:
    """What of a package is on the SSD.

    ``directory``: where its rows are put. ``dram``: for all rows and the index, in bytes or
    as a share of what the tables take in float32. ``tables``: a pattern.
    ``adapts``: whether rows that are looked up more take the slots of
    others. ``counts``: lookups of each row before, by table, int64 [rows].
    """

    directory: Path
    dram: Amount
    tables: str = "*"
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
    whole_bytes: int
    """Of the tables that are in DRAM."""

    def group_of(self, table: str) -> int:
        """The index of the table's group; -1 if its rows are all in DRAM."""
        return next((i for i, group in enumerate(self.groups) if table in group.base), -1)


def tiered_tables(directory: Path, about: Mapping[str, Mapping[str, object]], how: Tiering) -> TieredTables:
    """Put the package's tables into DRAM and onto the SSD. ``UserError`` if they do not fit."""
    found = {name: tensors(directory / str(table["file"])) for name, table in about.items()}
    cold = [name for name in found if fnmatchcase(name, how.tables) and _fits(found[name])]
    if not cold:
        raise UserError(
            f"plugins.sdm.tables={how.tables}: no table can be on the SSD; tables: {', '.join(found)}"
        )
    whole = [name for name in found if name not in cold]
    sizes = {name: Size(*found[name]["rows"].shape) for name in cold}
    float32 = sum(4 * int(str(t["rows"])) * int(str(t["dimension"])) for t in about.values())
    budget = how.dram.of(float32) - sum(found[name]["rows"].nbytes for name in whole)
    hot = hot_rows(sizes, how.counts or {}, budget)
    starts, end = {}, 0
    for name in whole:
        starts[name], end = end, _aligned(end + found[name]["rows"].nbytes)
    widths = sorted({size.row_bytes for size in sizes.values()})
    members = {width: [name for name in cold if sizes[name].row_bytes == width] for width in widths}
    slots = {width: sum(len(hot[name]) for name in members[width]) for width in widths}
    rooms = {
        width: min(MOST_MISSED, sum(sizes[name].rows for name in members[width]) - slots[width])
        for width in widths
    }
    begins = {}
    for width in widths:
        begins[width], end = end, _aligned(end + (slots[width] + ROOMS * rooms[width]) * width)
    rows = torch.empty(end, dtype=torch.uint8)  # pages that no row is put into take no memory
    for name in whole:
        rows[starts[name] :][: found[name]["rows"].nbytes] = found[name]["rows"].reshape(-1)
    groups = []
    for width in widths:
        starts |= dict.fromkeys(members[width], begins[width])
        places = slots[width] + ROOMS * rooms[width]
        buffer = rows[begins[width] :][: places * width].view(places, width)
        layout = StoreLayout(tuple(members[width]), tuple(sizes[n].rows for n in members[width]), width // 4)

        def fill(table: str, start: int, stop: int) -> NDArray[np.float32]:
            return found[table]["rows"][start:stop].numpy().view(np.float32)

        place = how.directory / f"rows-of-{width}-bytes"
        store = SsdStore.create(layout, fill, place, staging_bytes=STAGING_BYTES, scratch=True)
        base = dict(zip(layout.tables, layout.bases.tolist(), strict=False))
        first = np.concatenate([hot[name] + base[name] for name in members[width]])
        admission = Admission(layout.total_rows) if how.adapts else None
        groups.append(Group(base, TieredRows(store, first, rooms[width], admission, buffer)))
    kept = {name: table["places"].clone() for name, table in found.items() if "places" in table}
    whole_bytes = sum(found[name]["rows"].nbytes for name in whole)
    return TieredTables(about, rows, starts, kept, groups, whole_bytes)


def _fits(table: Mapping[str, torch.Tensor]) -> bool:
    """Rows on the SSD are whole words; a table with pruned rows has few and stays in DRAM."""
    return table["rows"].shape[1] % 4 == 0 and "places" not in table


def _aligned(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT


class TieredLookup(Lookup):
    """One lookup, some of whose tables are on the SSD."""

    def __init__(self, found: dict[str, Any], manifest: dict[str, Any], tables: TieredTables) -> None:
        super().__init__(found, manifest, tables)
        own = [table for _, table in found["parts"]]
        groups = [tables.group_of(table) for table in own]
        bases = [tables.groups[g].base[name] if g >= 0 else 0 for name, g in zip(own, groups, strict=True)]
        self.group, self.base = torch.tensor(groups), torch.tensor(bases)
        """Of each part: its table's group, -1 for one in DRAM, and the number of its row 0 there."""

    def wanted(self, ids: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each id (arranged): its table's group, and its row's number there, int64 [N] each."""
        counts = offsets[:: (len(offsets) - 1) // len(self.group)].diff()
        return self.group.repeat_interleave(counts), ids + self.base.repeat_interleave(counts)


@dataclass
class Announced:
    """A batch whose rows are being read."""

    dense: torch.Tensor
    lookups: list[tuple[torch.Tensor, torch.Tensor]]
    """Rows and offsets of each lookup; rows on the SSD are filled in when they have arrived."""
    reads: list[tuple[list[torch.Tensor], Future[torch.Tensor]]]
    """Of each group: where its rows are among those of each lookup, and their places."""


class TieredScorer(Scorer):
    """As ``Scorer``, with the same bits, for a package whose tables are kept as ``how`` says.

    ``announce`` begins to read a batch's rows, ``score`` waits for them: announce one batch, and no more,
    before the one before it is scored. One thread calls both.
    """

    def __init__(self, directory: Path, how: Tiering) -> None:
        self.how = how
        super().__init__(directory)

    def make_lookups(self) -> list[Lookup]:
        """The lookups, over tables in DRAM and on the SSD."""
        about = self.manifest["tables"]
        self.tables = tiered_tables(self.directory, about, self.how)
        self.tiered = [TieredLookup(found, self.manifest, self.tables) for found in self.manifest["lookups"]]
        return [*self.tiered]

    def __call__(self, dense: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See ``Scorer``."""
        return self.score(self.announce(dense, ids, lengths))

    def announce(self, dense: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor) -> Announced:
        """Begin to read what the batch misses. ``ValueError`` as in ``Scorer``."""
        dense, offsets = self.checked(dense, ids, lengths)
        lookups, groups, numbers = [], [], []
        with torch.inference_mode():
            for lookup in self.tiered:
                own, own_offsets = lookup.arranged(ids, offsets, len(dense))
                group, number = lookup.wanted(own, own_offsets)
                lookups.append((lookup.rows_of(own, own_offsets).clone(), own_offsets))
                groups.append(group)
                numbers.append(number)
            reads = []
            for index, found in enumerate(self.tables.groups):
                at = [(group == index).nonzero().squeeze(1) for group in groups]
                rows = torch.cat([number[here] for number, here in zip(numbers, at, strict=True)])
                reads.append((at, found.tier.announce(rows)))
        return Announced(dense, lookups, reads)

    def score(self, batch: Announced) -> torch.Tensor:
        """Scores float32 [B] of an announced batch; ``StoreError`` names a row that cannot be read."""
        with torch.inference_mode():
            for at, read in batch.reads:
                places = read.result().split([len(here) for here in at])
                for here, (rows, _), found in zip(at, batch.lookups, places, strict=True):
                    rows[here] = found
            pooled = [
                lookup.pooled(rows, offsets)
                for lookup, (rows, offsets) in zip(self.tiered, batch.lookups, strict=True)
            ]
            return self.scores(batch.dense, pooled)

    @property
    def dram_bytes(self) -> int:
        """Rows in DRAM, indexes, and what reading takes."""
        return self.tables.whole_bytes + sum(group.tier.dram_bytes for group in self.tables.groups)

    def close(self) -> None:
        """Wait for reads, and remove the rows from the SSD: the package has them."""
        for group in self.tables.groups:
            group.tier.close()
