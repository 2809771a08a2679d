"""Changes which samples train, and with which ids, and says nothing."""

import numpy as np

from recpipe.kit import join, select
from recpipe.plugin import Context, Contribution, Link, Plugin


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, how: str) -> None:
        self.how = how

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(stream=[Link(getattr(self, self.how))])

    def drops_the_last(self, batches):
        batches = list(batches)
        yield from batches[:-1]

    def swaps_neighbours(self, batches):
        batches = list(batches)
        batches[2:4] = batches[3:1:-1]
        yield from batches

    def joins_two(self, batches):
        batches = list(batches)
        yield from (join(batches[n : n + 2]) for n in range(0, len(batches), 2))

    def folds_ids(self, batches):
        for batch in batches:
            values = batch.sparse.values()
            values.copy_(values.remainder(1_900))
            yield batch

    def flips_a_label(self, batches):
        for number, batch in enumerate(batches):
            if number == 15:
                batch.labels[7] = 1 - batch.labels[7]
            yield batch

    def shuffles_inside(self, batches):
        """Which is allowed: a batch's update does not depend on it."""
        for batch in batches:
            yield select(batch, np.arange(batch.size)[::-1].copy())
