"""What a run tells of ids that features take for something else than the first rows seem to hold."""

from __future__ import annotations

import logging

import pyarrow as pa
import pyarrow.compute as pc

from recpipe.data.features import Feature, Features
from recpipe.data.proposal.column import Column
from recpipe.data.values import plain
from recpipe.errors import shown

log = logging.getLogger(__name__)

LOOKED_AT = 5000
"""Rows, the first ones of the files."""


def tell_of_lists(features: Features, rows: pa.RecordBatch) -> None:
    """Warn of text that seems to be a list and is taken for one id, and of lists whose padding is taken for
    an id. ``rows``: the first ones, with the columns of all features."""
    for feature in features.sparse:
        if feature.kind not in ("id", "multi_hot", "sequence"):
            continue
        column = Column(feature.source, plain(rows[feature.source].slice(0, LOOKED_AT)))
        if fault := _suspected(feature, column):
            log.warning("column %s %s", shown(feature.source), fault)


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
