"""What a tiered collection is made of, as core hands it to whoever builds one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from recpipe.distributed.ranks import Ranks
    from recpipe.tables.specs import TableSet
    from recpipe.tables.stores.base import ColdStore
    from recpipe.tables.tiers.placement import IndexBags


@dataclass(frozen=True)
class TierParts:
    """Everything that a collection over tiers needs; its rows start in ``store``."""

    tables: TableSet
    slots: int
    """Rows that ``tiers.resident_bytes`` holds on each trainer."""
    store: ColdStore
    """Holds every row at first. Owned by the collection: its ``close`` closes it."""
    device: torch.device
    prefetch: bool
    """Fetch what the next batch needs while this one trains."""
    ranks: Ranks
    """Who trains and who holds rows; one process is a group of one."""
    lookups: Callable[[Any], IndexBags]
    """A whole batch's lookups, as rows of ``tables``; ``DataError`` on an id of no row."""
    group: int = 0
    """Number of the group of tables (``Context.groups``)."""
