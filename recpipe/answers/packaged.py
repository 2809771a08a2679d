"""Offline scoring with a package: the same code, and so the same bits, as a server that loads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from recpipe.answers import score
from recpipe.answers.manifest import read_manifest
from recpipe.answers.trained import Scored, Trained
from recpipe.data.parts import on_device
from recpipe.errors import DataError, UserError
from recpipe.plugin.batch import Batch


class PackagedScoring:
    """Scores the batches of a checkpoint's data as its package in ``directory`` does.

    Takes the place of ``recpipe.answers.trained.Scoring`` where no labels are asked for. ``UserError`` if
    the package cannot be used, or is of another model.
    """

    def __init__(self, trained: Trained, directory: Path) -> None:
        read_manifest(directory)
        try:
            self._scorer = score.Scorer(directory)
        except score.PackageError as fault:
            raise UserError(str(fault)) from fault
        _require_same(trained, directory, self._scorer.manifest)
        self.batch_size = trained.cfg.data.batch_size
        self.tasks = trained.make_called().tasks
        """How the model is called for each of its outputs, by name."""

    def checked(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches in host memory: ids are checked when they are scored."""
        return (on_device(batch, torch.device("cpu")) for batch in batches)

    def scores(self, batches: Iterable[Batch], labelled: bool = False) -> Iterator[Scored]:
        """Score ``batches``; ``DataError`` for an id that is not in its table."""
        assert not labelled, "a package takes no labels"
        for batch in batches:
            ids, lengths = batch.sparse.values(), batch.sparse.lengths()
            try:
                found = self._scorer(batch.dense, ids.to(torch.int64), lengths.to(torch.int64))
            except ValueError as fault:
                raise DataError(str(fault)) from fault
            yield Scored(found, None, None)


def _require_same(trained: Trained, directory: Path, manifest: dict[str, Any]) -> None:
    schema = trained.schema
    mine = ([*schema.dense], [(f.name, f.rows) for f in schema.sparse], trained.step)
    sparse = [(feature["name"], feature["rows"]) for feature in manifest["sparse"]]
    theirs = (manifest["dense"]["names"], sparse, manifest["step"])
    for what, ours, other in zip(("dense columns", "tables", "step"), mine, theirs, strict=True):
        if ours != other:
            raise UserError(
                f"package={directory} is of another checkpoint than {trained.directory}: its {what} differ"
            )
