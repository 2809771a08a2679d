"""What core passes to the builder of a tiered collection."""

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
    """How many rows ``tiers.resident_bytes`` holds on each trainer."""
    store: ColdStore
    """Holds every row at first. The collection owns it and closes it in ``close``."""
    device: torch.device
    prefetch: bool
    """Whether to fetch what the next batch needs while this one trains."""
    ranks: Ranks
    """The ranks that train and that hold rows; a single process is a group of one."""
    lookups: Callable[[Any], IndexBags]
    """Returns a whole batch's lookups as rows of ``tables``; ``DataError`` if an id has no row."""
    group: int = 0
    """Number of the group of tables (``Context.groups``)."""
