"""A checkpoint as the source of a package.

Its tables stay on the disk, written piece by piece and read row by row: they may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.answers.counts import joined
from recpipe.answers.modules import replace_module
from recpipe.answers.source import FloatCheckpoint
from recpipe.answers.stand_ins import configs_of
from recpipe.errors import UserError, shown
from recpipe.model.call import Called


@dataclass(frozen=True)
class StoredTable:
    """A table of a checkpoint."""

    kind: str
    """The type of its rows, a key of ``recpipe.answers.score.TYPES``."""
    write: Callable[[Path], None]
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

        def rows(table: str, ids: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.ones(len(ids), dtype=torch.bool), source.rows_at(table, ids).view(torch.uint8)

        tables = {
            (place.collection, place.own): StoredTable(
                "fp32", partial(source.write, table), partial(rows, table)
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
        made: nn.Module = (EmbeddingBagCollection if pooled else EmbeddingCollection)(configs)
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
