"""Is wrong for some tables alone; it says that it changes nothing."""

import lightning as L
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.plugin import Batch, Context, Contribution, Link, Plugin


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, how: str) -> None:
        self.how = how.replace(" ", "_")

    def contribute(self, ctx: Context) -> Contribution:
        if self.how in ("folds_ids_above_100000", "ignores_weights"):
            return Contribution(batch=[Link(getattr(self, self.how))])
        return Contribution(callbacks=[Scaler(self.how)])

    def folds_ids_above_100000(self, batch: Batch) -> Batch:
        ids = batch.sparse.values()
        ids.copy_(torch.where(ids > 100_000, ids % 100_000, ids))
        return batch

    def ignores_weights(self, batch: Batch) -> Batch:
        ids = batch.sparse
        if ids.weights_or_none() is None:
            return batch
        plain = KeyedJaggedTensor(
            ids.keys(), ids.values(), torch.ones_like(ids.weights()), lengths=ids.lengths()
        )
        return Batch(batch.dense, plain, batch.labels)


class Scaler(L.Callback):
    """Scales the gradient of one kind of table."""

    def __init__(self, which: str) -> None:
        self.which = which

    def on_fit_start(self, trainer, pl_module) -> None:
        module = pl_module.model.called.module
        if hasattr(module, self.which):
            getattr(module, self.which).register_forward_hook(self.scaled)

    def scaled(self, module, given, output):
        if self.which == "rows":
            for found in output.values():
                found._values = halved(found.values())
        else:
            output._values = halved(output.values())
        return output


def halved(values: torch.Tensor) -> torch.Tensor:
    """The same values, with half of their gradient."""
    return values / 2 + values.detach() / 2
