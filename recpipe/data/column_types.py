"""What the types of Arrow's columns say: text, numbers, lists of these, whatever code they are kept in."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


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
