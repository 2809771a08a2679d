"""A slice of the data, kept so that a model with other tables is evaluated by its dense part alone: rows are
looked up once for each choice of a table, then handed out again."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recpipe.answers.row_types import encode_rows
from recpipe.answers.stored import FloatCheckpoint, replace_module
from recpipe.data.parts import require_ids
from recpipe.errors import shown
from recpipe.kit import Meter, batch_size, select
from recpipe.model.call import Called, Scored
from recpipe.plugin import UserError
from recpipe_low_precision.bags import (
    LowPrecisionBags,
    LowPrecisionRows,
    LowPrecisionTables,
    RowType,
    bag_keys,
)
from recpipe_low_precision.layers import LowPrecisionLinear, show_products
from recpipe_low_precision.row_types import FLOAT, Assignment, Choice

LAYER = "layer:"
"""What comes before a linear layer's path in its name in an assignment."""


@dataclass(frozen=True)
class Losses:
    """What a model says of a slice's samples, float64 [N, L] each, a column for each label."""

    logits: NDArray[np.float64]
    losses: NDArray[np.float64]
    """Cross-entropy in nats, times the samples' weights."""


class Slice:
    """The samples of ``batches``, of a finished model.

    Only rows that these samples look up are kept in memory, each in float32 and in the types that were asked
    for. Row-wise types make a row's bytes of that row alone, so the pooled rows, and so the scores, have the
    same bits as those of the whole table. Pooled rows are kept between evaluations, up to ``cache_bytes``.
    """

    def __init__(
        self,
        source: FloatCheckpoint,
        batches: Iterable[Any],
        cache_bytes: int,
        used: Mapping[str, NDArray[np.bool_]] | None = None,
    ) -> None:
        self.source, self.called = source, source.called()
        show_products(self.called.module)
        self.batches = list(batches)
        if not self.batches:
            raise UserError("there are no samples to judge types by: raise data.eval_fraction")
        self.pieces = Pieces(cache_bytes)
        self.stubs = put_stubs(self.called, source, self.pieces)
        # Without rows, so that the stubs see the ids.
        self.labels, self.weights = _learnt(self.called, self.stubs, self.batches)
        self.names = list(self.called.tasks)
        """Of the labels."""
        self.tables: dict[str, TableRows] = {}
        for stub in self.stubs:
            self.tables |= stub.gather(source, used or {})
        self.pieces.tables = self.tables
        self.layers: dict[str, LowPrecisionLinear] = {}
        """Linear layers that can be computed in low precision, by their names in an assignment."""

    def evaluate(self, assignment: Assignment) -> Losses:
        """The model's scores and losses with tables kept, and layers computed, by ``assignment``."""
        self.assign(assignment)
        return self.evaluate_called(self.called)

    def assign(self, assignment: Assignment) -> None:
        """Use ``assignment``; layers that it does not name are in float32."""
        self.pieces.assignment = assignment
        for name, layer in self.layers.items():
            layer.kind = assignment.get(name, FLOAT).kind

    def evaluate_called(self, called: Called) -> Losses:
        """The scores and losses of the slice's samples by any model."""
        logits = []
        for number, batch in enumerate(self.batches):
            self.pieces.number = number
            logits.append(_side_by_side([judged.prediction for judged in _judged(called, batch)]))
        score = torch.cat(logits).double()
        label = torch.from_numpy(self.labels).double()
        losses = nn.functional.binary_cross_entropy_with_logits(score, label, reduction="none")
        return Losses(
            score.numpy(), losses.numpy() if self.weights is None else losses.numpy() * self.weights
        )

    @cached_property
    def base_entropy(self) -> NDArray[np.float64]:
        """Logloss of always predicting the mean of each label, in nats, float64 [L]; normalized entropy is
        logloss over it."""
        rate = np.average(self.labels.astype(np.float64), axis=0, weights=self.weights)
        return np.array([-(own * math.log(own) + (1 - own) * math.log(1 - own)) for own in rate.tolist()])


def asked_in(*slices: Slice) -> dict[str, torch.Tensor]:
    """The ids that they look up, int64 [n] of each feature."""
    found: dict[str, list[torch.Tensor]] = {}
    for asked in (asked for slice_ in slices for stub in slice_.stubs for asked in stub.asked):
        for name, own in asked.to_dict().items():
            found.setdefault(name, []).append(own.values().long())
    return {name: torch.cat(parts) for name, parts in found.items()}


def check_slice(source: FloatCheckpoint, batches: Iterable[Any]) -> None:
    """``UserError`` if a finished model cannot be judged by these samples, of which nothing is kept."""
    called = source.called()
    _learnt(called, put_stubs(called, source, Pieces(0)), batches)


def _learnt(
    called: Called, stubs: Sequence[Stub], batches: Iterable[Any]
) -> tuple[NDArray[np.float32], NDArray[np.float64] | None]:
    """The labels of all samples, float32 [N, L], and their weights, float64 [N, L] of a mean of 1 in each
    column; None if they have none. The stubs have then seen the ids."""
    labels, weights = [], []
    for batch in batches:
        judged = _judged(called, batch)
        labels.append(_side_by_side([own.labels for own in judged]))
        own = [each.weights for each in judged if each.weights is not None]
        if own:
            weights.append(_side_by_side(own).double())
        for stub in stubs:
            stub.end_batch()
    found: NDArray[np.float32] = torch.cat(labels).numpy()
    whole: NDArray[np.float64] | None = torch.cat(weights).numpy() if weights else None
    for column, name in enumerate(called.tasks):
        known = found[:, column] if whole is None else found[whole[:, column] > 0, column]
        of = "" if len(called.tasks) == 1 else f" of {shown(name)}"
        if not np.isin(known, (0, 1)).all():
            raise UserError(f"normalized entropy is of clicks, and the labels{of} are not 0 and 1 alone")
        if not len(known) or known.min() == known.max():
            raise UserError(f"all labels{of} of a slice are equal: raise data.eval_fraction")
    return found, None if whole is None else whole / whole.mean(axis=0)


def _judged(called: Called, batch: Any) -> list[Scored]:
    """Of each label in turn."""
    with torch.no_grad():
        found = called.judge(batch).tasks
    judged = [found.get(name) for name in called.tasks]
    scored = [each for each in judged if each is not None]
    if len(scored) < len(judged) or any(task.kind != "clicks" for task in called.tasks.values()):
        raise UserError(
            "types are chosen by normalized entropy: the model must predict a click a sample, or one for "
            "each label"
        )
    return scored


def _side_by_side(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Float32 [B, L]."""
    return torch.stack([column.float() for column in columns], dim=1)


def between_samples(batches: Iterable[Any], low: int, high: int) -> Iterator[Any]:
    """Samples ``low`` to ``high`` (excluded) of all that ``batches`` hold."""
    at = 0
    for batch in batches:
        size = batch_size(batch)
        first, last = max(low - at, 0), min(high - at, size)
        if first < last:
            yield batch if last - first == size else select(batch, np.arange(first, last))
        at += size
        if at >= high:
            return


def used_rows(
    source: FloatCheckpoint, batches: Iterable[Any], count: int, meter: Meter
) -> dict[str, NDArray[np.bool_]]:
    """For each table, bool [rows]: the rows that ``batches``, of which there are ``count``, look up."""
    called = source.called()
    stubs = put_stubs(called, source, Pieces(0))
    used = {table: np.zeros(rows, np.bool_) for table, (rows, _) in source.shapes.items()}
    for number, batch in enumerate(batches):
        with torch.no_grad():
            called(batch)
        for stub in stubs:
            stub.end_batch()
            asked = stub.asked.pop().to_dict()  # forgotten, for there may be many batches
            for config in stub.configs:
                for feature in config.feature_names:
                    used[stub.tables[config.name]][asked[feature].values().numpy()] = True
        if meter.due:
            meter.show((number + 1) / count, f"reading training samples: batch {number + 1:,} of {count:,}")
    return used


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
        if choice in self._kept:
            return self._kept[choice]
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
        self._kept[choice] = made
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
    of each table. ``pooled``: whether it was an ``EmbeddingBagCollection``; ``weighted``: whether ids have
    weights."""

    def __init__(
        self,
        path: str,
        configs: Sequence[Any],
        tables: Mapping[str, str],
        pieces: Pieces,
        pooled: bool,
        weighted: bool,
    ) -> None:
        super().__init__()
        self.path, self.configs, self.pieces = path, list(configs), pieces
        self.pooled, self.weighted = pooled, weighted
        self.tables = {config.name: tables[config.name] for config in configs}
        self.asked: list[KeyedJaggedTensor] = []
        """What each batch looks up, the features in the configs' order."""
        self._learning = True
        self._batch: list[KeyedJaggedTensor] = []

    def low_precision(self, configs: Sequence[Any], kinds: Mapping[str, RowType]) -> LowPrecisionTables:
        """A collection of its kind with some of its tables, rows of these ``kinds``."""
        if self.pooled:
            return LowPrecisionBags(configs, kinds, self.weighted)
        return LowPrecisionRows(configs, kinds)

    def shaped(self, features: KeyedJaggedTensor, found: Sequence[torch.Tensor] | None) -> Any:
        """What the collection would return for its ``features``, from what was ``found`` in each table; None:
        of zeros."""
        keys, dims = bag_keys(self.configs)
        if self.pooled:
            values = (
                torch.zeros(features.stride(), sum(dims)) if found is None else torch.cat([*found], dim=1)
            )
            return KeyedTensor(keys=keys, length_per_key=dims, values=values)
        sizes = features.length_per_key()
        rows = torch.zeros(sum(sizes), dims[0]) if found is None else torch.cat([*found])
        lengths = features.lengths().view(len(keys), -1)
        parts = zip(keys, torch.split(rows, sizes), lengths, strict=True)
        return {key: JaggedTensor(values=own, lengths=counts) for key, own, counts in parts}

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

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Zeros while it learns the ids, then what the present assignment gives."""
        names = [feature for config in self.configs for feature in config.feature_names]
        features = features.permute([features.keys().index(name) for name in names])
        if self._learning:
            require_ids(features, [c.num_embeddings for c in self.configs for _ in c.feature_names])
            self._batch.append(features)
            return self.shaped(features, None)
        before = self.asked[self.pieces.number]
        pairs = [(features.values(), before.values()), (features.lengths(), before.lengths())]
        if self.weighted:
            pairs.append((features.weights(), before.weights()))
        if not all(torch.equal(own, first) for own, first in pairs):
            raise UserError(
                f"the ids or weights that the model looks up in '{self.path}' depend on other tables' rows: "
                "such a model cannot be quantized by this plugin"
            )
        return self.shaped(features, [self.pieces.of(table) for table in self.tables.values()])


def put_stubs(called: Called, source: FloatCheckpoint, pieces: Pieces) -> list[Stub]:
    """Replace every collection of the model by a stub; ``UserError`` for one whose tables cannot be
    quantized."""
    names = {(place.collection, place.own): table for table, place in source.places.items()}
    stubs: list[Stub] = []
    for path in dict.fromkeys(place.collection for place in source.places.values()):
        collection = called.module.get_submodule(path)
        own = {name: table for (at, name), table in names.items() if at == path}
        if isinstance(collection, EmbeddingBagCollection):
            configs, weighted = collection.embedding_bag_configs(), collection.is_weighted()
            stubs.append(Stub(path, configs, own, pieces, True, weighted))
        elif isinstance(collection, EmbeddingCollection) and not collection.need_indices():
            stubs.append(Stub(path, collection.embedding_configs(), own, pieces, False, False))
        else:
            raise UserError(
                f"'{path}' is a {type(collection).__name__}, and only the tables of an "
                "EmbeddingBagCollection, or of an EmbeddingCollection without need_indices, can be quantized"
            )
        replace_module(called.module, path, stubs[-1])
    return stubs
