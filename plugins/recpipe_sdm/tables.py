"""The tables of a package in one buffer: whole ones, and the slots of those whose rows are on the SSD."""

from __future__ import annotations

import hashlib
import logging
import mmap
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from recpipe_serve import ALIGNMENT, Tables
from safetensors import safe_open

from recpipe.kit import Amount, SsdStore
from recpipe.plugin import RowIds, StoreLayout, UserError
from recpipe_sdm.admission import FULL, Admission
from recpipe_sdm.bags import PooledBags
from recpipe_sdm.budget import Counts, Size, planned
from recpipe_sdm.index import RowIndex
from recpipe_sdm.rows import PAUSE, Shared, TieredRows
from recpipe_sdm.tiers import Newer, Tiers

log = logging.getLogger("recpipe")
STAGING_BYTES = 1 << 20
"""Bytes of a store's buffer for blocks on their way."""
MOST_MISSED = 1 << 20
"""Rows that a batch can miss at most, where there are more on the SSD."""
AT_A_TIME = 1024
"""Rows that are compared and replaced at a time while others are looked up."""
NOTHING = Amount(0, False)
NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python 3.13 names."""
ROWS, PLACES = "rows", "places"
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Tiering:
    """What of a package is on the SSD."""

    directory: Path
    """Where its rows are put."""
    dram: Amount
    """For all rows and the index; a share is one of what the tables take in float32."""
    tables: str = "*"
    """A pattern: tables whose rows may be on the SSD."""
    adapts: bool = True
    """Whether rows that are looked up more take the slots of others."""
    counts: Counts = field(default_factory=dict)
    """Lookups of rows before."""
    pooled: Amount = NOTHING
    """Which part of ``dram`` is for sums of bags that come again."""
    follows: bool = False
    """Whether newer rows come while rows are looked up (``TieredTables.twin``)."""


class RowFile:
    """A table's ``file`` in a package, with a row for each of so many ``ids``, read in parts: it may be
    larger than memory. Where rows were pruned, an id that has none has a row of zeros here."""

    def __init__(self, file: Path, ids: int) -> None:
        self.file, self.ids = file, ids
        with safe_open(file, framework="np") as opened:
            self.row_bytes: int = opened.get_slice(ROWS).get_shape()[1]
            pruned = PLACES in opened.keys()  # noqa: SIM118
            self.places: NDArray[np.int32] | None = opened.get_tensor(PLACES) if pruned else None
            """For each id its row among those kept, or -1; None: each has its own."""

    def size(self, copies: int = 1) -> Size:
        """What it takes in DRAM, so many times as a whole."""
        kept = None if self.places is None else np.flatnonzero(self.places >= 0)
        return Size(self.ids, self.row_bytes, kept, copies)

    def rows(self, start: int, stop: int) -> Bytes:
        """The rows of ids ``start`` to ``stop`` (excluded), uint8 [n, row_bytes]."""
        if self.places is None:
            return self.stored(start, stop)
        at = self.places[start:stop]
        live = at >= 0
        found = np.zeros((len(at), self.row_bytes), np.uint8)
        if live.any():
            low, high = int(at[live].min()), int(at[live].max()) + 1
            found[live] = self.stored(low, high)[at[live] - low]
        return found

    def stored(self, start: int, stop: int) -> Bytes:
        """Rows of the file, uint8 [n, row_bytes]."""
        # Opened anew for these rows: what has been read stays in memory until the file is closed.
        with safe_open(self.file, framework="np") as opened:
            found: Bytes = opened.get_slice(ROWS)[start:stop]
        return found


@dataclass(frozen=True)
class Group:
    """Tables whose rows have the same size, in one tier; ``base``: the number of each one's row 0 there."""

    base: Mapping[str, int]
    tier: TieredRows


class TieredTables(Tables):
    """What ``Lookup`` reads, and the tiers: ``rows`` are whole tables, then the places of each group,
    ``starts`` where each table begins, or its group's places. ``bases``: of each table on the SSD the number
    of its row 0 over all tiers. ``whole_bytes``: of the tables in DRAM. ``again``: where the second copy of
    each whole table begins, if there are two."""

    def __init__(
        self,
        about: dict[str, Any],
        rows: torch.Tensor,
        starts: dict[str, int],
        files: Mapping[str, RowFile],
        groups: list[Group],
        tiers: Tiers,
        bags: PooledBags | None,
        again: Mapping[str, int],
    ) -> None:
        self.bags, self.again = bags, again
        self.replaced = 0
        """Rows of whole tables that updates have changed."""
        self.about, self.rows, self.starts, self.groups, self.tiers = about, rows, starts, groups, tiers
        self.bases = {name: group.tier.first + base for group in groups for name, base in group.base.items()}
        self.whole = {name: file for name, file in files.items() if name not in self.bases}
        self.places = {
            name: torch.from_numpy(file.places)
            for name, file in self.whole.items()
            if file.places is not None
        }
        self.pruned = {name: _digest(file) for name, file in files.items()}
        copies = 2 if again else 1
        self.whole_bytes = sum(file.size(copies).nbytes for file in self.whole.values())

    def twin(self) -> TieredTables:
        """These tables with the other copies of those that are whole."""
        made = copy(self)
        made.starts = {**self.starts, **self.again}
        return made

    def newer(self, changed: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> list[Newer]:
        """What ``Tiers.stage`` takes, of rows that have ``changed``, by table ids int64 [n], ascending, and
        rows uint8 [n, bytes]; those of whole tables are not among them."""
        found = []
        for group in self.groups:
            own = sorted((base, *changed[name]) for name, base in group.base.items() if name in changed)
            if own:
                rows = np.concatenate([ids.numpy() + base for base, ids, _ in own])
                found.append(Newer(group.tier, rows, torch.cat([values for _, _, values in own])))
        return found

    @property
    def version(self) -> int:
        """Another number once rows on the SSD were replaced."""
        return sum(group.tier.changes for group in self.groups)

    def become(self, directory: Path, about: dict[str, Any]) -> int:
        """Replace the rows that differ in the package ``directory``, while they are looked up; returns how
        many do. ``UserError`` if its tables have other sizes, types or pruned rows, before a row is
        replaced."""
        files = {name: RowFile(directory / table["file"], table["rows"]) for name, table in about.items()}
        for name in {**about, **self.about}:
            mine, theirs = (
                [one[name][key] for key in ("rows", "dimension", "type")] if name in one else []
                for one in (self.about, about)
            )
            if mine != theirs:
                raise UserError(
                    f"{directory}: table '{name}' is not as in the package that is served; restart the server"
                )
            if self.pruned[name] != _digest(files[name]):
                raise UserError(
                    f"{directory}: other rows of table '{name}' are pruned than in the package that is "
                    "served; restart the server"
                )
        on_ssd, before = 0, self.replaced
        for name, file in files.items():
            group = next((group for group in self.groups if name in group.base), None)
            if group is not None:
                for start in range(0, file.ids, AT_A_TIME):
                    values = file.rows(start, min(start + AT_A_TIME, file.ids))
                    rows = group.base[name] + np.arange(start, start + len(values))
                    on_ssd += group.tier.replace(rows, values)
                    time.sleep(PAUSE)
                continue
            own = _view(self.rows, self.starts[name], file)
            for start in range(0, len(own), AT_A_TIME):
                values = file.stored(start, min(start + AT_A_TIME, len(own)))
                part = own[start : start + len(values)]
                differ = (part != values).any(axis=1)
                with self.tiers.shared.using:
                    part[differ] = values[differ]
                self.replaced += int(differ.sum())
        self.about = about
        return on_ssd + self.replaced - before


@dataclass
class _Part:
    """Tables whose rows have ``width`` bytes, and the rows of each that are in DRAM at first."""

    width: int
    files: Mapping[str, RowFile]
    hot: Mapping[str, RowIds]
    follows: bool

    def __post_init__(self) -> None:
        ids = tuple(file.ids for file in self.files.values())
        self.layout = StoreLayout(tuple(self.files), ids, self.width // 4)
        self.base = dict(zip(self.layout.tables, self.layout.bases.tolist(), strict=False))
        self.slots = sum(map(len, self.hot.values()))
        self.room = min(MOST_MISSED, self.layout.total_rows - self.slots)
        self.spare = self.layout.total_rows if self.follows else 0
        self.places = self.slots + 2 * self.room + self.spare

    def group(self, how: Tiering, buffer: torch.Tensor, shared: Shared, first: int) -> Group:
        """Put the rows on the SSD, and the first ones into ``buffer``. ``first``: the number of its row 0
        over all tiers."""

        def fill(table: str, start: int, stop: int) -> NDArray[np.float32]:
            words: NDArray[np.float32] = self.files[table].rows(start, stop).view(np.float32)
            return words

        place = how.directory / f"rows-of-{self.width}-bytes"
        store = SsdStore.create(self.layout, fill, place, staging_bytes=STAGING_BYTES, scratch=True)
        store.remedy = "start the server again, which copies the package's rows anew, and check the disk"
        hot = np.concatenate([rows + self.base[name] for name, rows in self.hot.items()])
        return Group(self.base, TieredRows(shared, store, hot, self.room, buffer, first, self.spare))


def _shared(how: Tiering, parts: Sequence[_Part], first: Sequence[int]) -> Shared:
    """The index of all parts' rows, whose numbers begin at ``first``, and the counts of lookups before."""
    pruned = [
        np.flatnonzero(file.places < 0) + part.base[name] + start
        for part, start in zip(parts, first, strict=False)
        for name, file in part.files.items()
        if file.places is not None
    ]
    index = RowIndex(first[-1], np.concatenate([np.empty(0, np.int64), *pruned]), how.adapts)
    if not how.adapts:
        return Shared(index)
    admission = Admission(sum(part.slots for part in parts))
    known = [
        (how.counts[name].rows + start + base, how.counts[name].counts)
        for part, start in zip(parts, first, strict=False)
        for name, base in part.base.items()
        if name in how.counts
    ]
    if known:
        rows, counts = (np.concatenate(each) for each in zip(*known, strict=True))
        # The counters have 16 bits: of the rows that have slots, the least must be below that.
        last = min(len(counts), max(1, admission.slots))
        least = int(np.partition(counts, -last)[-last])
        admission.before(rows, counts // (1 + least // (FULL // 8)))
    return Shared(index, admission)


def tiered_tables(directory: Path, about: dict[str, Any], how: Tiering) -> TieredTables:
    """Put the package's tables into DRAM and onto the SSD. ``UserError`` if they do not fit."""
    files = {name: RowFile(directory / table["file"], table["rows"]) for name, table in about.items()}
    twice = 2 if how.follows else 1
    may = {n: f.size(twice) for n, f in files.items() if fnmatchcase(n, how.tables) and f.row_bytes % 4 == 0}
    if not may:
        raise UserError(
            f"plugins.sdm.tables={how.tables}: no table can be on the SSD; tables: {', '.join(files)}"
        )
    others = sum(file.size(twice).nbytes for name, file in files.items() if name not in may)
    float32 = sum(4 * table["rows"] * table["dimension"] for table in about.values())
    width = max(about[name]["dimension"] for name in may)
    bags = PooledBags(how.pooled.of(float32), width)
    plan = planned(may, how.counts, how.dram.of(float32) - others - bags.nbytes, how.adapts)
    log.info(
        "%d tables are in DRAM, %d on the SSD with %s of %s rows in DRAM%s",
        *(len(files) - len(plan.hot), len(plan.hot)),
        f"{sum(map(len, plan.hot.values())):,}",
        f"{sum(files[name].ids for name in plan.hot):,}",
        "" if plan.hits is None else f"; {plan.hits:.1%} of training's lookups find theirs in DRAM",
    )
    whole = [name for name in files if name not in plan.hot]
    parts = [
        _Part(width, {n: files[n] for n in own}, {n: plan.hot[n] for n in own}, how.follows)
        for width in sorted({files[name].row_bytes for name in plan.hot})
        for own in [[name for name in plan.hot if files[name].row_bytes == width]]
    ]
    copies = whole * twice
    lengths = [_stored(files[name]) * files[name].row_bytes for name in copies]
    lengths += [part.places * part.width for part in parts]
    begins = list(accumulate((-(-n // ALIGNMENT) * ALIGNMENT for n in lengths), initial=0))
    buffer = _reserved(begins[-1])
    starts = dict(zip(whole, begins, strict=False))
    again = dict(zip(whole, begins[len(whole) :], strict=False)) if how.follows else {}
    for name, begin in zip(copies, begins, strict=False):
        own = _view(buffer, begin, files[name])
        for start in range(0, len(own), 1 << 16):
            own[start : start + (1 << 16)] = files[name].stored(start, min(start + (1 << 16), len(own)))
    first = list(accumulate((part.layout.total_rows for part in parts), initial=0))
    shared, groups = _shared(how, parts, first) if parts else Shared(RowIndex(0)), []
    for part, begin, number in zip(parts, begins[len(copies) :], first, strict=False):
        starts |= dict.fromkeys(part.files, begin)
        places = buffer[begin:][: part.places * part.width].view(part.places, part.width)
        groups.append(part.group(how, places, shared, number))
    tiers = Tiers(shared, [group.tier for group in groups])
    kept = bags if bags.size else None
    return TieredTables(about, buffer, starts, files, groups, tiers, kept, again)


def _reserved(nbytes: int) -> torch.Tensor:
    """Bytes uint8 [n], of which pages take no memory until something is put there; there may be more of them
    than the machine has memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, max(1, nbytes), flags=flags), dtype=torch.uint8)


def _stored(file: RowFile) -> int:
    return file.ids if file.places is None else int((file.places >= 0).sum())


def _view(buffer: torch.Tensor, start: int, file: RowFile) -> Bytes:
    """The rows of a whole table in the buffer, uint8 [rows, bytes of a row]."""
    own: Bytes = buffer[start:][: _stored(file) * file.row_bytes].view(-1, file.row_bytes).numpy()
    return own


def _digest(file: RowFile) -> bytes:
    """Identifies which rows were pruned; empty if none was."""
    return b"" if file.places is None else hashlib.sha256(file.places.tobytes()).digest()
