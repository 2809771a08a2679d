"""``TieredScorer``: scores a package whose large tables are on the SSD, with the bits of all rows in DRAM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recpipe.kit import Lookup, LookupCall, Scorer
from recpipe_sdm.tables import TieredTables, Tiering, tiered_tables


class TieredLookup(Lookup):
    """One lookup, some of whose tables are on the SSD."""

    def __init__(self, found: dict[str, Any], names: list[str], tables: TieredTables) -> None:
        super().__init__(found, names, tables)
        own = [table for _, table in found["parts"]]
        groups = [tables.group_of(table) for table in own]
        bases = [tables.groups[g].base[name] if g >= 0 else 0 for name, g in zip(own, groups, strict=True)]
        self.group, self.base = torch.tensor(groups), torch.tensor(bases)
        """Of each part: its table's group, -1 for one in DRAM, and the number of its row 0 there."""

    def wanted(self, ids: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each id (arranged): its table's group, and its row's number there, int64 [N] each."""
        counts = offsets[:: (len(offsets) - 1) // len(self.group)].diff()
        return self.group.repeat_interleave(counts), ids + self.base.repeat_interleave(counts)


class TieredScorer(Scorer):
    """As ``Scorer``, with the same bits, for a package whose tables are kept as ``how`` says. One thread
    scores."""

    tables: TieredTables

    def __init__(self, directory: Path, how: Tiering) -> None:
        self.how = how
        super().__init__(directory)

    def make_tables(self) -> TieredTables:
        """Tables in DRAM and on the SSD."""
        return tiered_tables(self.directory, self.manifest["tables"], self.how)

    def lookup(self, found: dict[str, Any], features: list[str] | None = None) -> TieredLookup:
        """See ``Scorer``."""
        names = [feature["name"] for feature in self.manifest["sparse"]]
        return TieredLookup(found, names if features is None else features, self.tables)

    def pooled(self, calls: list[LookupCall]) -> list[torch.Tensor]:
        """What the lookups find; all rows that they miss are read together. ``StoreError`` names a row that
        cannot be read."""
        places, offsets, groups, numbers = [], [], [], []
        lookups = [lookup for lookup, *_ in calls if isinstance(lookup, TieredLookup)]
        for lookup, (_, ids, own_offsets, samples) in zip(lookups, calls, strict=True):
            ids, own_offsets = lookup.arranged(ids, own_offsets, samples)
            group, number = lookup.wanted(ids, own_offsets)
            places.append(lookup.rows_of(ids, own_offsets).clone())
            offsets.append(own_offsets)
            groups.append(group)
            numbers.append(number)
        for index, found in enumerate(self.tables.groups):
            at = [(group == index).nonzero().squeeze(1) for group in groups]
            rows = torch.cat([number[here] for number, here in zip(numbers, at, strict=True)])
            came = torch.split(found.tier.announce(rows).result(), [len(here) for here in at])
            for own, here, slots in zip(places, at, came, strict=True):
                own[here] = slots
        return [
            lookup.pooled(own, own_offsets)
            for lookup, own, own_offsets in zip(lookups, places, offsets, strict=True)
        ]

    @property
    def dram_bytes(self) -> int:
        """Rows in DRAM, indexes, and what reading takes."""
        return self.tables.whole_bytes + sum(group.tier.dram_bytes for group in self.tables.groups)

    def close(self) -> None:
        """Wait for reads, and remove the rows from the SSD: the package has them."""
        for group in self.tables.groups:
            group.tier.close()
