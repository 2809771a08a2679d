"""Rows of a slice of the data: looked up once for each choice of a table, then handed out again."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recpipe.answers.stored import FloatCheckpoint, replace_module
from recpipe.data.parts import require_ids
from recpipe.model.call import Called
from recpipe.plugin import UserError
from recpipe_low_precision.bags import (
    LowPrecisionBags,
    LowPrecisionRows,
    LowPrecisionTables,
    RowType,
    bag_keys,
)
from recpipe_low_precision.row_types import Assignment, Choice, encode_rows


class TableRows:
    """The rows of ``table`` that a slice looks up, and its ids as numbers of these rows.

    ``config``: the table in the collection that ``stub`` stands for. ``asked``: what each batch looks up in
    this table. ``used``: which rows training looked up, bool [rows];
    None: all count as used.
    """

    def __init__(
        self,
        source: FloatCheckpoint,
        table: str,
        config: Any,
        stub: Stub,
        asked: Sequence[KeyedJaggedTensor],
        used: NDArray[np.bool_] | None,
    ) -> None:
        self.table, self._stub = table, stub
        ids = [features.values().numpy() for features in asked]
        self.distinct = distinct = np.unique(np.concatenate(ids))
        """Their ids, ascending."""
        self.asked = list(asked)
        self.ids = [torch.from_numpy(np.searchsorted(distinct, part)) for part in ids]
        self.rows = source.rows_at(table, distinct)
        self.used = None if used is None else torch.from_numpy(used[distinct])
        self.config = replace(config, num_embeddings=max(1, len(distinct)))
        self._kept: dict[Choice, LowPrecisionTables] = {}

    def kept(self, choice: Choice) -> LowPrecisionTables:
        """A collection of these rows alone, kept by ``choice``."""
        if choice not in self._kept:
            self._kept[choice] = self._made(choice)
        return self._kept[choice]

    def _made(self, choice: Choice) -> LowPrecisionTables:
        rows, kept = self.rows, None
        if choice.pruned:
            assert self.used is not None, "pruning needs to know which rows training looked up"
            rows, kept = rows[self.used], int(self.used.sum())
        made = self._stub.low_precision([self.config], {self.config.name: RowType(choice.kind, kept)})
        if len(rows):
            made.rows_of(self.config.name).copy_(encode_rows(rows, choice.kind, self.table))
        if kept is not None and len(self.rows):
            assert self.used is not None
            places = torch.where(self.used, self.used.cumsum(0) - 1, -1)
            made.places_of(self.config.name).copy_(places)
        return made

    def found(self, choice: Choice, number: int) -> torch.Tensor:
        """Pooled rows for batch ``number``, float32 [B, its features' columns], or a row for each id."""
        asked = self.asked[number]
        weights = asked.weights().float() if self._stub.weighted else None
        return self.kept(choice).look_up(self.ids[number], asked.offsets(), weights)


class Pieces:
    """What is looked up of each table, choice and batch; the latest used are kept, up to ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.assignment: Assignment = {}
        self.number = 0
        """The number of the batch that is being evaluated."""
        self.tables: Mapping[str, TableRows] = {}
        self._kept: OrderedDict[tuple[str, Choice, int], torch.Tensor] = OrderedDict()
        self._bytes = 0

    def of(self, table: str) -> torch.Tensor:
        """The piece of ``table`` for the present assignment and batch."""
        key = (table, self.assignment[table], self.number)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self.tables[table].found(key[1], self.number)
        self._kept[key] = made
        self._bytes += made.nbytes
        while self._bytes > self.most and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return made


class Stub(nn.Module):
    """Stands where a collection with the tables ``configs`` was, at ``path``. At first it notes the ids that
    it is asked for; once the rows are gathered it hands out what they give. ``tables``: the checkpoint's name
    of each table. ``weighted``: whether ids have weights."""

    def __init__(
        self,
        path: str,
        configs: Sequence[Any],
        tables: Mapping[str, str],
        pieces: Pieces,
        weighted: bool = False,
    ) -> None:
        super().__init__()
        self.path, self.configs, self.pieces, self.weighted = path, list(configs), pieces, weighted
        self.tables = {config.name: tables[config.name] for config in configs}
        self.asked: list[KeyedJaggedTensor] = []
        """What each batch looks up, the features in the configs' order."""
        self._learning = True
        self._batch: list[KeyedJaggedTensor] = []

    @abstractmethod
    def low_precision(self, configs: Sequence[Any], kinds: Mapping[str, RowType]) -> LowPrecisionTables:
        """A collection of its kind with some of its tables, rows of these ``kinds``."""

    @abstractmethod
    def shaped(self, features: KeyedJaggedTensor, found: Sequence[torch.Tensor] | None) -> Any:
        """What the collection would return for its ``features``, from what was ``found`` in each table; None:
        of zeros."""

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
            found[table] = TableRows(source, table, config, self, parts, used.get(table))
        return found

    def taken(self) -> KeyedJaggedTensor:
        """What the batch just seen looks up, which is then forgotten."""
        self.end_batch()
        return self.asked.pop()

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Zeros while it learns the ids, then what the present assignment gives."""
        names = [feature for config in self.configs for feature in config.feature_names]
        features = features.permute([features.keys().index(name) for name in names])
        if self._learning:
            require_ids(features, [c.num_embeddings for c in self.configs for _ in c.feature_names])
            self._batch.append(features)
            return self.shaped(features, None)
        self._require_the_same(features)
        return self.shaped(features, [self.pieces.of(table) for table in self.tables.values()])

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


class BagStub(Stub):
    """Stands for an ``EmbeddingBagCollection``."""

    def low_precision(self, configs: Sequence[Any], kinds: Mapping[str, RowType]) -> LowPrecisionTables:
        """See ``Stub``."""
        return LowPrecisionBags(configs, kinds, self.weighted)

    def shaped(self, features: KeyedJaggedTensor, found: Sequence[torch.Tensor] | None) -> KeyedTensor:
        """Pooled rows of all keys."""
        keys, dims = bag_keys(self.configs)
        values = torch.zeros(features.stride(), sum(dims)) if found is None else torch.cat([*found], dim=1)
        return KeyedTensor(keys=keys, length_per_key=dims, values=values)


class SequenceStub(Stub):
    """Stands for an ``EmbeddingCollection``."""

    def low_precision(self, configs: Sequence[Any], kinds: Mapping[str, RowType]) -> LowPrecisionTables:
        """See ``Stub``."""
        return LowPrecisionRows(configs, kinds)

    def shaped(
        self, features: KeyedJaggedTensor, found: Sequence[torch.Tensor] | None
    ) -> dict[str, JaggedTensor]:
        """A row for each id, by key."""
        keys = [key for own in get_embedding_names_by_table(self.configs) for key in own]
        sizes = features.length_per_key()
        rows = (
            torch.zeros(sum(sizes), self.configs[0].embedding_dim) if found is None else torch.cat([*found])
        )
        lengths = features.lengths().view(len(keys), -1)
        parts = zip(keys, torch.split(rows, sizes), lengths, strict=True)
        return {key: JaggedTensor(values=own, lengths=counts) for key, own, counts in parts}


def put_stubs(called: Called, source: FloatCheckpoint, pieces: Pieces) -> list[Stub]:
    """Replace every collection of the model by a stub; ``UserError`` for one whose tables cannot be
    quantized."""
    names = {(place.collection, place.own): table for table, place in source.places.items()}
    stubs = []
    for path in dict.fromkeys(place.collection for place in source.places.values()):
        collection = called.module.get_submodule(path)
        own = {name: table for (at, name), table in names.items() if at == path}
        stubs.append(_stub(path, collection, own, pieces))
        replace_module(called.module, path, stubs[-1])
    return stubs


def _stub(path: str, collection: nn.Module, own: Mapping[str, str], pieces: Pieces) -> Stub:
    if isinstance(collection, EmbeddingBagCollection):
        configs = collection.embedding_bag_configs()
        return BagStub(path, configs, own, pieces, collection.is_weighted())
    if isinstance(collection, EmbeddingCollection) and not collection.need_indices():
        return SequenceStub(path, collection.embedding_configs(), own, pieces)
    raise UserError(
        f"'{path}' is a {type(collection).__name__}, and only the tables of an EmbeddingBagCollection, or of "
        "an EmbeddingCollection without need_indices, can be quantized"
    )
