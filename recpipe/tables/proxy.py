"""Proxies replace TorchRec's collections in a model, with the same interface and names.

A proxy owns no rows. Its tables are in groups (see ``groups``), and each group's collection keeps the rows in
its tiers. While a batch is trained, its rows are looked up once. A proxy called with the batch's own ids
hands out these rows, for the samples being trained. Called with other ids, such as ids that the model has
computed, it looks them up at once, and their update follows at the end of the step.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recpipe.data.parts import in_order, require_ids, weights_in_order, without_weights
from recpipe.errors import DataError, UserError
from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import TableCollection
from recpipe.plugin.tables import row_chunks
from recpipe.tables.collection import RowCollection
from recpipe.tables.group_rows import GroupRows, GroupTables
from recpipe.tables.groups import Group
from recpipe.tables.rows import looked_up, pool, table_bags, updated


class HandedOut(Protocol):
    """A proxy's rows for the samples being trained."""

    def rows(self, sparse: KeyedJaggedTensor) -> list[torch.Tensor] | None:
        """The rows of each group for the ids of these samples, in the form of ``TableCollection.lookup``; the
        same tensors at every call. None if ``sparse`` has other ids."""


class _Current(threading.local):
    rows: Mapping[CollectionProxy, HandedOut] | None = None


_current = _Current()
"""What the proxies hand out in this thread. It is per thread because parts of a batch may train in
parallel."""


@contextmanager
def handing_out(rows: Mapping[CollectionProxy, HandedOut]) -> Iterator[None]:
    """In the block, the proxies hand out ``rows`` in this thread."""
    before, _current.rows = _current.rows, rows
    try:
        yield
    finally:
        _current.rows = before


@dataclass
class _Late:
    """Rows looked up by ids that are not the batch's own; they are updated by the gradient of ``leaf``."""

    group: int
    rows: RowIds
    records: torch.Tensor
    """The records before the step, float32 [U, width]."""
    weights: torch.Tensor
    """A leaf of the graph, float32 [U, D]."""


class RowsElsewhere(UserError, AttributeError):
    """A model reads the weights of a proxy's tables, which are no parameters. It is an ``AttributeError``,
    too, so that ``hasattr`` says no."""


class CollectionProxy(ABC, nn.Module):
    """The base class of both kinds of proxies; ``path`` is the proxy's place in the model.

    Rows are not parameters of any module, so the model's parameters are those of its dense part.
    ``state_dict`` has the rows under the names that the collection gave them.
    """

    weights_under: str
    """The name of TorchRec's module of tables in ``state_dict``."""

    def __init__(self, path: str, tables: Sequence[EmbeddingBagConfig | EmbeddingConfig]) -> None:
        super().__init__()
        self.path = path
        self.configs = list(tables)
        self.features = [name for table in tables for name in table.feature_names]
        self.names = [name for names in get_embedding_names_by_table(self.configs) for name in names]
        self.groups: tuple[Group, ...] = ()
        self.whole: HandedOut | None = None
        """The whole batch's rows, which it hands out in every thread outside ``handing_out``."""
        self.padded = False
        """Whether its rows are looked up with padding in front (``recpipe.tables.group_rows``)."""
        self.late_calls = 0
        """How many times it was trained with ids that are not the batch's own."""
        self.collections: tuple[TableCollection, ...] = ()
        """The collection of each group."""
        self._late: list[_Late] = []
        self._weighted = False

    def place(self, groups: Sequence[Group], collections: Sequence[TableCollection]) -> None:
        """Take rows from ``collections``, one for each of ``groups``; the proxy does not own them."""
        # Kept in tuples: a module in an attribute would make rows parameters of the model.
        self.groups, self.collections = tuple(groups), tuple(collections)

    def __getattr__(self, name: str) -> Any:
        if name == self.weights_under:
            raise RowsElsewhere(
                f"'{self.path}.{name}' is read, and recpipe keeps the rows of '{self.path}' in its own "
                "tables: use what the collection returns (state_dict() has copies of all weights)"
            )
        return super().__getattr__(name)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """What TorchRec's collection returns for these features; ``UserError`` if it is weighted and they are
        not."""
        if self._weighted and features.weights_or_none() is None:
            raise UserError(
                f"the model's collection '{self.path}' is weighted (is_weighted=True), and is called with "
                "ids that have no weights: give the KeyedJaggedTensor weights, or leave is_weighted out"
            )
        given = self.whole if _current.rows is None else _current.rows.get(self)
        rows = None if given is None else given.rows(features)
        if rows is None and self.training and torch.is_grad_enabled():
            rows = self._looked_up_late(features)
        elif rows is None:
            self._require_ids(features)
            rows = self.look_up(features)
        return self.shaped(rows, features)

    def _require_ids(self, features: KeyedJaggedTensor) -> None:
        """``DataError`` for an id that is not in its table: nobody has checked those that the model makes."""
        for group in self.groups:
            try:
                ids = in_order(without_weights(features), group.tables.features)
                require_ids(ids, group.tables.rows_of_features)
            except DataError as fault:
                raise DataError(f"the model calls its collection '{self.path}': {fault}") from fault

    @abstractmethod
    def shaped(self, rows: Sequence[torch.Tensor], features: KeyedJaggedTensor) -> Any:
        """Convert each group's ``rows`` into what TorchRec's collection returns for ``features``."""

    def look_up(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        """Read the rows of each group from its collection; nothing is trained, planned or moved. The ids must
        be in their tables."""
        pairs = zip(self.groups, self.collections, strict=True)
        with torch.no_grad():
            return [c.lookup(in_order(features, g.tables.features)) for g, c in pairs]

    # -- ids that are not the batch's own ----------------------------------------------------

    def _looked_up_late(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        self.late_calls += 1
        self._require_ids(features)
        found = []
        for number, (group, collection) in enumerate(zip(self.groups, self.collections, strict=True)):
            rows = _rows_of(collection, self.path)
            bags = table_bags(group.tables, features)
            distinct, which = np.unique(bags.rows, return_inverse=True)
            records = rows.records_of(distinct)
            weights = records[:, : group.tables.dim].clone()
            if not group.tables.optimizer.frozen:
                self._late.append(_Late(number, distinct, records, weights.requires_grad_()))
            scale = weights_in_order(features, group.tables.features) if group.tables.weighted else None
            found.append(looked_up(group.tables, weights, which, bags, scale))
        return found

    def late_leaves(self) -> list[torch.Tensor]:
        """Leaves of the graph made since the last update, for ids that are not the batch's own."""
        return [one.weights for one in self._late]

    def update_late(self, own: Sequence[GroupRows]) -> None:
        """Update each row looked up since the last call by ids that are not the batch's own, once, by its
        summed gradient.

        ``own``: each group's lookups by the batch's own ids; empty if the batch has no ids for this proxy. If
        a row is in both, this update replaces the one that the backward pass has made: it starts from the
        record before the step.
        """
        late, self._late = [one for one in self._late if one.weights.grad is not None], []
        for number, group in enumerate(self.groups):
            mine = [one for one in late if one.group == number]
            if not mine:
                continue
            every = np.concatenate([one.rows for one in mine])
            rows, first, which = np.unique(every, return_index=True, return_inverse=True)
            gradients = torch.cat([one.weights.grad for one in mine if one.weights.grad is not None])
            total = gradients.new_zeros((len(rows), group.tables.dim))
            total.index_add_(0, torch.from_numpy(which).to(total.device), gradients)
            if own:
                total += own[number].gradient_of(group.tables, rows)
            before = torch.cat([one.records for one in mine])[torch.from_numpy(first).to(total.device)]
            collection = _rows_of(self.collections[number], self.path)
            after = updated(group.tables.optimizer, before, total)
            stay = None if collection.row_filter is None else collection.row_filter.stay(rows, total)
            if stay is not None:
                after = torch.where(stay[:, None], after, before)
            collection.replace_records(rows, after)
            driven = collection.offers(GroupTables)
            if driven is not None and driven.changes is not None:
                driven.changes.add(rows)

    # -- names -------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save a copy of every table's weights under TorchRec's name."""
        for group, collection in zip(self.groups, self.collections, strict=True):
            for table in group.tables.tables:
                destination[self._key(prefix, group, table.name)] = torch.empty(table.rows, group.tables.dim)
            for region in collection.regions():
                weights, _ = collection.read(region)
                whole = destination[self._key(prefix, group, region.table)]
                whole[region.start : region.stop, region.left : region.right] = torch.from_numpy(weights)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Put every table's weights into its tiers; optimizer state is reset."""
        known = set()
        for group, collection in zip(self.groups, self.collections, strict=True):
            state_width = group.tables.layout.width - group.tables.dim
            for table in group.tables.tables:
                key = self._key(prefix, group, table.name)
                known.add(key)
                weights, shape = state_dict.get(key), (table.rows, group.tables.dim)
                if weights is None:
                    missing_keys.append(key)
                elif tuple(weights.shape) != shape:
                    error_msgs.append(f"{key} is {tuple(weights.shape)}, and the table {shape}")
                else:
                    array = weights.detach().cpu().float().numpy()
                    for region in (r for r in row_chunks(group.tables) if r.table == table.name):
                        part = array[region.start : region.stop]
                        collection.write(region, (part, np.zeros((len(part), state_width), np.float32)))
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]

    def _key(self, prefix: str, group: Group, table: str) -> str:
        return f"{prefix}{self.weights_under}.{group.own_names[table]}.weight"


def _rows_of(collection: TableCollection, path: str) -> RowCollection:
    if not isinstance(collection, RowCollection):
        raise UserError(
            f"the model calls its collection '{path}' with ids that are not the batch's own, which "
            f"{type(collection).__name__} cannot look up: use tiers.policy=resident without "
            "tiers.sharded and plugins that shard tables, or hand the batch's ids on"
        )
    if collection.replicated:
        raise UserError(
            f"the model calls its collection '{path}' with ids that are not the batch's own, and several "
            "trainers cannot update such rows together: train in one process, or hand the batch's ids on"
        )
    return collection


class BagProxy(CollectionProxy, EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """Replaces an ``EmbeddingBagCollection``. Groups give sums; a mean is the sum divided by the number of
    ids. Where the model computes the ids' weights, groups give a row for each id, which are summed here."""

    weights_under = "embedding_bags"

    def __init__(self, path: str, replaced: EmbeddingBagCollectionInterface) -> None:
        super().__init__(path, replaced.embedding_bag_configs())
        self._weighted = replaced.is_weighted()
        self.dims = [table.embedding_dim for table in self.configs for _ in table.feature_names]
        means = [table.pooling == PoolingType.MEAN for table in self.configs for _ in table.feature_names]
        self._means, self._any_means = np.array(means), any(means)
        self._sums: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}
        """By a group's places and the device, which of its features are summed, bool [F], for groups with
        features of both kinds."""
        self.sums = False
        """Whether its groups give a row for each id, so that batches are planned by ids alone: rows are
        summed here, with the weights that the ids have when it is called, and these get their gradient."""
        self.takes_padding = False
        """Whether padding in front costs nothing: its pooled rows are the sums of a single group."""

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.configs

    def is_weighted(self) -> bool:
        return self._weighted

    def place(self, groups: Sequence[Group], collections: Sequence[TableCollection]) -> None:
        """Take rows from ``collections``, one for each of ``groups``; the proxy does not own them."""
        super().place(groups, collections)
        self.sums = any(not group.tables.pooled for group in groups)
        self.takes_padding = len(groups) == 1 and not self._any_means and not self.sums

    def shaped(self, rows: Sequence[torch.Tensor], features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows by feature, each float32 [B, D of its table]."""
        by_feature: dict[int, torch.Tensor] = {}
        for group, found in zip(self.groups, rows, strict=True):
            pooled = found
            if self.sums:  # ``found`` has a row for each id
                names, at = group.tables.features, torch.arange(len(found), device=found.device)
                ids = in_order(without_weights(features), names)
                scale = weights_in_order(features, names).to(found.dtype)
                pooled = pool(found, at, ids.offsets().long(), ids.stride(), scale)
            values = self._meant(group, pooled, features) if self._any_means else pooled
            if len(rows) == 1:
                return KeyedTensor(self.names, self.dims, values)
            by_feature |= dict(zip(group.places, torch.split(values, group.tables.dim, 1), strict=True))
        joined = torch.cat([by_feature[place] for place in range(len(self.names))], dim=1)
        return KeyedTensor(self.names, self.dims, joined)

    def _meant(self, group: Group, pooled: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        """Divide the sums in ``pooled`` by the number of ids, for tables that want means."""
        means = self._means[list(group.places)]
        if not means.any():
            return pooled
        ids = in_order(without_weights(features), group.tables.features)
        counts = ids.lengths().view(len(means), -1).t().to(pooled.dtype).clamp(min=1)
        size = len(pooled)
        if not means.all():
            key = (group.places, counts.device)
            if key not in self._sums:  # copied once, since that waits for a GPU
                self._sums[key] = torch.from_numpy(~means).to(counts.device)
            counts = counts.masked_fill(self._sums[key], 1.0)
        meant: torch.Tensor = pooled.view(size, len(means), -1) / counts.unsqueeze(2)
        return meant.view(size, -1)


class SequenceProxy(CollectionProxy, EmbeddingCollectionInterface):  # type: ignore[misc]
    """Replaces an ``EmbeddingCollection``, which gives a row for each id."""

    weights_under = "embeddings"

    def __init__(self, path: str, replaced: EmbeddingCollectionInterface) -> None:
        super().__init__(path, replaced.embedding_configs())
        self._need_indices: bool = replaced.need_indices()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self.configs

    def need_indices(self) -> bool:
        return self._need_indices

    def embedding_dim(self) -> int:
        """The number of columns, which all tables share."""
        return int(self.configs[0].embedding_dim)

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of each table's features, under which results are found."""
        names: list[list[str]] = get_embedding_names_by_table(self.configs)
        return names

    def shaped(self, rows: Sequence[torch.Tensor], features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Rows by feature, float32 [ids, D], with the lengths of the bags."""
        found: dict[int, JaggedTensor] = {}
        for group, values in zip(self.groups, rows, strict=True):
            ids = in_order(features, group.tables.features)
            lengths = ids.lengths().view(len(group.places), -1)
            sizes = ids.length_per_key()
            indices = ids.values().split(sizes)
            for number, (place, part) in enumerate(
                zip(group.places, torch.split(values, sizes), strict=True)
            ):
                found[place] = JaggedTensor(
                    values=part,
                    lengths=lengths[number],
                    weights=indices[number] if self._need_indices else None,
                )
        return {self.names[place]: found[place] for place in range(len(self.names))}


def proxy_of(path: str, collection: nn.Module) -> CollectionProxy | None:
    """The proxy that can replace ``collection``; None if that is not one of TorchRec's collections."""
    if isinstance(collection, EmbeddingBagCollection):
        return BagProxy(path, collection)
    if isinstance(collection, EmbeddingCollection):
        return SequenceProxy(path, collection)
    return None


def same_ids(
    sparse: KeyedJaggedTensor, own: KeyedJaggedTensor, proxy: CollectionProxy, by_weights: bool = True
) -> bool:
    """Whether ``proxy`` would look up the same rows with either of the two and, if it hands out sums by the
    batch's weights and ``by_weights``, make the same sums."""
    if sparse is own:
        return True
    if not set(proxy.features) <= set(sparse.keys()):
        return False
    by_weights &= isinstance(proxy, BagProxy) and proxy.is_weighted() and not proxy.sums
    if not by_weights:
        own, sparse = without_weights(own), without_weights(sparse)
    elif any(w is None or w.requires_grad for w in (own.weights_or_none(), sparse.weights_or_none())):
        return False
    mine, theirs = (in_order(ids, proxy.features) for ids in (own, sparse))
    if by_weights and not torch.equal(mine.weights(), theirs.weights()):
        return False
    pairs = ((mine.lengths(), theirs.lengths()), (mine.values(), theirs.values()))
    return all(a is b or (a.shape == b.shape and bool((a == b).all())) for a, b in pairs)
