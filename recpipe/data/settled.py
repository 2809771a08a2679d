"""Features whose kinds and types are settled by the columns that they are read from, where the recipe leaves
them open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pyarrow as pa

from recpipe.data.column_types import is_list, plain_type
from recpipe.data.encoding import element_of
from recpipe.data.expression_values import require_types
from recpipe.data.feature import HEX, Feature
from recpipe.data.features import Features
from recpipe.data.refusals import require_type
from recpipe.data.weighted import require_weights
from recpipe.errors import DataError, shown

Types = Mapping[str, tuple[pa.DataType, object]]
"""The type of each column, and where it was found, for messages."""


def settled(
    features: Features, types: Types, type_of_text: Callable[[Feature], str], labelled: bool = True
) -> Features:
    """``features`` with the kinds and types of text of their columns where they were left open; ``DataError``
    for a column that cannot be its feature. ``type_of_text``: what text of ids is."""
    found = []
    for feature in features.sparse:
        if feature.of:
            found.append(feature)
            continue
        kind = plain_type(types[feature.source][0])
        if feature.kind == "id" and is_list(kind):
            feature = replace(feature, kind="multi_hot")
        held = element_of(kind)
        if feature.own_rows is not None:
            pass
        elif feature.type == "auto" and held == "text":
            feature = replace(feature, type=type_of_text(feature))
        elif held == "numbers" and feature.type != HEX:  # a type is of text
            feature = replace(feature, type="auto")
        found.append(feature)
    dense = tuple(_sized(feature, *types[feature.source]) for feature in features.dense)
    made = replace(features, dense=dense, sparse=tuple(found))
    if labelled:
        require_labels(features, types)
    for feature in made.sparse:
        if feature.weights is not None:
            kind, where = types[feature.weights]
            require_weights(str(where), kind, feature)
    for feature in made.dense:
        if feature.until is not None:
            kind, where = types[feature.until]
            own = Feature(feature.until, "timestamp", unit=feature.unit, format=feature.format)
            require_type(str(where), feature.until, kind, own)
    for feature in (*made.dense, *(f for f in made.sparse if not f.of)):
        kind, where = types[feature.source]
        require_type(str(where), feature.source, kind, feature)
    return made


def require_labels(features: Features, types: Types) -> None:
    """``DataError`` for a column that cannot be what the labels, or their weights, take it for."""
    for name in [label.source for label in features.labels if label.parsed is None] + features.weights:
        kind, where = types[name]
        require_type(str(where), name, kind, Feature(name, "dense"))
    for label in features.labels:
        if label.parsed is not None:
            require_types(label.parsed, types)


def _sized(feature: Feature, kind: pa.DataType, where: object) -> Feature:
    """A vector with as many numbers as its column's type says."""
    if feature.kind != "vector":
        return feature
    own = plain_type(kind).list_size if pa.types.is_fixed_size_list(plain_type(kind)) else None
    if feature.size is None and own is None:
        raise DataError(
            f"{where}, column {shown(feature.source)}: holds {kind}; state how many numbers a vector has, "
            "size: 16 for example"
        )
    if feature.size is not None and own not in (None, feature.size):
        raise DataError(
            f"{where}, column {shown(feature.source)}: holds vectors of {own}, not of size: {feature.size}"
        )
    return replace(feature, size=feature.size or own)
