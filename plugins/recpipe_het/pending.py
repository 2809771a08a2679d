"""What a trainer's lines hold: records, and updates that were not pushed yet."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from recpipe.kit import updated
from recpipe.plugin import Slots, TableOptimizer
from recpipe_het.messages import Floats, Push, Rows, Sums


class Pending(ABC):
    """Records and waiting updates by slot. ``base`` (float32 [slots, width]) is what the holder sent, with
    what was pushed since; rows that are not cached have no slot."""

    def __init__(self, slots: int, optimizer: TableOptimizer, dim: int, width: int) -> None:
        self.optimizer, self.dim, self.width = optimizer, dim, width
        self.base = np.zeros((slots, width), np.float32)

    def step(self, slots: Slots, gradients: Floats) -> None:
        """Make one step of ``slots``, which have nothing waiting: their gradients were pushed at once."""
        self.put(slots, self.stepped(self.base[slots], gradients))

    def stepped(self, records: Floats, gradients: Floats) -> Floats:
        """``records`` [n, width] after one optimizer step with ``gradients`` [n, D]."""
        after: Floats = updated(
            self.optimizer, torch.from_numpy(records), torch.from_numpy(gradients)
        ).numpy()
        return after

    def nothing(self) -> Push:
        """A push of no rows."""
        return Push(Sums.none(self.dim), Sums.none(self.width))

    @abstractmethod
    def put(self, slots: Slots, records: Floats) -> None:
        """Replace the base records of ``slots``; what waits there goes on waiting."""

    @abstractmethod
    def view(self, slots: Slots) -> Floats:
        """What the holder would have if ``slots`` were pushed now and nobody else pushed, [n, width]."""

    @abstractmethod
    def add(self, slots: Slots, gradients: Floats) -> None:
        """One more update of ``slots``, gradients float32 [n, D]."""

    @abstractmethod
    def take(self, slots: Slots, rows: Rows, updates: Rows) -> Push:
        """Push what waits in ``slots``, which hold ``rows``; from now on it is part of their base records."""

    @property
    @abstractmethod
    def overhead_bytes(self) -> int:
        """Memory beyond the base records."""


class SummedGradients(Pending):
    """Gradients are added up, and the holder makes one step with their sum."""

    def __init__(self, slots: int, optimizer: TableOptimizer, dim: int, width: int) -> None:
        super().__init__(slots, optimizer, dim, width)
        self.gradient = np.zeros((slots, dim), np.float32)

    def put(self, slots: Slots, records: Floats) -> None:
        """Replace the base records of ``slots``; what waits there goes on waiting."""
        self.base[slots] = records

    def view(self, slots: Slots) -> Floats:
        """What the holder would have if ``slots`` were pushed now and nobody else pushed, [n, width]."""
        return self.stepped(self.base[slots], self.gradient[slots])

    def add(self, slots: Slots, gradients: Floats) -> None:
        """One more update of ``slots``, gradients float32 [n, D]."""
        self.gradient[slots] += gradients

    def take(self, slots: Slots, rows: Rows, updates: Rows) -> Push:
        """Push what waits in ``slots``, which hold ``rows``; from now on it is part of their base records."""
        sums = Sums(rows, updates, self.gradient[slots])
        self.base[slots] = self.view(slots)
        self.gradient[slots] = 0
        return Push(sums, Sums.none(self.width))

    @property
    def overhead_bytes(self) -> int:
        """Memory beyond the base records."""
        return self.gradient.nbytes


class OwnSteps(Pending):
    """The trainer makes an optimizer step for each of its updates, on its own copy of the record, and pushes
    what they changed. ``own`` is that copy."""

    def __init__(self, slots: int, optimizer: TableOptimizer, dim: int, width: int) -> None:
        super().__init__(slots, optimizer, dim, width)
        self.own = np.zeros((slots, width), np.float32)

    def put(self, slots: Slots, records: Floats) -> None:
        """Replace the base records; where nothing waits, ``own`` equals ``base`` before and after."""
        self.own[slots] = records + (self.own[slots] - self.base[slots])
        self.base[slots] = records

    def view(self, slots: Slots) -> Floats:
        """What the holder would have if ``slots`` were pushed now and nobody else pushed, [n, width]."""
        return self.own[slots]

    def add(self, slots: Slots, gradients: Floats) -> None:
        """One more update of ``slots``, gradients float32 [n, D]."""
        self.own[slots] = self.stepped(self.own[slots], gradients)

    def take(self, slots: Slots, rows: Rows, updates: Rows) -> Push:
        """Push what waits. The holder adds the same floats to the same record, if nobody else pushed."""
        base = self.base[slots]
        change = self.own[slots] - base
        self.base[slots] = self.own[slots] = base + change
        return Push(Sums.none(self.dim), Sums(rows, updates, change))

    @property
    def overhead_bytes(self) -> int:
        """Memory beyond the base records."""
        return self.own.nbytes


UPDATES: dict[str, type[Pending]] = {"each": OwnSteps, "summed": SummedGradients}
"""The values of ``plugins.het.updates``."""
