"""The tables of a model whose ids get rows as they come: batches of keys become batches of rows.

The loader plans each batch in the order of training (``plan``), when its turn comes the rows that other ids
have got are initialised anew (``begin``), and plans of batches that are not trained are undone (``forget``).
Evaluation and predictions look up (``rows_of``) what the ids had after the last batch whose turn has come,
whatever is planned.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.parts import kjts_in, with_kjts
from recpipe.errors import UserError
from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import TableCollection
from recpipe.plugin.tables import Table, TableSet
from recpipe.tables.changes import ChangedIds
from recpipe.tables.dynamic import loops
from recpipe.tables.dynamic.admission import Keys
from recpipe.tables.dynamic.id_map import Content, IdMap, Rows, Turn
from recpipe.tables.dynamic.loops import DEFAULT_ROW, FIRST_ROW
from recpipe.tables.dynamic.saved import load_map, save_map
from recpipe.tables.dynamic.spreading import Growing, with_values
from recpipe.tables.group_rows import GroupTables
from recpipe.tables.groups import Group, ModelTables

Plan = list[tuple[IdMap, Turn]]
"""What a batch has changed in each map."""


@dataclass(frozen=True)
class _Held:
    """A table of a group whose rows are those of a map's ids."""

    map: IdMap
    tables: TableSet
    index: int

    @property
    def table(self) -> Table:
        """The table itself."""
        return self.tables.tables[self.index]

    @cached_property
    def given(self) -> NDArray[np.float32] | None:
        """The first values that the model itself gives the table, if it does, float32 [rows, D]. They are
        kept: its initialiser makes them for the whole table, which is no work for each batch."""
        first = self.table.first
        return first(0, self.table.rows) if callable(first) else None

    def records(self, rows: Rows, keys: Keys) -> torch.Tensor:
        """First records of ``rows``, which these ``keys`` have got, float32 [n, width]: weights drawn by key
        and table alone, or where the model gives the first values those of the row; optimizer state 0."""
        dim, drawn_from = self.tables.dim, self.table.drawn_from
        made = np.zeros((len(rows), self.tables.layout.width), np.float32)
        if self.given is not None:
            made[:, :dim] = self.given[rows]
        else:
            assert drawn_from is not None, "first values are given or drawn"
            made[:, :dim] = drawn_from.made_of(partial(self._numbers, keys), dim)
        return torch.from_numpy(made)

    def _numbers(self, keys: Keys, columns: int) -> NDArray[np.float32]:
        """Numbers of the ``keys`` in this table, as ``recpipe.plugin.first_values.Numbers`` says."""
        number = (self.tables.numbers or range(len(self.tables.tables)))[self.index]
        values = np.empty(len(keys) * columns, np.float32)
        loops.uniform(keys, (self.tables.seed * 1_000_003 + number) % 2**62, columns, values)
        return values.reshape(-1, columns)


class GrowingTables:
    """The maps of a model's tables, and the collections with their rows."""

    def __init__(
        self, growing: Growing, tables: ModelTables, collections: Sequence[TableCollection], seed: int
    ) -> None:
        self.maps: dict[str, IdMap] = {}
        """The map of each table of the data."""
        self._map_of: dict[str, IdMap] = {}
        self._renewed: list[tuple[GroupTables, list[_Held]]] = []
        for group, collection in zip(tables.groups, collections, strict=True):
            held = [
                _Held(self._map(growing, group, table, seed), group.tables, index)
                for index, table in enumerate(group.tables.tables)
                if grows(growing, table)
            ]
            if held:
                self._renewed.append((_renewing(collection, group), held))
        self._lock = threading.RLock()
        self._pending: deque[Plan] = deque()
        self.changes: ChangedIds | None = None
        """What notes the ids that get and lose rows; None: nobody asks for them."""
        self.unknown = 0
        """Lookups of evaluations and predictions that got the default row."""

    @classmethod
    def of(
        cls, growing: Growing, tables: ModelTables, collections: Sequence[TableCollection]
    ) -> GrowingTables | None:
        """Those of ``tables`` that features in ``growing`` look up; None if there are none."""
        if not any(grows(growing, table) for table in tables.tables):
            return None
        return cls(growing, tables, collections, tables.groups[0].tables.seed)

    def _map(self, growing: Growing, group: Group, table: Table, seed: int) -> IdMap:
        """The map of the ids of ``table``; ``UserError`` if its features have rows of different ones."""
        growth = growing[table.features[0]]
        if any(growing.get(name) != growth for name in table.features):
            raise UserError(
                f"table '{table.name}' of '{group.path}' is looked up by {', '.join(table.features)}, whose "
                f"ids do not get rows together: state the same 'table' and 'rows: dynamic' for each of them"
            )
        own = self.maps.get(growth.table)
        if own is None:
            own = self.maps[growth.table] = IdMap(
                growth, table.rows, seed + zlib.crc32(growth.table.encode())
            )
        if own.capacity != table.rows:
            raise UserError(
                f"table '{table.name}' of '{group.path}' has {table.rows:,} rows, and its ids are given rows "
                f"of {own.capacity:,}: make the model's table of that many (capacity in data.features)"
            )
        for name in growing:
            if growing[name] == growth:
                self._map_of[name] = own
        return own

    # -- training ------------------------------------------------------------------------------

    def plan(self, batch: Any) -> tuple[Any, Plan]:
        """The batch that comes next with rows in place of keys, and what that has changed; from any thread,
        in the order of training."""
        plan: Plan = []

        def planned(own: IdMap, keys: Keys) -> Rows:
            rows, turn = own.plan(keys)
            plan.append((own, turn))
            return rows

        with self._lock:
            made = self._with_rows(batch, planned)
            self._pending.append(plan)
        return made, plan

    def begin(self, plan: Plan) -> None:
        """Begin with a planned batch, after the update of the one before and before its own rows are looked
        up or moved: rows that ids have got are initialised. All ranks call it."""
        with self._lock:
            first = self._pending.popleft()
        assert first is plan, "batches are trained in the order of their plans"
        if self.changes is not None:
            for own_map, its_turn in plan:
                self.changes.begun(own_map.growth.table, its_turn)
        turns = {id(own): turn for own, turn in plan}
        for tables, held in self._renewed:
            rows, records = list[RowIds](), list[torch.Tensor]()
            for each in held:
                turn = turns.get(id(each.map))
                if turn is None or not len(turn.rows):
                    continue
                order = np.argsort(turn.rows)
                own = turn.rows[order]
                rows.append(own + each.tables.layout.bases[each.index])
                records.append(each.records(own, turn.keys[order]))
            if rows:
                renewed = np.concatenate(rows)
                tables.renew(renewed, torch.cat(records))
                if tables.changes is not None:
                    tables.changes.add(renewed)

    def forget(self) -> None:
        """Undo all plans of batches whose turn has not come."""
        with self._lock:
            while self._pending:
                for own, turn in reversed(self._pending.pop()):
                    own.undo(turn)

    # -- evaluation and predictions ------------------------------------------------------------

    def rows_of(self, batch: Any) -> Any:
        """``batch`` with rows in place of keys: the default row for ids without one. Nothing changes but
        ``unknown``."""
        with self._lock:
            return self._with_rows(batch, self._found)

    def _found(self, own: IdMap, keys: Keys) -> Rows:
        rows = own.rows_of(keys)
        before = self._before(own)
        if before:
            known = np.array(sorted(before), np.int64)
            at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
            same = known[at] == keys
            rows[same] = np.array([before[key] for key in known.tolist()])[at[same]]
        without = np.flatnonzero(rows < 0)
        self.unknown += len(without)
        rows[without] = DEFAULT_ROW
        return rows

    def _before(self, own: IdMap) -> dict[int, int]:
        """The rows that some ids had (-1: none) before the batches whose turn has not come."""
        rows: dict[int, int] = {}
        for plan in reversed(self._pending):
            for each, turn in plan:
                if each is own:
                    rows.update(dict.fromkeys(turn.keys.tolist(), -1))
                    taken = turn.rows < turn.used
                    rows.update(zip(turn.before[taken, 0].tolist(), turn.rows[taken].tolist(), strict=True))
        return rows

    def _with_rows(self, batch: Any, rows_of: Callable[[IdMap, Keys], Rows]) -> Any:
        """``batch`` with ``rows_of`` each map's keys, all of them at once, in place of these."""
        ids = [each for each in kjts_in(batch) if not self._map_of.keys().isdisjoint(each.keys())]
        runs = [self._runs(each) for each in ids]
        rows: dict[IdMap | None, Iterator[Rows]] = {}
        for own in dict.fromkeys(own for of_ids in runs for own, _ in of_ids):
            keys = [keys for of_ids in runs for each, keys in of_ids if each is own]
            if own is not None:
                whole = rows_of(own, keys[0] if len(keys) == 1 else np.concatenate(keys))
                ends = accumulate(map(len, keys), initial=0)
                keys = [whole[begin:end] for begin, end in pairwise(ends)]
            rows[own] = iter(keys)
        made = {}
        for each, of_ids in zip(ids, runs, strict=True):
            parts = [next(rows[own]) for own, _ in of_ids]
            made[id(each)] = with_values(each, parts[0] if len(parts) == 1 else np.concatenate(parts))
        return with_kjts(batch, lambda each: made.get(id(each), each))

    def _runs(self, ids: KeyedJaggedTensor) -> list[tuple[IdMap | None, Keys]]:
        """The values of ``ids``, cut where the features of another map begin (None: of no map)."""
        keys = ids.values().cpu().numpy().astype(np.int64, copy=False)
        maps = [self._map_of.get(name) for name in ids.keys()]  # noqa: SIM118, no mapping
        if len(set(maps)) == 1:
            return [(maps[0], keys)]
        runs: list[tuple[IdMap | None, Keys]] = []
        begin = end = 0
        for own, of_map in groupby(zip(maps, ids.length_per_key(), strict=True), itemgetter(0)):
            begin, end = end, end + sum(count for _, count in of_map)
            runs.append((own, keys[begin:end]))
        return runs

    # -- checkpoints and figures ---------------------------------------------------------------

    def content_of(self, own: IdMap) -> Content:
        """A copy of a map's content as it was after the last batch whose turn has come."""
        with self._lock:
            content = own.content.copied()
            turns = [turn for plan in self._pending for each, turn in plan if each is own]
        for turn in reversed(turns):
            content.undo(turn)
        return content.copied()

    def save(self, directory: Path) -> None:
        """Write the maps as they were after the last batch whose turn has come."""
        for own in self.maps.values():
            save_map(directory, own.growth, own.capacity, self.content_of(own))

    def load(self, directory: Path) -> None:
        """Go on from the maps of a checkpoint; ``UserError`` if they are of tables that grow otherwise."""
        found = {
            name: load_map(directory, own.growth, own.capacity, own.seed) for name, own in self.maps.items()
        }
        with self._lock:
            for name, content in found.items():
                self.maps[name].load(content)

    def figures(self) -> dict[str, dict[str, int]]:
        """For each table: rows of ids and its capacity for them, ids that got rows and lost them in training,
        lookups of the default row there, and the map's bytes."""
        return {
            name: {
                "occupied": own.occupied,
                "capacity": own.capacity - FIRST_ROW,
                "admitted": own.content.figures.admitted,
                "evicted": own.content.figures.evicted,
                "defaulted": own.content.figures.defaulted,
                "map_bytes": own.nbytes,
            }
            for name, own in self.maps.items()
        }


def grows(growing: Growing, table: Table) -> bool:
    """Whether a feature that looks up ``table`` is in ``growing``."""
    return any(name in growing for name in table.features)


def _renewing(collection: TableCollection, group: Group) -> GroupTables:
    tables = collection.offers(GroupTables)
    if tables is None or type(tables).renew is GroupTables.renew:
        raise UserError(
            f"tables {', '.join(group.tables.layout.tables)} grow (rows: dynamic), and their rows are kept "
            f"by {type(collection).__name__}, which cannot initialise single rows anew: drop the plugin that "
            "keeps them"
        )
    return tables
