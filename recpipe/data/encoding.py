"""What turns raw values into what tables and layers take: the same object in preparation, predict, a package
and a server, so that a value means one thing in all of them.

It does so in two steps: ``read`` gives keys of ids and numbers, and ``finish`` applies what preparation has
learned from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recpipe.data.columns import Bits, Columns, Float32, Int64, MultiHot, bits_of
from recpipe.data.features import Feature, Features
from recpipe.data.files import RowChecks
from recpipe.data.id_mapper import IdMapper
from recpipe.data.learned import (
    FIRST,
    UNSEEN,
    Learned,
    bit_at,
    bits_as_numbers,
    numbers_as_bits,
    require_room,
    vocabulary_tables,
)
from recpipe.data.schema import LABEL_KINDS, IdRule, LabelKind, Schema
from recpipe.data.sources.transforms import signed_log
from recpipe.data.values import (
    is_list,
    is_text,
    plain_type,
    read_bags,
    read_ids,
    read_numbers,
    require_type,
)
from recpipe.errors import DataError, nearest_or_all, shown

Bools = NDArray[np.bool_]
KEPT: dict[str, IdRule] = {
    "hash": "hashed",
    "modulo": "modulo",
    "rows": "unchanged",
    "vocabulary": "unchanged",
}
"""The rule by which ``IdMapper`` makes rows of a feature's ids."""


class Encoded(NamedTuple):
    """n samples, and how many of them have no value of each feature."""

    columns: Columns
    missing: dict[str, int]


class _Sparse(NamedTuple):
    """The ids of one feature of n samples: ``bags``, or keys int64 [n] of one each; and which samples have
    none, bool [n]."""

    missing: Bools
    keys: Int64
    bags: MultiHot | None = None


@dataclass(frozen=True)
class Encoding:
    """Features whose types of text are settled, and what was learned for them; None: nothing yet."""

    features: Features
    learned: Learned | None = None

    def __post_init__(self) -> None:
        for table, own in vocabulary_tables(self.features).items():
            if self.learned is not None:
                require_room(table, own[0], len(self.learned.keys(table)))

    @property
    def is_complete(self) -> bool:
        """Whether all is learned that has to be."""
        return self.learned is not None or not self.features.is_learned

    @cached_property
    def schema(self) -> Schema:
        """The columns of batches; before they are learned, vocabularies are taken as empty."""
        return self.features.schema({name: FIRST + len(own.keys) for name, own in self._vocabularies.items()})

    @cached_property
    def _vocabularies(self) -> dict[str, _Vocabulary]:
        none = np.empty(0, np.int64)
        return {
            table: _Vocabulary(none if self.learned is None else self.learned.keys(table))
            for table in vocabulary_tables(self.features)
        }

    @cached_property
    def multi_hot(self) -> tuple[str, ...]:
        """The features with bags of ids."""
        return tuple(feature.name for feature in self.features.sparse if feature.is_bag)

    @cached_property
    def kept(self) -> tuple[IdRule, ...]:
        """What the ids of each sparse feature are in ``columns``."""
        return tuple(
            "unchanged" if feature.in_buckets else KEPT[feature.ids] for feature in self.features.sparse
        )

    @cached_property
    def wide(self) -> tuple[str, ...]:
        """The features whose ids take 8 bytes as they are ``read``."""
        return tuple(f.name for f in self.features.sparse if f.type == "text" or f.in_buckets)

    @cached_property
    def to_rows(self) -> IdMapper:
        """Makes rows of tables of the ids."""
        return IdMapper(self.schema, self.multi_hot, self.kept)

    def columns(self, rows: pa.RecordBatch, checks: RowChecks, labelled: bool = True) -> Encoded:
        """``read``, and then ``finish``."""
        columns, missing = self.read(rows, checks, labelled)
        return Encoded(self.finish(columns), missing)

    def read(self, rows: pa.RecordBatch, checks: RowChecks, labelled: bool = True) -> Encoded:
        """The samples of ``rows``, which has the columns of the features; labels are 0 if they are not
        ``labelled``. Rows with values that cannot be are marked in ``checks``, and have any values here.

        Ids of a vocabulary are keys, numbers that become buckets are their bits, and those that become
        standard ones are float64, NaN where they are missing.
        """
        labels, missing = np.zeros(len(rows), np.float32), {}
        if labelled:
            (label,) = self.features.labels
            labels = _labels(checks, label.source, rows[label.source], LABEL_KINDS[label.kind or "clicks"])
        exact = any(feature.scale == "standard" for feature in self.features.dense)
        dense = np.empty((len(rows), len(self.features.dense)), np.float64 if exact else np.float32)
        for index, feature in enumerate(self.features.dense):
            dense[:, index], absent = _dense(checks, feature, rows[feature.source])
            missing[feature.name] = int(absent.sum())
        found = {f.name: _sparse(checks, f, rows[f.source]) for f in self.features.sparse}
        missing |= {name: int(own.missing.sum()) for name, own in found.items()}
        bags = {name: own.bags for name, own in found.items() if own.bags is not None}
        single = [own for own in found.values() if own.bags is None]
        ids, bits = np.empty((len(rows), 0), np.int64), None
        if single:
            ids = np.stack([own.keys for own in single], 1)
            bits = bits_of(np.stack([own.missing for own in single], 1))
        return Encoded(Columns(labels, dense, ids, bags, bits), missing)

    def finish(self, columns: Columns) -> Columns:
        """The samples that were ``read``, with float32 numbers and with rows of the tables that have a
        vocabulary or buckets."""
        learned = self.learned or Learned()
        dense = columns.dense
        for place, feature in enumerate(self.features.dense):
            if feature.scale == "standard":
                mean, deviation = learned.scales[feature.name]
                values = columns.dense[:, place]
                scaled = np.where(np.isnan(values), feature.default, (values - mean) / deviation)
                dense = dense.copy() if dense is columns.dense else dense
                dense[:, place] = scaled
        ids, bags, place = columns.ids, dict(columns.bags), 0
        for feature in self.features.sparse:
            rows = partial(self._rows, feature, learned)
            if feature.is_bag:
                if feature.ids == "vocabulary":
                    bag = columns.bags[feature.name].trimmed()
                    bags[feature.name] = MultiHot(rows(bag.values, bag.missing, 0), bag.offsets)
                continue
            if feature.in_buckets or feature.ids == "vocabulary":
                ids = ids.copy() if ids is columns.ids else ids
                ids[:, place] = rows(columns.ids[:, place], columns.missing, place)
            place += 1
        return Columns(columns.labels, dense.astype(np.float32, copy=False), ids, bags, columns.missing)

    def _rows(
        self, feature: Feature, learned: Learned, keys: NDArray[np.integer], bits: Bits | None, place: int
    ) -> Int64:
        """The rows of ``keys`` [n]; those whose bit is set at ``place`` have row 0."""
        if feature.in_buckets:
            edges = feature.edges or learned.edges[feature.name]
            rows = 1 + np.searchsorted(np.array(edges, np.float64), bits_as_numbers(keys), side="right")
        else:
            rows = self._vocabularies[feature.table or feature.name].rows(keys)
        return np.where(bit_at(bits, place, len(keys)), 0, rows)

    def unseen(self, columns: Columns) -> dict[str, int]:
        """How many ids of finished samples their vocabularies lack, by feature."""
        single = [feature.name for feature in self.features.sparse if not feature.is_bag]
        counts = {}
        for feature in self.features.sparse:
            if feature.ids == "vocabulary" and not feature.in_buckets:
                bag = columns.bags.get(feature.name)
                ids = columns.ids[:, single.index(feature.name)] if bag is None else bag.trimmed().values
                counts[feature.name] = int((ids == UNSEEN).sum())
        return counts

    def require_types(self, where: str, found: pa.Schema) -> None:
        """``DataError`` unless ``found`` has the columns of the features, and no others, with types that say
        what they said in training: text and numbers have other keys."""
        features = (*self.features.dense, *self.features.sparse)
        wanted = [feature.source for feature in features]
        for name in found.names:
            if name not in wanted:
                hint = nearest_or_all(name, wanted)
                raise DataError(f"{where}: no feature has a column '{shown(name)}'; {hint}")
        for feature in features:
            name = feature.source
            if name not in found.names:
                raise DataError(f"{where}: no column '{shown(name)}'; null stands for a missing value")
            kind = found.field(name).type
            require_type(where, name, kind, feature)
            then = content(feature)
            if (
                feature in self.features.sparse
                and not feature.in_buckets
                and then
                and element_of(kind) not in (then, None)
            ):
                raise DataError(f"{where}, column {shown(name)}: holds {kind}, and held {then} in training")


class _Vocabulary:
    """``keys`` int64 [n], of which the first has row ``FIRST``."""

    def __init__(self, keys: Int64) -> None:
        self.keys = keys
        self._order = np.argsort(keys)
        self._sorted = keys[self._order]

    def rows(self, keys: NDArray[np.integer]) -> Int64:
        """The rows int64 of ``keys``; ``UNSEEN`` for those that it lacks."""
        if not len(self._sorted):
            return np.full(len(keys), UNSEEN, np.int64)
        wanted = keys.astype(np.int64)
        places = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        return np.where(self._sorted[places] == wanted, self._order[places] + FIRST, UNSEEN)


def content(feature: Feature) -> str | None:
    """What the columns of ids held whose types the feature was settled by: text or numbers; None: text of
    numbers, so that both have the same keys."""
    return {"text": "text", "auto": "numbers", "integer": None}[feature.type]


def element_of(kind: pa.DataType) -> str | None:
    """Whether a column has text or numbers, or lists of these; None: it has no values."""
    kind = plain_type(kind)
    element = plain_type(kind.value_type) if is_list(kind) else kind
    return None if pa.types.is_null(element) else "text" if is_text(element) else "numbers"


def _dense(checks: RowChecks, feature: Feature, array: pa.Array) -> tuple[NDArray[np.floating], Bools]:
    """Values [n], scaled, the default where they are missing; and where that is, bool [n]."""
    found, show = read_numbers(array, feature), partial(_value, array)
    checks.require(found.valid, feature.source, show, "is not a number")
    values = found.values
    if feature.scale == "standard":
        checks.require_finite(values, feature.source, show)
        return np.where(found.missing, np.nan, values), found.missing
    if feature.scale == "log":
        values = signed_log(values).astype(np.float64)
    elif feature.scale == "log1p":
        checks.require(values > -1, feature.source, show, "has no log1p: it must be above -1")
        values = np.log1p(np.maximum(values, -1 + 2**-53))
    scaled = checks.require_finite(values, feature.source, show)
    return np.where(found.missing, np.float32(feature.default), scaled), found.missing


def _sparse(checks: RowChecks, feature: Feature, array: pa.Array) -> _Sparse:
    if feature.in_buckets:
        number, show = read_numbers(array, feature), partial(_value, array)
        checks.require(number.valid, feature.source, show, "is not a number")
        checks.require(np.isfinite(number.values), feature.source, show, "is not a finite number")
        return _Sparse(number.missing, numbers_as_bits(number.values))
    found = read_bags(array, feature) if feature.is_bag else None
    ids = read_ids(array, feature) if found is None else found.ids

    def require(valid: Bools, remedy: str) -> None:
        """Of each id."""
        checks.require(
            valid if found is None else found.all_of(valid), feature.source, partial(_value, array), remedy
        )

    require(ids.valid, ids.remedy)
    if feature.ids == "rows":
        assert feature.rows is not None
        remedy = (
            f"is not in [0, {feature.rows}): raise data.tables.{shown(feature.name)} or pass "
            "data.hash_ids=true, which hashes ids into the table"
        )
        require((ids.keys >= 0) & (ids.keys < feature.rows) & ~ids.missing, remedy)
    if found is None:
        return _Sparse(ids.missing, ids.keys)
    bags = MultiHot(ids.keys, found.offsets, bits_of(ids.missing[:, None]))
    return _Sparse(found.empty, ids.keys, bags)


def _labels(checks: RowChecks, name: str, array: pa.Array, kind: LabelKind) -> Float32:
    """float32 labels; rows with one that is not of its ``kind``, or missing, are bad."""
    found = read_numbers(array)
    values = np.where(found.missing | ~found.valid, np.nan, found.values)
    with np.errstate(over="ignore"):
        stored = values.astype(np.float32)
    valid = kind.fits(values) & np.isfinite(stored)
    checks.require(valid, name, partial(_value, array), kind.fault)
    return np.where(valid, stored, np.float32(0))


def _value(array: pa.Array, row: int) -> object:
    """The value in a row, for a message; text that is not UTF-8 is shown as bytes."""
    try:
        return array[row].as_py()
    except UnicodeDecodeError:
        kind = pa.list_(pa.binary()) if is_list(array.type) else pa.binary()
        return array.slice(row, 1).cast(kind)[0].as_py()
