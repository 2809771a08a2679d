"""What a batch looks up, and what tiers count."""

from __future__ import annotations

from dataclasses import dataclass

from recpipe.plugin import RowIds


@dataclass
class Reads:
    """What was looked up and moved since the tiers were made."""

    batches: int = 0
    lookups: int = 0
    missed: int = 0
    """Lookups whose row was not in DRAM when their batch was first looked at: it had no slot, and no earlier
    batch had read it a moment ago."""
    rows_read: int = 0
    """Rows that were read because they were missed, or were about to be."""
    rows_ahead: int = 0
    """Missed rows that were read before their batch was scored."""
    admitted: int = 0
    """Rows that were given a slot since the tiers were made."""
    replaced: int = 0
    """Rows that an update has changed."""


@dataclass
class Look:
    """What a batch looks up, and what the index said: ``rows`` int64 [N] with repeats, their ``places`` int64
    [N], and where among them those are that have no slot, ``cold``. ``version``: the index's; ``missed``: how
    many were not in DRAM at first; ``lookups``: how many are the tiers' own, others being ``elsewhere``."""

    rows: RowIds
    places: RowIds
    cold: RowIds
    version: int
    missed: int
    lookups: int
