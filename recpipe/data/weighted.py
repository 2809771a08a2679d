"""Ids that have weights: a list of numbers beside them, or a number in the text of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpipe.data.column_types import is_list, is_number, is_text, plain, plain_type
from recpipe.data.columns import Float32, Int64, offsets_of
from recpipe.data.feature import Feature
from recpipe.data.text_values import Bools, without_value
from recpipe.data.values import Bags, elements_of, is_one_of, parted, read_ids, read_numbers, without
from recpipe.errors import DataError, shown

FAULT = "has not a weight for each of its ids"


class WeightedBags(NamedTuple):
    """The ids of n samples, their ``weights`` float32 [ids], and whether each sample has ``valid`` ones, bool
    [n]."""

    bags: Bags
    weights: Float32
    valid: Bools


def read_weighted(array: pa.Array, beside: pa.Array | None, feature: Feature) -> WeightedBags:
    """The ids of an array [n] of lists or text. Their weights are in their text, or in the lists ``beside``
    them; those of ids that are no value may be left out of text, and are 1."""
    elements, lengths = elements_of(array, feature)
    if beside is None:
        assert feature.weight_separator is not None
        elements, weights, fits = _in_text(plain(elements), feature)
        as_many = np.ones(len(lengths), bool)
    else:
        weights, fits, as_many = _beside(beside, lengths, feature)
    with np.errstate(over="ignore"):
        stored = weights.astype(np.float32)
    fits &= np.isfinite(stored)
    if feature.pooling == "mean":
        fits &= stored >= 0
    ids = read_ids(elements, feature)
    filled = is_one_of(elements, ids, feature.padding) if feature.padding else np.zeros(len(fits), bool)
    valid = as_many & Bags(ids, offsets_of(lengths), lengths == 0).all_of(fits | filled)
    ids, lengths = without(filled, ids, lengths)
    return WeightedBags(Bags(ids, offsets_of(lengths), lengths == 0), stored[~filled], valid)


def _in_text(elements: pa.Array, feature: Feature) -> tuple[pa.Array, NDArray[np.float64], Bools]:
    """The ids, their weights, and which of them have one."""
    text = elements if is_text(elements.type) else elements.cast(pa.string())
    absent = without_value(text, feature.missing)
    parts = parted(text, str(feature.weight_separator))
    counts = pc.fill_null(pc.list_value_length(parts), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    two = counts == 2
    found = read_numbers(parts.flatten().take(pa.array(offsets_of(counts)[:-1][two] + 1)))
    weights, fits = np.ones(len(text)), absent.copy()
    weights[two], fits[two] = found.values, found.valid & ~found.missing
    return pc.list_element(parts, 0), weights, fits


def _beside(array: pa.Array, lengths: Int64, feature: Feature) -> tuple[NDArray[np.float64], Bools, Bools]:
    """The weights of lists of so many ids, which of them are numbers, and which lists have as many."""
    elements, counts = elements_of(array, feature)
    found, as_many = read_numbers(elements), counts == lengths
    weights, fits = np.ones(lengths.sum()), np.ones(lengths.sum(), bool)
    mine, theirs = np.repeat(as_many, lengths), np.repeat(as_many, counts)
    weights[mine], fits[mine] = found.values[theirs], (found.valid & ~found.missing)[theirs]
    return weights, fits, as_many


def require_weights(where: str, kind: pa.DataType, feature: Feature) -> None:
    """``DataError`` for a column ``feature.weights`` whose type cannot be lists of numbers."""
    kind = plain_type(kind)
    element = plain_type(kind.value_type) if is_list(kind) else kind
    text = is_text(kind) and feature.separator is not None
    numbers = is_list(kind) and (is_number(element) or is_text(element) or pa.types.is_null(element))
    if not (text or numbers or pa.types.is_null(kind)):
        raise DataError(
            f"{where}, column {shown(str(feature.weights))}: holds {kind}; weights are lists of numbers, as "
            f"many as {shown(feature.source)} has ids, or text of them with its separator"
        )
