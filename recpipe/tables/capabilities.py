"""Optional capabilities of a collection of tables, beyond looking rows up.

Each capability is a small interface. Core asks for one by ``TableCollection.offers`` and never checks a
collection's class, so that a collection around another one (``WrappedCollection``) keeps the inner one's
capabilities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.plugin.collection import Rows

if TYPE_CHECKING:
    from recpipe.plugin.bags import RowIds
    from recpipe.plugin.collection import TierTimes
    from recpipe.tables.repeated import RepeatedLookup
    from recpipe.tables.tiers.placement import TierPlan


class Planned(ABC):
    """A collection whose rows move between tiers, as planned for each batch before it is trained.

    The calls for a batch are, in order: ``find``, at any time before; ``plan`` and ``prefetch`` while the
    batch before it trains; ``begin`` and ``advance`` between the two batches; ``arrive`` before rows of the
    slab are looked up; and one backward pass through each lookup. ``begin`` may be left out: it lets the next
    batch be planned while ``advance`` works.
    """

    prefetches: bool
    """Whether to fetch a plan's rows while the batch before it trains."""
    times: TierTimes
    """Seconds of the host in these calls so far."""

    finds_ahead = False
    """Whether ``find`` has work to do."""

    def find(self, sparse: KeyedJaggedTensor) -> Any:
        """What ``plan`` needs of a batch's ids and no other batch has a part in; None: ``plan`` does it all.
        ``DataError`` if an id has no row. From any thread."""
        return None

    @abstractmethod
    def plan(self, sparse: KeyedJaggedTensor, found: Any = None) -> TierPlan:
        """Decide where the batch's lookups go and which rows move; ``DataError`` if an id has no row.
        ``found``: the result of ``find`` for these ids."""

    @abstractmethod
    def prefetch(self, plan: TierPlan) -> None:
        """Start fetching the plan's rows, once ``advance`` of the batch before it has been called."""

    @abstractmethod
    def forget(self) -> None:
        """Undo a plan whose batch will not be trained."""

    @abstractmethod
    def begin(self, plan: TierPlan) -> None:
        """Note that the batch's turn has come, so that its plan is not undone any more."""

    @abstractmethod
    def advance(self, plan: TierPlan) -> None:
        """After the last batch's update: send away the rows that leave their tier."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait for the batch's rows, if they have not arrived, and put them into their places."""

    @abstractmethod
    def lookup_resident(self, plan: TierPlan) -> torch.Tensor:
        """Pooled resident rows of all samples, float32 [B, F * D]; its backward updates them."""

    @abstractmethod
    def lookup_slab(self, plan: TierPlan) -> torch.Tensor:
        """Pooled slab rows, which this batch alone needs, for samples from ``plan.cold_first`` on, float32
        [B - cold_first, F * D]; its backward updates them."""

    def lookup_both(self, plan: TierPlan) -> torch.Tensor | None:
        """The sum of the two for all samples, once all rows have arrived, where they are looked up at once;
        None: they are not."""
        return None

    def repeated(self, plan: TierPlan) -> RepeatedLookup | None:
        """``lookup_both`` for a graph of kernels, which looks the rows up and updates them itself; None: it
        cannot."""
        return None


class SavesPlacement(ABC):
    """A collection that saves which rows are resident in a checkpoint, from which a resumed run goes on."""

    @abstractmethod
    def placement_state(self) -> dict[str, Any]:
        """Which rows are resident and the policy's state, as tensors, arrays and plain values."""

    @abstractmethod
    def check_placement_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` if ``state`` cannot be a result of ``placement_state``."""

    @abstractmethod
    def load_placement_state(self, state: dict[str, Any] | None) -> bool:
        """Continue from ``state``, before the tables are loaded. False if it is from another policy or
        budget."""


class SendsAhead(ABC):
    """A collection whose rows are on several ranks. It can send the next batch's ids there while a batch
    trains."""

    @abstractmethod
    def start(self, sparse: KeyedJaggedTensor) -> Any:
        """Begin to send the ids of a batch that will be looked up later; all ranks do so together.

        What it gives has ``send_ids()``, which may be called while another batch trains; and then, once that
        batch's rows have been looked up, ``fetch_rows()``.
        """

    @abstractmethod
    def finish(self, sent: Any) -> Rows:
        """The rows for the ids that ``start`` sent."""


class SavedByRanks(ABC):
    """A collection of which every rank writes and reads its own part of a checkpoint's tables."""

    @abstractmethod
    def save_tables(self, directory: Path) -> None:
        """Write this rank's part into ``directory``, which rank 0 creates; all ranks call it."""

    @abstractmethod
    def load_tables(self, directory: Path) -> None:
        """Read this rank's part of tables that were saved by any number of ranks."""


class ShowsRows(ABC):
    """A collection that shows, between two batches, which rows are resident and what their weights are."""

    slots: int
    """How many rows can be resident."""

    @property
    @abstractmethod
    def resident_count(self) -> int:
        """How many rows are resident."""

    @abstractmethod
    def resident_rows(self) -> RowIds:
        """The resident rows, sorted, int64 [n]."""

    @abstractmethod
    def resident_weights(self, rows: RowIds) -> torch.Tensor:
        """A copy of the weights of distinct resident ``rows`` after the last batch, float32 [n, D]."""
