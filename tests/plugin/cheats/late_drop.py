"""From step 12 on the dense part's gradients are thrown away; it says that it changes nothing."""

import lightning as L

from recpipe.plugin import Context, Contribution, Plugin


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, cheats: bool) -> None:
        self.after = 12 if cheats else 10**9

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(callbacks=[Dropper(self.after)])


class Dropper(L.Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step >= self.after:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
