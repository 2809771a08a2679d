"""Puts functions of its own in the place of torch's, for good or for a while."""

import lightning as L
import torch

from recpipe.plugin import Context, Contribution, Link, Plugin

LINEAR, ADD = torch.nn.functional.linear, torch.Tensor.add_


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, how: str) -> None:
        self.how, self.batches = how, 0
        if how == "in its constructor":
            torch.nn.functional.linear = scaled

    def contribute(self, ctx: Context) -> Contribution:
        if self.how == "in contribute":
            torch.nn.functional.linear = scaled
        if self.how == "from step 10 to 12":
            return Contribution(batch=[Link(self.sometimes)])
        return Contribution(callbacks=[Patcher(self.how)])

    def sometimes(self, batch):
        self.batches += 1
        torch.nn.functional.linear = scaled if 10 <= self.batches < 12 else LINEAR
        return batch


class Patcher(L.Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_start(self, trainer, pl_module) -> None:
        if self.how == "to no effect":
            torch.Tensor.add_ = lambda *given, **more: ADD(*given, **more)
        if self.how == "to no effect for a while":
            torch.Tensor.add_ = lambda *given, **more: ADD(*given, **more)

    def on_train_end(self, trainer, pl_module) -> None:
        if self.how == "to no effect for a while":
            torch.Tensor.add_ = ADD


def scaled(values, weight, bias=None):
    return 1.001 * LINEAR(values, weight, bias)
