"""What takes the place of ids and collections while the dense part of a model is traced.

An ``EmbeddingBagCollection`` is replaced by its pooled rows, an ``EmbeddingCollection`` by the rows and the
number of ids of each sample, all of which are inputs of what is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recpipe.errors import UserError, shown

Collection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection
Config: TypeAlias = EmbeddingBagConfig | EmbeddingConfig
ROW_FOR_EACH_ID = "none"
"""The pooling of a lookup whose rows are not pooled."""


@dataclass(frozen=True)
class Lookup:
    """One call of a collection: the rows that it pools, side by side in the order of ``parts``; or the rows
    of one feature, one for each id."""

    pooling: str
    """``sum``, ``mean``, or ``none``: a row for each id."""
    parts: tuple[tuple[str, str], ...]
    """Feature and table, one pair for each pooled row of a sample; one pair if rows are not pooled."""

    @property
    def sequence(self) -> bool:
        """Whether its rows are not pooled."""
        return self.pooling == ROW_FOR_EACH_ID


class ReadsIds(AttributeError):
    """The model does more with the ids than look them up."""


class Features:
    """Stands for the batch's ``KeyedJaggedTensor`` while a model is traced: the ids are not there, so it can
    only be handed to a collection."""

    def __init__(self, keys: list[str], samples: int) -> None:
        self._keys, self._samples = keys, samples

    def keys(self) -> list[str]:
        return self._keys

    def stride(self) -> int:
        return self._samples

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else ReadsIds(name)

    def __getitem__(self, key: str) -> Any:
        raise ReadsIds(f"[{key!r}]")


class Given:
    """What the lookups of one forward pass find, in their order. Without ``given`` it notes which lookups
    are made, and what they would be given for ``lengths`` ids of each sample, by feature: zeros."""

    def __init__(
        self,
        samples: int,
        lengths: Mapping[str, torch.Tensor] | None = None,
        given: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.samples = samples
        self.lookups: list[Lookup] = []
        self.inputs: list[torch.Tensor] = []
        """A lookup that pools its rows adds float32 [B, W]; one that does not adds its rows float32 [N, D]
        and then how many each sample has, int64 [B]."""
        self._lengths, self._given = lengths or {}, given

    def pooled(self, lookup: Lookup, width: int) -> torch.Tensor:
        """float32 [B, width]."""
        self.lookups.append(lookup)
        return self._next(lambda: torch.zeros(self.samples, width))

    def sequence(self, lookup: Lookup, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows float32 [N, width], and how many of them each sample has, int64 [B]."""
        self.lookups.append(lookup)
        ((feature, _),) = lookup.parts
        rows = self._next(lambda: torch.zeros(int(self._lengths[feature].sum()), width))
        return rows, self._next(lambda: self._lengths[feature].clone())

    def _next(self, zeros: Callable[[], torch.Tensor]) -> torch.Tensor:
        found = zeros() if self._given is None else self._given[len(self.inputs)]
        self.inputs.append(found)
        return found


class StandIn(nn.Module):
    """Takes the place of the ``collection`` at ``path``. ``names``: the package's names of its tables."""

    given: Given

    def __init__(self, path: str, collection: Collection, names: Mapping[str, str]) -> None:
        super().__init__()
        self.path = path
        configs = configs_of(collection)
        self.keys = [name for own in get_embedding_names_by_table(configs) for name in own]
        self.dims = [config.embedding_dim for config in configs for _ in config.feature_names]
        self.parts = [(name, names[config.name]) for config in configs for name in config.feature_names]

    def require(self, features: Features) -> None:
        """``UserError`` unless ``features`` are the batch's and have those that are looked up."""
        if not isinstance(features, Features):
            raise UserError(
                f"the collection '{self.path}' looks up ids that the model computes; a package looks up "
                "those of the batch alone"
            )
        present = features.keys()
        absent = next((name for name, _ in self.parts if name not in present), None)
        if absent is not None:
            raise UserError(f"the collection '{self.path}' looks up '{shown(absent)}', which the data lack")


class PooledStandIn(StandIn):
    """Takes the place of an ``EmbeddingBagCollection``."""

    def __init__(self, path: str, collection: EmbeddingBagCollection, names: Mapping[str, str]) -> None:
        super().__init__(path, collection, names)
        if collection.is_weighted():
            raise UserError(f"the collection '{path}' takes a weight for each id, which no package can")
        configs = configs_of(collection)
        self.poolings = [_pooling(config.pooling) for config in configs for _ in config.feature_names]

    def forward(self, features: Features) -> KeyedTensor:
        """Rows for all keys, from one lookup for each kind of pooling."""
        self.require(features)
        columns: dict[int, torch.Tensor] = {}
        for pooling in dict.fromkeys(self.poolings):
            own = [i for i, found in enumerate(self.poolings) if found == pooling]
            lookup = Lookup(pooling, tuple(self.parts[i] for i in own))
            rows = self.given.pooled(lookup, sum(self.dims[i] for i in own))
            columns |= dict(zip(own, torch.split(rows, [self.dims[i] for i in own], dim=1), strict=True))
        if len(set(self.poolings)) == 1:
            values = rows
        else:
            values = torch.cat([columns[i] for i in range(len(self.dims))], dim=1)
        return KeyedTensor(keys=self.keys, length_per_key=self.dims, values=values)


def _pooling(pooling: PoolingType) -> str:
    return "mean" if pooling is PoolingType.MEAN else "sum"


class SequenceStandIn(StandIn):
    """Takes the place of an ``EmbeddingCollection``."""

    def __init__(self, path: str, collection: EmbeddingCollection, names: Mapping[str, str]) -> None:
        super().__init__(path, collection, names)
        if collection.need_indices():
            raise UserError(
                f"the collection '{path}' gives ids beside rows (need_indices), which no package can"
            )

    def forward(self, features: Features) -> dict[str, JaggedTensor]:
        """Rows of each key, from one lookup for each."""
        self.require(features)
        found = {}
        for key, dim, part in zip(self.keys, self.dims, self.parts, strict=True):
            rows, lengths = self.given.sequence(Lookup(ROW_FOR_EACH_ID, (part,)), dim)
            found[key] = JaggedTensor(values=rows, lengths=lengths)
        return found


def configs_of(collection: Collection) -> list[Any]:
    """The configurations of its tables."""
    if isinstance(collection, EmbeddingBagCollection):
        return list(collection.embedding_bag_configs())
    return list(collection.embedding_configs())


def stand_in(path: str, collection: Collection, names: Mapping[str, str]) -> StandIn:
    """What takes the place of ``collection``."""
    if isinstance(collection, EmbeddingBagCollection):
        return PooledStandIn(path, collection, names)
    return SequenceStandIn(path, collection, names)
