"""What core passes to the builder of a tiered collection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recpipe.tables.rowtable import distinct

if TYPE_CHECKING:
    import torch

    from recpipe.distributed.ranks import Ranks
    from recpipe.plugin.policy import RowIds
    from recpipe.tables.specs import TableSet
    from recpipe.tables.stores.base import ColdStore
    from recpipe.tables.tiers.parting import IndexBags


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
    finds: Callable[[Any], RowIds] | None = None
    """What ``distinct`` returns, found by the GPU that trains; None: a CPU trains."""

    def distinct(self, batch: Any) -> RowIds:
        """The distinct rows of ``tables`` that a whole batch looks up, sorted, int64 [U]; ``DataError`` if an
        id has no row."""
        return distinct(self.lookups(batch).indices) if self.finds is None else self.finds(batch)
