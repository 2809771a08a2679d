"""What sampled batches say about the tables' load: lookups and distinct rows, also of parts of a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recpipe.kit import batch_size, leaves
from recpipe.plugin import UserError

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FeatureStats:
    """One feature's lookups in sampled global batches."""

    rows: Rows
    """Looked-up rows, int64 [n], ascending; a row is there once for each batch that has it."""
    counts: Rows
    """How often that batch looks it up, int64 [n]."""
    batches: int
    samples: float
    """Samples per batch."""
    growth: float
    """Exponent of distinct rows over samples, from half a batch to a whole one: 0 (no new rows) to 1."""

    @property
    def lookups_per_sample(self) -> float:
        """The mean pooling factor."""
        return float(self.counts.sum()) / (self.batches * self.samples)

    @property
    def distinct(self) -> float:
        """Distinct rows per global batch."""
        return len(self.rows) / self.batches

    def within(self, start: int, stop: int, samples: float) -> tuple[float, float]:
        """Lookups and distinct rows of rows ``start`` to ``stop`` that ``samples`` samples have."""
        first, last = np.searchsorted(self.rows, (start, stop))
        ratio = samples / self.samples
        lookups = float(self.counts[first:last].sum()) / self.batches * ratio
        distinct = float(last - first) / self.batches * ratio**self.growth
        return lookups, min(distinct, lookups)


def feature_stats(batches: Iterable[object]) -> dict[str, FeatureStats]:
    """Statistics of every feature over a few global batches of equal size, whatever their type.

    Of a feature that several parts of a batch have, the first one's.
    Raises ``UserError`` when there is no batch, or none with a sample.
    """
    sizes: list[int] = []
    seen: dict[str, list[tuple[Rows, Rows, int]]] = {}
    for batch in batches:
        size = batch_size(batch)
        if size:
            sizes.append(size)
            for name, bags in _features(batch).items():
                half = int(bags.lengths()[: size // 2].sum())
                ids = bags.values().cpu().numpy().astype(np.int64)
                rows, counts = np.unique(ids, return_counts=True)
                seen.setdefault(name, []).append((rows, counts, len(np.unique(ids[:half]))))
    if not sizes:
        raise UserError("no batch to take statistics of: the training data is empty")
    return {name: _stats(found, sizes) for name, found in seen.items()}


def _features(batch: object) -> dict[str, JaggedTensor]:
    found: dict[str, JaggedTensor] = {}
    for part in leaves(batch):
        if isinstance(part, KeyedJaggedTensor):
            found = part.to_dict() | found
    return found


def _stats(found: list[tuple[Rows, Rows, int]], sizes: list[int]) -> FeatureStats:
    rows = np.concatenate([entry[0] for entry in found])
    counts = np.concatenate([entry[1] for entry in found])
    order = np.argsort(rows, kind="stable")
    whole, half = len(rows), sum(entry[2] for entry in found)
    growth = float(np.clip(np.log2(whole / half), 0, 1)) if half else 1.0
    return FeatureStats(rows[order], counts[order], len(found), float(np.mean(sizes)), growth)
