"""Exports the dense part of a model: everything but its embedding lookups.

The exported program takes dense features float32 [B, D] and, for each lookup, its pooled rows float32 [B, W],
and returns scores float32 [B], or [B, T] of T tasks. B is dynamic. The lookups stay outside, so that tables
can be kept in any type and at any place, and a server can look rows up once for many candidates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedTensor

from recpipe.data.batch import Batch
from recpipe.data.dataset import Schema
from recpipe.errors import UserError, shown
from recpipe.inference.lookup import LowPrecisionBags
from recpipe.model.call import Called
from recpipe.seams.compiled import any_batch_size

_SAMPLES = 3
"""Samples of the batch that a model is traced with; the exported program takes any number."""


@dataclass(frozen=True)
class Lookup:
    """One call of a collection: the rows that it pools, side by side in the order of ``parts``."""

    pooling: str
    """``sum`` or ``mean``."""
    parts: tuple[tuple[str, str], ...]
    """Feature and table, one pair for each pooled row of a sample."""


@dataclass(frozen=True)
class Table:
    """A table of the model."""

    kind: str
    """The type of its rows, a key of ``recpipe.inference.rows.ROW_TYPES``."""
    dim: int
    ids: int
    """How many ids it has rows for."""
    rows: torch.Tensor
    """uint8 [rows, bytes of a row], as FBGEMM reads them, sharing the model's memory."""
    places: torch.Tensor | None = None
    """For each id its row, or -1 if that was pruned: int32 [ids]; None: every id has its row."""


Collection: TypeAlias = EmbeddingBagCollection | LowPrecisionBags
"""What is replaced by its pooled rows."""


@dataclass(frozen=True)
class DensePart:
    """What ``export_dense`` finds in a model."""

    program: ExportedProgram
    lookups: tuple[Lookup, ...]
    tables: Mapping[str, Table]


def constants_of(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a program by name, contiguous and detached."""
    found = {**program.state_dict, **program.constants}
    return {k: v.detach().contiguous() for k, v in found.items() if isinstance(v, torch.Tensor)}


class _Features:
    """Stands for the batch's ``KeyedJaggedTensor`` while a model is traced: the ids are not there, so it can
    only be handed to a collection."""

    def __init__(self, keys: list[str], samples: int) -> None:
        self._keys, self._samples = keys, samples

    def keys(self) -> list[str]:
        return self._keys

    def stride(self) -> int:
        return self._samples

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else _ReadsIds(name)

    def __getitem__(self, key: str) -> Any:
        raise _ReadsIds(f"[{key!r}]")


class _ReadsIds(AttributeError):
    """The model does more with the ids than look them up."""


class _Pooled(nn.Module):
    """Takes the place of an ``EmbeddingBagCollection``; returns the rows that ``_Traced`` was given."""

    def __init__(self, path: str, collection: Collection, names: Mapping[str, str]) -> None:
        super().__init__()
        self.path = path
        configs = _configs(collection)
        weighted = collection.is_weighted
        if weighted if isinstance(weighted, bool) else weighted():
            raise UserError(f"the collection '{path}' takes a weight for each id, which no package can")
        self.keys = [name for own in get_embedding_names_by_table(configs) for name in own]
        self.dims = [config.embedding_dim for config in configs for _ in config.feature_names]
        self.poolings = [_pooling(config.pooling) for config in configs for _ in config.feature_names]
        self.parts = [(name, names[config.name]) for config in configs for name in config.feature_names]
        self.given: _Given | None = None

    def forward(self, features: _Features) -> KeyedTensor:
        """Rows for all keys, from one lookup for each kind of pooling."""
        assert self.given is not None
        if not isinstance(features, _Features):
            raise UserError(
                f"the collection '{self.path}' looks up ids that the model computes; a package looks up "
                "those of the batch alone"
            )
        present = features.keys()
        absent = next((name for name, _ in self.parts if name not in present), None)
        if absent is not None:
            raise UserError(f"the collection '{self.path}' looks up '{shown(absent)}', which the data lack")
        columns: dict[int, torch.Tensor] = {}
        for pooling in dict.fromkeys(self.poolings):
            own = [i for i, found in enumerate(self.poolings) if found == pooling]
            rows = self.given.rows(
                Lookup(pooling, tuple(self.parts[i] for i in own)), sum(self.dims[i] for i in own)
            )
            columns |= dict(zip(own, torch.split(rows, [self.dims[i] for i in own], dim=1), strict=True))
        if len(set(self.poolings)) == 1:
            values = rows
        else:
            values = torch.cat([columns[i] for i in range(len(self.dims))], dim=1)
        return KeyedTensor(keys=self.keys, length_per_key=self.dims, values=values)


def _pooling(pooling: PoolingType) -> str:
    return "mean" if pooling is PoolingType.MEAN else "sum"


class _Given:
    """The pooled rows of one forward pass, in the order of the lookups. Without ``rows`` it notes which
    lookups are made, and gives zeros."""

    def __init__(self, samples: int, given: Sequence[torch.Tensor] | None = None) -> None:
        self.samples = samples
        self.lookups: list[Lookup] = []
        self.widths: list[int] = []
        self.given = given

    def rows(self, lookup: Lookup, width: int) -> torch.Tensor:
        """float32 [B, width]."""
        self.lookups.append(lookup)
        self.widths.append(width)
        if self.given is None:
            return torch.zeros(self.samples, width)
        return self.given[len(self.lookups) - 1]


class _Traced(nn.Module):
    """The model as a function of dense features and pooled rows."""

    def __init__(self, called: Called, collections: Sequence[_Pooled], features: list[str]) -> None:
        super().__init__()
        self.model = called.module
        self._called, self._tasks = called, list(called.tasks.values())
        self._collections, self._features = list(collections), features

    def run(self, dense: torch.Tensor, given: _Given) -> torch.Tensor:
        for collection in self._collections:
            collection.given = given
        samples = dense.shape[0]
        features: Any = _Features(self._features, samples)
        _, output = self._called.output(Batch(dense, features, dense.new_zeros(samples)))
        scores = [task.prediction(output) for task in self._tasks]
        return scores[0] if len(scores) == 1 else torch.stack(scores, dim=1)

    def forward(self, dense: torch.Tensor, pooled: list[torch.Tensor]) -> torch.Tensor:
        """Scores float32 [B], or [B, T] of T tasks."""
        return self.run(dense, _Given(dense.shape[0], pooled))


def export_dense(called: Called, schema: Schema) -> DensePart:
    """Export the dense part of ``called``, whose batches have the columns of ``schema``.

    The model itself is not changed; its tables share memory with the result's. Raises ``UserError`` with the
    reason if the model cannot be exported.
    """
    model = called.module
    found = {name: m for name, m in model.named_modules() if isinstance(m, Collection)}
    _check(model, found)
    names = _table_names(found)
    pooled = {path: _Pooled(path, collection, names[path]) for path, collection in found.items()}
    twin = Called(
        _without(model, found, pooled), called.loss, called.labels, called.key, called.low_precision
    )
    traced = _Traced(twin, list(pooled.values()), [feature.name for feature in schema.sparse]).eval()
    dense = torch.zeros(_SAMPLES, len(schema.dense))
    noting = _Given(_SAMPLES)
    with torch.no_grad(), _told(model):
        traced.run(dense, noting)
        lookups = tuple(noting.lookups)
        if not lookups:
            raise UserError("the model looks nothing up")
        rows = [torch.zeros(_SAMPLES, width) for width in noting.widths]
        size = {0: Dim.AUTO}
        with any_batch_size():
            program = torch.export.export(
                traced, (dense, rows), dynamic_shapes=(size, [size for _ in rows]), strict=False
            )
    tables = {
        names[path][config.name]: _table(collection, config)
        for path, collection in found.items()
        for config in _configs(collection)
    }
    return DensePart(program, lookups, tables)


def _configs(collection: Collection) -> list[EmbeddingBagConfig]:
    if isinstance(collection, LowPrecisionBags):
        return list(collection.configs)
    return list(collection.embedding_bag_configs())


def _table(collection: Collection, config: EmbeddingBagConfig) -> Table:
    name, dim, ids = config.name, config.embedding_dim, config.num_embeddings
    if isinstance(collection, LowPrecisionBags):
        places = collection.places_of(name)
        kind, rows = collection.kind_of(name).kind, collection.rows_of(name)
        return Table(kind, dim, ids, rows, places if len(places) else None)
    weight = collection.embedding_bags[name].weight.detach().contiguous()
    return Table("fp32", dim, ids, weight.view(torch.uint8))


def _check(model: nn.Module, found: Mapping[str, Collection]) -> None:
    sequences = next((n for n, m in model.named_modules() if isinstance(m, EmbeddingCollection)), None)
    if sequences is not None:
        raise UserError(
            f"the model's '{sequences}' is an EmbeddingCollection, whose rows are not pooled; packages hold "
            "EmbeddingBagCollections alone"
        )
    if not found:
        raise UserError(
            "the model has no EmbeddingBagCollection of TorchRec's, so there is nothing to look up"
        )


def _table_names(found: Mapping[str, Collection]) -> dict[str, dict[str, str]]:
    """Each collection's tables under names that are unique in the model: with the collection's path where
    another one has a table of that name."""
    every = [config.name for collection in found.values() for config in _configs(collection)]
    return {
        path: {
            config.name: config.name if every.count(config.name) == 1 else f"{path}.{config.name}"
            for config in _configs(collection)
        }
        for path, collection in found.items()
    }


def _without(model: nn.Module, found: Mapping[str, Collection], pooled: Mapping[str, _Pooled]) -> nn.Module:
    """A copy of ``model`` with other collections; parameters are shared, not copied."""
    if "" in found:
        raise UserError("the model is a collection itself; a package needs a model that makes scores of rows")
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    memo |= {id(collection): pooled[path] for path, collection in found.items()}
    try:
        return copy.deepcopy(model, memo)
    except Exception as fault:
        raise UserError(f"{type(model).__name__} cannot be copied ({_reason(fault)})") from fault


@contextmanager
def _told(model: nn.Module) -> Iterator[None]:
    """Turns what tracing raises into one line."""
    name = type(model).__name__
    try:
        yield
    except UserError as error:
        raise UserError(f"{name} cannot be packaged: {error}") from error
    except _ReadsIds as read:
        raise UserError(
            f"{name} cannot be packaged: it reads the ids themselves (KeyedJaggedTensor.{read}), and a "
            "package gives the model pooled rows alone; hand the ids to an EmbeddingBagCollection only"
        ) from read
    except Exception as fault:
        raise UserError(
            f"{name} cannot be packaged: torch.export cannot trace it ({_reason(fault)})"
        ) from fault


def _reason(fault: BaseException) -> str:
    """The first line that says something."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return f"{type(fault).__name__}: {shown(lines[0] if lines else '', 200)}"
