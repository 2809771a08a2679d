"""The popularity profile: sampled access counts of all rows, kept between runs and shared by plugins.

A share of the epoch's batches is chosen at random (seeded, without replacement) and read directly. The file
holds the rows that were seen, their counts, and a description of the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import ALONE, Spread, compiled
from recpipe.common.own_cache import CACHE_HOME, own_folder, require_own
from recpipe.data.dataset import chosen_batches
from recpipe.errors import UserError
from recpipe.plugin.bags import RowIds
from recpipe.plugin.context import Context

VERSION = 1
SAMPLE = 0.05
"""The default share of batches to count. Plugins that use the same share use the same file."""


@dataclass(frozen=True)
class Profile:
    """Global ``rows`` (int64 [U], sorted, distinct) and how often each was looked up (int32 [U], above 0)."""

    rows: RowIds
    counts: NDArray[np.int32]
    reused: bool
    """Whether it was read from a file instead of counted."""

    def dense(self, total: int) -> NDArray[np.int32]:
        """Counts of all ``total`` rows, int32 [total]."""
        counts = np.zeros(total, np.int32)
        counts[self.rows] = self.counts
        return counts


def table_bases(ctx: Context) -> RowIds:
    """Global number of each table's row 0, and of the row after the last: int64 [T + 1]."""
    rows = [table.rows for table in ctx.tables.values()]
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)))


def group_rows(ctx: Context, group: int) -> slice:
    """The numbers of a group's rows among the rows of all tables."""
    rows = [sum(ctx.tables[name].rows for name in g.tables) for g in ctx.groups]
    return slice(sum(rows[:group]), sum(rows[: group + 1]))


def load_profile(ctx: Context, sample: float = SAMPLE) -> Profile:
    """The profile of a ``sample`` share of the batches: from ``ctx.cache_dir``, or counted and saved there.

    Raises ``UserError`` if the file is damaged or for other data, and if the folder cannot be used.
    """
    meta = {
        "version": VERSION,
        "data": ctx.data_fingerprint,
        "tables": [[table.name, table.rows] for table in ctx.tables.values()],
        "sample": sample,
        "seed": ctx.seed,
        "batch_size": ctx.batch_size,
    }
    if ctx.cache_dir is None:
        return Profile(*_count(ctx, sample), reused=False)
    key = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()[:24]
    path = ctx.cache_dir / "profiles" / f"{key}.npz"
    require_own(path.parent, f"{CACHE_HOME} (or data.cache_dir)")
    found = _read(path, meta)
    if found is not None:
        return found
    rows, counts = _count(ctx, sample)
    _write(path, meta, rows, counts)
    return Profile(rows, counts, reused=False)


def _count(ctx: Context, sample: float) -> tuple[RowIds, NDArray[np.int32]]:
    """Count the chosen batches."""
    bases = table_bases(ctx)
    counts = np.zeros(int(bases[-1]), np.int32)
    batches = max(1, -(-ctx.epoch_samples // ctx.batch_size))
    chosen = min(batches, math.ceil(sample * batches))
    for batch in chosen_batches(ctx.batches, batches, chosen, ctx.seed):
        seen, times = np.unique(ctx.lookups(batch).rows, return_counts=True)
        counts[seen] += times.astype(np.int32)
    rows = np.flatnonzero(counts)
    return rows, counts[rows]


def _write(path: Path, meta: dict[str, Any], rows: RowIds, counts: NDArray[np.int32]) -> None:
    """Write the file under a temporary name and rename it, so that a reader sees all of it or nothing."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        own_folder(path.parent)
        partial.touch(0o600)
        with partial.open("wb") as file:
            np.savez(file, meta=np.array(json.dumps(meta)), rows=rows, counts=counts)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise _unusable("write", path, error) from error
    finally:
        with suppress(OSError):
            partial.unlink()


def _unusable(verb: str, path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot {verb} the popularity profile {path} ({error.strerror or error}): free space there, or set "
        "XDG_CACHE_HOME (for data from files also data.cache_dir) to a folder that can be written"
    )


def _read(path: Path, meta: dict[str, Any]) -> Profile | None:
    """The profile that an earlier run has saved, or None."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            found, rows, counts = json.loads(str(file["meta"])), file["rows"], file["counts"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable("read", path, error) from error
    # The errors of zip archives, zlib, array headers and JSON have no common base class.
    except Exception as error:
        raise UserError(f"the popularity profile {path} is damaged; delete it, it is made anew") from error
    if found != meta:
        raise UserError(f"the popularity profile {path} is of other data or tables; delete it")
    total = sum(rows_of for _, rows_of in meta["tables"])
    typed = (rows.dtype, counts.dtype, rows.ndim) == (np.int64, np.int32, 1) and rows.shape == counts.shape
    inside = typed and (not len(rows) or bool(rows[0] >= 0 and rows[-1] < total))
    if not inside or not bool((np.diff(rows) > 0).all()) or not bool((counts > 0).all()):
        raise UserError(f"the popularity profile {path} is damaged; delete it, it is made anew")
    return Profile(rows, counts, reused=True)


CAP = 1 << 16
"""Counts from this one on are put in order; of lower ones it is enough to know how many are equal."""


CHUNK = 1 << 22
"""Rows whose counts are read at a time."""


Counts = NDArray[np.int32]


class CountsOfRows(Protocol):
    """Counts by row: an array int32 [rows], or what reads some of them as one."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Counts:
        """Those of a slice of rows, or of rows int64 [n]."""


def top_rows(
    counts: CountsOfRows, size: int, resident: RowIds | None = None, spread: Spread = ALONE
) -> RowIds:
    """The ``size`` rows with the highest counts above 0, as global row numbers, int64, sorted.

    Of rows with equal counts, those that are already ``resident`` (distinct rows; below 0: none) come first
    (moving a row for nothing costs two transfers), then lower row numbers. ``spread``: threads that share the
    work.
    """
    if size == 0:
        return np.empty(0, np.int64)
    parts = spread.parts(len(counts))
    counted = spread.map(lambda part: _counted(counts, part), parts)
    rows, own_counts, numbers = zip(*counted, strict=True)
    if sum(map(len, rows)) <= size:
        return np.concatenate(rows)
    least, tied = _least(np.sum(numbers, axis=0), size, own_counts)
    marks = np.zeros(len(counts), bool)
    if resident is not None:
        held = resident[resident >= 0]
        mine = [held[part] for part in spread.parts(len(held))]
        spread.map(lambda some: _mark(marks, counts[some], least, some), mine)
    found = spread.map(lambda of, own: _tally(of, own, least, marks), rows, own_counts)
    others, works = max(0, tied - sum(marked for _, _, marked in found)), []
    for above, without, with_mark in found:
        taken = min(others, without), min(tied - others, with_mark)
        works.append((*taken, above + sum(taken)))
        others, tied = others - taken[0], tied - sum(taken)
    chosen = spread.map(lambda of, own, work: _chosen(of, own, least, marks, *work), rows, own_counts, works)
    return np.concatenate(chosen)


def _counted(counts: CountsOfRows, part: slice) -> tuple[RowIds, Counts, NDArray[np.int64]]:
    """The rows of a ``part`` with ``counts`` above 0, and their counts; how many have each count below
    ``CAP``, and how many a higher one. Most rows of large tables have none, so that what follows is short."""
    numbers, found = np.zeros(CAP + 1, np.int64), [(np.empty(0, np.int64), np.empty(0, np.int32))]
    for start in range(part.start, part.stop, CHUNK):
        some = counts[slice(start, min(start + CHUNK, part.stop))]
        found.append(_above_zero(some, start, numbers))
    rows, own = map(np.concatenate, zip(*found, strict=True))
    return rows, own, numbers


@compiled
def _above_zero(counts: Counts, first: int, numbers: NDArray[np.int64]) -> tuple[RowIds, Counts]:
    """The rows, from row ``first`` on, with ``counts`` above 0, and their counts, which ``numbers`` gets."""
    rows, own = np.empty(len(counts), np.int64), np.empty(len(counts), np.int32)
    found = 0
    for row in range(len(counts)):
        if counts[row]:
            rows[found], own[found] = first + row, counts[row]
            numbers[min(counts[row], CAP)] += 1
            found += 1
    return rows[:found].copy(), own[:found].copy()


def _least(numbers: NDArray[np.int64], size: int, counts: Sequence[Counts]) -> tuple[int, int]:
    """The least of the ``size`` highest of more ``counts``, and how many of these are equal to it.
    ``numbers``: how many are equal to each below ``CAP``, and how many are higher."""
    at_least = np.append(np.cumsum(numbers[:0:-1])[::-1], 0)  # from 1 on
    least = int(np.flatnonzero(at_least >= size)[-1]) + 1
    if least < CAP:
        return least, size - int(at_least[least])
    high = np.sort(np.concatenate([part[part >= CAP] for part in counts]))
    least = int(high[len(high) - size])
    return least, size - int(np.count_nonzero(high > least))


@compiled
def _mark(marks: NDArray[np.bool_], counts: Counts, least: int, resident: RowIds) -> None:
    """Mark those ``resident`` rows whose ``counts`` are ``least``."""
    for i in range(len(resident)):
        if counts[i] == least:
            marks[resident[i]] = True


@compiled
def _tally(rows: RowIds, counts: Counts, least: int, marks: NDArray[np.bool_]) -> tuple[int, int, int]:
    """How many ``rows`` have ``counts`` above ``least``; how many have as many and no mark, and how many a
    mark."""
    above = unmarked = marked = 0
    for i in range(len(rows)):
        tied = counts[i] == least
        above += counts[i] > least
        marked += tied & marks[rows[i]]
        unmarked += tied & (not marks[rows[i]])
    return above, unmarked, marked


@compiled
def _chosen(
    rows: RowIds, counts: Counts, least: int, marks: NDArray[np.bool_], others: int, marked: int, most: int
) -> RowIds:
    """The ``most`` of ``rows`` with ``counts`` above ``least`` and the first of those with as many,
    ``marked`` of those that have a mark and ``others``."""
    found = np.empty(most, np.int64)
    left = np.array((others, marked))
    count = 0
    for i in range(len(rows)):
        if counts[i] < least:
            continue
        if counts[i] == least:
            mark = int(marks[rows[i]])
            left[mark] -= 1
            if left[mark] < 0:
                continue
        found[count] = rows[i]
        count += 1
    return found
