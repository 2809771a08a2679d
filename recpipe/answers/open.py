"""``open_trained``: opens any checkpoint for answers, quantized or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from recpipe.answers.manifest import is_package
from recpipe.answers.opened import QuantizedTrained, read_quantized
from recpipe.answers.recipe import scoring_recipe
from recpipe.answers.trained import Trained, is_quantized
from recpipe.checkpoint.table_io import newest, open_checkpoint
from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.data.dataset import Dataset
from recpipe.data.given import Batches, GivenBatches
from recpipe.errors import UserError
from recpipe.model.config import UserModel
from recpipe.plugin.batch import Batch


def open_trained(
    checkpoint: str | Path,
    overrides: Sequence[str] = (),
    model: nn.Module | None = None,
    data: Dataset | Batches | None = None,
) -> Trained:
    """Open ``checkpoint``, or the newest one in that folder or run's directory, and check all its files.

    Args:
        checkpoint: written by one process or by any number of ranks.
        overrides: words of the command line; they may change data, tiers, trainer and seed.
        model: the model, if training was given one in Python; its dense parameters are replaced.
        data: a data set or ready-made batches, instead of the recipe's; batches of ``recpipe.kit.Batch`` have
            the columns that were trained on.

    ``UserError`` if it is damaged, of an earlier version that does not carry its recipe, or if the overrides
    would change its model.
    """
    directory, kind = Path(checkpoint).expanduser(), Trained
    if is_quantized(directory):
        kind = QuantizedTrained
        trainer, trained_on = read_quantized(directory)
    else:
        if is_package(directory):
            raise UserError(f"{directory} is a package: name the checkpoint, or run, that it was made from")
        directory = newest(directory, "")
        trainer = open_checkpoint(directory)
        trained_on = TrainedOn.read(trainer, directory)
    cfg = scoring_recipe(trained_on, [*overrides, "data=given"] if data is not None else overrides)
    if model is not None and not isinstance(cfg.model, UserModel):
        raise UserError(f"{directory} has a model of recpipe's own, model={cfg.model.name}: leave model out")
    dataset = data if data is None or isinstance(data, Dataset) else _given(data, trained_on)
    return kind(directory, cfg, trained_on, trainer, model, dataset)


def _given(batches: Batches, trained_on: TrainedOn) -> GivenBatches:
    given, columns = GivenBatches(batches), trained_on.columns
    if columns is None or not isinstance(next(given.batches("train", 1)), Batch):
        return given
    return GivenBatches(batches, schema=columns.schema)
