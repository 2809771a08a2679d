"""Optional capabilities of a collection of tables, beyond looking rows up.

Each capability is a small interface. Core asks for one by ``TableCollection.offers`` and never checks a
collection's class, so that a collection around another one can keep the inner one's capabilities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from recpipe.plugin.bags import RowIds


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
