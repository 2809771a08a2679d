"""A checkpoint's tables on the disk, as a package takes them: written piece by piece, and some rows of each.

So a package is made of tables that are larger than memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.answers.counts import joined
from recpipe.answers.lookup import LowPrecisionBags, LowPrecisionRows, LowPrecisionTables, RowType
from recpipe.answers.modules import replace_module
from recpipe.answers.quantized import PLACES, ROWS, put_dense, write_table
from recpipe.answers.quantized_manifest import QuantizedTable, table_file
from recpipe.answers.rows import row_bytes
from recpipe.answers.source import FloatCheckpoint, gather
from recpipe.answers.stand_ins import configs_of
from recpipe.answers.trained import Trained, is_quantized
from recpipe.errors import UserError, shown
from recpipe.model.call import Called


@dataclass(frozen=True)
class StoredTable:
    """A table of a checkpoint."""

    kind: str
    """The type of its rows, a key of ``recpipe.answers.rows.ROW_TYPES``."""
    write: Callable[[Path], None]
    """Writes the table as a package's file, piece by piece."""
    rows: Callable[[NDArray[np.int64]], tuple[torch.Tensor, torch.Tensor]]
    """For n ids, which ascend: which of them were not pruned, bool [n], and the rows of those, uint8 [k,
    bytes]."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint as the source of a package."""

    called: Called
    """Its model in eval mode with its dense part; the collections are TorchRec's, and not filled."""
    tables: Mapping[tuple[str, str], StoredTable]
    """By the path of the collection and the table's name there."""
    quantized: bool

    def hold(self, ids: Mapping[str, torch.Tensor]) -> None:
        """Put the rows of these ``ids`` of each feature into the model, which then looks up those alone."""
        for path in dict.fromkeys(path for path, _ in self.tables):
            collection = self.called.module.get_submodule(path)
            replace_module(self.called.module, path, self._few(path, collection, ids))

    def _few(self, path: str, collection: Any, ids: Mapping[str, torch.Tensor]) -> FewRows:
        configs = configs_of(collection)
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
            inner = self._inner(path, collection, small, rows)
        return FewRows(inner.eval(), distinct)

    def _inner(
        self,
        path: str,
        collection: Any,
        configs: Sequence[Any],
        rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> nn.Module:
        """A collection of the same kind with tables of these ``rows``, as ``StoredTable.rows`` gives them."""
        pooled = isinstance(collection, EmbeddingBagCollection)
        if not self.quantized:
            inner: nn.Module = (EmbeddingBagCollection if pooled else EmbeddingCollection)(configs)
            under = "embedding_bags" if pooled else "embeddings"
            for config in configs:
                weight = inner.get_parameter(f"{under}.{config.name}.weight").detach()
                there, own = rows[config.name]
                weight[: len(there)] = own.view(torch.float32)
            return inner
        kinds = {
            name: RowType(self.tables[path, name].kind, None if bool(there.all()) else len(own))
            for name, (there, own) in rows.items()
        }
        low: LowPrecisionTables = (
            LowPrecisionBags(configs, kinds, collection.is_weighted())
            if pooled
            else LowPrecisionRows(configs, kinds)
        )
        for name, (there, own) in rows.items():
            if len(own):
                low.rows_of(name).copy_(own)
            if kinds[name].kept is not None:
                low.places_of(name).copy_(torch.where(there, there.cumsum(0) - 1, -1))
        return low


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
        """As the collection with all rows."""
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


def stored(trained: Trained) -> Stored:
    """The checkpoint that ``trained`` has opened, quantized or not."""
    if is_quantized(trained.directory):
        return _opened(trained.make_called(), trained.directory)
    return _float(trained)


def _float(trained: Trained) -> Stored:
    source = FloatCheckpoint.of(trained)
    return Stored(
        source.called(),
        {(place.collection, place.own): _float_table(source, name) for name, place in source.places.items()},
        False,
    )


def _float_table(source: FloatCheckpoint, table: str) -> StoredTable:
    def rows(ids: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(len(ids), dtype=torch.bool), source.rows_at(table, ids).view(torch.uint8)

    return StoredTable("fp32", lambda file: write_table(file, source, table, "fp32"), rows)


def put_rows_of(called: Called, directory: Path, ids: Mapping[str, torch.Tensor]) -> None:
    """As ``recpipe.kit.put_rows`` for the model that ``called`` calls, with the rows of some ``ids`` alone,
    int64 by feature: its collections become ``FewRows``. The tables may be larger than memory."""
    _opened(called, directory).hold(ids)


def _opened(called: Called, directory: Path) -> Stored:
    """The quantized checkpoint ``directory`` as the model that ``called`` calls."""
    tables = put_dense(called.module, directory).tables
    found = {
        (table.collection, table.own): _quantized_table(directory / table_file(name), table)
        for name, table in tables.items()
    }
    return Stored(called, found, True)


def _quantized_table(file: Path, table: QuantizedTable) -> StoredTable:
    def read(name: str, low: int, high: int) -> NDArray[Any]:
        # Opened anew for these rows: what has been read stays in memory until the file is closed.
        with safe_open(file, framework="np") as opened:
            found: NDArray[Any] = opened.get_slice(name)[low:high]
        return found

    def rows(ids: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        places = ids
        if table.kept is not None:
            own = np.empty(len(ids), np.int32)
            gather(ids, own, partial(read, PLACES))
            places = own[own >= 0].astype(np.int64)
            there = torch.from_numpy(own >= 0)
        else:
            there = torch.ones(len(ids), dtype=torch.bool)
        found = np.empty((len(places), row_bytes(table.type, table.dim)), np.uint8)
        gather(places, found, partial(read, ROWS))
        return there, torch.from_numpy(found)

    return StoredTable(table.type, lambda to: _copy(file, to), rows)


def _copy(file: Path, to: Path) -> None:
    shutil.copyfile(file, to)
