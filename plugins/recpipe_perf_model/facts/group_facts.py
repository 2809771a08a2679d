"""What is known of the lookups of one group of tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from recpipe.access.curve import Curve
from recpipe.access.misses import SHARES
from recpipe.plugin.bags import RowIds
from recpipe_perf_model.facts.replay import Kept
from recpipe_perf_model.statement import Moved

NEVER = np.float32(np.inf)
"""The rank of a row that was not looked up before."""


@dataclass(frozen=True)
class Misses:
    """What a cache misses in an average batch, once it is full."""

    lookups: float
    """Lookups of rows that are not resident."""
    rows: float
    """Distinct rows among them."""
    carried: float
    """Those of these rows that the batch before looked up too, so that its slab has them."""


@dataclass(frozen=True)
class Stretch:
    """All lookups of some consecutive batches in one group of tables, by sample, so that others can ask what
    is not counted here. [L] each."""

    batches: int
    samples: NDArray[np.int64]
    """The sample of each lookup, numbered over the stretch."""
    rows: RowIds
    ranks: NDArray[np.float32]
    """How popular the row was in earlier batches: the share of the group's rows that were looked up more
    often, or ``NEVER``. A hot set of a ``share`` of the rows has those with a rank below it."""


@dataclass(frozen=True)
class GroupFacts:
    """The lookups of one group of tables, on average over batches."""

    table_rows: tuple[int, ...]
    """Rows of each of its tables."""
    dim: int
    record_bytes: int
    """Bytes of a row's weights and optimizer state in device memory."""
    features: int
    pooled: bool
    optimizer: str
    lookups: float
    distinct: float
    repeated: float
    """Those of the distinct rows that the batch before looked up too."""
    curves: dict[str, Curve]
    """What lru, lfu and a hot set hit with each of ``SHARES``."""
    windows: NDArray[np.float64]
    """Distinct rows of 1, 2, 3 .. consecutive batches."""
    stretch: Stretch
    first: Mapping[str, Curve] = field(default_factory=dict)
    """What lru and lfu hit in as many batches before those of ``curves``, when they began empty."""
    kept: Kept | None = None
    """All lookups that were read; None if they were more than are kept."""
    frozen: bool = False
    """Whether its rows never change: they are read, and neither updated nor written back."""

    def from_empty(self, steps: int) -> GroupFacts:
        """The same on average over the first ``steps`` batches, which caches begin empty."""
        curves = dict(self.curves)
        for name, first in self.first.items():
            curves[name] = self.curves[name].blended(first, min(1.0, first.batches / steps))
        return replace(self, curves=curves)

    @property
    def rows(self) -> int:
        """Rows of all its tables."""
        return sum(self.table_rows)

    @property
    def width(self) -> int:
        """float32 values of a record in the cold tier."""
        return self.dim + {"sgd": 0, "adagrad": self.dim}.get(self.optimizer, 1)

    def misses(self, policy: str, share: float) -> Misses:
        """What ``policy`` (nocache, lru, lfu or hot: the rows that were looked up most often before) misses
        if a ``share`` of the rows have slots."""
        if policy == "nocache" or share <= 0:
            return Misses(self.lookups, self.distinct, self.repeated)
        curve = self.curves[policy]
        missed = self._at(1 - curve.hits / max(1.0, curve.lookups), share)
        rows = self._at(1 - curve.hit_rows / max(1.0, curve.rows), share)
        carried = self._at(curve.carried / max(1, curve.batches), share)
        return Misses(missed * self.lookups, rows * self.distinct, min(carried, rows * self.distinct))

    def moved(self, policy: str, misses: Misses, share: float, full: float, carries: bool) -> Moved:
        """The rows that a cache of a ``share`` of the rows moves; ``policy`` as in ``misses``, which are what
        it misses. ``full``: the share of the batches that find no slot empty.

        A row that is missed gets a slot while there are empty ones. Then each row that leaves was read
        before: as many are written as are read. LRU gives every row that it misses a slot. The others, in a
        stable state, let nearly all of them pass through the slab, from which the next batch takes those it
        needs again (``carries``).
        """
        if not misses.rows:
            return Moved()
        placed = 0.0 if policy == "nocache" else (1 - full) * misses.rows
        evicted = 0.0
        if policy == "lru":
            room = max(0.0, share * self.rows - (self.distinct - misses.rows))
            evicted = full * min(misses.rows, room)
            placed = min(placed, room) + evicted
        slab = misses.rows - placed
        part = slab / misses.rows
        carried = part * misses.carried if carries and policy != "lru" else 0.0
        return Moved(
            read=misses.rows - carried,
            evicted=evicted,
            returned=slab - carried,
            placed=placed,
            slab=slab,
            slab_lookups=part * misses.lookups,
            missed=misses.lookups,
        )

    def fills(self, share: float) -> float:
        """After how many batches so many slots have been filled, if each row that is looked up gets one."""
        slots, low, high = share * self.rows, 1.0, 2.0
        if share >= 1:
            return float("inf")
        while self.window(high) < slots and high < 2**40:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.window(middle) < slots else (low, middle)
        return high

    def _at(self, values: NDArray[np.float64], share: float) -> float:
        return float(np.interp(np.log(max(share, SHARES[0])), np.log(SHARES), values))

    def window(self, batches: float) -> float:
        """Distinct rows of so many consecutive batches, on average; beyond half of what was read it grows as
        it did last."""
        known = len(self.windows)
        if known < 2 or batches <= known:
            return float(np.interp(batches, np.arange(1, known + 1), self.windows))
        growth = np.log(self.windows[-1] / self.windows[known // 2]) / np.log(known / (known // 2 + 1))
        return min(float(self.rows), float(self.windows[-1] * (batches / known) ** growth))
