"""What the values of a column say, before anything is learned from them: the keys of ids, and numbers.

The same functions read the columns of files and the values of a request, whatever Arrow type they have: a
whole number is one id whether a file has it as int8, as a double without a fraction or as a decimal. Missing
is null, NaN, empty text, and what the feature's ``missing`` lists. A value that is none of what a feature can
be makes its row bad; a type that cannot be is refused as a whole, with what would help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpipe.data.column_types import is_list, is_number, is_text, plain, plain_type
from recpipe.data.columns import Int64, offsets_of
from recpipe.data.feature import HEX, NO_VALUE, Feature
from recpipe.data.text_values import (
    DECIMAL_NUMBERS,
    HEXADECIMAL_NUMBERS,
    KEYS,
    WHOLE_NUMBERS,
    Bools,
    without_value,
)

EXACT = {pa.float16(): 2**11, pa.float32(): 2**24, pa.float64(): 2**53}
"""Up to here every whole number is itself in floating point."""
WHOLE_REMEDY = "is not a whole number that its type holds exactly, as an id must be: make it text or int64"


@dataclass
class Ids:
    """Keys int64 [n] (unsigned ones from 2**63 on wrap, so that they stay distinct), which of them are
    ``missing`` and which are ``valid``, bool [n], and the remedy for one that is not."""

    keys: Int64
    missing: Bools
    valid: Bools
    remedy: str = WHOLE_REMEDY


@dataclass
class Bags:
    """The ids of n samples: those of sample i are ``ids[offsets[i]:offsets[i + 1]]``. ``empty`` bool [n]: the
    list is missing or has none."""

    ids: Ids
    offsets: Int64
    empty: Bools

    def all_of(self, valid: Bools) -> Bools:
        """Whether all ids of a sample are ``valid``, bool [ids]; bool [n]."""
        if valid.all():
            return np.ones(len(self.empty), bool)
        owners = np.searchsorted(self.offsets, np.flatnonzero(~valid), "right") - 1
        return np.asarray(np.bincount(owners, minlength=len(self.empty)) == 0)


@dataclass
class Numbers:
    """Values float64 [n], 0 where they are ``missing`` or not ``valid``, bool [n]."""

    values: NDArray[np.float64]
    missing: Bools
    valid: Bools


def read_ids(array: pa.Array, feature: Feature) -> Ids:
    """The ids of an array [n], one each. ``TypeError`` for a type that ``refusal`` refuses."""
    array = plain(array)
    kind, size = array.type, len(array)
    if pa.types.is_null(kind):
        return Ids(np.zeros(size, np.int64), np.ones(size, bool), np.ones(size, bool))
    if is_text(kind):
        return _ids_of_text(array, feature)
    missing = nulls(array)
    if pa.types.is_floating(kind):
        floats = pc.fill_null(array, np.nan).to_numpy(zero_copy_only=False).astype(np.float64)
        missing = np.isnan(floats)
        valid = missing | ((floats == np.floor(floats)) & (np.abs(floats) <= EXACT[kind]))
        keys = np.where(valid & ~missing, floats, 0).astype(np.int64)
    elif pa.types.is_decimal(kind):
        keys, valid = _whole_decimals(array)
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        keys = filled(array if kind == pa.int64() else array.cast(pa.int64(), safe=False), 0)
        valid = np.ones(size, bool)
    else:
        raise TypeError(kind)
    return Ids(keys, missing | (_declared(keys, feature.missing) & valid), valid)


def nulls(array: pa.Array) -> Bools:
    """Where an array [n] is null."""
    return np.asarray(array.is_null()) if array.null_count else np.zeros(len(array), bool)


def filled(array: pa.Array, none: float) -> NDArray[Any]:
    """The values of an array [n] of numbers, ``none`` in place of null."""
    return np.asarray(
        (pc.fill_null(array, none) if array.null_count else array).to_numpy(zero_copy_only=False)
    )


def _ids_of_text(array: pa.Array, feature: Feature) -> Ids:
    missing = without_value(array, feature.missing)
    read, remedy = KEYS, "is not UTF-8, which text must be: write it as text, or as binary"
    if feature.type == HEX:
        read, remedy = HEXADECIMAL_NUMBERS, "is not a hexadecimal id of up to 16 digits"
    elif feature.type == "integer":
        read = WHOLE_NUMBERS
        remedy = "is not a whole number as type: integer takes it; type: text takes any value as it is"
    keys, valid = read(array, missing)
    if feature.type == "integer" and feature.missing:
        missing = missing | (_declared(keys, feature.missing) & valid & ~missing)
    return Ids(keys, missing, valid, remedy)


def _whole_decimals(array: pa.Array) -> tuple[Int64, Bools]:
    """Decimals as whole numbers, and which of them are whole and within int64."""
    low, high = -(2**63), 2**63 - 1
    floor = pc.floor(array)
    whole = pc.and_(pc.equal(array, floor), pc.and_(pc.greater_equal(floor, low), pc.less_equal(floor, high)))
    valid = np.asarray(pc.fill_null(whole, True))
    keys = np.zeros(len(array), np.int64)
    good = valid & ~np.asarray(array.is_null())
    keys[good] = np.asarray(floor.filter(pa.array(good)).cast(pa.int64()))
    return keys, valid


def read_bags(array: pa.Array, feature: Feature) -> Bags:
    """The ids of an array [n] of lists, or of text in which ``separator`` stands between ids."""
    elements, lengths = elements_of(array, feature)
    ids = read_ids(elements, feature)
    none = np.zeros(len(elements), bool)
    if feature.padding:
        none = is_one_of(elements, ids, feature.padding)
    if feature.missing and not is_text(plain_type(array.type)):
        none |= _declared_alone(elements, ids, lengths, feature.missing)
    if none.any():
        ids, lengths = without(none, ids, lengths)
    if feature.max_length is not None and len(lengths) and lengths.max() > feature.max_length:
        offsets, cut = offsets_of(lengths), np.minimum(lengths, feature.max_length)
        starts = offsets[1:] - cut if feature.keep == "last" else offsets[:-1]
        kept = np.repeat(starts - offsets_of(cut)[:-1], cut) + np.arange(cut.sum())
        ids, lengths = Ids(ids.keys[kept], ids.missing[kept], ids.valid[kept], ids.remedy), cut
    return Bags(ids, offsets_of(lengths), lengths == 0)


def _declared_alone(elements: pa.Array, ids: Ids, lengths: Int64, declared: tuple[str, ...]) -> Bools:
    """Where the only element of a list is one of the ``declared`` values: such a list has no id, as text with
    that value has none."""
    given = ~np.asarray(elements.is_null(nan_is_null=pa.types.is_floating(elements.type)))
    known = Ids(ids.keys, ids.missing & ~given, ids.valid)
    return np.repeat(lengths == 1, lengths) & is_one_of(elements, known, declared)


def elements_of(array: pa.Array, feature: Feature) -> tuple[pa.Array, Int64]:
    """The values in an array [n] of lists, or of text with a separator, and how many each has, int64 [n]."""
    array = plain(array)
    if pa.types.is_null(array.type):
        array = array.cast(pa.list_(pa.int64()))
    elif is_text(array.type):
        array = pc.split_pattern(_emptied(array, feature), pattern=feature.separator)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return plain(array.flatten()), lengths


def without(filled: Bools, ids: Ids, lengths: Int64) -> tuple[Ids, Int64]:
    """The ids of lists of ``lengths`` but for those that are ``filled``, bool [ids]."""
    ends = np.concatenate(([0], np.cumsum(filled)))[offsets_of(lengths)]
    left = Ids(ids.keys[~filled], ids.missing[~filled], ids.valid[~filled], ids.remedy)
    return left, lengths - np.diff(ends)


def _emptied(array: pa.Array, feature: Feature) -> pa.Array:
    """Text of lists with null for what is no value, so that ``""`` has no id instead of an empty one."""
    none = pc.is_in(array, value_set=pa.array([*NO_VALUE, *feature.missing], array.type))
    return pc.if_else(none, pa.scalar(None, array.type), array)


def is_one_of(array: pa.Array, ids: Ids, words: tuple[str, ...]) -> Bools:
    """Where the values of ``array``, whose ``ids`` these are, are one of ``words``."""
    if is_text(array.type):
        return np.asarray(pc.fill_null(pc.is_in(array, value_set=pa.array(words, array.type)), False))
    return _declared(ids.keys, words) & ~ids.missing & ids.valid


def read_numbers(array: pa.Array, feature: Feature | None = None) -> Numbers:
    """The numbers of an array [n]; text must be a decimal number, or nan. ``TypeError`` for other types."""
    array = plain(array)
    kind, size, declared = array.type, len(array), () if feature is None else feature.missing
    valid = np.ones(size, bool)
    if pa.types.is_null(kind):
        return Numbers(np.zeros(size), np.ones(size, bool), valid)
    if is_text(kind):
        missing = without_value(array, declared)
        values, valid = DECIMAL_NUMBERS(array, missing)
    elif is_number(kind) or pa.types.is_boolean(kind):
        values = filled(array if kind == pa.float64() else array.cast(pa.float64(), safe=False), np.nan)
    else:
        raise TypeError(kind)
    missing = np.isnan(values)
    for word in declared:  # 2.0 and 2.00 are the 2 that is declared, in text as in numbers
        if (number := _number(word)) is not None:
            missing = missing | ((values == number) & valid)
    return Numbers(np.where(missing, 0.0, values) if missing.any() else values, missing, valid)


def read_vectors(array: pa.Array, feature: Feature) -> Numbers:
    """The ``feature.size`` numbers of each of an array [n] of lists, or of text of them: values [n, size].
    Missing is each number by itself, and all of a list that is null; lists of other lengths are not valid.
    """
    assert feature.size is not None
    array = plain(array)
    size = len(array)
    if pa.types.is_null(array.type):
        return Numbers(
            np.zeros((size, feature.size)), np.ones((size, feature.size), bool), np.ones(size, bool)
        )
    if is_text(array.type):
        array = pc.split_pattern(_emptied(array, feature), pattern=feature.separator)
    lengths = pc.fill_null(pc.list_value_length(array), -1).to_numpy(zero_copy_only=False)
    absent, whole = np.asarray(array.is_null()), lengths == feature.size
    found = read_numbers(array.filter(pa.array(whole & ~absent)).flatten(), feature)
    values, missing = np.zeros((size, feature.size)), np.ones((size, feature.size), bool)
    valid = whole | absent
    there = whole & ~absent
    values[there], missing[there] = (own.reshape(-1, feature.size) for own in (found.values, found.missing))
    valid[there] = found.valid.reshape(-1, feature.size).all(1)
    return Numbers(values, missing, valid)


def whole_text(array: pa.Array, feature: Feature) -> bool:
    """Whether all values of an array of text are written as whole numbers, and there are some."""
    array = plain(array)
    if feature.is_bag and feature.separator is not None:
        array = pc.split_pattern(_emptied(array, feature), pattern=feature.separator).flatten()
    if feature.weight_separator is not None:
        array = pc.list_element(parted(array, feature.weight_separator), 0)
    none = pa.array([*NO_VALUE, *feature.missing, *feature.padding], array.type)
    present = array.filter(pc.and_not(array.is_valid(), pc.is_in(array, value_set=none)))
    return bool(len(present)) and bool(WHOLE_NUMBERS(present, np.zeros(len(present), bool))[1].all())


def parted(array: pa.Array, separator: str) -> pa.Array:
    """Lists of an array [n] of text: what is in front of the last ``separator``, and what is behind it."""
    return pc.split_pattern(array, pattern=separator, max_splits=1, reverse=True)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _declared(keys: Int64, words: tuple[str, ...]) -> Bools:
    """Where ``keys`` [n] of numbers are one of ``words``, bool [n]."""
    numbers = [number for word in words if (number := _whole(word)) is not None]
    return np.isin(keys, numbers) if numbers else np.zeros(len(keys), bool)


def _whole(word: str) -> int | None:
    """A whole number of 64 bits as keys have it, unsigned ones wrapped; None: ``word`` is none."""
    try:
        number = int(word)
    except ValueError:
        found = _number(word)
        if found is None or not found.is_integer():
            return None
        number = int(found)
    return (number + 2**63) % 2**64 - 2**63 if -(2**63) <= number < 2**64 else None


def value_at(array: pa.Array, row: int) -> object:
    """The value in a row, for a message; text that is not UTF-8 is shown as bytes."""
    try:
        return array[row].as_py()
    except UnicodeDecodeError:
        kind = pa.list_(pa.binary()) if is_list(array.type) else pa.binary()
        return array.slice(row, 1).cast(kind)[0].as_py()
