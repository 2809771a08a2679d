"""A float checkpoint as a source of rows: its model without its tables, and the tables block by block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.answers.plain import fill_dense, parameters_of_tables, saved_dense
from recpipe.checkpoint.averaged import saved_tables
from recpipe.common.tensors import Streamed, TensorFiles, new_tensors
from recpipe.errors import UserError, shown
from recpipe.model.call import Called
from recpipe.plugin.tables import FILL_ROWS, weight_name

_Value = TypeVar("_Value", bound=np.generic)
_T = TypeVar("_T")
Collection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection


@dataclass(frozen=True)
class Place:
    """Where a model has a table: the path of its collection, and the table's name there."""

    collection: str
    own: str


class FloatCheckpoint:
    """The open checkpoint ``directory`` with the content of its trainer.pt, its tables on the disk.

    ``make`` gives a new module of the model, not filled, ready to be called. ``UserError`` if the two do not
    fit together.
    """

    def __init__(self, directory: Path, trainer: Mapping[str, Any], make: Callable[[], Called]) -> None:
        self.directory, self.trainer, self._make = directory, trainer, make
        self.dense = saved_dense(directory, trainer)
        self.files: TensorFiles = saved_tables(directory, trainer)
        suffix = weight_name("")
        names = sorted(name for name in self.files.pieces if name.endswith(suffix))
        sizes = {name.removesuffix(suffix): self.files.shape(name) for name in names}
        self.shapes = {name: (size[0], size[1]) for name, size in sizes.items()}
        """Rows and dimension of each table."""
        module = make().module
        streamed: dict[str, Streamed] = {table: (shape, ()) for table, shape in self.shapes.items()}
        parameters = parameters_of_tables(module, self.dense, streamed, directory)
        self.places: dict[str, Place] = {}
        for table, name in parameters.items():
            path, own, _ = name.rsplit(".", 2)
            self.places[table] = Place(path.rpartition(".")[0], own)
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
        shared = {id(found): found for found in made.module.modules() if isinstance(found, Collection)}
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

    def bytes_at(self, table: str, ids: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """``rows_at`` for a ``StoredTable``."""
        return torch.ones(len(ids), dtype=torch.bool), self.rows_at(table, ids).view(torch.uint8)

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


def configs_of(collection: Collection) -> list[Any]:
    """The configurations of its tables."""
    if isinstance(collection, EmbeddingBagCollection):
        return list(collection.embedding_bag_configs())
    return list(collection.embedding_configs())


def joined(sets: Iterable[set[_T]]) -> list[set[_T]]:
    """Sets that share a member, put together."""
    found: list[set[_T]] = []
    for new in sets:
        apart = [old for old in found if not old & new]
        found = [*apart, new.union(*(old for old in found if old & new))]
    return found


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put ``new`` wherever ``model`` holds the module at ``path``."""
    old = model.get_submodule(path)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


@dataclass(frozen=True)
class StoredTable:
    """A table of a checkpoint."""

    kind: str
    """The type of its rows, a key of ``recpipe.answers.score.TYPES``."""
    write: Callable[[Path], object]
    """Writes the table as a package's file, piece by piece."""
    rows: Callable[[NDArray[np.int64]], tuple[torch.Tensor, torch.Tensor]]
    """For n ids, which ascend: which of them were not pruned, bool [n], and the rows of those, uint8 [k,
    bytes]."""


FewTableRows = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By table what ``StoredTable.rows`` gives."""


class StoredModel:
    """A finished model, rows in float32. A package's own format of checkpoints derives from it.

    ``called``: the model in eval mode with its dense part; its collections are TorchRec's, and not filled.
    ``tables``: by the path of the collection and the table's name there. ``layers``: its linear layers that
    are not computed in float32, by their paths, as a package's manifest has them.
    """

    def __init__(
        self,
        called: Called,
        tables: Mapping[tuple[str, str], StoredTable],
        layers: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.called, self.tables, self.layers = called, tables, dict(layers or {})

    @classmethod
    def of(cls, source: FloatCheckpoint) -> StoredModel:
        """The model of a float checkpoint."""
        tables = {
            (place.collection, place.own): StoredTable(
                "fp32", partial(source.write, table), partial(source.bytes_at, table)
            )
            for table, place in source.places.items()
        }
        return cls(source.called(), tables)

    def in_float32(self) -> AbstractContextManager[None]:
        """In the block, ``layers`` are computed in float32 as well."""
        return nullcontext()

    def collection(self, path: str, like: Any, configs: Sequence[Any], rows: FewTableRows) -> nn.Module:
        """A collection as ``like``, which is at ``path``, with tables ``configs`` of these ``rows``."""
        pooled = isinstance(like, EmbeddingBagCollection)
        made: nn.Module
        if pooled:
            made = EmbeddingBagCollection(configs, is_weighted=like.is_weighted())
        else:
            made = EmbeddingCollection(configs)
        for config in configs:
            kind = "embedding_bags" if pooled else "embeddings"
            weight = made.get_parameter(f"{kind}.{config.name}.weight").detach()
            there, own = rows[config.name]
            weight[: len(there)] = own.view(torch.float32)
        return made

    def hold(self, ids: Mapping[str, torch.Tensor]) -> None:
        """Put the rows of these ``ids``, int64 by feature, into the model, which then looks up those alone:
        its collections become ``FewRows``."""
        for path in dict.fromkeys(path for path, _ in self.tables):
            like: Any = self.called.module.get_submodule(path)
            configs = configs_of(like)
            # A feature that several tables look up has one number for each id.
            groups = joined(set(config.feature_names) for config in configs)
            distinct = {
                name: torch.unique(torch.cat([ids[other] for other in group if other in ids]))
                for group in groups
                for name in group
            }
            rows = {
                # An id beyond the table is another feature's.
                config.name: self.tables[path, config.name].rows(
                    distinct[config.feature_names[0]].long().clamp(max=config.num_embeddings - 1).numpy()
                )
                for config in configs
            }
            small = [replace(config, num_embeddings=max(1, len(rows[config.name][0]))) for config in configs]
            with torch.random.fork_rng(devices=[]):
                made = self.collection(path, like, small, rows)
            replace_module(self.called.module, path, FewRows(made.eval(), distinct))


class FewRows(nn.Module):
    """A collection ``inner`` that has the rows of some ids alone; ``distinct``: those of each feature,
    ascending."""

    def __init__(self, inner: nn.Module, distinct: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.distinct = inner, dict(distinct)

    def numbers(self, feature: str, ids: torch.Tensor) -> torch.Tensor:
        """The numbers of the rows of these ``ids`` in ``inner``, int64 [n]; ``UserError`` if one is not
        there."""
        distinct = self.distinct[feature]
        if not bool(torch.isin(ids, distinct).all()):
            raise UserError(
                f"the model looks up other rows of '{shown(feature)}' than those that the batch has ids of, "
                "or than at first: such a model cannot be quantized or packaged"
            )
        return torch.searchsorted(distinct, ids)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """What the collection with all rows would return."""
        own = features.permute([features.keys().index(name) for name in self.distinct])
        numbers = [self.numbers(name, own[name].values()) for name in self.distinct]
        return self.inner(
            KeyedJaggedTensor(
                own.keys(),
                torch.cat(numbers),
                weights=own.weights_or_none(),
                lengths=own.lengths(),
                offsets=own.offsets(),
            )
        )
