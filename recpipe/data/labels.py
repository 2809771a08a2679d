"""Labels and their weights, from the columns of record batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recpipe.data.columns import Float32
from recpipe.data.expression_values import values_of
from recpipe.data.feature import Feature
from recpipe.data.features import Features, Label
from recpipe.data.files import RowChecks
from recpipe.data.schema import LABEL_KINDS
from recpipe.data.text_values import Bools
from recpipe.data.values import read_numbers, value_at
from recpipe.errors import shown

NO_LABEL = "is no label (on_missing: mask in data.features keeps such rows, with weight 0 for it)"
MOST_WEIGHT = 1e18
"""So that the product of two weights is within float32."""


class Labels(NamedTuple):
    """Of n samples, float32 [n] of one label, [n, L] of several."""

    values: Float32
    """0 where a label is missing."""
    weights: Float32 | None
    """In the same shape; None if the features have none."""
    missing: dict[str, int]
    """How many samples do not have each label."""


def no_labels(features: Features, samples: int) -> Labels:
    """Those of samples that are only to be scored: 0."""
    shape = (samples,) if len(features.labels) == 1 else (samples, len(features.labels))
    return Labels(np.zeros(shape, np.float32), None, {})


def read_labels(rows: pa.RecordBatch, features: Features, checks: RowChecks) -> Labels:
    """The labels of ``rows``. A weight is the product of the sample's, the label's own and, where the label
    is missing and masked, 0. Rows with values that cannot be are marked in ``checks``."""
    found, weights, missing = [], [], dict[str, int]()
    for label in features.labels:
        values, known = _label(checks, label, rows, features.masks(label))
        missing[label.name] = int((~known).sum())
        found.append(values)
        if features.weighted:
            own = known.astype(np.float64)
            for name in filter(None, (features.weight, label.weight)):
                own *= _weights(checks, name, rows[name])
            weights.append(own.astype(np.float32))
    several = len(found) > 1
    joined = (np.stack(weights, 1) if several else weights[0]) if features.weighted else None
    return Labels(np.stack(found, 1) if several else found[0], joined, missing)


def _label(checks: RowChecks, label: Label, rows: pa.RecordBatch, masked: bool) -> tuple[Float32, Bools]:
    """float32 labels, 0 where they are missing, and whether each is known. Rows with one that is not of its
    kind, or missing unless that is ``masked``, are bad."""
    kind, expression = LABEL_KINDS[label.kind or "clicks"], label.parsed
    if expression is None:
        found = read_numbers(rows[label.source], Feature(label.name, "dense", missing=label.missing))
    else:
        found = values_of(expression, rows, label.missing, checks)
    is_whole = bool(found.valid.all() and not found.missing.any())
    values = found.values if is_whole else np.where(found.missing | ~found.valid, np.nan, found.values)
    show: Callable[[int], object] = values.item
    if expression is None:
        show = partial(value_at, rows[label.source])
    with np.errstate(over="ignore"):
        stored = values.astype(np.float32)
    valid = kind.fits(values) & np.isfinite(stored)
    if is_whole and valid.all():
        return stored, np.ones(len(stored), bool)
    bad = ~(found.valid | found.missing)
    checks.require(
        ~bad, label.source, show, _no_number(label, show(int(np.argmax(bad)))) if bad.any() else ""
    )
    checks.require(valid | found.missing, label.source, show, kind.fault)
    checks.require(~found.missing | masked, label.source, show, NO_LABEL)
    return np.where(valid, stored, np.float32(0)), ~found.missing


def _no_number(label: Label, word: object) -> str:
    """What is said of a label that is a ``word``."""
    if label.parsed is not None:
        return LABEL_KINDS[label.kind or "clicks"].fault
    made = f'{shown(label.source)} == \\"{shown(word)}\\"'
    return f"is no number; what is one for a word is an expression: 'data.label={{liked: \"{made}\"}}'"


def _weights(checks: RowChecks, name: str, array: pa.Array) -> NDArray[np.float64]:
    """Rows whose weight is missing, below 0 or above ``MOST_WEIGHT`` are bad."""
    found = read_numbers(array)
    valid = found.valid & ~found.missing & (found.values >= 0) & (found.values <= MOST_WEIGHT)
    checks.require(valid, name, partial(value_at, array), f"is no weight: a number from 0 to {MOST_WEIGHT:g}")
    return np.where(valid, found.values, 0.0)
