"""Statistics of the tables' load in sampled batches: lookups and distinct rows, also for parts of a table."""

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
    """Looked-up rows, int64 [n], ascending; a row occurs once for each batch that has it."""
    counts: Rows
    """How many times that batch looks the row up, int64 [n]."""
    batches: int
    samples: float
    """The number of samples per batch."""
    growth: float
    """The exponent by which distinct rows grow with samples, from half a batch to a whole one: 0 (no new
    rows) to 1."""

    @property
    def lookups_per_sample(self) -> float:
        """The mean pooling factor."""
        return float(self.counts.sum()) / (self.batches * self.samples)

    @property
    def distinct(self) -> float:
        """The mean number of distinct rows per global batch."""
        return len(self.rows) / self.batches

    def within(self, start: int, stop: int, samples: float) -> tuple[float, float]:
        """The numbers of lookups and of distinct rows of ``samples`` samples in rows ``start`` to
        ``stop``."""
        first, last = np.searchsorted(self.rows, (start, stop))
        ratio = samples / self.samples
        lookups = float(self.counts[first:last].sum()) / self.batches * ratio
        distinct = float(last - first) / self.batches * ratio**self.growth
        return lookups, min(distinct, lookups)


def feature_stats(batches: Iterable[object]) -> dict[str, FeatureStats]:
    """Statistics of every feature over a few global batches of equal size and any type.

    If several parts of a batch have a feature, the first one counts.
    Raises ``UserError`` if there is no batch, or no batch has samples.
    """
    sizes: list[int] = []
    seen: dict[str, list[tuple[Rows, Rows, int]]] = {}
    for batch in batches:
        size = batch_size(batch)
        if size:
            sizes.append(size)
            features: dict[str, JaggedTensor] = {}
            for part in leaves(batch):
                if isinstance(part, KeyedJaggedTensor):
                    features = part.to_dict() | features
            for name, bags in features.items():
                half = int(bags.lengths()[: size // 2].sum())
                ids = bags.values().cpu().numpy().astype(np.int64)
                rows, counts = np.unique(ids, return_counts=True)
                seen.setdefault(name, []).append((rows, counts, len(np.unique(ids[:half]))))
    if not sizes:
        raise UserError("no batch to take statistics of: the training data is empty")
    made = {}
    for name, found in seen.items():
        rows, counts = (np.concatenate(parts) for parts in list(zip(*found, strict=True))[:2])
        order = np.argsort(rows, kind="stable")
        whole, in_half = len(rows), sum(entry[2] for entry in found)
        growth = float(np.clip(np.log2(whole / in_half), 0, 1)) if in_half else 1.0
        made[name] = FeatureStats(rows[order], counts[order], len(found), float(np.mean(sizes)), growth)
    return made
