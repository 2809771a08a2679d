"""``LowPrecisionBags`` and ``LowPrecisionRows``: take the place of an ``EmbeddingBagCollection`` and of an
``EmbeddingCollection`` in a finished model, with rows in low precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recpipe.answers.row_types import row_bytes
from recpipe.data.parts import require_ids
from recpipe.errors import UserError
from recpipe.private_api import MEAN, NONE, SUM, NbitLayout, look_up_nbit, remapped_ids

ALIGNED = 128
"""Bytes at whose multiples a table begins in the buffer of all tables, as in FBGEMM's own modules."""


@dataclass(frozen=True)
class RowType:
    """How a table's rows are kept: their type and, if some are pruned, how many are left."""

    kind: str
    kept: int | None = None
    """None: all of them, and there is no table of places."""


def bag_keys(configs: Sequence[EmbeddingBagConfig]) -> tuple[list[str], list[int]]:
    """The keys of what an ``EmbeddingBagCollection`` of these tables returns, and the columns of each."""
    names = get_embedding_names_by_table(list(configs))
    return [name for listed in names for name in listed], [
        config.embedding_dim for config in configs for _ in config.feature_names
    ]


class LowPrecisionTables(nn.Module):
    """Tables of any row types, of a collection with the tables ``configs``. ``parts``: one for each way to
    pool among them.

    The rows are uninitialized: write them through ``rows_of`` and ``places_of``. Ids are checked before any
    row is read: FBGEMM would silently take row 0 for one that is not in its table.
    """

    configs: list[Any]
    parts: nn.ModuleList

    def rows_of(self, table: str) -> torch.Tensor:
        """The rows of ``table``, uint8 [kept, row_bytes], sharing the module's memory."""
        return self._part(table).rows_of(table)

    def places_of(self, table: str) -> torch.Tensor:
        """For each id of ``table`` its row among those kept, or -1: int32 [rows], sharing the module's
        memory. Empty if no row was pruned."""
        return self._part(table).places_of(table)

    def kind_of(self, table: str) -> RowType:
        """How the rows of ``table`` are kept."""
        return self._part(table).kinds[table]

    def look_up(
        self, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Pooled rows float32 [B, W], or a row for each id float32 [N, D], for ``ids`` and ``offsets``
        [F * B + 1] of the features in the tables' order. Ids are not checked. Only for tables that are all
        pooled in the same way."""
        (part,) = self.parts
        assert isinstance(part, BagLookup)
        found: torch.Tensor = part.look_up(ids, offsets, weights)
        return found

    def _part(self, table: str) -> BagLookup:
        return next(part for part in self.parts if isinstance(part, BagLookup) and table in part.kinds)


class LowPrecisionBags(LowPrecisionTables):
    """Tables of any row types behind the interface of TorchRec's ``EmbeddingBagCollection``.

    ``configs``: the collection's tables. ``kinds``: the type of each one's rows, by its name.
    """

    def __init__(
        self, configs: Sequence[EmbeddingBagConfig], kinds: Mapping[str, RowType], is_weighted: bool = False
    ) -> None:
        super().__init__()
        self.configs = list(configs)
        self.is_weighted = is_weighted
        names = get_embedding_names_by_table(self.configs)
        self.keys, self.dims = bag_keys(self.configs)
        ways = {PoolingType.SUM: SUM} if is_weighted else {PoolingType.SUM: SUM, PoolingType.MEAN: MEAN}
        pooled: dict[str, int] = {}
        for c in self.configs:
            if c.pooling not in ways:
                weighted = "weighted " if is_weighted else ""
                raise UserError(
                    f"table '{c.name}' has {weighted}pooling {c.pooling.value}; in low precision rows are "
                    "summed (with weights or without) or averaged without weights: keep the model in float32"
                )
            pooled[c.name] = ways[c.pooling]
        self.parts = nn.ModuleList()
        order: list[str] = []
        for way in sorted(set(pooled.values())):
            chosen = [c for c in self.configs if pooled[c.name] == way]
            self.parts.append(BagLookup(chosen, kinds, way))
            order += [k for c, own in zip(self.configs, names, strict=True) if c in chosen for k in own]
        self.order = None if order == self.keys else [order.index(key) for key in self.keys]
        """The position among the parts' results of each key's; None: they are in the keys' order."""

    @classmethod
    def of(cls, collection: EmbeddingBagCollection, kinds: Mapping[str, RowType]) -> LowPrecisionBags:
        """The tables of ``collection`` with rows of these ``kinds``."""
        return cls(collection.embedding_bag_configs(), kinds, collection.is_weighted())

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of each feature, float32 [B, sum of dimensions]; ``DataError`` for a bad id."""
        found = [part(features, self.is_weighted) for part in self.parts]
        values = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        if self.order is not None:
            widths = [0] * len(self.dims)
            for key, place in enumerate(self.order):
                widths[place] = self.dims[key]
            pieces = values.split(widths, dim=1)
            values = torch.cat([pieces[place] for place in self.order], dim=1)
        return KeyedTensor(keys=self.keys, length_per_key=self.dims, values=values)


class LowPrecisionRows(LowPrecisionTables):
    """Tables of any row types behind the interface of TorchRec's ``EmbeddingCollection``: a row for each id.

    ``configs``: the collection's tables. ``kinds``: the type of each one's rows, by its name.
    """

    def __init__(
        self, configs: Sequence[EmbeddingConfig], kinds: Mapping[str, RowType], need_indices: bool = False
    ) -> None:
        super().__init__()
        self.configs = list(configs)
        self._need_indices = need_indices
        self.keys = [name for own in get_embedding_names_by_table(self.configs) for name in own]
        self.parts = nn.ModuleList([BagLookup(self.configs, kinds, NONE)])

    @classmethod
    def of(cls, collection: EmbeddingCollection, kinds: Mapping[str, RowType]) -> LowPrecisionRows:
        """The tables of ``collection`` with rows of these ``kinds``."""
        return cls(collection.embedding_configs(), kinds, collection.need_indices())

    def need_indices(self) -> bool:
        """Whether rows come with their ids, as of TorchRec's collection."""
        return self._need_indices

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Rows of each feature, float32 [N, D], with the lengths of its bags; ``DataError`` for a bad id."""
        (part,) = self.parts
        assert isinstance(part, BagLookup)
        features = part.own(features)
        sizes = features.length_per_key()
        rows = part(features, False).split(sizes)
        ids = features.values().split(sizes)
        lengths = features.lengths().view(len(self.keys), -1)
        return {
            key: JaggedTensor(rows[i], lengths=lengths[i], weights=ids[i] if self._need_indices else None)
            for i, key in enumerate(self.keys)
        }


class BagLookup(nn.Module):
    """Tables that are pooled in the same way, or not at all, in one buffer, looked up by one operator.

    Buffers: ``rows`` uint8, all tables' bytes; ``starts`` int64 [F], where each feature's table begins;
    ``placements``, ``types`` and ``columns``, as the operator takes them; ``places`` and ``place_starts``,
    the tables of places where rows are pruned. So ``look_up`` can be exported by torch.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    placements: torch.Tensor
    types: torch.Tensor
    columns: torch.Tensor
    places: torch.Tensor
    place_starts: torch.Tensor

    def __init__(self, configs: Sequence[Any], kinds: Mapping[str, RowType], way: int) -> None:
        super().__init__()
        self.way = way
        self.kinds = {c.name: kinds[c.name] for c in configs}
        self.features = [feature for c in configs for feature in c.feature_names]
        per = [c for c in configs for _ in c.feature_names]
        self.ids = [c.num_embeddings for c in per]
        """How many ids each feature may have."""
        self.layout = NbitLayout(
            tuple(self.kinds[c.name].kind for c in per), tuple(c.embedding_dim for c in per)
        )
        self._shapes: dict[str, tuple[int, int]] = {}
        """By table the rows that are kept, and the bytes of each."""
        for c in configs:
            kind = self.kinds[c.name]
            rows = c.num_embeddings if kind.kept is None else kind.kept
            self._shapes[c.name] = rows, row_bytes(kind.kind, c.embedding_dim)
        sizes = [-(-rows * width // ALIGNED) * ALIGNED for rows, width in self._shapes.values()]
        ends = list(accumulate(sizes, initial=0))
        self._begins = dict(zip(self._shapes, ends, strict=False))
        self._ids_of = {c.name: c.num_embeddings for c in configs}
        pruned = [c.num_embeddings if self.kinds[c.name].kept is not None else 0 for c in configs]
        places = dict(zip(self.kinds, accumulate(pruned, initial=0), strict=False))
        self._places = {name: place for name, place in places.items() if self.kinds[name].kept is not None}
        self.prunes = bool(self._places)
        of_features = [self._ids_of[c.name] if c.name in self._places else 0 for c in per]
        if any(c.name in self._places and len(c.feature_names) > 1 for c in configs):
            raise UserError("rows of a table that several features share cannot be pruned: prune none")
        for name, tensor in zip(("placements", "types", "columns"), self.layout.tensors(), strict=True):
            self.register_buffer(name, tensor)
        self.register_buffer("rows", torch.empty(ends[-1], dtype=torch.uint8))
        self.register_buffer("starts", torch.tensor([self._begins[c.name] for c in per]))
        self.register_buffer("places", torch.empty(sum(pruned), dtype=torch.int32))
        self.register_buffer("place_starts", torch.tensor(list(accumulate(of_features, initial=0))))

    def rows_of(self, table: str) -> torch.Tensor:
        """The rows of ``table``, uint8 [kept, row_bytes]."""
        (rows, width), begin = self._shapes[table], self._begins[table]
        return self.rows[begin : begin + rows * width].view(rows, width)

    def places_of(self, table: str) -> torch.Tensor:
        """The places of the ids of ``table``, int32 [rows]; empty if none is pruned."""
        if table not in self._places:
            return self.places[:0]
        begin = self._places[table]
        return self.places[begin : begin + self._ids_of[table]]

    def own(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """This lookup's features among ``features``, in the tables' order."""
        if features.variable_stride_per_key():
            raise UserError("rows in low precision are looked up for features of one batch size alone")
        keys = features.keys()
        if keys == self.features:
            return features
        absent = next((name for name in self.features if name not in keys), None)
        if absent is not None:
            raise UserError(f"the batch has no feature '{absent}', which the model looks up")
        return features.permute([keys.index(name) for name in self.features])

    def forward(self, features: KeyedJaggedTensor, weighted: bool) -> torch.Tensor:
        """Pooled rows float32 [B, sum of dimensions] of its features among ``features``, or a row for each id
        float32 [N, dimension]."""
        features = self.own(features)
        require_ids(features, self.ids)
        weights = features.weights().float() if weighted else None
        return self.look_up(features.values(), features.offsets(), weights)

    def look_up(
        self, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Pooled rows, or a row for each id, for ``ids`` and ``offsets`` [F * B + 1] of its features in their
        order. Ids are not checked."""
        offsets = offsets.to(ids.dtype)
        if self.prunes:
            ids = remapped_ids(ids, offsets, self.places, self.place_starts)
        tensors = (self.placements, self.types, self.columns)
        return look_up_nbit(self.layout, tensors, self.rows, self.starts, ids, offsets, self.way, weights)
