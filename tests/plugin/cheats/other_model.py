"""Says that its updates are not exact, and changes the model or its loss without a word."""

import lightning as L
import torch

from recpipe.plugin import Context, Contribution, Invariant, Plugin


class P(Plugin):
    api = (2, 0)
    alters = frozenset({Invariant.EXACT_GRADIENT})

    def __init__(self, *, how: str) -> None:
        self.how = how

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(callbacks=[Changer(self.how)])


class Changer(L.Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_fit_start(self, trainer, pl_module) -> None:
        called = pl_module.model.called
        if self.how == "values":
            with torch.no_grad():
                next(iter(pl_module.model.dense_parameters().values())).mul_(1.001)
        if self.how == "loss":
            loss = called._loss
            called._loss = lambda output, batch: 0.9 * loss(output, batch)
        if self.how == "dropout":
            called.module.over_arch.register_forward_pre_hook(
                lambda module, given: (torch.nn.functional.dropout(given[0], 0.1), *given[1:])
            )
