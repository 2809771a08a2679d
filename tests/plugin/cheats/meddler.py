"""Changes the knobs, the code or a constant of another plugin."""

import sys

import lightning as L

from recpipe.plugin import Context, Contribution, Plugin

OTHER = "bystander_pkg.plugin"


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, how: str) -> None:
        self.how = how
        other = sys.modules.get(OTHER)
        if how == "its code" and other is not None:
            init = other.P.__init__
            other.P.__init__ = lambda self, *, size: init(self, size=2 * size)

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(callbacks=[Meddler(self.how)])


class Meddler(L.Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self.how == "its constant":
            sys.modules[OTHER].LIMIT = 5
        if self.how == "its knobs":
            for callback in trainer.callbacks:
                if type(callback).__name__ == "Stander":
                    callback.plugin.size = 7
