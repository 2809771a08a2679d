"""Says that it alters the order of the samples, which it does, and zeroes their features besides."""

import torch

from recpipe.plugin import Batch, Context, Contribution, EpochOrder, Invariant, Link, Plugin


class P(Plugin):
    api = (2, 0)
    alters = frozenset({Invariant.SAMPLE_ORDER})

    def __init__(self, *, cheats: bool) -> None:
        self.cheats = cheats

    def contribute(self, ctx: Context) -> Contribution:
        zero = [Link(zeroed)] if self.cheats else []
        return Contribution(order=Backwards(ctx), batch=zero)


def zeroed(batch: Batch) -> Batch:
    batch.sparse.values().zero_()
    return Batch(torch.zeros_like(batch.dense), batch.sparse, batch.labels)


class Backwards(EpochOrder):
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def __len__(self) -> int:
        return -(-self.ctx.epoch_samples // self.ctx.batch_size)

    def batches(self, first: int):
        return iter(list(self.ctx.batches(0))[::-1][first:])
