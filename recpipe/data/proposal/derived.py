"""A bounded sample of what a recipe derives from the records of files: side tables beside rows of the files'
first, middle and last parts, and the samples of whole sessions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recpipe.data.joins import Beside, JoinedFile
from recpipe.data.proposal.sample import MOST_BYTES, Sample, as_plain, in_one, shared, take_sample
from recpipe.data.records import InputFile
from recpipe.data.sessions import SessionFile
from recpipe.data.sources.transforms import mix64
from recpipe.data.text import Block
from recpipe.errors import DataError

MOST_EVENTS = 1 << 24
"""Of a log, from its beginning, that are read for whole sessions."""
FEWEST = 20
"""Sessions that a sample has at least, however long they are."""


def derived_sample(files: Sequence[InputFile], rows: int) -> Sample:
    """At most about ``rows`` rows of ``files`` with what is derived; of sessions, the samples of about so
    many events. ``DataError`` as of ``take_sample``, and for a join's column that is there already."""
    first = files[0]
    if isinstance(first, SessionFile):
        return _of_sessions(first, rows)
    if isinstance(first, JoinedFile):
        return _joined([file for file in files if isinstance(file, JoinedFile)], rows)
    return take_sample(files, rows)


def _joined(files: Sequence[JoinedFile], rows: int) -> Sample:
    own, sides = take_sample([file.file for file in files], rows), files[0].sides
    added = [name for name in files[0].columns.names if name not in files[0].file.columns.names]
    beside = Beside(sides, [*own.rows.column_names, *added])
    (batch,) = own.rows.combine_chunks().to_batches()
    return replace(own, rows=as_plain(beside(batch)), says=f"{own.says}, side tables beside them")


class _Events(NamedTuple):
    """Events of whole sessions, of which ``one_in`` of so many are here: of the first ``share`` of the files,
    in which ``left_out`` others have no session or no time."""

    rows: pa.RecordBatch
    sessions: int
    one_in: int
    share: float
    left_out: int


@dataclass(frozen=True)
class _Held(InputFile):
    """Rows in memory, as if they were those of a file."""

    rows: pa.RecordBatch = field(kw_only=True)

    @cached_property
    def columns(self) -> pa.Schema:
        """Names and types of all columns."""
        return self.rows.schema

    def blocks(self, columns: Sequence[str], start: int = 0, groups: range | None = None) -> Iterator[Block]:
        """All rows, at once."""
        yield Block(1, self.rows.select(list(columns)), 1.0)


def _of_sessions(file: SessionFile, rows: int) -> Sample:
    """The samples of about ``rows`` events, as training makes them."""
    names, lacking = shared(file.inputs)
    log = replace(file, skips=True)
    found = _some_sessions(log, names, rows)
    if not found.sessions:
        for _ in replace(log, skips=False).events(names):
            pass  # until the first event that has no session, or no time, of which more is said
        raise DataError(f"{file}: has no events to look at")
    first = file.inputs[0]
    held = replace(log, inputs=(_Held(first.path, first.format, rows=found.rows),))
    tables, size, made = [], 0, 0
    for block in held.blocks(held.columns.names):
        made += len(block.rows)
        if size <= MOST_BYTES:
            tables.append(as_plain(block.rows))
            size += tables[-1].nbytes
    table = in_one(tables)
    whole = found.one_in == 1 and found.share == 1 and table.num_rows == made
    total = ceil(made * found.one_in / (found.share or 1))  # of Arrow's streams the share is not known
    return Sample(table, total, whole, lacking, _said(found, table.num_rows), found.left_out)


def _said(found: _Events, samples: int) -> str:
    """How much was read, and of what."""
    part = f"one in {found.one_in} of its sessions" if found.one_in > 1 else "all its sessions"
    read = f"the first {100 * found.share:.2g}% of the log" if found.share else "the log's beginning"
    read = "the whole log" if found.share == 1 else read
    return f"{samples:,} samples of {found.sessions:,} sessions ({part}, by hash; read: {read})"


def _some_sessions(log: SessionFile, names: Sequence[str], most: int) -> _Events:
    """About ``most`` events, at most twice as many, of sessions that are chosen by their hash: while there
    are more, half of the sessions are left out."""
    kept = list[tuple[NDArray[np.uint64], pa.RecordBatch]]()
    halvings, read, left_out, share = 0, 0, 0, 0.0
    for events in log.events(names):
        hashes = mix64(~events.keys.view(np.uint64))
        kept.append(_of_hash(hashes, events.rows, halvings))
        read, left_out, share = read + len(hashes), left_out + events.left_out, events.share
        while sum(len(own) for own, _ in kept) > 2 * most:
            halved = [_of_hash(*each, halvings + 1) for each in kept]
            if _different(halved) < FEWEST:
                break
            kept, halvings = halved, halvings + 1
        if read >= MOST_EVENTS or sum(len(own) for own, _ in kept) > 2 * most:
            break
    else:
        share = 1.0
    if not kept:
        raise DataError(f"{log}: has no events to look at")
    rows = pa.Table.from_batches([rows for _, rows in kept]).combine_chunks()
    (batch,) = rows.to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]
    return _Events(batch, _different(kept), 2**halvings, share, left_out)


def _of_hash(
    hashes: NDArray[np.uint64], rows: pa.RecordBatch, halvings: int
) -> tuple[NDArray[np.uint64], pa.RecordBatch]:
    """The events of one in 2**``halvings`` sessions."""
    here = hashes & np.uint64(2**halvings - 1) == 0
    return (hashes, rows) if here.all() else (hashes[here], rows.filter(pa.array(here)))


def _different(kept: Sequence[tuple[NDArray[np.uint64], pa.RecordBatch]]) -> int:
    """How many sessions there are."""
    return len(np.unique(np.concatenate([hashes for hashes, _ in kept])))
