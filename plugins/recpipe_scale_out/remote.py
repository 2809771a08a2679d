"""A lookup whose rows are at the shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from recpipe_serve import Lookup, Tables

from recpipe.answers.manifest import SHARDS
from recpipe_scale_out.lookups import Part, Parts, TableLookup, table_lookups


class RemoteTables(Tables):
    """What a ``Lookup`` reads of tables none of whose rows are here."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.about = manifest["tables"]
        self.places = {}
        self.starts = dict.fromkeys(self.about, 0)
        self.rows = torch.empty(0, dtype=torch.uint8)
        self.parts: Parts = manifest[SHARDS]["parts"]
        self.numbers = {own: number for number, own in enumerate(table_lookups(manifest))}


class Column(NamedTuple):
    """One part of a lookup: a table, and where its values are among those of the whole lookup."""

    number: int
    """Of the table's lookup."""
    own: TableLookup
    parts: Sequence[Part]
    begin: int
    end: int

    @property
    def width(self) -> int:
        """How many values a bag has."""
        return self.end - self.begin


class RemoteLookup(Lookup):
    """One lookup, whose rows are at the shards."""

    def __init__(self, found: dict[str, Any], names: list[str], tables: RemoteTables) -> None:
        super().__init__(found, names, tables)
        self.columns: list[Column] = []
        end = 0
        for _, table in found["parts"]:
            begin, end = end, end + tables.about[table]["dimension"]
            own = TableLookup(table, found["pooling"], self.weighted)
            self.columns.append(Column(tables.numbers[own], own, tables.parts[table], begin, end))
        self.width = end

    def pooled(self, *_: Any, **__: Any) -> torch.Tensor:
        """There are no rows here to add up."""
        raise AssertionError("ShardedScorer.pooled asks the shards")
