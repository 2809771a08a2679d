"""A float checkpoint as a source of rows: its model without its tables, and the tables block by block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe.answers.plain import parameters_of_tables, saved_dense
from recpipe.checkpoint.manifest import TABLES
from recpipe.checkpoint.table_files import open_tables
from recpipe.common.tensors import Streamed, TensorFiles, new_tensors
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.pipeline.placed import saved_values
from recpipe.plugin.tables import FILL_ROWS, weight_name

_Value = TypeVar("_Value", bound=np.generic)
COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)


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
    """The open checkpoint ``directory`` with the content of its trainer.pt, its tables on the disk.

    ``make`` gives a new module of the model, not filled, ready to be called. ``UserError`` if the two do not
    fit together.
    """

    def __init__(self, directory: Path, trainer: Mapping[str, Any], make: Callable[[], Called]) -> None:
        self.directory, self.trainer, self._make = directory, trainer, make
        self.dense = saved_dense(directory, trainer)
        self.files: TensorFiles = open_tables(directory / TABLES)
        suffix = weight_name("")
        names = sorted(name for name in self.files.pieces if name.endswith(suffix))
        self.shapes = {name.removesuffix(suffix): _pair(self.files.shape(name)) for name in names}
        """Rows and dimension of each table."""
        module = make().module
        streamed: dict[str, Streamed] = {table: (shape, ()) for table, shape in self.shapes.items()}
        parameters = parameters_of_tables(module, self.dense, streamed, directory)
        self.places = {table: Place.of(name) for table, name in parameters.items()}
        bags = {path for path, m in module.named_modules() if isinstance(m, EmbeddingBagCollection)}
        self.pooled = [table for table, place in self.places.items() if place.collection in bags]
        """The tables whose rows are pooled; others give a row for each id."""

    @property
    def step(self) -> int:
        """How many steps had been trained."""
        return int(self.trainer["global_step"])

    def called(self) -> Called:
        """A copy of the model in eval mode with its dense part. Its collections are those of ``make``, which
        are not filled: replace them."""
        made = copy.copy(self._make())
        shared = {id(found): found for found in made.module.modules() if isinstance(found, COLLECTIONS)}
        made.module = copy.deepcopy(made.module, shared)
        fill_dense(made.module, self.dense)
        made.module.eval()
        return made

    def blocks(self, table: str) -> Iterator[tuple[int, torch.Tensor]]:
        """The weights of ``table`` in blocks: the number of the first row, and float32 [n, D]."""
        rows, name = self.shapes[table][0], weight_name(table)
        for start in range(0, rows, FILL_ROWS):
            yield start, torch.from_numpy(self.files.rows(name, start, min(start + FILL_ROWS, rows)))

    def rows_at(self, table: str, ids: NDArray[np.int64]) -> torch.Tensor:
        """The weights of the rows ``ids``, which ascend, of ``table``: float32 [n, D]."""
        name, found = weight_name(table), np.empty((len(ids), self.shapes[table][1]), np.float32)
        gather(ids, found, lambda low, high: self.files.rows(name, low, high))
        return torch.from_numpy(found)

    def write(self, table: str, file: Path) -> None:
        """Write ``table`` as a package's file, block by block: "rows" uint8 [rows, 4 * D].

        ``UserError`` for a weight that is not finite."""
        rows, dim = self.shapes[table]
        shapes = {"rows": (rows, 4 * dim)}
        with new_tensors(file, shapes, {"type": "fp32", "dim": str(dim)}, {"rows": "U8"}) as put:
            for start, values in self.blocks(table):
                if not bool(torch.isfinite(values).all()):
                    row = start + int((~torch.isfinite(values).all(1)).int().argmax())
                    raise UserError(f"table '{table}', row {row}: a weight is not finite: train it again")
                put("rows", start * 4 * dim, values.contiguous().view(torch.uint8).numpy())


def gather(
    ids: NDArray[np.int64], into: NDArray[_Value], read: Callable[[int, int], NDArray[_Value]]
) -> None:
    """Put the rows ``ids``, which ascend, of a table that may be larger than memory ``into`` [n, ...].
    ``read(low, high)`` gives rows of the table; it is asked for those of one block at a time."""
    ends = [*(np.flatnonzero(np.diff(ids // FILL_ROWS)) + 1), len(ids)] if len(ids) else []
    for start, end in zip([0, *ends], ends, strict=False):
        own = ids[start:end]
        low = int(own[0])
        into[start:end] = read(low, int(own[-1]) + 1)[own - low]


def fill_dense(module: nn.Module, dense: Mapping[str, torch.Tensor]) -> None:
    """Set the parameters and buffers of ``module`` that ``dense`` names."""
    own = saved_values(module)
    with torch.no_grad():
        for name, value in dense.items():
            own[name].copy_(value)


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], shape[1]
