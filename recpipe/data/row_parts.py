"""The part of each row of files, by ``data.split``."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpipe.data.columns import Int64
from recpipe.data.features import Feature
from recpipe.data.files import RowChecks
from recpipe.data.sources.transforms import mix64, string_keys
from recpipe.data.split import TEST, TRAIN, VALID, Bound, Split
from recpipe.data.timestamps import read_times, stated_time
from recpipe.data.values import Bools, is_text, plain, read_ids, read_numbers, value_at
from recpipe.errors import shown

USERS = np.uint64(0x5D1CE5A1B3C0FFEE)
"""Added to a user's key, so that its part says nothing of its row in a table."""
SHOWN = 5
"""Different values that a message lists."""


class RowParts:
    """Says the part of each row by the column of ``split``, and remembers what it has seen there."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self._words: dict[str, None] = {}
        self._low, self._high = np.inf, -np.inf

    @property
    def feature(self) -> Feature:
        """What the column must be fit for."""
        split = self.split
        if split.by == "time" and not split.compares_numbers:
            return Feature(split.column, "timestamp", unit=split.unit, format=split.format, zone=split.zone)
        return Feature(split.column, "dense" if split.by == "time" else "id")

    @property
    def seen(self) -> str:
        """The values so far, for a message."""
        if self.split.by == "column":
            more = " and others" if len(self._words) > SHOWN else ""
            return ", ".join(shown(word) for word in list(self._words)[:SHOWN]) + more
        if self._low > self._high:
            return "too few values" if self.split.by == "user" else "no value"
        if self.split.compares_numbers:
            return f"{self._low:g} to {self._high:g}"
        low, high = (np.datetime64(int(micros), "us") for micros in (self._low, self._high))
        return f"{low} to {high} (UTC)"

    def of(self, array: pa.Array, checks: RowChecks) -> NDArray[np.uint8]:
        """The part of each row, uint8 [n]; rows of which the column does not say it are marked in
        ``checks``."""
        by = {"time": self._of_times, "user": self._of_users, "column": self._of_words}
        valid, test = by[self.split.by](array, checks)
        return np.where(test, TEST, np.where(valid, VALID, TRAIN)).astype(np.uint8)

    def _of_times(self, array: pa.Array, checks: RowChecks) -> tuple[Bools, Bools]:
        split, show = self.split, partial(value_at, array)
        values: NDArray[np.float64] | Int64
        if split.compares_numbers:
            numbers = read_numbers(array)
            values, missing, valid = numbers.values, numbers.missing, numbers.valid
        else:
            times = read_times(array, self.feature)
            values, missing, valid = times.micros, times.missing, times.valid
        checks.require(valid, split.column, show, "is no " + ("number" if split.compares_numbers else "time"))
        checks.require(~missing, split.column, show, "is missing, and data.split needs it")
        if len(known := values[valid & ~missing]):
            self._low, self._high = min(self._low, float(known.min())), max(self._high, float(known.max()))
        first = [values >= self._bound(bound) for bound in (split.valid, split.test)]
        return first[0], first[1]

    def _bound(self, bound: Bound) -> float:
        """``valid`` or ``test`` as the values are."""
        if bound is None or isinstance(bound, float):
            return np.inf if bound is None else bound
        return stated_time(Feature("bound", "timestamp", now=str(bound), zone=self.split.zone)) or 0

    def _of_users(self, array: pa.Array, checks: RowChecks) -> tuple[Bools, Bools]:
        """By the hash of the id as text, so that files of other types say the same. Rows without an id
        train."""
        column, array = self.split.column, plain(array)
        ids = read_ids(array, Feature(column, type="text"))
        checks.require(ids.valid, column, partial(value_at, array), ids.remedy)
        keys = ids.keys.view(np.uint64)
        if not is_text(array.type):
            keys, _ = string_keys(pa.array(ids.keys).cast(pa.string()))
        place = (mix64(keys + USERS) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        valid, test = self.split.shares
        return (place < valid) & ~ids.missing, (place >= 1 - test) & ~ids.missing

    def _of_words(self, array: pa.Array, checks: RowChecks) -> tuple[Bools, Bools]:
        column, show = self.split.column, partial(value_at, array)
        array = plain(array)
        ids = read_ids(array, Feature(column, type="text"))
        checks.require(ids.valid, column, show, ids.remedy)
        words = array if is_text(array.type) else pa.array(ids.keys)
        words = pc.if_else(pa.array(ids.valid), words, pa.scalar(None, words.type)).cast(pa.string())
        if len(self._words) <= SHOWN:
            self._words |= dict.fromkeys(map(str, pc.unique(words).to_pylist()))
        checks.require(~ids.missing, column, show, "is missing, and data.split needs it")
        wanted = self.split.values
        valid, test = (np.asarray(pc.is_in(words, value_set=pa.array(own, pa.string()))) for own in wanted)
        if self.split.is_by_words:
            known = valid | test | np.asarray(pc.fill_null(pc.equal(words, "train"), False))
            told = "is not train, valid or test: state which values mean these in data.split"
            checks.require(known | ids.missing, column, show, told)
        return valid, test
