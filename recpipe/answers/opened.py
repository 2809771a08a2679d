"""A quantized checkpoint opened for answers, as ``open_trained`` opens others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recpipe.answers.quantized import put_rows
from recpipe.answers.quantized_manifest import read_manifest, recipe_of
from recpipe.answers.trained import Scored, Trained, scored
from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.common.files import RunDir
from recpipe.data.dataset import Dataset, SplitName
from recpipe.data.parts import on_device
from recpipe.model.call import Called

_HOST = torch.device("cpu")


@dataclass
class QuantizedTrained(Trained):
    """As ``Trained``, for a quantized checkpoint. Its model is in memory, whatever tiers the recipe has."""

    @cached_property
    def called(self) -> Called:
        """How training calls ``model``."""
        called = self.make_called()
        put_rows(called.module, self.directory)
        return called

    @cached_property
    def model(self) -> nn.Module:
        """The model in eval mode, its tables' rows in their own types."""
        return self.called.module

    @contextmanager
    def scoring(self, dataset: Dataset | None = None, run_dir: RunDir | None = None) -> Iterator[Any]:
        """In the block, ``model`` for batches of ``dataset`` (None: ``self.dataset``)."""
        yield QuantizedScoring(self.called, dataset or self.dataset, self.cfg.data.batch_size)


class QuantizedScoring:
    """The same methods as ``Scoring``, for a model whose tables check ids themselves."""

    def __init__(self, called: Called, dataset: Dataset, batch_size: int) -> None:
        self.called, self.dataset, self.batch_size = called, dataset, batch_size
        self.tasks = called.tasks

    def batches(self, split: SplitName) -> Iterator[Any]:
        """The batches of a split of the data, in host memory, where the model is."""
        return self.checked(self.dataset.batches(split, self.batch_size))

    def checked(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Other batches, in host memory; ids are checked when they are scored."""
        return (on_device(batch, _HOST) for batch in batches)

    def scores(self, batches: Iterable[Any], labelled: bool = True) -> Iterator[Scored]:
        """Score ``batches``; ``DataError`` for an id that is not in its table."""
        return scored(self.called, batches, labelled)


def read_quantized(directory: Path) -> tuple[dict[str, Any], TrainedOn]:
    """What a quantized checkpoint keeps of trainer.pt, and what its model was trained on."""
    manifest = read_manifest(directory)
    return {"global_step": manifest.step}, recipe_of(manifest, directory)
