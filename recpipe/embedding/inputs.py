"""Which ids of a batch each group of tables looks up, whatever type the batch has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.checks import require_ids
from recpipe.data.parts import Place, batch_size, find_ids, ids_at
from recpipe.embedding.groups import ModelTables
from recpipe.embedding.planner import Bags, table_bags


class Inputs:
    """The lookups that batches of one kind make in a model's tables, without the model.

    ``places``: where the ids of each group's front lie in a batch; none where the model makes its ids itself.
    """

    def __init__(self, tables: ModelTables, places: Sequence[Sequence[Place]]) -> None:
        self.tables, self.places = tables, tuple(places)

    @classmethod
    def of(cls, tables: ModelTables, batch: object) -> Inputs:
        """Found in a batch, of which all others are made alike."""
        by_path: dict[str, list[str]] = {}
        for group in tables.groups:
            by_path.setdefault(group.path, []).extend(group.tables.features)
        found = {path: find_ids(batch, features) for path, features in by_path.items()}
        return cls(tables, [found[group.path] for group in tables.groups])

    def front_ids(self, batch: object, group: int, features: Sequence[str]) -> KeyedJaggedTensor | None:
        """Where a group's ids lie, those of ``features``, in their order."""
        places = self.places[group]
        return ids_at(batch, places, features) if places else None

    def ids(self, batch: object, group: int) -> KeyedJaggedTensor | None:
        """The ids of a group's features, in their order; None where the model makes them."""
        return self.front_ids(batch, group, self.tables.groups[group].tables.features)

    def bound(self, group: int) -> bool:
        """Whether a batch has the ids of a group."""
        return bool(self.places[group])

    def bags(self, batch: object, group: int) -> Bags:
        """A group's lookups, as rows of its table set; none where the model makes its ids."""
        ids = self.ids(batch, group)
        if ids is None:
            size = batch_size(batch)
            return Bags(np.empty(0, np.int64), np.zeros(size + 1, np.int64), size)
        return table_bags(self.tables.groups[group].tables, ids)

    def count(self, batch: object) -> int:
        """How many ids the model looks up."""
        ids = (self.ids(batch, group) for group in range(len(self.places)))
        return sum(found.values().numel() for found in ids if found is not None)

    def require_ids(self, batch: object) -> None:
        """``DataError`` on an id that is not in its table."""
        for number, group in enumerate(self.tables.groups):
            ids = self.ids(batch, number)
            if ids is not None:
                sizes = group.tables.layout.rows
                rows = [sizes[table] for table in group.tables.table_of]
                require_ids(ids, rows)

    def lookups(self, batch: object) -> Bags:
        """All groups' lookups by the rows' numbers among all tables'; ``DataError`` on an unknown id."""
        found = [self.bags(batch, group) for group in range(len(self.places))]
        if len(found) == 1:
            return found[0]
        rows = [bags.rows + base for bags, base in zip(found, self.tables.bases[:-1], strict=True)]
        counts = np.concatenate([np.diff(bags.offsets) for bags in found])
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        return Bags(np.concatenate(rows), offsets, found[0].batch_size)
