"""What turns raw values into what tables and layers take: the same object in preparation, predict, a package
and a server, so that a value means one thing in all of them.

It does so in two steps: ``read`` gives keys of ids and numbers, and ``finish`` applies what preparation has
learned from these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recpipe.data.column_types import is_list, is_text, plain_type
from recpipe.data.columns import Bits, Columns, Int64, MultiHot, bits_of
from recpipe.data.feature import AGES, HEX, WEIGHTED, Feature
from recpipe.data.features import Features
from recpipe.data.files import RowChecks
from recpipe.data.id_mapper import IdMapper
from recpipe.data.labels import no_labels, read_labels
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
from recpipe.data.refusals import require_type
from recpipe.data.schema import OF_MODULES, IdRule, Schema
from recpipe.data.sources.transforms import mix64, signed_log
from recpipe.data.text_values import Bools
from recpipe.data.timestamps import MICROSECONDS_OF_A_DAY, read_ages, read_times, stated_time
from recpipe.data.values import Ids, Numbers, read_bags, read_ids, read_numbers, read_vectors, value_at
from recpipe.data.weighted import FAULT, read_weighted, require_weights
from recpipe.errors import DataError, nearest_or_all, shown

Numeric = NDArray[np.floating]
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
    """The ids of one feature of n samples: ``bags``, or keys int64 [n] of one each, and which of these are
    ``missing``; and how many samples are ``empty``, without a value."""

    missing: Bools
    keys: Int64
    empty: int
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
            "unchanged" if feature.own_rows else KEPT[feature.ids] for feature in self.features.sparse
        )

    @cached_property
    def wide(self) -> tuple[str, ...]:
        """The features whose ids take 8 bytes as they are ``read``."""
        return tuple(f.name for f in self.features.sparse if f.type in ("text", HEX) or f.buckets or f.of)

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
        features = self.features
        labels = read_labels(rows, features, checks) if labelled else no_labels(features, len(rows))
        missing = dict(labels.missing)
        exact = any(feature.is_exact for feature in self.features.dense)
        dense = np.empty((len(rows), len(self.schema.dense)), np.float64 if exact else np.float32)
        place = 0
        for feature in self.features.dense:
            wide = slice(place, place := place + len(feature.names))
            dense[:, wide], absent = _DENSE[feature.kind](checks, feature, rows)
            missing[feature.name] = int(absent.sum())
        read = {f.name: _sparse(checks, f, rows) for f in self.features.sparse if not f.of}
        found = {f.name: _crossed(f, read) if f.of else read[f.name] for f in self.features.sparse}
        missing |= {name: own.empty for name, own in found.items()}
        bags = {name: own.bags for name, own in found.items() if own.bags is not None}
        self._require_ages(checks, dense, bags, rows)
        single = [own for own in found.values() if own.bags is None]
        ids, bits = np.empty((len(rows), 0), np.int64), None
        if single:
            ids = np.stack([own.keys for own in single]).T  # by feature in memory, as they are worked on
        if any(own.missing.any() for own in single):
            bits = bits_of(np.stack([own.missing for own in single], 1))
        return Encoded(Columns(labels.values, dense, ids, bags, bits, labels.weights), missing)

    def _require_ages(
        self, checks: RowChecks, dense: Numeric, bags: Mapping[str, MultiHot], rows: pa.RecordBatch
    ) -> None:
        """Marks samples of which a sequence has more ids than its events have times, or fewer; of long ones
        as far as both are kept."""
        for feature in self.features.sparse:
            if feature.ages is not None:
                places = list(self.schema.ages_of(feature.name))
                most = min(len(places), feature.max_length or len(places))
                times = (dense[:, places] >= 0).sum(1)
                same = np.minimum(times, most) == np.minimum(np.diff(bags[feature.name].offsets), most)
                show = partial(value_at, rows[feature.source])
                checks.require(
                    same, feature.source, show, f"has another number of ids than {feature.ages} has"
                )

    def finish(self, columns: Columns) -> Columns:
        """The samples that were ``read``, with float32 numbers and with rows of the tables that have a
        vocabulary or buckets."""
        learned = self.learned or Learned()
        dense = columns.dense
        inputs = [(feature, name) for feature in self.features.dense for name in feature.names]
        for place, (feature, name) in enumerate(inputs):
            if feature.is_exact:
                dense = dense.copy() if dense is columns.dense else dense
                dense[:, place] = _finished(feature, name, columns.dense[:, place], learned)
        ids, bags = columns.ids, dict(columns.bags)
        single = [feature.name for feature in self.features.sparse if not feature.is_bag]
        for feature in self.features.sparse:
            if feature.is_bag and feature.ids == "vocabulary":
                bag = columns.bags[feature.name].trimmed()
                ids_of_bag = self._rows(feature, learned, bag.values, bag.missing, 0)
                bags[feature.name] = MultiHot(ids_of_bag, bag.offsets, weights=bag.weights)
            elif feature.buckets or feature.ids == "vocabulary":
                ids, place = ids.copy() if ids is columns.ids else ids, single.index(feature.name)
                ids[:, place] = self._rows(feature, learned, columns.ids[:, place], columns.missing, place)
        dense = dense.astype(np.float32, copy=False)
        return Columns(columns.labels, dense, ids, bags, columns.missing, columns.weights)

    def _rows(
        self, feature: Feature, learned: Learned, keys: NDArray[np.integer], bits: Bits | None, place: int
    ) -> Int64:
        """The rows of ``keys`` [n]; those whose bit is set at ``place`` have row 0."""
        if feature.buckets:
            rows = _bucket_rows(learned.edges[feature.name], bits_as_numbers(keys))
        else:
            rows = self._vocabularies[feature.table_name].rows(keys)
        return np.where(bit_at(bits, place, len(keys)), 0, rows)

    def rows_of(self, values: pa.Array) -> NDArray[np.integer]:
        """The rows of its table that the values [n] of the only feature's column, one id each, become; those
        that cannot be have any row."""
        (feature,) = self.features.sparse
        checks = RowChecks(f"column {shown(feature.source)}", 1, len(values))
        rows = pa.record_batch([values], [feature.source])
        return self.to_rows.by_column(self.columns(rows, checks, labelled=False).columns)[""][:, 0]

    def unseen(self, columns: Columns) -> dict[str, int]:
        """How many ids of finished samples their vocabularies lack, by feature."""
        single = [feature.name for feature in self.features.sparse if not feature.is_bag]
        counts = {}
        for feature in self.features.sparse:
            if feature.ids == "vocabulary":
                bag = columns.bags.get(feature.name)
                ids = columns.ids[:, single.index(feature.name)] if bag is None else bag.trimmed().values
                counts[feature.name] = int((ids == UNSEEN).sum())
        return counts

    def require_types(self, where: str, found: pa.Schema) -> None:
        """``DataError`` unless ``found`` has the columns of the features, and no others, with types that say
        what they said in training: text and numbers have other keys."""
        features = [f for f in (*self.features.dense, *self.features.sparse) if not f.of]
        weighted = [f for f in features if f.weights is not None]
        wanted = [*(feature.source for feature in features), *self.features.beside]
        for name in found.names:
            if name not in wanted:
                hint = nearest_or_all(name, wanted)
                raise DataError(f"{where}: no feature has a column '{shown(name)}'; {hint}")
        for name in wanted:
            if name not in found.names:
                raise DataError(f"{where}: no column '{shown(name)}'; null stands for a missing value")
        for feature in weighted:
            require_weights(where, found.field(str(feature.weights)).type, feature)
        for feature in features:
            name = feature.source
            kind = found.field(name).type
            if feature.kind not in ("timestamp", AGES) or element_of(kind) != "text":
                require_type(where, name, kind, feature)
            then = content(feature)
            if (
                feature in self.features.sparse
                and feature.own_rows is None
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
    return {"text": "text", HEX: "text", "auto": "numbers", "integer": None}[feature.type]


def element_of(kind: pa.DataType) -> str | None:
    """Whether a column has text or numbers, or lists of these; None: it has no values."""
    kind = plain_type(kind)
    element = plain_type(kind.value_type) if is_list(kind) else kind
    return None if pa.types.is_null(element) else "text" if is_text(element) else "numbers"


def _dense(checks: RowChecks, feature: Feature, rows: pa.RecordBatch) -> tuple[Numeric, Bools]:
    """Values [n, 1] or [n, size], scaled, the default where they are missing; and which samples have none,
    bool [n]."""
    array = rows[feature.source]
    show = partial(value_at, array)
    if feature.kind == "vector":
        found = read_vectors(array, feature)
        checks.require(found.valid, feature.source, show, f"is not a list of {feature.size} numbers")
    else:
        one = read_numbers(array, feature)
        checks.require(one.valid, feature.source, show, "is not a number")
        found = Numbers(one.values[:, None], one.missing[:, None], one.valid)
    values = found.values
    if feature.scale == "log":
        values = signed_log(values).astype(np.float64)
    elif feature.scale == "log1p":
        fault = "has no log1p: it must be above -1"
        checks.require(np.all(values > -1, axis=1), feature.source, show, fault)
        values = np.log1p(np.maximum(values, -1 + 2**-53))
    stored = np.stack([checks.require_finite(own, feature.source, show) for own in values.T], 1)
    if not found.missing.any() and feature.scale != "standard":
        return stored, np.zeros(len(stored), bool)
    none: Bools = found.missing[:, 0] if found.missing.shape[1] == 1 else np.all(found.missing, axis=1)
    if feature.scale == "standard":
        return np.where(found.missing, np.nan, values), none
    return np.where(found.missing, np.float32(feature.number), stored), none


def _finished(feature: Feature, name: str, values: Numeric, learned: Learned) -> Numeric:
    """The dense input ``name`` of exact ``values`` [n]; those that are NaN have the default."""
    if feature.scale == "standard":
        mean, deviation = learned.scales[name]
        scaled = (values - mean) / deviation
    else:
        stated = stated_time(feature)
        now = learned.times[name] if stated is None else stated
        scaled = signed_log((now - values).astype(np.float64) / MICROSECONDS_OF_A_DAY)
    return np.where(np.isnan(values), feature.number, scaled)


def _time(checks: RowChecks, feature: Feature, rows: pa.RecordBatch) -> tuple[Numeric, Bools]:
    """Microseconds since 1970 float64 [n, 1], NaN where they are missing; and where that is."""
    array = rows[feature.source]
    times = read_times(array, feature)
    checks.require(times.valid, feature.source, partial(value_at, array), _no_time(feature))
    return np.where(times.missing, np.nan, times.micros)[:, None], times.missing


def _no_time(feature: Feature) -> str:
    written = f" as format: '{feature.format}' has it" if feature.format else ""
    return f"is not a time{written}, in the years 1 to 9999"


def _ages(checks: RowChecks, feature: Feature, rows: pa.RecordBatch) -> tuple[Numeric, Bools]:
    """Seconds float64 [n, size]; and which samples have no event."""
    lists, until = rows[feature.source], rows[str(feature.until)]
    now = read_times(until, feature)
    checks.require(now.valid & ~now.missing, str(feature.until), partial(value_at, until), _no_time(feature))
    found = read_ages(lists, now, feature)
    fault = f"has a time that is none, or is later than {shown(str(feature.until))}"
    checks.require(found.valid, feature.source, partial(value_at, lists), fault)
    return found.seconds, found.missing


_DENSE = {"dense": _dense, "vector": _dense, "timestamp": _time, AGES: _ages}


def _bucket_rows(edges: Sequence[float], values: NDArray[np.float64]) -> Int64:
    return 1 + np.searchsorted(np.array(edges, np.float64), values, side="right").astype(np.int64)


def _crossed(feature: Feature, read: Mapping[str, _Sparse]) -> _Sparse:
    """The keys of ids together: one after the other they are mixed in, so that their order matters."""
    first, *others = (read[name] for name in feature.of)
    keys, missing = first.keys.view(np.uint64), first.missing
    for other in others:
        keys = mix64(mix64(keys + np.uint64(0x9E3779B97F4A7C15)) ^ other.keys.view(np.uint64))
        missing = missing | other.missing
    return _Sparse(missing, keys.view(np.int64), int(missing.sum()))


def _sparse(checks: RowChecks, feature: Feature, rows: pa.RecordBatch) -> _Sparse:
    array = rows[feature.source]
    if feature.in_buckets:
        return _bucket(checks, feature, array)
    if feature.kind == "timestamp":
        return _calendar(checks, feature, array)
    return _ids(checks, feature, array, None if feature.weights is None else rows[feature.weights])


def _bucket(checks: RowChecks, feature: Feature, array: pa.Array) -> _Sparse:
    found, show = read_numbers(array, feature), partial(value_at, array)
    checks.require(found.valid, feature.source, show, "is not a number")
    checks.require(np.isfinite(found.values), feature.source, show, "is not a finite number")
    if feature.buckets:
        keys = numbers_as_bits(found.values)
    else:
        keys = np.where(found.missing, 0, _bucket_rows(feature.edges, found.values))
    return _Sparse(found.missing, keys, int(found.missing.sum()))


def _calendar(checks: RowChecks, feature: Feature, array: pa.Array) -> _Sparse:
    times = read_times(array, feature)
    checks.require(times.valid, feature.source, partial(value_at, array), _no_time(feature))
    rows = np.where(times.missing, 0, 1 + times.parts(feature))
    return _Sparse(times.missing, rows, int(times.missing.sum()))


def _ids(checks: RowChecks, feature: Feature, array: pa.Array, beside: pa.Array | None = None) -> _Sparse:
    """``beside``: the column of its weights, if they have one."""
    found, weights = read_bags(array, feature) if feature.is_bag and feature.kind != WEIGHTED else None, None
    if feature.kind == WEIGHTED:
        found, weights, valid = read_weighted(array, beside, feature)
        checks.require(valid, feature.source, partial(value_at, array), FAULT)
    ids = read_ids(array, feature) if found is None else found.ids
    empty = ids.missing if found is None else found.empty
    if feature.default is not None:
        ids = _with_default(ids, feature)

    def require(valid: Bools, remedy: str) -> None:
        """Of each id."""
        checks.require(
            valid if found is None else found.all_of(valid), feature.source, partial(value_at, array), remedy
        )

    require(ids.valid, ids.remedy)
    if feature.ids == "rows":
        assert isinstance(feature.rows, int)
        remedy = (
            f"is not in [0, {feature.rows}): raise data.tables.{shown(feature.table_name)} or pass "
            "data.hash_ids=true, in data.features ids: hash, which hashes ids into the table " + OF_MODULES
        )
        require((ids.keys >= 0) & (ids.keys < feature.rows) & ~ids.missing, remedy)
    if found is None:
        return _Sparse(ids.missing, ids.keys, int(empty.sum()))
    bags = MultiHot(ids.keys, found.offsets, bits_of(ids.missing[:, None]), weights)
    return _Sparse(ids.missing, ids.keys, int(empty.sum()), bags)


def _with_default(ids: Ids, feature: Feature) -> Ids:
    """The id that the default is stands where there is none."""
    default = feature.default
    whole = isinstance(default, float) and default.is_integer()
    text = str(int(default)) if whole and isinstance(default, float) else str(default)
    kind = replace(feature, type="integer" if feature.type == "auto" else feature.type)
    own = read_ids(pa.array([text]), kind)
    if not own.valid.all() or own.missing.any():
        raise DataError(
            f"data.features, {shown(feature.name)}: default {shown(text)} is no id as its column has them"
        )
    return Ids(
        np.where(ids.missing, own.keys[0], ids.keys), np.zeros_like(ids.missing), ids.valid, ids.remedy
    )
