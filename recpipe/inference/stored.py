"""A checkpoint's tables on the disk, as a package takes them: written piece by piece, and some rows of each.

So a package is made of tables that are larger than memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.inference.counts import joined
from recpipe.inference.lookup import LowPrecisionBags, LowPrecisionRows, RowType
from recpipe.inference.quantized import PLACES, ROWS, put_dense, write_table
from recpipe.inference.quantized_manifest import read_manifest, table_file
from recpipe.inference.source import FloatCheckpoint, replace_module
from recpipe.inference.stand_ins import configs_of
from recpipe.inference.trained import Trained, is_quantized
from recpipe.model.call import Called
from recpipe.tables.specs import weight_name


@dataclass(frozen=True)
class StoredTable:
    """A table of a checkpoint."""

    kind: str
    """The type of its rows, a key of ``recpipe.inference.rows.ROW_TYPES``."""
    write: Callable[[Path], None]
    """Writes the table as a package's file, piece by piece."""
    row: Callable[[int], torch.Tensor | None]
    """The row of an id, uint8 [1, bytes]; None if it was pruned."""


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
            config.name: [
                # An id beyond the table is another feature's.
                self.tables[path, config.name].row(min(int(i), config.num_embeddings - 1))
                for i in distinct[config.feature_names[0]]
            ]
            for config in configs
        }
        small = [replace(config, num_embeddings=max(1, len(rows[config.name]))) for config in configs]
        with torch.random.fork_rng(devices=[]):
            inner = self._inner(path, collection, small, rows)
        return FewRows(inner.eval(), distinct)

    def _inner(
        self, path: str, collection: Any, configs: Sequence[Any], rows: Mapping[str, Sequence[Any]]
    ) -> nn.Module:
        """A collection of the same kind with tables of these ``rows``."""
        pooled = isinstance(collection, EmbeddingBagCollection)
        if not self.quantized:
            inner: nn.Module = (EmbeddingBagCollection if pooled else EmbeddingCollection)(configs)
            under = "embedding_bags" if pooled else "embeddings"
            for config in configs:
                weight = inner.get_parameter(f"{under}.{config.name}.weight").detach()
                for place, row in enumerate(rows[config.name]):
                    assert row is not None, "rows of a float table are not pruned"
                    weight[place] = row.view(torch.float32)[0]
            return inner
        kept = {name: [row for row in own if row is not None] for name, own in rows.items()}
        pruned = {name for name, own in rows.items() if len(kept[name]) < len(own)}
        kinds = {
            name: RowType(self.tables[path, name].kind, len(kept[name]) if name in pruned else None)
            for name in rows
        }
        low = LowPrecisionBags(configs, kinds) if pooled else LowPrecisionRows(configs, kinds)
        for name, own in rows.items():
            if kept[name]:
                low.rows_of(name).copy_(torch.cat(kept[name]))
            if name in pruned:
                there = torch.tensor([row is not None for row in own])
                low.places_of(name).copy_(torch.where(there, there.cumsum(0) - 1, -1))
        return low


class FewRows(nn.Module):
    """A collection ``inner`` that has the rows of some ids alone; ``distinct``: those of each feature,
    ascending."""

    def __init__(self, inner: nn.Module, distinct: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.distinct = inner, dict(distinct)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """As the collection with all rows."""
        own = features.permute([features.keys().index(name) for name in self.distinct])
        numbers = [torch.searchsorted(self.distinct[name], own[name].values()) for name in self.distinct]
        return self.inner(
            KeyedJaggedTensor(own.keys(), torch.cat(numbers), lengths=own.lengths(), offsets=own.offsets())
        )


def stored(trained: Trained) -> Stored:
    """The checkpoint that ``trained`` has opened, quantized or not."""
    return _quantized(trained) if is_quantized(trained.directory) else _float(trained)


def _float(trained: Trained) -> Stored:
    source = FloatCheckpoint.of(trained)
    return Stored(
        source.called(),
        {(place.collection, place.own): _float_table(source, name) for name, place in source.places.items()},
        False,
    )


def _float_table(source: FloatCheckpoint, table: str) -> StoredTable:
    def row(number: int) -> torch.Tensor:
        values = source.files.rows(weight_name(table), number, number + 1)
        return torch.from_numpy(values).view(torch.uint8)

    return StoredTable("fp32", lambda file: write_table(file, source, table, "fp32"), row)


def _quantized(trained: Trained) -> Stored:
    called = trained.make_called()
    put_dense(called.module, trained.directory)
    found = {
        (table.collection, table.own): _quantized_table(trained.directory / table_file(name), table.type)
        for name, table in read_manifest(trained.directory).tables.items()
    }
    return Stored(called, found, True)


def _quantized_table(file: Path, kind: str) -> StoredTable:
    def row(number: int) -> torch.Tensor | None:
        with safe_open(file, framework="pt") as opened:
            place = number
            if PLACES in opened.keys():  # noqa: SIM118  it is no dictionary
                place = int(opened.get_slice(PLACES)[number : number + 1])
            return None if place < 0 else opened.get_slice(ROWS)[place : place + 1]

    return StoredTable(kind, lambda to: _copy(file, to), row)


def _copy(file: Path, to: Path) -> None:
    shutil.copyfile(file, to)
