"""The rows of tables that ids stand for: made when a batch is read, so that what is prepared once serves
tables of any number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled
from recpipe.data.columns import Columns, MultiHot
from recpipe.data.schema import IdRule, Schema
from recpipe.data.sources.transforms import hash_rows
from recpipe.errors import DataError, shown
from recpipe.plugin.tables import SparseFeature

MISSING_KEY = -(2**63)
"""Stands for a missing value among the keys of a table that grows."""


class BeyondTable(DataError):
    """Prepared data whose ids are rows were prepared for larger tables."""


class IdMapper:
    """Turns columns of ids, as a source with ``multi_hot`` features gives them, into columns of table rows.

    ``rules``, one for each sparse feature: ``hashed``: ids are keys of 64 bits, and missing ones have a bit;
    ``modulo``: whole numbers of any sign; ``unchanged``: rows already. Keys of tables that grow are handed
    on, ``MISSING_KEY`` in place of missing ones.
    """

    def __init__(self, schema: Schema, multi_hot: Sequence[str], rules: Sequence[IdRule]) -> None:
        self.unchanged = all(rule == "unchanged" for rule in rules)
        """Whether all ids are rows already."""
        self.keeps_keys = any(feature.growth is not None for feature in schema.sparse)
        """Whether some of the columns are keys and not rows."""
        ruled = [
            (f, rule if f.growth is None else _KEYS) for f, rule in zip(schema.sparse, rules, strict=True)
        ]
        self._one_hot = _Rows([each for each in ruled if each[0].name not in multi_hot])
        self._bags = {each[0].name: _Rows([each]) for each in ruled if each[0].name in multi_hot}

    def __call__(self, columns: Columns) -> Columns:
        """The same samples with int64 rows; ``columns`` themselves if the ids are rows."""
        if self.unchanged:
            return columns  # ``require_rows`` has looked at them once
        bags = {}
        for name, rows in self._bags.items():
            own = columns.bags[name].trimmed()
            bags[name] = MultiHot(
                rows.of(own.values[:, None], own.missing)[0], own.offsets, weights=own.weights
            )
        ids = self._one_hot.of(columns.ids, columns.missing).T
        return Columns(columns.labels, columns.dense, ids, bags, weights=columns.weights)

    def by_column(self, columns: Columns) -> dict[str, NDArray[np.integer]]:
        """The same rows of each multi-hot feature's values, and under "" the one-hot features' [n, features].
        They are made by numpy, whose work on long blocks need not wait for numba's import: half a second, and
        60 MiB."""
        found = {"": self._one_hot.by_column(columns.ids, columns.missing)}
        for name, rows in self._bags.items():
            bag = columns.bags[name].trimmed()
            found[name] = rows.by_column(bag.values[:, None], bag.missing)[:, 0]
        return found

    def require_rows(self, columns: Columns) -> None:
        """``BeyondTable`` unless ids that are rows are in their tables."""
        self._one_hot.require(columns.ids)
        for name, rows in self._bags.items():
            rows.require(columns.bags[name].trimmed().values[:, None])


class _Rows:
    """The rows of features' tables, and the rule by which ids become them."""

    def __init__(self, features: Sequence[tuple[SparseFeature, str]]) -> None:
        self.names = [feature.name for feature, _ in features]
        self.rows = np.array([feature.rows for feature, _ in features], np.int64)
        self.rules = np.array([_RULES.index(rule) for _, rule in features], np.int64)

    def require(self, ids: NDArray[np.integer]) -> None:
        """``BeyondTable`` for ids [n, F] that are rows and are not in their table."""
        rows = self.rules == _RULES.index("unchanged")
        if len(ids) and rows.any() and (ids.max(axis=0)[rows] >= self.rows[rows]).any():
            raise BeyondTable("an id of the prepared data is not in its table")

    def of(self, ids: NDArray[np.integer], missing: NDArray[np.uint8] | None) -> NDArray[np.int64]:
        """The rows int64 [F, n] of ``ids`` [n, F]."""
        out = np.empty(ids.shape[::-1], np.int64)
        if out.size:
            bits = np.empty(0, np.uint8) if missing is None else np.array(missing.reshape(-1))
            # A copy of a mapped file, which is read-only: for that the loop would be compiled once more.
            keys: NDArray[Any] = np.require(ids, requirements=("C", "W")).reshape(-1)
            keys = keys.view(np.uint64) if keys.dtype == np.int64 else keys
            signed = ids.dtype.kind == "i"
            taken = rows_into(out.reshape(-1), keys, bits, self.rows, self.rules, signed)
            if taken >= 0:
                raise self._taken(taken)
        return out

    def by_column(self, ids: NDArray[np.integer], missing: NDArray[np.uint8] | None) -> NDArray[np.integer]:
        """The rows [n, F] of ``ids`` [n, F], made by numpy; int32 unless some of them are keys."""
        if missing is None and (self.rules == _RULES.index("unchanged")).all():
            return ids
        keys = self.rules == _RULES.index(_KEYS)
        rows = np.empty(ids.shape, np.int64 if keys.any() else np.int32)
        gone = np.zeros(ids.shape, bool)
        if missing is not None:
            gone = np.unpackbits(missing, axis=1, count=ids.shape[1]).view(bool)
        for place, (size, rule) in enumerate(zip(self.rows.tolist(), self.rules.tolist(), strict=True)):
            own = ids[:, place]
            if _RULES[rule] == "hashed":
                own = hash_rows(own.astype(f"{own.dtype.kind}8").view(np.uint64), size)
            elif _RULES[rule] == "modulo":
                own = own % size
            rows[:, place] = own
            if keys[place] and ((rows[:, place] == MISSING_KEY) & ~gone[:, place]).any():
                raise self._taken(place)
        if missing is not None:
            np.copyto(rows, np.where(keys, MISSING_KEY, 0).astype(rows.dtype), where=gone)
        return rows

    def _taken(self, place: int) -> DataError:
        return DataError(
            f"column {shown(self.names[place])}: {MISSING_KEY} is no id of a table that grows, where "
            "it stands for missing values; read the column as text (type: text)"
        )


_KEYS = "keys"
_RULES = ("hashed", "modulo", "unchanged", _KEYS)


AT_ONCE = 256
"""Samples whose rows are made together, feature by feature: their keys stay in the nearest cache."""


@compiled
def rows_into(
    out: NDArray[np.int64],
    keys: NDArray[np.int32] | NDArray[np.uint32] | NDArray[np.uint64],
    missing: NDArray[np.uint8],
    rows: NDArray[np.int64],
    rules: NDArray[np.int64],
    signed: bool,
) -> int:
    """Write the rows of ``keys`` [n * F], by sample and then by feature, into ``out`` [F * n], by feature and
    then by sample, by the rule of each feature: ``recpipe.data.sources.transforms.hash_rows``, key % rows, or
    the key itself. 0 or ``MISSING_KEY`` where there is a bit in ``missing``, as packbits makes them of
    [n, F], which is empty if nothing is missing. Keys that are ``signed`` are hashed as 64 bits with their
    sign. ``rows`` [F]: of each feature's table. Returns a feature with an id that is ``MISSING_KEY``, or
    -1."""
    features = len(rows)
    samples, width, taken = len(keys) // features, (features + 7) // 8, -1
    column, bits = np.empty(AT_ONCE, np.uint64), np.zeros(AT_ONCE, np.uint8)
    for low in range(0, samples, AT_ONCE):
        high = min(low + AT_ONCE, samples)
        own, gone = column[: high - low], bits[: high - low]
        for feature in range(features):
            made = out[feature * samples + low : feature * samples + high]
            bit, rule = np.uint8(1 << (7 - feature % 8)), rules[feature]
            if rule == 3:
                _copy_each(made, keys[low * features + feature :], features)
            else:
                _copy_each(own, keys[low * features + feature :], features)
            if len(missing) and feature % 8 == 0:
                _copy_each(gone, missing[low * width + feature // 8 :], width)
            if rule == 0:
                _hash_into(made, own, np.uint64(rows[feature] - 1))
            elif rule == 1:
                _modulo_into(made, own, rows[feature], signed)
            elif rule == 2:
                _copy_each(made, own, 1)
            elif _has(made, MISSING_KEY) and ((made == MISSING_KEY) & ((gone & bit) == 0)).any():
                taken = feature
            if len(missing):
                _mark(made, gone, bit, MISSING_KEY if rule == 3 else 0)
    return taken


# Each loop below is one that compilers make vector instructions of, which they do not of them all in one.


def _copy_each(out: Any, values: Any, step: int) -> None:
    """Each ``step``-th value."""
    for place in range(len(out)):
        out[place] = values[place * step]


def _has(values: Any, wanted: int) -> bool:
    found = False
    for place in range(len(values)):
        found |= values[place] == wanted
    return found


def _hash_into(out: Any, keys: Any, divisor: Any) -> None:
    """1 + mix64(key) % divisor; ``keys`` are overwritten.

    A quotient in floating point, of an inverse that is a little too small, is never too large. What it leaves
    of 64 bits is below divisor + 22528, and what the next one leaves of that is below 2 * divisor.
    """
    for place in range(len(keys)):
        key = keys[place]
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys[place] = key ^ (key >> np.uint64(31))
    inverse = (1.0 - 2.0**-50) / np.float64(divisor)
    if divisor < np.uint64(2**15):
        for place in range(len(keys)):
            keys[place] -= np.uint64(np.float64(keys[place]) * inverse) * divisor
    for place in range(len(keys)):
        left = keys[place] - np.uint64(np.float64(keys[place]) * inverse) * divisor
        out[place] = np.int64(left - divisor if left >= divisor else left) + 1


def _modulo_into(out: Any, keys: Any, rows: int, signed: bool) -> None:
    for place in range(len(keys)):
        key = keys[place]
        out[place] = np.int64(key) % rows if signed else np.int64(key % np.uint64(rows))


def _mark(out: Any, gone: Any, bit: Any, missing: int) -> None:
    for place in range(len(out)):
        out[place] = missing if gone[place] & bit else out[place]
