"""The hot set that Slipstream brings where no other plugin decides which rows are resident."""

from __future__ import annotations

from recpipe.embedding.policies import CachePolicy, HotSet, RowSpace
from recpipe.embedding.popularity import top_rows
from recpipe.embedding.profile import SAMPLE, group_rows, load_profile, table_bases
from recpipe.plugin.api import Context, TablePolicy


class HotTables(TablePolicy):
    """The rows with the most lookups in a sample of the epoch, as many as fit; they never change."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def cache(self, space: RowSpace) -> CachePolicy:
        """A fixed hot set for ``space``, from the shared popularity profile."""
        counts = load_profile(self.context, SAMPLE).dense(int(table_bases(self.context)[-1]))
        mine = counts[group_rows(self.context, space.group)]
        return HotSet(space, top_rows(mine, space.slots))
