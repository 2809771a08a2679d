"""Where each table's rows are when a run ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recpipe.plugin.collection import TableCollection
from recpipe.report.record import TableMemory
from recpipe.tables.capabilities import ShowsRows
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import Group, ModelTables
from recpipe.tables.owners import RESIDENT


def memory_of_tables(
    described: Mapping[str, Any], tables: ModelTables, embeddings: GroupedCollection
) -> list[TableMemory]:
    """Rows and bytes of each table; ``described``: the content of assembly.json."""
    shards = (described["shards"] or {}).get("tables", {})
    found: list[TableMemory] = []
    owners = described["tiers"]["groups"]
    for group, told, collection in zip(tables.groups, owners, embeddings.collections, strict=True):
        resident = _resident(group, told["cache"], collection)
        for table in group.tables.tables:
            weights = table.rows * group.tables.bytes_of_weights(group.tables.dim)
            sharding = shards.get(table.name, {}).get("sharding")
            cold = told["cold_bytes"]
            tiered = cold is not None and sharding != "data_parallel"
            here = resident.get(table.name) if tiered else table.rows
            found.append(
                TableMemory(
                    name=table.name,
                    rows=table.rows,
                    dim=group.tables.dim,
                    weight_bytes=weights,
                    state_bytes=table.rows * group.tables.record_bytes - weights,
                    resident_rows=here,
                    resident_bytes=None if here is None else here * group.tables.record_bytes,
                    cold_bytes=cold[table.name] if tiered else 0,
                    sharding=sharding,
                )
            )
    return found


def _resident(group: Group, cache: str, collection: TableCollection) -> Mapping[str, int]:
    """How many rows of each table are resident; empty if the collection does not show its rows."""
    layout = group.tables.layout
    if cache == RESIDENT:
        return dict(zip(layout.tables, layout.rows, strict=True))
    shows = collection.offers(ShowsRows)
    if shows is None:
        return {}
    counts = np.diff(np.searchsorted(shows.resident_rows(), layout.bases))
    return dict(zip(layout.tables, counts.tolist(), strict=True))
