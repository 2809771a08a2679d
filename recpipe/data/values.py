"""What the values of a column say, before anything is learned from them: the keys of ids, and numbers.

The same functions read the columns of files and the values of a request, whatever Arrow type they have: a
whole number is one id whether a file has it as int8, as a double without a fraction or as a decimal. Missing
is null, NaN, empty text, and what the feature's ``missing`` lists. A value that is none of what a feature can
be makes its row bad; a type that cannot be is refused as a whole, with what would help.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpipe.common.loops import at_hand
from recpipe.data.columns import Int64, offsets_of
from recpipe.data.features import AGES, HEX, NO_VALUE, WEIGHTED, Feature
from recpipe.data.sources.transforms import string_keys
from recpipe.data.text_columns import is_utf8
from recpipe.data.text_loops import whole_numbers
from recpipe.data.word_keys import WordKeys
from recpipe.errors import DataError, shown

Bools = NDArray[np.bool_]
WHOLE = r"^(0|-?[1-9][0-9]{0,17})$"
"""Whole numbers as ``type: integer`` takes them: in one way each, and within int64."""
NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
NAN = r"^[nN][aA][nN]$"
HEXADECIMAL = r"^[0-9a-fA-F]{1,16}$"
EXACT = {pa.float16(): 2**11, pa.float32(): 2**24, pa.float64(): 2**53}
"""Up to here every whole number is itself in floating point."""
LONG = 1024
"""Values of an array from which on it is read by a loop, whose first call waits for its machine code."""
_WORD_KEYS = WordKeys()
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


def plain(array: pa.Array) -> pa.Array:
    """``array`` without dictionaries, views and run-length codes, which say the same in fewer bytes."""
    kind = array.type
    if pa.types.is_dictionary(kind):  # whose dictionary could hold nulls and repeats
        return plain(array.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(array))
    if kind in (pa.string_view(), pa.binary_view()):
        return array.cast(pa.large_string() if kind == pa.string_view() else pa.large_binary())
    if isinstance(array, pa.ExtensionArray):
        return plain(array.storage)
    return array


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
    read, remedy = _string_keys, "is not UTF-8, which text must be: write it as text, or as binary"
    if feature.type == HEX:
        read, remedy = _hexadecimal_numbers, "is not a hexadecimal id of up to 16 digits"
    elif feature.type == "integer":
        read = _whole_numbers
        remedy = "is not a whole number as type: integer takes it; type: text takes any value as it is"
    keys, valid = _of_present(read, array, missing, 0)
    if feature.type == "integer" and feature.missing:
        missing = missing | (_declared(keys, feature.missing) & valid & ~missing)
    return Ids(keys, missing, valid, remedy)


def _of_present(
    read: Callable[[pa.Array], tuple[NDArray[Any], Bools]], text: pa.Array, missing: Bools, none: float
) -> tuple[NDArray[Any], Bools]:
    """What is ``read`` of the values that are not ``missing``, ``none`` in place of these; and which are
    valid."""
    if not missing.any():
        return read(text)
    own, present = read(text.filter(pa.array(~missing)))
    values, valid = np.full(len(text), none, own.dtype), np.ones(len(text), bool)
    values[~missing], valid[~missing] = own, present
    return values, valid


def without_value(text: pa.Array, declared: tuple[str, ...]) -> Bools:
    """Where text is null, empty, or one of the ``declared`` values."""
    if declared:
        absent = pc.or_(pc.is_in(text, value_set=pa.array([*NO_VALUE, *declared], text.type)), text.is_null())
    elif not text.null_count:
        offsets = offsets_in(text)
        return np.asarray(offsets[1:] == offsets[:-1])
    else:
        absent = pc.equal(pc.binary_length(text), 0)
    return np.asarray(pc.fill_null(absent, True))


def offsets_in(text: pa.Array) -> NDArray[Any]:
    """Where in its buffer each of an array [n] of text begins, and where the last one ends, [n + 1]."""
    wide = pa.types.is_large_string(text.type) or pa.types.is_large_binary(text.type)
    if not len(text):  # which need not have a buffer
        return np.zeros(1, np.int64)
    whole = np.frombuffer(memoryview(text.buffers()[1]).toreadonly(), np.int64 if wide else np.int32)
    return whole[text.offset : text.offset + len(text) + 1]


def _bytes_in(text: pa.Array) -> NDArray[np.uint8]:
    """The buffer of an array of text, of which each value has some."""
    return np.frombuffer(memoryview(text.buffers()[2]).toreadonly(), np.uint8)


def _string_keys(text: pa.Array) -> tuple[Int64, Bools]:
    """Keys of an array [n] of text without nulls, and which of them are valid: UTF-8, unless it is bytes."""
    if len(text) >= LONG and at_hand():
        keys, is_ascii = _WORD_KEYS(_bytes_in(text), offsets_in(text))
        if is_ascii or is_bytes(text.type) or is_utf8(text):
            return keys.view(np.int64), np.ones(len(text), bool)
    keys, valid = string_keys(text)
    return keys.view(np.int64), valid


def _whole_numbers(text: pa.Array) -> tuple[Int64, Bools]:
    """The numbers in an array [n] of text without nulls, 0 for what is not ``WHOLE``; and which of it is."""
    if len(text) >= LONG and at_hand():
        values = np.empty(len(text), np.int64)
        if whole_numbers(_bytes_in(text), offsets_in(text), values):
            return values, np.ones(len(text), bool)
    with suppress(pa.ArrowInvalid):
        values = np.asarray(text.cast(pa.int64()))
        if _is_shortest(text, values):
            return values, np.ones(len(text), bool)
    whole = np.asarray(pc.match_substring_regex(text, WHOLE))
    keys = np.zeros(len(text), np.int64)
    keys[whole] = np.asarray(text.filter(pa.array(whole)).cast(pa.int64()))
    return keys, whole


def _is_shortest(text: pa.Array, values: Int64) -> bool:
    """Whether each number is ``WHOLE`` as text has it: then all are as short as they can be, and have digits
    and signs alone, where pyarrow takes 007, -0 and 0x1F too. That is a tenth of the work of the pattern."""
    if not len(values):
        return True
    most = max(-int(values.min()), int(values.max()))
    if most >= 10**18:
        return False
    sizes = np.abs(values)
    digits = [10**power for power in range(1, 18) if 10**power <= most]
    least = len(values) + sum(np.count_nonzero(sizes >= first) for first in digits)
    offsets = offsets_in(text)
    written = _bytes_in(text)[offsets[0] : offsets[-1]]
    return len(written) == least + np.count_nonzero(values < 0) and bool(written.max() <= ord("9"))


def _hexadecimal_numbers(text: pa.Array) -> tuple[Int64, Bools]:
    """The same of hexadecimal digits; from 2**63 on wrapped."""
    encoded = text.dictionary_encode()
    good = np.asarray(pc.match_substring_regex(encoded.dictionary, HEXADECIMAL))
    keys = np.zeros(len(good), np.uint64)
    keys[good] = [int(word, 16) for word in encoded.dictionary.filter(pa.array(good)).to_pylist()]
    where = np.asarray(encoded.indices)
    return keys.view(np.int64)[where], good[where]


def _decimal_numbers(text: pa.Array) -> tuple[NDArray[np.float64], Bools]:
    """The same of ``NUMBER``, float64; infinite where it is too large, and NaN where it is written so."""
    with suppress(pa.ArrowInvalid):
        values = np.asarray(text.cast(pa.float64()))
        if np.isfinite(values).all():  # inf and nan(1) are numbers to pyarrow, too
            return values, np.ones(len(text), bool)
    good = np.asarray(pc.match_substring_regex(text, f"{NUMBER}|{NAN}"))
    values = np.zeros(len(text))
    # Python's float takes what pyarrow's cast does not: +7, 1e999 and 1e-999.
    values[good] = [float(number) for number in text.filter(pa.array(good)).to_pylist()]
    return values, good


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
        values, valid = _of_present(_decimal_numbers, array, missing, np.nan)
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
    return bool(len(present)) and bool(pc.all(pc.match_substring_regex(present, WHOLE)).as_py())


def parted(array: pa.Array, separator: str) -> pa.Array:
    """Lists of an array [n] of text: what is in front of the last ``separator``, and what is behind it."""
    return pc.split_pattern(array, pattern=separator, max_splits=1, reverse=True)


def refusal(kind: pa.DataType, feature: Feature) -> str | None:
    """Why a column of type ``kind`` cannot be ``feature``, and what would help; None: it can."""
    kind = plain_type(kind)
    if pa.types.is_null(kind):
        return None
    lists = is_list(kind)
    element = plain_type(kind.value_type) if lists else kind
    if feature.kind == "timestamp":
        return _no_time(kind, feature)
    if feature.kind == AGES:
        if not lists and not (is_text(kind) and feature.separator is not None):
            return "ages are of a list of times, or text of them with a separator"
        return None if pa.types.is_null(element) else _no_time(element, feature)
    if feature.kind == "vector":
        if not lists and not (is_text(kind) and feature.separator is not None):
            return "a vector is a list of numbers, or text of them with a separator"
        return None if is_number(element) or is_text(element) or pa.types.is_null(element) else "not numbers"
    if feature.kind == "dense":
        if lists:
            return "a dense feature is one number; a list of them is of kind: vector"
        fits = is_number(kind) or pa.types.is_boolean(kind) or is_text(kind)
        return None if fits else f"a label or dense column must be numeric or bool{cast_of(kind)}"
    if lists and not feature.is_bag:
        return "several ids a sample are of kind: multi_hot or sequence"
    if not lists and feature.is_bag and not is_text(kind):
        return f"a {feature.kind} column has lists, or text with a separator; kind: id is one id"
    if not lists and feature.is_bag and feature.separator is None:
        return "state what stands between its ids, separator: '|' for example"
    if (
        feature.kind == WEIGHTED
        and feature.weight_separator
        and not (is_text(element) or pa.types.is_null(element))
    ):
        return "weight_separator is of text; weights of numbers are a column, weights: NAME"
    if feature.type == HEX and not (is_text(element) or pa.types.is_null(element)):
        return "hexadecimal ids are text; leave type out"
    if is_text(element) and feature.ids in ("modulo", "rows") and feature.type != "integer":
        return "text needs data.hash_ids=true, in data.features ids: hash or vocabulary"
    if is_text(element) or is_number(element) or pa.types.is_boolean(element) or pa.types.is_null(element):
        return None
    return f"sparse ids are integers, strings or lists of them{cast_of(element)}"


def _no_time(kind: pa.DataType, feature: Feature) -> str | None:
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return None
    if is_text(kind):
        if feature.format or feature.unit:
            return None
        return "state how times are written, format: iso or '%d.%m.%Y' for example; unit: s for numbers"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return None if feature.unit else "state of which unit the numbers are, unit: s, ms, us or ns"
    return "a timestamp is a date, a timestamp, a number or text"


def cast_of(kind: pa.DataType) -> str:
    """What makes of a column of type ``kind`` something that a feature can be."""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "; it is of kind: timestamp, or cast it to int64, or to text"
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        return "; cast it to int64, or to text"
    if pa.types.is_struct(kind):
        return "; write its parts as columns of their own"
    return "; write its ids as a list" if pa.types.is_map(kind) or is_list(kind) else ""


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that ``plain`` arrays of type ``kind`` have."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if kind in (pa.string_view(), pa.binary_view()):
        return pa.large_string() if kind == pa.string_view() else pa.large_binary()
    return plain_type(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else kind


def is_text(kind: pa.DataType) -> bool:
    """Whether a plain type is of strings or bytes."""
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in text) or kind in (pa.string_view(), pa.binary_view())


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a plain type is of bytes, which need not be UTF-8."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is of lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """Whether a plain type is of numbers."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def alike(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types of a column say the same: ids of text have other keys than numbers, times are read
    otherwise, and lists are not single values. A column of nulls has no type of its own."""
    one, other = plain_type(one), plain_type(other)
    if pa.types.is_null(one) or pa.types.is_null(other):
        return True
    if is_list(one) != is_list(other):
        return False
    if is_list(one):
        return alike(one.value_type, other.value_type)
    return _sort(one) == _sort(other)


def _sort(kind: pa.DataType) -> str:
    """What single values of a plain type are read as."""
    if is_text(kind):
        return "text"
    if is_number(kind) or pa.types.is_boolean(kind):
        return "number"
    return "time" if pa.types.is_timestamp(kind) or pa.types.is_date(kind) else str(kind)


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


def require_type(file: str, name: str, kind: pa.DataType, feature: Feature) -> None:
    """``DataError`` for a column whose type cannot be ``feature``."""
    if reason := refusal(kind, feature):
        raise DataError(f"{file}, column {shown(name)}: holds {kind}; {reason}")


def value_at(array: pa.Array, row: int) -> object:
    """The value in a row, for a message; text that is not UTF-8 is shown as bytes."""
    try:
        return array[row].as_py()
    except UnicodeDecodeError:
        kind = pa.list_(pa.binary()) if is_list(array.type) else pa.binary()
        return array.slice(row, 1).cast(kind)[0].as_py()
