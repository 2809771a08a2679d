"""Sessions: a log of events becomes samples of an event and those before it in its session.

The log is read twice: once for where each session ends, and once for the samples. Sessions come in the order
of their last events. A log that lies so is read through; of another one the events are first put into parts
on the disk, each of which is sorted in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recpipe.common.own_cache import private_files
from recpipe.data.column_types import alike, is_list, is_text, plain, plain_type
from recpipe.data.columnar import BLOCK_ROWS
from recpipe.data.columns import Int64, offsets_of
from recpipe.data.derivations import Sessions
from recpipe.data.feature import Feature
from recpipe.data.files import RowChecks
from recpipe.data.gathered import Gathered
from recpipe.data.records import InputFile, each_of, require_columns
from recpipe.data.refusals import require_type
from recpipe.data.remote import AnyPath
from recpipe.data.text import Block, Made
from recpipe.data.text_values import Bools
from recpipe.data.timestamps import read_times
from recpipe.data.values import read_ids, read_numbers, value_at, whole_text
from recpipe.errors import DataError, shown

log = logging.getLogger(__name__)

HISTORY = "_history"
"""Ends the name of the column with the values of the events before."""
POSITIVE = "positive"
"""A column of ones: each event took place."""
LAST = "is_last"
"""A column that is 1 for the last event of each session, else 0."""
EVENTS = 1 << 22
"""About how many events are sorted at a time."""
PARTS = 256
"""Most parts on the disk, each of which is an open file; of more events than fit, parts are longer."""
VALUES = 1 << 22
"""About how many values of events before are in a block of samples."""
_RANK, _TIME = "rank", "time"


class Events(NamedTuple):
    """Events of a file that have a session and a time: keys and times int64 [n] (times are comparable, all 0
    without an order), the columns that were asked for, the share of all files read so far, and how many
    others there were."""

    keys: Int64
    times: Int64
    rows: pa.RecordBatch
    share: float
    left_out: int


class _Whole(NamedTuple):
    """Events of whole sessions, which lie together and in order: which session each is of, int64 [n]."""

    keys: Int64
    rows: pa.RecordBatch
    share: float


@dataclass(frozen=True)
class _Survey:
    """All sessions: keys int64 [S] in ascending order, how many events each has, and its place in the order
    of last events. ``lies_so``: whether the files have the events in that order. ``left_out``: how many
    events have no session or no time."""

    keys: Int64
    counts: Int64
    ranks: Int64
    lies_so: bool
    left_out: int


@dataclass(frozen=True)
class SessionFile(InputFile):
    """The samples of the sessions in ``inputs``, as if they were the rows of one file.

    It has the columns of the events, of which a sample has its own event's values, for each of these one
    called ``name_history`` with a list of the values of the events before, ``POSITIVE`` and ``LAST``.
    ``room``: where parts of a log are kept while it is sorted. Of events without a session, or without a
    place in the order, the first is a ``BadRow``, or they are left out if that is ``skips``.
    """

    inputs: tuple[InputFile, ...] = field(kw_only=True)
    rule: Sessions = field(kw_only=True)
    room: Path = field(kw_only=True)
    skips: bool = field(kw_only=True)

    def __str__(self) -> str:
        more = f" and {len(self.inputs) - 1} more" if len(self.inputs) > 1 else ""
        return f"sessions of {self.path}{more}"

    @property
    def paths(self) -> tuple[AnyPath, ...]:
        """The files of events."""
        return tuple(path for file in self.inputs for path in file.paths)

    @property
    def parts(self) -> list[range | None]:
        """One alone, for a session's events may lie anywhere."""
        return [None]

    @cached_property
    def columns(self) -> pa.Schema:
        """Names and types of all columns."""
        own = [pa.field(name, self._type(name)) for name in self.inputs[0].columns.names]
        before = [pa.field(field.name + HISTORY, pa.list_(field.type)) for field in own]
        return pa.schema([*own, *before, *(pa.field(name, pa.int8()) for name in (POSITIVE, LAST))])

    def first_rows(self, columns: Sequence[str]) -> pa.RecordBatch | None:
        """The first events, with the columns that they have; those of events before have single values."""
        names = [name for name in columns if name not in (POSITIVE, LAST)]
        found = self.inputs[0].first_rows(list(dict.fromkeys(map(self._event_column, names))))
        if found is None:
            return None
        return pa.record_batch([found[self._event_column(name)] for name in names], names)

    def is_all_text(self, column: str) -> bool:
        """As of the events."""
        return self.inputs[0].is_all_text(self._event_column(column))

    def blocks(self, columns: Sequence[str], start: int = 0, groups: range | None = None) -> Iterator[Block]:
        """Samples with these ``columns``; rows are numbered by sample."""
        require_columns(self, columns)
        of_events = [self._event_column(name) for name in columns if name not in (POSITIVE, LAST)]
        asked = list(dict.fromkeys([self.rule.by, *of_events]))
        sample, left_out = 1, self._survey.left_out
        for whole in self._as_they_lie(asked) if self._survey.lies_so else self._sorted(asked):
            for rows in self._samples(whole.keys, whole.rows, columns):
                yield Block(sample, rows, whole.share, left_out)
                sample, left_out = sample + len(rows), 0
        if sample == 1 and (sessions := len(self._survey.keys)):
            raise DataError(
                f"{self}: none of {sessions:,} sessions has {self.rule.min_length} events, as many as "
                "data.sessions.min_length says that a sample's session has at least"
            )

    def each(
        self, columns: Sequence[str], make: Callable[[pa.RecordBatch], Made], groups: range | None = None
    ) -> Iterator[tuple[Block, Made]]:
        """As of ``InputFile``."""
        return each_of(self.blocks(columns), make)

    def _event_column(self, column: str) -> str:
        """The column of events that ``column`` is made of."""
        return column if column in self.inputs[0].columns.names else column.removesuffix(HISTORY)

    def _type(self, name: str) -> pa.DataType:
        """The plain type of a column of events, which holds the values of all files."""
        found: pa.DataType = pa.null()
        for file in self.inputs:
            if name not in file.columns.names:
                continue  # which is a fault if it is asked for
            both = found, plain_type(file.columns.field(name).type)
            found = _wider(*both) or found
        return found

    def _require(self, names: Sequence[str]) -> None:
        """``DataError`` for a file of events that lacks one of these columns or holds something else."""
        for file in self.inputs:
            require_columns(file, names)
            for name in names:
                kind, other = file.columns.field(name).type, self._type(name)
                if _wider(plain_type(kind), other) is None:
                    raise DataError(
                        f"{file}, column {shown(name)}: holds {kind} here and {other} in other files"
                    )

    def events(self, columns: Sequence[str]) -> Iterator[Events]:
        """All events in the order of the files; those of all files have the same types."""
        rule = self.rule
        read = list(dict.fromkeys([*columns, rule.by, *([rule.order] if rule.order else [])]))
        self._require(read)
        kinds = {name: self._type(name) for name in read}
        require_type(str(self.path), rule.by, kinds[rule.by], Feature(rule.by, type="text"))
        for index, file in enumerate(self.inputs):
            for first, rows, share, bad in file.blocks(read):
                arrays = {name: _cast(file, name, rows[name], kinds[name]) for name in read}
                checks = RowChecks(str(file), first, len(rows))
                by = read_ids(arrays[rule.by], Feature(rule.by, type="text"))
                there = by.valid & ~by.missing
                checks.require(there, rule.by, partial(value_at, arrays[rule.by]), "is no session")
                times = np.zeros(len(rows), np.int64)
                if rule.order is not None:
                    times, known = self._times(arrays[rule.order], rule.order)
                    checks.require(known, rule.order, partial(value_at, arrays[rule.order]), "is no time")
                bad += checks.finish(self.skips)
                kept = pa.record_batch([arrays[name] for name in columns], list(columns))
                keys = by.keys
                if not checks.good.all():
                    keys, times = keys[checks.good], times[checks.good]
                    kept = kept.filter(pa.array(checks.good))
                yield Events(keys, times, kept, (index + share) / len(self.inputs), bad)

    def _times(self, array: pa.Array, name: str) -> tuple[Int64, Bools]:
        """Whole numbers int64 [n] in the order of the values, and which of these there are."""
        kind = array.type
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or (is_text(kind) and not self._numbered):
            found = read_times(array, Feature(name, "timestamp", format="iso" if is_text(kind) else None))
            return found.micros, found.valid & ~found.missing
        if pa.types.is_floating(kind):
            numbers = read_numbers(array)
            return in_order(numbers.values), numbers.valid & ~numbers.missing
        if is_list(kind) or not (is_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)):
            raise DataError(
                f"{self.path}, column {shown(name)}: holds {kind}, and data.sessions.order is a column of "
                "numbers, dates or times"
            )
        whole = read_ids(array, Feature(name, type="integer"))
        return whole.keys, whole.valid & ~whole.missing

    @cached_property
    def _numbered(self) -> bool:
        """Whether the order, where it is text, is of whole numbers, not of times in ISO 8601."""
        assert self.rule.order is not None
        first = self.inputs[0].first_rows([self.rule.order])
        if first is None or not is_text(plain_type(first.schema.types[0])):
            return False
        return whole_text(first.column(0), Feature(self.rule.order))

    @cached_property
    def _survey(self) -> _Survey:
        found = Gathered(4, _merged, EVENTS // 4)  # keys, events, last times, last events' numbers
        number, runs, ordered, bad = 0, 0, True, 0
        key, time = np.empty(0, np.int64), np.empty(0, np.int64)  # of the event before
        for keys, times, _, _, left_out in self.events([self.rule.by]):
            bad += left_out
            if not len(keys):
                continue
            key, time = np.concatenate((key, keys)), np.concatenate((time, times))
            same = key[1:] == key[:-1]
            runs += int((~same).sum()) + (number == 0)
            ordered = ordered and bool(np.all((time[1:] >= time[:-1])[same]))
            numbers = np.arange(number, number + len(keys))
            found.add(keys, np.ones_like(keys), times, numbers)
            key, time, number = keys[-1:], times[-1:], number + len(keys)
        keys, counts, times, numbers = found.merged()
        order = np.lexsort((numbers, times))
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        lies_so = ordered and runs == len(keys) and bool(np.all(np.diff(numbers[order]) > 0))
        log.info("%s: %s events in %s sessions", self, f"{number:,}", f"{len(keys):,}")
        return _Survey(keys, counts, ranks, lies_so, bad)

    def _as_they_lie(self, columns: Sequence[str]) -> Iterator[_Whole]:
        """Of a log that has them so."""
        keys, rest, share = np.empty(0, np.int64), None, 0.0
        for events in self.events(columns):
            if not len(events.keys):
                continue
            keys, share = np.concatenate((keys, events.keys)), events.share
            rest = events.rows if rest is None else _together([rest, events.rows])
            ends = np.flatnonzero(keys[1:] != keys[:-1])
            if len(ends):
                end = int(ends[-1]) + 1
                yield _Whole(keys[:end], rest.slice(0, end), share)
                keys, rest = keys[end:], rest.slice(end)
        if rest is not None:
            yield _Whole(keys, rest, share)

    def _sorted(self, columns: Sequence[str]) -> Iterator[_Whole]:
        """Of a log in any order, through parts on the disk."""
        with self._folder() as folder:
            files = self._parts(columns, Path(folder))
            for done, file in enumerate(files, 1):
                with pa.OSFile(str(file)) as stream, pa.ipc.open_stream(stream) as reader:
                    events = _together(list(reader))
                file.unlink()
                ranks, times = (np.asarray(events[name]) for name in (_RANK, _TIME))
                order = np.lexsort((times, ranks))  # stable: events of one time as they were read
                events = events.take(pa.array(order))
                asked = pa.record_batch(events.columns[: len(columns)], list(columns))
                yield _Whole(ranks[order], asked, 0.5 + done / len(files) / 2)

    @contextmanager
    def _folder(self) -> Iterator[str]:
        """In the block, a folder of its own in ``room``; ``DataError`` where it, or what is written into it,
        cannot be."""
        try:
            with private_files():
                self.room.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix="sessions-", dir=self.room) as folder:
                yield folder
        except OSError as error:
            raise DataError(
                f"{self.room}: cannot keep the events of data.sessions while they are sorted "
                f"({error.strerror or error}); free space there or pass data.cache_dir=DIR"
            ) from error

    def _parts(self, columns: Sequence[str], folder: Path) -> list[Path]:
        """Files in ``folder`` with the events of some sessions each, in the order of these; after the columns
        there are their sessions' ranks and their times."""
        survey = self._survey
        by_rank = np.empty_like(survey.counts)
        by_rank[survey.ranks] = survey.counts
        each = max(EVENTS, -(-int(by_rank.sum()) // PARTS))
        part_of = (np.cumsum(by_rank) - by_rank) // each
        names = [*map(str, range(len(columns))), _RANK, _TIME]
        writers: dict[int, pa.RecordBatchWriter] = {}
        with ExitStack() as opened:
            for events in self.events(columns):
                ranks = survey.ranks[np.searchsorted(survey.keys, events.keys)]
                added = [*events.rows.columns, pa.array(ranks), pa.array(events.times)]
                batch, parts = pa.record_batch(added, names), part_of[ranks]
                for part in np.unique(parts).tolist():
                    if part not in writers:
                        made = pa.ipc.new_stream(str(folder / f"{part}.arrow"), batch.schema)
                        writers[part] = opened.enter_context(made)
                    writers[part].write_batch(batch.filter(pa.array(parts == part)))
        return [folder / f"{part}.arrow" for part in sorted(writers)]

    def _samples(
        self, keys: Int64, events: pa.RecordBatch, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """The samples of whole sessions, whose events lie together and in order; ``keys`` [n]: of which
        session each is."""
        rule, size = self.rule, len(keys)
        if not size:
            return
        firsts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        first_of = np.repeat(firsts, np.diff(np.append(firsts, size)))
        before = np.arange(size) - first_of
        is_last = np.zeros(size, np.int8)
        is_last[np.append(firsts[1:], size) - 1] = 1
        targets = np.arange(size) if rule.target == "next" else np.flatnonzero(is_last)
        targets = targets[before[targets] >= rule.min_length - 1]
        names = self.inputs[0].columns.names
        for own in _blocks(targets, np.minimum(before[targets], rule.max_length)):
            lengths = np.minimum(before[own], rule.max_length)
            offsets = offsets_of(lengths)
            begins = own - lengths if rule.keep == "last" else first_of[own]
            places = pa.array(np.repeat(begins - offsets[:-1], lengths) + np.arange(offsets[-1]))
            wide, at = pa.array(offsets.astype(np.int32)), pa.array(own)
            made = []
            for name in columns:
                if name == POSITIVE:
                    made.append(pa.array(np.ones(len(own), np.int8)))
                elif name == LAST:
                    made.append(pa.array(is_last[own]))
                elif name in names:
                    made.append(events[name].take(at))
                else:
                    values = events[self._event_column(name)].take(places)
                    made.append(pa.ListArray.from_arrays(wide, values))
            yield pa.record_batch(made, list(columns))


def _blocks(targets: Int64, lengths: Int64) -> Iterator[Int64]:
    """``targets`` in blocks of at most ``BLOCK_ROWS``, and of about ``VALUES`` events before them."""
    values = np.cumsum(lengths) // VALUES
    begins = [np.arange(0, len(targets), BLOCK_ROWS), np.flatnonzero(np.diff(values)) + 1]
    bounds = np.unique(np.concatenate([*begins, [len(targets)]])).tolist()
    return (targets[low:high] for low, high in pairwise(bounds))


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both; None: there is none, or they would say something else."""
    if not alike(one, other):
        return None
    try:
        both = [pa.schema([("", kind)]) for kind in (one, other)]
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def _cast(file: InputFile, name: str, array: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return plain(array).cast(kind)
    except pa.ArrowException as error:
        raise DataError(
            f"{file}, column {shown(name)}: a value is no {kind}, which it is with other files "
            f"({shown(error, 200)}); write the same type in all files"
        ) from error


def in_order(values: NDArray[np.float64]) -> Int64:
    """Whole numbers int64 [n] that are in the order of ``values``."""
    bits = (values + 0.0).view(np.int64)
    return np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)


def _together(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of some rows; ``DataError`` beyond what one holds."""
    found = pa.Table.from_batches(batches).combine_chunks().to_batches()
    if len(found) > 1:
        raise DataError(
            "data.sessions: a column of the events that are in memory at a time has more than 2 GiB of text; "
            "leave it out of the features"
        )
    return found[0]


def _merged(found: Int64) -> Int64:
    """Keys, counts, last times and last numbers [4, n] in which each key is there once, in ascending order.
    Of several events at a session's last time, the one that was read last counts."""
    keys, counts, times, numbers = found
    order = np.lexsort((numbers, times, keys))
    keys = keys[order]
    if not len(keys):
        return found
    ends = np.append(np.flatnonzero(keys[1:] != keys[:-1]), len(keys) - 1)
    starts = np.append(0, ends[:-1] + 1)
    counts, last = np.add.reduceat(counts[order], starts), order[ends]
    return np.stack([keys[ends], counts, times[last], numbers[last]])
