"""The part of each row of files, by ``data.split``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpipe.data.column_types import is_text, plain, plain_type
from recpipe.data.columns import Int64
from recpipe.data.feature import Feature
from recpipe.data.files import RowChecks
from recpipe.data.last_rows import LastRows
from recpipe.data.sources.transforms import UInt64, mix64, string_keys
from recpipe.data.split import TEST, TRAIN, VALID, Bound, Split
from recpipe.data.text_values import Bools
from recpipe.data.timestamps import read_times, stated_time
from recpipe.data.values import read_ids, read_numbers, value_at
from recpipe.errors import shown

USERS = np.uint64(0x5D1CE5A1B3C0FFEE)
"""Added to a user's key, so that its part says nothing of its row in a table."""
ROWS = np.uint64(0x2545F4914F6CDD1D)
"""Likewise, added to the seed of a split at random."""
SHOWN = 5
"""Different values that a message lists."""
NEEDED = "is missing, and data.split needs it"


class RowParts:
    """Says the part of each row by the columns of ``split``, and remembers what it has seen there."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self._words: dict[str, None] = {}
        self._low, self._high = np.inf, -np.inf
        self._place = 0
        self._held: tuple[Int64, Int64] = np.empty(0, np.int64), np.empty(0, np.int64)
        """The places, in ascending order, of the last rows that validate, and of those that test."""

    @property
    def features(self) -> list[Feature]:
        """What the columns must be fit for."""
        split = self.split
        if split.by == "random":
            return []
        if split.by == "time":
            return [self._time(split.column) if split.has_times else Feature(split.column, "dense")]
        return [Feature(split.column, "id"), *(self._time(name) for name in split.columns[1:])]

    def _time(self, name: str) -> Feature:
        split = self.split
        return Feature(name, "timestamp", unit=split.unit, format=split.format, zone=split.zone)

    @property
    def seen(self) -> str:
        """The values so far, for a message."""
        if self.split.by == "column":
            more = " and others" if len(self._words) > SHOWN else ""
            return ", ".join(shown(word) for word in list(self._words)[:SHOWN]) + more
        few = {"user": "too few values", "last": "too few rows of each value", "random": "too few rows"}
        if self.split.by in few:
            return few[self.split.by]
        if self._low > self._high:
            return "no value"
        if self.split.compares_numbers:
            return f"{self._low:g} to {self._high:g}"
        low, high = (np.datetime64(int(micros), "us") for micros in (self._low, self._high))
        return f"{low} to {high} (UTC)"

    def begin(self, blocks: Iterable[pa.RecordBatch]) -> None:
        """All rows come from the first one on. ``blocks``: their ``split.columns``, which are read beforehand
        where a part depends on later rows."""
        self._place = 0
        if self.split.by == "last":
            valid, test = map(int, self.split.shares)
            last, place = LastRows(valid + test + 1), 0
            for rows in blocks:
                unread = RowChecks("", 1, len(rows))
                keys, missing = self._ids(rows, unread)
                times = np.zeros(len(rows), np.int64)
                if self.split.time is not None:
                    times = self._times(rows, self.split.time, unread)
                known = unread.good & ~missing
                last.add(keys[known], times[known], place + np.flatnonzero(known))
                place += len(rows)
            self._held = last.places(valid, test)

    def of(self, rows: pa.RecordBatch, checks: RowChecks) -> NDArray[np.uint8]:
        """The part of each row, uint8 [n]; rows of which the columns do not say it are marked in
        ``checks``."""
        by = {
            "time": self._of_times,
            "user": self._of_users,
            "random": self._at_random,
            "last": self._of_last,
            "column": self._of_words,
        }
        valid, test = by[self.split.by](rows, checks)
        return np.where(test, TEST, np.where(valid, VALID, TRAIN)).astype(np.uint8)

    def _of_times(self, rows: pa.RecordBatch, checks: RowChecks) -> tuple[Bools, Bools]:
        split = self.split
        values: NDArray[np.float64] | Int64
        if split.has_times:
            values = self._times(rows, split.column, checks)
        else:
            array = rows[split.column]
            numbers, show = read_numbers(array), partial(value_at, array)
            checks.require(numbers.valid, split.column, show, "is no number")
            checks.require(~numbers.missing, split.column, show, NEEDED)
            values = numbers.values
        if len(known := values[checks.good]):
            self._low, self._high = min(self._low, float(known.min())), max(self._high, float(known.max()))
        first = [values >= self._bound(bound) for bound in (split.valid, split.test)]
        return first[0], first[1]

    def _times(self, rows: pa.RecordBatch, name: str, checks: RowChecks) -> Int64:
        """The times of a column in microseconds since 1970, int64 [n]."""
        array = rows[name]
        times, show = read_times(array, self._time(name)), partial(value_at, array)
        checks.require(times.valid, name, show, "is no time")
        checks.require(~times.missing, name, show, NEEDED)
        return times.micros

    def _bound(self, bound: Bound) -> float:
        """``valid`` or ``test`` as the values are."""
        if bound is None or isinstance(bound, float):
            return np.inf if bound is None else bound
        return stated_time(Feature("bound", "timestamp", now=str(bound), zone=self.split.zone)) or 0

    def _ids(self, rows: pa.RecordBatch, checks: RowChecks) -> tuple[Int64, Bools]:
        """The keys of the column's ids, and which are missing."""
        column, array = self.split.column, plain(rows[self.split.column])
        ids = read_ids(array, Feature(column, type="text"))
        checks.require(ids.valid, column, partial(value_at, array), ids.remedy)
        return ids.keys, ids.missing

    def _of_last(self, rows: pa.RecordBatch, checks: RowChecks) -> tuple[Bools, Bools]:
        """By their places. Rows without an id train."""
        self._ids(rows, checks)
        if self.split.time is not None:
            self._times(rows, self.split.time, checks)
        low, self._place = self._place, self._place + len(rows)
        found = []
        for places in self._held:
            first, end = np.searchsorted(places, (low, self._place))
            found.append(np.isin(np.arange(low, self._place), places[first:end]))
        return found[0], found[1]

    def _of_users(self, rows: pa.RecordBatch, checks: RowChecks) -> tuple[Bools, Bools]:
        """By the hash of the id as text, so that files of other types say the same. Rows without an id
        train."""
        own, missing = self._ids(rows, checks)
        keys = own.view(np.uint64)
        if not is_text(plain_type(rows[self.split.column].type)):
            keys, _ = string_keys(pa.array(own).cast(pa.string()))
        valid, test = self._shared(keys + USERS)
        return valid & ~missing, test & ~missing

    def _at_random(self, _: pa.RecordBatch, checks: RowChecks) -> tuple[Bools, Bools]:
        """By the hash of the row's number, so that rows which come later leave the part of others as it
        is."""
        low, self._place = self._place, self._place + len(checks.good)
        numbers = np.arange(low, self._place, dtype=np.uint64)
        return self._shared(numbers + mix64(np.array([self.split.seed], np.uint64) + ROWS))

    def _shared(self, keys: UInt64) -> tuple[Bools, Bools]:
        """Which of ``keys`` [n] are among the shares that validate, and that test, by their hash."""
        place = (mix64(keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        valid, test = self.split.shares
        return place < valid, place >= 1 - test

    def _of_words(self, rows: pa.RecordBatch, checks: RowChecks) -> tuple[Bools, Bools]:
        column, array = self.split.column, plain(rows[self.split.column])
        show = partial(value_at, array)
        ids = read_ids(array, Feature(column, type="text"))
        checks.require(ids.valid, column, show, ids.remedy)
        words = array if is_text(array.type) else pa.array(ids.keys)
        words = pc.if_else(pa.array(ids.valid), words, pa.scalar(None, words.type)).cast(pa.string())
        if len(self._words) <= SHOWN:
            self._words |= dict.fromkeys(map(str, pc.unique(words).to_pylist()))
        checks.require(~ids.missing, column, show, NEEDED)
        wanted = self.split.values
        valid, test = (np.asarray(pc.is_in(words, value_set=pa.array(own, pa.string()))) for own in wanted)
        if self.split.is_by_words:
            known = valid | test | np.asarray(pc.fill_null(pc.equal(words, "train"), False))
            told = "is not train, valid or test: state which values mean these in data.split"
            checks.require(known | ids.missing, column, show, told)
        return valid, test
