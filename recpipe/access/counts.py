"""The popularity profile: sampled access counts of all rows, kept between runs and shared by plugins.

A share of the epoch's batches is chosen at random (seeded, without replacement) and read directly. The file
holds the rows that were seen, their counts, and a description of the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    meta = _meta(ctx, sample)
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


def _meta(ctx: Context, sample: float) -> dict[str, Any]:
    return {
        "version": VERSION,
        "data": ctx.data_fingerprint,
        "tables": [[table.name, table.rows] for table in ctx.tables.values()],
        "sample": sample,
        "seed": ctx.seed,
        "batch_size": ctx.batch_size,
    }


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
    if not _sound(rows, counts, total):
        raise UserError(f"the popularity profile {path} is damaged; delete it, it is made anew")
    return Profile(rows, counts, reused=True)


def _sound(rows: NDArray[Any], counts: NDArray[Any], total: int) -> bool:
    """Whether the arrays have the form that ``Profile`` describes, with all rows below ``total``."""
    if rows.dtype != np.int64 or counts.dtype != np.int32 or rows.ndim != 1 or rows.shape != counts.shape:
        return False
    inside = not len(rows) or bool(rows[0] >= 0 and rows[-1] < total)
    return inside and bool((np.diff(rows) > 0).all()) and bool((counts > 0).all())
