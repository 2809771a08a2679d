"""What a collection of tables may be able to do beyond looking rows up.

Each capability is a small interface. Core asks a collection for one by ``TableCollection.offers`` and never
for its class, so a collection around another one (``WrappedCollection``) keeps what the inner one can do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

if TYPE_CHECKING:
    from recpipe.plugin.policy import RowIds
    from recpipe.tables.tiers.placement import TierPlan


class Planned(ABC):
    """Its rows move between tiers, as planned for each batch before that batch's turn comes.

    The order of the calls: ``plan`` and ``prefetch`` of a batch while the one before it trains, ``advance``
    between the two, ``arrive`` before rows of the slab are looked up, one backward pass through each lookup.
    """

    prefetches: bool
    """Whether a plan's rows are to be fetched while the batch before it trains."""

    @abstractmethod
    def plan(self, sparse: KeyedJaggedTensor) -> TierPlan:
        """Decide where the batch's lookups go and which rows move; ``DataError`` on an id of no row."""

    @abstractmethod
    def prefetch(self, plan: TierPlan) -> None:
        """Start fetching the plan's rows, once ``advance`` of the batch before it has been called."""

    @abstractmethod
    def forget(self) -> None:
        """Take back a plan whose batch will not be trained."""

    @abstractmethod
    def advance(self, plan: TierPlan) -> None:
        """The last batch's update is done: rows that leave their tier are sent away."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait for the batch's rows and put them into their places; at once if they are there."""

    @abstractmethod
    def lookup_resident(self, plan: TierPlan) -> torch.Tensor:
        """Pooled resident rows of all samples, float32 [B, F * D]; its backward updates them."""

    @abstractmethod
    def lookup_slab(self, plan: TierPlan) -> torch.Tensor:
        """Pooled rows that this batch alone needs, of samples ``plan.cold_first ..``, float32
        [B - cold_first, F * D]; its backward updates them."""


class SavesPlacement(ABC):
    """Which rows are resident is part of its state: a checkpoint has it, a resumed run goes on with it."""

    @abstractmethod
    def placement_state(self) -> dict[str, Any]:
        """Which rows are resident, and what the policy knows, as tensors, arrays and plain values."""

    @abstractmethod
    def check_placement_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` on what ``placement_state`` cannot have given."""

    @abstractmethod
    def load_placement_state(self, state: dict[str, Any] | None) -> bool:
        """Go on from ``state``; the tables are loaded next. False where it is of another policy or budget."""


Rows: TypeAlias = KeyedTensor | dict[str, JaggedTensor]
"""What a collection looks up: pooled rows, float32 [B, F * D] in the order of the keys, or by feature one for
each id, float32 [L, D]."""


class SendsAhead(ABC):
    """Its rows lie on several ranks, and the next batch's ids can travel to them while a batch trains."""

    @abstractmethod
    def start(self, sparse: KeyedJaggedTensor) -> Any:
        """Begin to send the ids of a batch that will be looked up later; all ranks do so together.

        What it gives has ``send_ids()``, which may be called while another batch trains; and then, once that
        batch's rows have been looked up, ``fetch_rows()``.
        """

    @abstractmethod
    def finish(self, sent: Any) -> Rows:
        """Rows of what ``start`` sent."""


class SavedByRanks(ABC):
    """Every rank writes and reads its own part of a checkpoint's tables."""

    @abstractmethod
    def save_tables(self, directory: Path) -> None:
        """Write this rank's part into ``directory``, which rank 0 makes; all ranks call it."""

    @abstractmethod
    def load_tables(self, directory: Path) -> None:
        """Read this rank's part of tables that any number of ranks has saved."""


class ShowsRows(ABC):
    """Which of its rows are resident can be seen between two batches, and their weights."""

    slots: int
    """How many can be."""

    @property
    @abstractmethod
    def resident_count(self) -> int:
        """How many are."""

    @abstractmethod
    def resident_rows(self) -> RowIds:
        """Which ones, sorted, int64 [n]."""

    @abstractmethod
    def resident_weights(self, rows: RowIds) -> torch.Tensor:
        """Weights of distinct resident ``rows`` as the last batch left them: a copy, float32 [n, D]."""
