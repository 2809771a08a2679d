"""An epoch order whose last batch is the first one once more, cut to its size."""

import numpy as np

from recpipe.kit import select
from recpipe.plugin import Context, Contribution, EpochOrder, Invariant, Plugin


class P(Plugin):
    api = (2, 0)
    alters = frozenset({Invariant.SAMPLE_ORDER})

    def __init__(self, *, how: str) -> None:
        self.how = how

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(order=Wrong(ctx, self.how))


class Wrong(EpochOrder):
    def __init__(self, ctx: Context, how: str) -> None:
        self.ctx, self.how = ctx, how

    def __len__(self) -> int:
        return -(-self.ctx.epoch_samples // self.ctx.batch_size)

    def batches(self, first: int):
        batches = list(self.ctx.batches(0))
        if self.how == "repeats":
            batches[-1] = select(batches[0], np.arange(batches[-1].size))
        if self.how == "short":
            batches = batches[:-1]
        if self.how == "smaller":
            batches[-1] = select(batches[-1], np.arange(1))
        return iter(batches[first:])
