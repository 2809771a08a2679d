"""Pooled rows of a slice of the data: looked up once for each choice of a table, then handed out again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recpipe.kit import (
    Called,
    FloatCheckpoint,
    LowPrecisionBags,
    RowType,
    bag_keys,
    encode_rows,
    replace_module,
    require_ids,
)
from recpipe.plugin import UserError
from recpipe_low_precision.choices import Assignment, Choice


class TableRows:
    """The rows of ``table`` that a slice looks up, and its ids as numbers of these rows.

    ``asked``: what each batch looks up in this table. ``used``: which rows training looked up, bool [rows];
    None: all count as used.
    """

    def __init__(
        self,
        source: FloatCheckpoint,
        table: str,
        config: EmbeddingBagConfig,
        weighted: bool,
        asked: Sequence[KeyedJaggedTensor],
        used: NDArray[np.bool_] | None,
    ) -> None:
        self.table, self.weighted = table, weighted
        ids = [features.values().numpy() for features in asked]
        self.distinct = distinct = np.unique(np.concatenate(ids))
        """Their ids, ascending."""
        self.asked = list(asked)
        self.ids = [torch.from_numpy(np.searchsorted(distinct, part)) for part in ids]
        self.rows = _gathered(source, table, distinct)
        self.used = None if used is None else torch.from_numpy(used[distinct])
        self.config = replace(config, num_embeddings=max(1, len(distinct)))
        self._bags: dict[Choice, LowPrecisionBags] = {}

    def bags(self, choice: Choice) -> LowPrecisionBags:
        """A collection of these rows alone, kept by ``choice``."""
        if choice not in self._bags:
            self._bags[choice] = self._made(choice)
        return self._bags[choice]

    def _made(self, choice: Choice) -> LowPrecisionBags:
        rows, kept = self.rows, None
        if choice.pruned:
            assert self.used is not None, "pruning needs to know which rows training looked up"
            rows, kept = rows[self.used], int(self.used.sum())
        bags = LowPrecisionBags([self.config], {self.config.name: RowType(choice.kind, kept)}, self.weighted)
        if len(rows):
            bags.rows_of(self.config.name).copy_(encode_rows(rows, choice.kind, self.table))
        if kept is not None and len(self.rows):
            assert self.used is not None
            places = torch.where(self.used, self.used.cumsum(0) - 1, -1)
            bags.places_of(self.config.name).copy_(places)
        return bags

    def pooled(self, choice: Choice, number: int) -> torch.Tensor:
        """Pooled rows for batch ``number``, float32 [B, its features' columns]."""
        asked = self.asked[number]
        weights = asked.weights().float() if self.weighted else None
        return self.bags(choice).look_up(self.ids[number], asked.offsets(), weights)


def _gathered(source: FloatCheckpoint, table: str, distinct: NDArray[np.int64]) -> torch.Tensor:
    """Rows ``distinct`` (ascending) of a table, float32 [U, D]."""
    found = torch.empty(len(distinct), source.shapes[table][1])
    for start, block in source.blocks(table):
        low, high = np.searchsorted(distinct, (start, start + len(block)))
        found[low:high] = block[torch.from_numpy(distinct[low:high] - start)]
    return found


class Pieces:
    """Pooled rows of each table, choice and batch; the latest used are kept, up to ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.assignment: Assignment = {}
        self.number = 0
        """Of the batch that is being evaluated."""
        self.tables: Mapping[str, TableRows] = {}
        self._kept: OrderedDict[tuple[str, Choice, int], torch.Tensor] = OrderedDict()
        self._bytes = 0

    def of(self, table: str) -> torch.Tensor:
        """The piece of ``table`` for the present assignment and batch."""
        key = (table, self.assignment[table], self.number)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self.tables[table].pooled(key[1], self.number)
        self._kept[key] = made
        self._bytes += made.nbytes
        while self._bytes > self.most and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return made


class Stub(nn.Module):
    """Stands where ``collection`` was, at ``path``. At first it notes the ids that it is asked for; once the
    rows are gathered it hands out pooled rows. ``tables``: the checkpoint's name of each table."""

    def __init__(
        self, path: str, collection: EmbeddingBagCollection, tables: Mapping[str, str], pieces: Pieces
    ) -> None:
        super().__init__()
        self.path, self.tables, self.pieces = path, dict(tables), pieces
        self.configs = collection.embedding_bag_configs()
        self.weighted = collection.is_weighted()
        self.keys, self.dims = bag_keys(self.configs)
        self.asked: list[KeyedJaggedTensor] = []
        """What each batch looks up, the features in the configs' order."""
        self._learning = True
        self._batch: list[KeyedJaggedTensor] = []

    def end_batch(self) -> None:
        """A batch has been seen; ``UserError`` unless the collection was called once for it."""
        if len(self._batch) != 1:
            raise UserError(
                f"the model calls '{self.path}' {len(self._batch)} times for a batch, and its tables can be "
                "quantized if it does so once"
            )
        self.asked += self._batch
        self._batch = []

    def gather(self, source: FloatCheckpoint, used: Mapping[str, NDArray[np.bool_]]) -> dict[str, TableRows]:
        """Read the rows that were asked for, by the checkpoint's names of the tables."""
        self._learning = False
        found, place = {}, 0
        for config in self.configs:
            own = list(range(place, place + len(config.feature_names)))
            place += len(own)
            parts = [asked.permute(own) for asked in self.asked]
            table = self.tables[config.name]
            found[table] = TableRows(source, table, config, self.weighted, parts, used.get(table))
        return found

    def taken(self) -> KeyedJaggedTensor:
        """What the batch just seen looks up, which is then forgotten."""
        self.end_batch()
        return self.asked.pop()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Zeros while it learns the ids, then the pooled rows of the present assignment."""
        names = [feature for config in self.configs for feature in config.feature_names]
        features = features.permute([features.keys().index(name) for name in names])
        if self._learning:
            require_ids(features, [c.num_embeddings for c in self.configs for _ in c.feature_names])
            self._batch.append(features)
            values = torch.zeros(features.stride(), sum(self.dims))
        else:
            self._require_the_same(features)
            values = torch.cat([self.pieces.of(table) for table in self.tables.values()], dim=1)
        return KeyedTensor(keys=self.keys, length_per_key=self.dims, values=values)

    def _require_the_same(self, features: KeyedJaggedTensor) -> None:
        """``UserError`` if the model asks for other rows than at first: they depend on the rows' values."""
        before = self.asked[self.pieces.number]
        same = torch.equal(features.values(), before.values()) and torch.equal(
            features.lengths(), before.lengths()
        )
        if same and self.weighted:
            same = torch.equal(features.weights(), before.weights())
        if not same:
            raise UserError(
                f"the ids or weights that the model looks up in '{self.path}' depend on other tables' rows: "
                "such a model cannot be quantized by this plugin"
            )


def put_stubs(called: Called, source: FloatCheckpoint, pieces: Pieces) -> list[Stub]:
    """Replace every collection of the model by a stub; ``UserError`` if one is no
    ``EmbeddingBagCollection``."""
    names = {(place.collection, place.own): table for table, place in source.places.items()}
    stubs = []
    for path in dict.fromkeys(place.collection for place in source.places.values()):
        collection = called.module.get_submodule(path)
        if not isinstance(collection, EmbeddingBagCollection):
            raise UserError(
                f"'{path}' is a {type(collection).__name__}, and only the tables of an "
                "EmbeddingBagCollection can be quantized"
            )
        own = {config.name: names[path, config.name] for config in collection.embedding_bag_configs()}
        stubs.append(Stub(path, collection, own, pieces))
        replace_module(called.module, path, stubs[-1])
    return stubs
