"""The shards of tables that are on this rank."""

from __future__ import annotations

from recpipe import private_api
from recpipe.plugin.tables import Region, Values
from recpipe.private_api import LocalPart
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection


class TieredShard:
    """A shard on this rank whose rows are in tiers, and therefore never in one piece of memory."""

    def __init__(self, part: LocalPart, tiers: TieredEmbeddingBagCollection, index: int) -> None:
        self.row, self.column, self.shape = part.row, part.column, (part.rows, part.columns)
        self._tiers, self._table = tiers, tiers.tables.layout.tables[index]

    def read(self, low: int, high: int) -> Values:
        """Weights and optimizer state of its rows [low, high)."""
        return self._tiers.read(self._region(low, high))

    def write(self, low: int, high: int, values: Values) -> None:
        """Replace weights and optimizer state of its rows [low, high)."""
        self._tiers.write(self._region(low, high), values)

    def _region(self, low: int, high: int) -> Region:
        return Region(self._table, low, high, 0, self.shape[1])


LocalShard = private_api.LocalShard | TieredShard
"""A shard on this rank: in memory, or in tiers."""
