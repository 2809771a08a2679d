"""``TieredScorer``: scores a package whose large tables are on the SSD, with the bits of all rows in DRAM."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recpipe.kit import Lookup, Scorer
from recpipe_sdm.tables import TieredTables, Tiering, tiered_tables


class TieredLookup(Lookup):
    """One lookup, some of whose tables are on the SSD."""

    def __init__(self, found: dict[str, Any], manifest: dict[str, Any], tables: TieredTables) -> None:
        super().__init__(found, manifest, tables)
        own = [table for _, table in found["parts"]]
        groups = [tables.group_of(table) for table in own]
        bases = [tables.groups[g].base[name] if g >= 0 else 0 for name, g in zip(own, groups, strict=True)]
        self.group, self.base = torch.tensor(groups), torch.tensor(bases)
        """Of each part: its table's group, -1 for one in DRAM, and the number of its row 0 there."""

    def wanted(self, ids: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each id (arranged): its table's group, and its row's number there, int64 [N] each."""
        counts = offsets[:: (len(offsets) - 1) // len(self.group)].diff()
        return self.group.repeat_interleave(counts), ids + self.base.repeat_interleave(counts)


@dataclass
class Announced:
    """A batch whose rows are being read."""

    dense: torch.Tensor
    lookups: list[tuple[torch.Tensor, torch.Tensor]]
    """Rows and offsets of each lookup; rows on the SSD are filled in when they have arrived."""
    reads: list[tuple[list[torch.Tensor], Future[torch.Tensor]]]
    """Of each group: where its rows are among those of each lookup, and their places."""


class TieredScorer(Scorer):
    """As ``Scorer``, with the same bits, for a package whose tables are kept as ``how`` says.

    ``announce`` begins to read a batch's rows, ``score`` waits for them: announce one batch, and no more,
    before the one before it is scored. One thread calls both.
    """

    def __init__(self, directory: Path, how: Tiering) -> None:
        self.how = how
        super().__init__(directory)

    def make_lookups(self) -> list[Lookup]:
        """The lookups, over tables in DRAM and on the SSD."""
        about = self.manifest["tables"]
        self.tables = tiered_tables(self.directory, about, self.how)
        self.tiered = [TieredLookup(found, self.manifest, self.tables) for found in self.manifest["lookups"]]
        return [*self.tiered]

    def __call__(self, dense: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See ``Scorer``."""
        return self.score(self.announce(dense, ids, lengths))

    def announce(self, dense: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor) -> Announced:
        """Begin to read what the batch misses. ``ValueError`` as in ``Scorer``."""
        dense, offsets = self.checked(dense, ids, lengths)
        lookups, groups, numbers = [], [], []
        with torch.inference_mode():
            for lookup in self.tiered:
                own, own_offsets = lookup.arranged(ids, offsets, len(dense))
                group, number = lookup.wanted(own, own_offsets)
                lookups.append((lookup.rows_of(own, own_offsets).clone(), own_offsets))
                groups.append(group)
                numbers.append(number)
            reads = []
            for index, found in enumerate(self.tables.groups):
                at = [(group == index).nonzero().squeeze(1) for group in groups]
                rows = torch.cat([number[here] for number, here in zip(numbers, at, strict=True)])
                reads.append((at, found.tier.announce(rows)))
        return Announced(dense, lookups, reads)

    def score(self, batch: Announced) -> torch.Tensor:
        """Scores float32 [B] of an announced batch; ``StoreError`` names a row that cannot be read."""
        with torch.inference_mode():
            for at, read in batch.reads:
                places = read.result().split([len(here) for here in at])
                for here, (rows, _), found in zip(at, batch.lookups, places, strict=True):
                    rows[here] = found
            pooled = [
                lookup.pooled(rows, offsets)
                for lookup, (rows, offsets) in zip(self.tiered, batch.lookups, strict=True)
            ]
            return self.scores(batch.dense, pooled)

    @property
    def dram_bytes(self) -> int:
        """Rows in DRAM, indexes, and what reading takes."""
        return self.tables.whole_bytes + sum(group.tier.dram_bytes for group in self.tables.groups)

    def close(self) -> None:
        """Wait for reads, and remove the rows from the SSD: the package has them."""
        for group in self.tables.groups:
            group.tier.close()
