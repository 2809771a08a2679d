"""A float checkpoint as a source of rows: its model without its tables, and the tables block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.checkpoint.manifest import TABLES
from recpipe.checkpoint.table_files import open_tables
from recpipe.checkpoint.table_io import MODEL, naming, newest, open_checkpoint
from recpipe.common.saved import typed_as
from recpipe.common.tensor_files import TensorFiles
from recpipe.errors import UserError
from recpipe.model.dlrm import make_dlrm
from recpipe.model.sizes import DlrmSizes
from recpipe.pipeline.placed import saved_values
from recpipe.tables.specs import FILL_ROWS, weight_name
from recpipe.tasks.load import parameters_of_tables
from recpipe.tasks.unshard import saved_dense


@dataclass(frozen=True)
class Place:
    """Where a model has a table: the path of its collection, and the table's name there."""

    collection: str
    own: str

    @classmethod
    def of(cls, parameter: str) -> Place:
        """From the name of its parameter."""
        path, own, _ = parameter.rsplit(".", 2)
        return cls(path.rpartition(".")[0], own)


class FloatCheckpoint:
    """The checkpoint ``directory`` (or the newest in that folder), checked against its manifest.

    ``model`` None: one of recpipe's own. Otherwise a module of the class that was trained. ``UserError`` if
    the checkpoint is damaged or of another model.
    """

    def __init__(self, directory: Path, model: nn.Module | None = None) -> None:
        self.directory = newest(directory.expanduser())
        self.trainer: dict[str, Any] = open_checkpoint(self.directory)
        self.dense = saved_dense(self.directory, self.trainer)
        self.files: TensorFiles = open_tables(self.directory / TABLES)
        suffix = weight_name("")
        names = sorted(name for name in self.files.pieces if name.endswith(suffix))
        self.shapes = {name.removesuffix(suffix): _pair(self.files.shape(name)) for name in names}
        """Rows and dimension of each table."""
        with naming(self.directory):
            noted = self.trainer.get(MODEL)
            self.sizes = None if noted is None else typed_as(DlrmSizes, noted, MODEL)
        self._given = model
        own = self.model()
        streamed = {table: (shape, ()) for table, shape in self.shapes.items()}
        parameters = parameters_of_tables(own, self.dense, streamed, self.directory)
        self.places = {table: Place.of(name) for table, name in parameters.items()}
        bags = {p for p, m in own.named_modules() if isinstance(m, EmbeddingBagCollection)}
        self.pooled = {table for table, place in self.places.items() if place.collection in bags}
        """The tables whose rows are pooled; others give a row for each id."""

    def model(self) -> nn.Module:
        """The model in eval mode with its dense part, and without its tables' rows: they are on the meta
        device if the model is recpipe's own, else as the given module has them."""
        if self._given is None and self.sizes is None:
            raise UserError(
                f"{self.directory} does not say how its model is made (it is not of recpipe's own, or of an "
                "earlier version): pass the model from Python"
            )
        return shell(self._given, self.sizes, self.dense)

    def blocks(self, table: str) -> Iterator[tuple[int, torch.Tensor]]:
        """The weights of ``table`` in blocks: the number of the first row, and float32 [n, D]."""
        rows, name = self.shapes[table][0], weight_name(table)
        for start in range(0, rows, FILL_ROWS):
            yield start, torch.from_numpy(self.files.rows(name, start, min(start + FILL_ROWS, rows)))


def shell(given: nn.Module | None, sizes: DlrmSizes | None, dense: Mapping[str, torch.Tensor]) -> nn.Module:
    """A model with its ``dense`` part set: ``given``, or one of recpipe's own without rows."""
    if given is None:
        assert sizes is not None
        made: nn.Module = make_dlrm(sizes, torch.device("cpu"))
    else:
        made = given
    own = saved_values(made)
    with torch.no_grad():
        for name, value in dense.items():
            if name in own:
                own[name].copy_(value)
    return made.eval()


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put ``new`` wherever ``model`` holds the module at ``path``."""
    old = model.get_submodule(path)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], shape[1]
