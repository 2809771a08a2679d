"""The hot set that Slipstream brings where no other plugin decides which rows are resident."""

from __future__ import annotations

import numpy as np

from recpipe.embedding.policies import CachePolicy, HotSet, RowSpace
from recpipe.embedding.popularity import top_rows
from recpipe.plugin.api import Context, TablePolicy

SAMPLE = 0.05
"""Share of the epoch's batches whose lookups are counted."""


class HotTables(TablePolicy):
    """The rows with the most lookups in a sample of the epoch, as many as fit; they never change."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def cache(self, space: RowSpace) -> CachePolicy:
        """A fixed hot set for ``space``."""
        context, counts = self.context, np.zeros(space.rows, np.int32)
        epoch = max(1, -(-context.epoch_samples // context.batch_size))
        rng = np.random.default_rng(context.seed)
        for number in np.sort(rng.choice(epoch, max(1, round(SAMPLE * epoch)), replace=False)).tolist():
            sparse = next(context.batches(number)).sparse
            for table, base in zip(context.tables.values(), space.bases[:-1].tolist(), strict=True):
                ids = sparse[table.name].values().numpy()
                # An id beyond its table is told of when its batch is trained.
                known = ids[(ids >= 0) & (ids < table.rows)]
                counts[base : base + table.rows] += np.bincount(known, minlength=table.rows).astype(np.int32)
        return HotSet(space, top_rows(counts, space.slots))
