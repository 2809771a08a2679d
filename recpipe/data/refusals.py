"""Columns whose types cannot be what a feature is, each with what would help."""

from __future__ import annotations

import pyarrow as pa

from recpipe.data.column_types import is_list, is_number, is_text, plain_type
from recpipe.data.feature import AGES, HEX, WEIGHTED, Feature
from recpipe.errors import DataError, shown


def require_type(file: str, name: str, kind: pa.DataType, feature: Feature) -> None:
    """``DataError`` for a column whose type cannot be ``feature``."""
    if reason := refusal(kind, feature):
        raise DataError(f"{file}, column {shown(name)}: holds {kind}; {reason}")


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
