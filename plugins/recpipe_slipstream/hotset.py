"""The hot set that Slipstream brings where no other plugin decides which rows are resident."""

from __future__ import annotations

from recpipe.plugin.api import Context, TablePolicy
from recpipe.tables.tiers.access_counts import SAMPLE, group_rows, load_profile, table_bases
from recpipe.tables.tiers.policies import CachePolicy, HotSet, RowSpace
from recpipe.tables.tiers.popularity import top_rows


class HotTables(TablePolicy):
    """The rows with the most lookups in a sample of the epoch, as many as fit; they never change."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def cache(self, space: RowSpace) -> CachePolicy:
        """A fixed hot set for ``space``, from the shared popularity profile."""
        counts = load_profile(self.context, SAMPLE).dense(int(table_bases(self.context)[-1]))
        mine = counts[group_rows(self.context, space.group)]
        return HotSet(space, top_rows(mine, space.slots))
