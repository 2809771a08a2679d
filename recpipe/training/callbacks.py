"""Lightning callbacks of a recipe: made, or refused where they would do something other than they say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from hydra.utils import get_class
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.callbacks import ModelCheckpoint

from recpipe.common.words import make
from recpipe.errors import UserError, shown
from recpipe.plugin.calls import Owned
from recpipe.plugin.collection import TableCollection
from recpipe.plugin.errors import PluginError

_AVERAGED = (
    "it averages the dense part alone, and tables, which are updated in their own backward pass, stay as the "
    "last step left them: a model of two halves that were never trained together. Set trainer.ema.decay or "
    "trainer.swa.start, which average both"
)
_OWN_BAR = "recpipe shows its own bar: trainer.progress=true"
REFUSED = {
    "WeightAveraging": _AVERAGED,  # and EMAWeightAveraging, which is one
    "StochasticWeightAveraging": _AVERAGED,
    "GradientAccumulationScheduler": (
        "Lightning would add up the dense gradients alone, while tables are updated after each batch: set "
        "trainer.accumulate_grad_batches=N, the same number in each epoch"
    ),
    "BatchSizeFinder": "a run's batch size is fixed before its tables are built: set data.batch_size",
    "LearningRateFinder": (
        "it would change the tables while it looks and put back the dense part alone: search the rates with "
        "-m hydra/sweeper=optuna optimized_metric=quality.logloss"
    ),
    "ModelPruning": (
        "it replaces parameters by masked ones, which recpipe's checkpoints do not hold: make a finished "
        "model smaller with recpipe quantize"
    ),
    "BaseFinetuning": (  # and BackboneFinetuning, which is one
        "it moves parameters between groups of the dense optimizer, which has one: set requires_grad_(False) "
        "in the model on what is to stay as it is"
    ),
    "BasePredictionWriter": "training predicts nothing: recpipe predict CHECKPOINT output=FILE writes scores",
    "ProgressBar": _OWN_BAR,  # and RichProgressBar and TQDMProgressBar, which are some
}
"""Lightning's classes that a run cannot have, nor those made from them: why, and what there is instead."""
NO_HOOK = "on_before_backward"
"""The hook of callbacks that a step, whose parts each go forward and backward, has no place for."""


def make_callbacks(
    chosen: Sequence[Mapping[str, Any]], checkpoints: Path, given: Sequence[L.Callback] = ()
) -> list[L.Callback]:
    """The user's callbacks of ``trainer.callbacks``, and those ``given`` in Python. Their checkpoints go into
    the run's directory, unless they name another. ``UserError`` for those in ``REFUSED``."""
    made = []
    for index, wanted in enumerate(chosen):
        key = f"trainer.callbacks[{index}]"
        # Before it is made: its arguments may be ones that no recipe can have, as whole numbers as keys.
        kind: type = object
        with suppress(Exception):  # ``make`` says what is wrong with the name
            kind = get_class(str(wanted.get("_target_")))
        _allow(kind, key)
        made.append(make(L.Callback, wanted, key))
        _check(made[-1], key)
    for index, callback in enumerate(given):
        key = f"callbacks[{index}]"
        if not isinstance(callback, L.Callback):
            raise UserError(f"{key}: {shown(type(callback).__name__)} is no Lightning callback")
        _check(callback, key)
    for callback in (made := [*made, *given]):
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(checkpoints.absolute())
    return made


def check_callbacks(brought: Iterable[Owned[L.Callback]]) -> None:
    """``PluginError`` if a plugin has brought a callback that is in ``REFUSED``."""
    for owned in brought:
        _check(owned.part, str(owned), PluginError)


def overrides(callback: L.Callback, hook: str) -> bool:
    """Whether a callback has a ``hook`` of its own: its class's, or the object's, as ``LambdaCallback``'s."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(L.Callback, hook)


def _check(callback: L.Callback, where: str, error: type[UserError] = UserError) -> None:
    _allow(type(callback), where, error)
    if overrides(callback, NO_HOOK):
        raise error(
            f"{where}: {NO_HOOK}() of {type(callback).__name__} would never be called: the passes of a step "
            "go forward and backward part by part; use on_train_batch_start() or on_after_backward()"
        )


def _allow(kind: type, where: str, error: type[UserError] = UserError) -> None:
    for name, why in REFUSED.items():
        if issubclass(kind, getattr(lightnings, name, ())):  # EMAWeightAveraging is new in Lightning 2.6
            raise error(f"{where}: {kind.__name__} cannot be used: {why}")


class Nudge(L.Callback):
    """Flips the last bit of every weight of the tables and the dense part before the first step.

    This moves each weight up or down to a neighbouring float32, depending on its bits. It happens after a
    checkpoint or pretrained weights have been loaded; optimizer state does not change.
    """

    def __init__(self, embeddings: TableCollection, dense: Iterable[torch.Tensor]) -> None:
        self.embeddings, self.dense = embeddings, list(dense)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All ranks call it, each for the regions that it owns."""
        for parameter in self.dense:
            parameter.detach().view(torch.int32).bitwise_xor_(1)
        for region in self.embeddings.regions():
            weights, state = self.embeddings.read(region)
            moved = (np.ascontiguousarray(weights).view(np.int32) ^ 1).view(np.float32)
            self.embeddings.write(region, (moved, state))
