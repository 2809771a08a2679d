"""The hot set that Slipstream uses if no other plugin decides which rows are resident."""

from __future__ import annotations

from recpipe.kit import HotSet, group_rows, load_profile, table_bases, top_rows
from recpipe.plugin import Cache, CachePolicy, Context, RowSpace


class HotTables(Cache):
    """Keeps the rows with the most lookups in a sample of the epoch resident, as many as fit; they never
    change."""

    fallback = True

    def __init__(self, context: Context) -> None:
        self.context = context

    def policy(self, space: RowSpace) -> CachePolicy:
        """A fixed hot set for ``space``, from the shared popularity profile."""
        counts = load_profile(self.context).dense(int(table_bases(self.context)[-1]))
        mine = counts[group_rows(self.context, space.group)]
        return HotSet(space, top_rows(mine, space.slots))
