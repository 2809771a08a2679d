"""Finds the ids that each group of tables looks up, in batches of any type."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.parts import Place, batch_size, find_ids, ids_at, in_order, require_ids
from recpipe.errors import UserError
from recpipe.plugin.bags import Bags
from recpipe.plugin.tables import Growth
from recpipe.tables.dynamic.spreading import spread
from recpipe.tables.groups import ModelTables
from recpipe.tables.rows import table_bags

NONE: Mapping[str, Growth] = MappingProxyType({})
"""No feature whose table grows."""
GroupIds = tuple[KeyedJaggedTensor | None, ...]
"""A batch's ids for each group, with the group's features in order; None if the model makes the ids."""


class Inputs:
    """Finds the lookups of batches of one type in a model's tables, without the model.

    ``places``: where a batch has the ids of each group's proxy; missing if the model makes these ids itself.
    ``growing``: how the ids of each feature get rows, of those whose tables grow.
    """

    def __init__(
        self, tables: ModelTables, places: Sequence[Sequence[Place]], growing: Mapping[str, Growth] = NONE
    ) -> None:
        self.tables, self.places, self.growing = tables, tuple(places), growing

    @classmethod
    def of(
        cls,
        tables: ModelTables,
        batch: object,
        made: Collection[str] = (),
        growing: Mapping[str, Growth] = NONE,
    ) -> Inputs:
        """Find the places in one batch; all others have the same structure. ``made``: paths of collections
        whose ids are not the batch's, whatever features it has."""
        by_path: dict[str, list[str]] = {}
        for group in tables.groups:
            by_path.setdefault(group.path, []).extend(group.tables.features)
        found = {
            path: [] if path in made else find_ids(batch, features) for path, features in by_path.items()
        }
        return cls(tables, [found[group.path] for group in tables.groups], growing)

    def ids(self, batch: object, group: int) -> KeyedJaggedTensor | None:
        """The ids of a group's features, in order; None if the model makes them."""
        places = self.places[group]
        return in_order(ids_at(batch, places), self.tables.groups[group].tables.features) if places else None

    def each(self, batch: object) -> GroupIds:
        """``ids`` of all groups."""
        found: list[KeyedJaggedTensor | None] = []
        for group, places in zip(self.tables.groups, self.places, strict=True):
            found.append(in_order(ids_at(batch, places), group.tables.features) if places else None)
        return tuple(found)

    def bound(self, group: int) -> bool:
        """Whether a batch has the ids of a group."""
        return bool(self.places[group])

    def bags(self, batch: object, group: int) -> Bags:
        """A group's lookups, in a batch as the data yields it, as rows of its table set; empty if the model
        makes its ids. Ids of tables that grow are spread over their rows."""
        ids = self.ids(batch, group)
        return self._bags(None if ids is None else self.spread(ids), batch, group)

    def spread(self, batch: Any) -> Any:
        """``batch``, or ids of one, with some rows in place of keys of tables that grow."""
        if not self.growing:
            return batch
        rows: dict[str, int] = {}
        for group in self.tables.groups:
            own = group.tables
            rows |= dict(zip(own.features, own.rows_of_features.tolist(), strict=True))
        return spread(batch, self.growing, rows)

    def bags_of_rows(self, batch: object, group: int) -> Bags:
        """``bags`` of a batch in which all ids are rows."""
        return self._bags(self.ids(batch, group), batch, group)

    def _bags(self, ids: KeyedJaggedTensor | None, batch: object, group: int) -> Bags:
        if ids is None:
            size = batch_size(batch)
            return Bags(np.empty(0, np.int64), np.zeros(size + 1, np.int64), size)
        return table_bags(self.tables.groups[group].tables, ids)

    def require_ids(self, each: GroupIds) -> None:
        """``DataError`` if an id is not in its table."""
        for group, ids in zip(self.tables.groups, each, strict=True):
            if ids is not None:
                require_ids(ids, group.tables.rows_of_features)

    def lookups(self, batch: object) -> Bags:
        """The lookups of all groups; ``DataError`` for an unknown id, ``UserError`` if tables grow."""
        if self.growing:
            raise UserError(
                "a plugin asks which rows a batch looks up before it is trained, and the ids of "
                f"{', '.join(self.growing)} get their rows then (rows: dynamic): drop the plugin, or state "
                "the tables' rows"
            )
        found = [self.bags(batch, group) for group in range(len(self.places))]
        if len(found) == 1:
            return Bags(found[0].rows, found[0].offsets, found[0].batch_size)
        rows = [bags.rows + base for bags, base in zip(found, self.tables.bases[:-1], strict=True)]
        counts = np.concatenate([np.diff(bags.offsets) for bags in found])
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        return Bags(np.concatenate(rows), offsets, found[0].batch_size)
