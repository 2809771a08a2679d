"""What a run tells of values that features take for something else than the first rows seem to hold."""

from __future__ import annotations

import logging

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recpipe.data.column_types import plain
from recpipe.data.encoding import content, element_of
from recpipe.data.feature import Feature
from recpipe.data.features import Features
from recpipe.data.proposal.column import Column
from recpipe.data.timestamps import MICROSECONDS_OF_A_DAY, read_times
from recpipe.errors import shown

log = logging.getLogger(__name__)

LOOKED_AT = 5000
"""Rows, the first ones of the files."""
NEAR, FAR = 366, 366 * 200
"""Days from 1970 on that times of another unit are within, or beyond."""


def tell_of_lists(features: Features, rows: pa.RecordBatch) -> None:
    """Warn of text that seems to be a list and is taken for one id, and of lists whose padding is taken for
    an id. ``rows``: the first ones, with the columns of all features that are no numbers."""
    for feature in features.sparse:
        if feature.kind not in ("id", "multi_hot", "sequence") or feature.source not in rows.schema.names:
            continue
        column = Column(feature.source, plain(rows[feature.source].slice(0, LOOKED_AT)))
        if fault := _suspected(feature, column):
            log.warning("column %s %s", shown(feature.source), fault)


def tell_of_times(features: Features, rows: pa.RecordBatch) -> None:
    """Warn of numbers whose times are all in the first or a distant year, as those of another unit are.
    ``rows``: the first ones, with all columns of times."""
    for feature in (*features.dense, *features.sparse):
        if feature.kind != "timestamp" or feature.unit is None:
            continue
        times = read_times(plain(rows[feature.source].slice(0, LOOKED_AT)), feature)
        days = times.micros[times.valid & ~times.missing] / MICROSECONDS_OF_A_DAY
        if len(days) and (np.abs(days).max() < NEAR or np.abs(days).min() > FAR):
            day = np.datetime64(int(days.max()), "D")
            log.warning(
                "column %s has times until %s by unit: %s: are they in another unit?",
                shown(feature.source),
                day,
                feature.unit,
            )


def tell_of_units(features: Features, types: pa.Schema) -> None:
    """Warn of columns of times, of which ``unit`` and ``format`` are stated and one counts."""
    both = [f for f in (*features.dense, *features.sparse) if f.unit and f.format]
    for column in dict.fromkeys(feature.source for feature in both):
        held = element_of(types.field(column).type)
        log.warning(
            "column %s: unit and format are stated, of which %s; leave the other out",
            shown(column),
            "format counts, for it has text" if held == "text" else "unit counts, for it has no text",
        )


def tell_of_tables(features: Features) -> None:
    """Warn of features that share a table, of which one has text and another one numbers: no id is in
    both."""
    of: dict[str, dict[str, Feature]] = {}
    for feature in features.sparse:
        if feature.own_rows is None and not feature.of:
            held = "text" if content(feature) == "text" else "numbers"
            of.setdefault(feature.table_name, {}).setdefault(held, feature)
    for table, found in of.items():
        if len(found) > 1:
            log.warning(
                "table %s: %s has numbers and %s text, of which 7 and '7' are different ids: state type: "
                "integer where text is numbers",
                shown(table),
                shown(found["numbers"].name),
                shown(found["text"].name),
            )


def _suspected(feature: Feature, column: Column) -> str | None:
    name, mark, own = shown(feature.name), column.separator, feature.separator
    if mark is not None and own is None:
        return (
            f"seems to hold lists with '{shown(mark)}' between their ids, and feature {name} takes each text "
            f"for one id: if so, state kind: multi_hot and separator: '{shown(mark)}'"
        )
    if mark is not None and mark != own and not pc.any(pc.match_substring(column.present, own)).as_py():
        return (
            f"has no text with the separator '{shown(own)}' of feature {name}, and '{shown(mark)}' seems to "
            "be one: if so, correct separator"
        )
    if mark == own and column.padding and column.padding not in (*feature.padding, *feature.missing):
        return (
            f"seems to hold lists that are filled up with {column.padding}, which feature {name} takes for "
            f"an id: if so, state padding: ['{column.padding}']"
        )
    return None
