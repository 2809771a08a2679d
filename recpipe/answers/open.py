"""``open_trained``: opens any checkpoint for answers, quantized or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import nn

from recpipe.answers.manifest import is_package
from recpipe.answers.recipe import scoring_recipe
from recpipe.answers.trained import Trained
from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.data.dataset import Dataset
from recpipe.data.given import Batches, GivenBatches
from recpipe.errors import UserError
from recpipe.model.config import UserModel
from recpipe.plugin.batch import Batch
from recpipe.plugin.errors import PluginLoadError
from recpipe.plugin.offers import blocked_words, entry, imported, offered, origin_of

QUANTIZED = ("manifest.json", "dense.safetensors")
"""Files of a quantized checkpoint."""
PLUGIN, PACKAGE = "low_precision", "recpipe_low_precision"
"""What opens it."""


@runtime_checkable
class CheckpointFormat(Protocol):
    """A package's own format of checkpoints, by its entry point in the group ``recpipe.checkpoints``: an
    object of this kind or its class, in a module that imports nothing slow."""

    def holds(self, directory: Path) -> bool:
        """Whether ``directory`` is of this format; asked of every checkpoint that is opened."""

    def kind(self) -> type[Trained]:
        """The class that opens such directories, which derives from ``Trained``."""


def open_trained(
    checkpoint: str | Path,
    overrides: Sequence[str] = (),
    model: nn.Module | None = None,
    data: Dataset | Batches | None = None,
    kind: type[Trained] | None = None,
) -> Trained:
    """Open ``checkpoint``, or the newest one in that folder or run's directory, and check all its files.

    Args:
        checkpoint: written by one process or by any number of ranks.
        overrides: words of the command line; they may change data, tiers, trainer and seed.
        model: the model, if training was given one in Python; its dense parameters are replaced.
        data: a data set or ready-made batches, instead of the recipe's; batches of ``recpipe.plugin.Batch``
            have the columns that were trained on.
        kind: its format; None: what it looks like.

    ``UserError`` if it is damaged, of an earlier version that does not carry its recipe, or if the overrides
    would change its model.
    """
    kind = kind or kind_of(Path(checkpoint).expanduser())
    directory, trainer, trained_on = kind.read(Path(checkpoint).expanduser())
    cfg = scoring_recipe(trained_on, [*overrides, "data=given"] if data is not None else overrides)
    if model is not None and not isinstance(cfg.model, UserModel):
        raise UserError(f"{directory} has a model of recpipe's own, model={cfg.model.name}: leave model out")
    dataset = data if data is None or isinstance(data, Dataset) else _given(data, trained_on)
    return kind(directory, cfg, trained_on, trainer, model, dataset)


def kind_of(directory: Path) -> type[Trained]:
    """What opens the checkpoint ``directory``: ``Trained``, or what the format of a package gives.
    ``UserError`` for a quantized checkpoint without the package."""
    available = offered("checkpoint")
    for name in available:
        ep = entry("checkpoint", name, available)
        made = imported("checkpoint", ep)
        found = made() if isinstance(made, type) else made
        if not isinstance(found, CheckpointFormat):
            raise PluginLoadError(
                f"format of checkpoints {origin_of(ep)}: '{ep.value}' must have holds(directory) and kind(); "
                "correct its entry point"
            )
        if found.holds(directory):
            return found.kind()
    if not is_package(directory) and all((directory / name).is_file() for name in QUANTIZED):
        raise UserError(
            f"{directory} is a quantized checkpoint, which needs the package {PACKAGE}"
            f"{blocked_words(PLUGIN) or ', not installed here'}"
        )
    return Trained


def _given(batches: Batches, trained_on: TrainedOn) -> GivenBatches:
    given, columns = GivenBatches(batches), trained_on.columns
    if columns is None or not isinstance(next(given.batches("train", 1)), Batch):
        return given
    return GivenBatches(batches, schema=columns.schema)
