"""``EntityRows``: what is known of entities, as rows that ids get when they are first seen, as tables' ids
do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np
from safetensors import SafetensorError, safe_open

from recpipe.common.tensors import new_tensors
from recpipe.errors import UserError
from recpipe.plugin.store import Records, Rows, StoreLayout
from recpipe.plugin.tables import Growth
from recpipe.tables.dynamic.id_map import IdMap, Turn
from recpipe.tables.dynamic.loops import DEFAULT_ROW, FIRST_ROW, MISSING_ROW
from recpipe.tables.dynamic.saved import load_map, save_map
from recpipe.tables.stores import make_store
from recpipe_lambda_learner.posterior import Floats

Entities = Rows
"""int64 [N]: ids of entities, any 64 bits."""
BLOCK = 65_536
"""Rows that are written to a file, or read, at a time."""
_WORDS = 2
"""Words of float32, in which stores keep records, of a float64."""


@dataclass(frozen=True)
class Keeping:
    """How many entities have rows at most, and where these lie."""

    entities: int = 100_000
    """When there are more, a new one gets the row of the one seen longest ago."""
    store: str = "host"
    """``host``, or ``ssd`` with files in ``directory`` that go when it is closed."""
    directory: Path | None = None


class EntityRows:
    """Rows float64 of several ``parts`` (name: numbers in a row), each in a store of its own, for the ids of
    one column; ``first``: the row of each part that an id begins with."""

    def __init__(self, name: str, first: Mapping[str, Floats], keeping: Keeping) -> None:
        self.name, self.first = name, {part: row for part, row in first.items() if len(row)}
        self.growth = Growth(name)
        self.map = IdMap(self.growth, keeping.entities + FIRST_ROW, seed=0)
        self._stores = {
            part: make_store(
                keeping.store,
                StoreLayout((name,), (self.map.capacity,), _WORDS * len(row)),
                partial(_unused, row),
                directory=None if keeping.directory is None else keeping.directory / part,
                scratch=True,
            )
            for part, row in self.first.items()
        }

    def __len__(self) -> int:
        return self.map.occupied

    @property
    def free(self) -> int:
        """How many rows no id has had yet."""
        return self.map.capacity - self.map.content.used

    def found(self, ids: Entities) -> Rows:
        """The row of each of ``ids``, of which nothing is noted; -1: it has none."""
        rows = self.map.rows_of(np.ascontiguousarray(ids))
        return np.where(rows == DEFAULT_ROW, -1, rows)

    def met(self, ids: Entities) -> tuple[Rows, Turn]:
        """The row of each of ``ids`` of the next mini-batch, among which new ones get rows with the first
        values; -1: the mini-batch has more new ids than there are rows. What that has changed, too."""
        rows, turn = self.map.plan(np.ascontiguousarray(ids))
        for part, row in self.first.items():
            self.write(part, turn.rows, np.tile(row, (len(turn.rows), 1)))
        return np.where(rows == DEFAULT_ROW, -1, rows), turn

    def read(self, part: str, rows: Rows) -> Floats:
        """float64 [n, numbers in a row], of distinct ``rows``; none of a part of width 0."""
        if part not in self._stores:
            return np.empty((len(rows), 0))
        records = np.empty((len(rows), _WORDS * len(self.first[part])), np.float32)
        self._stores[part].gather(rows, records)
        return records.view(np.float64)

    def write(self, part: str, rows: Rows, values: Floats) -> None:
        """Replace distinct ``rows`` by ``values`` float64."""
        if part in self._stores and len(rows):
            self._stores[part].scatter(rows, np.ascontiguousarray(values, np.float64).view(np.float32))

    def save(self, directory: Path) -> None:
        """Write ids and rows into ``directory``, which fit in memory in blocks: NAME.ids as a checkpoint has
        those of tables that grow, and NAME.safetensors with a tensor float64 for each part, from row 0 on."""
        save_map(directory, self.growth, self.map.capacity, self.map.content.copied())
        shapes = {part: (self.map.content.used, len(row)) for part, row in self.first.items()}
        with new_tensors(rows_file(directory, self.name), shapes, None, dict.fromkeys(shapes, "F64")) as put:
            for part, rows in ((part, rows) for part in shapes for rows in self._blocks()):
                put(part, int(rows[0]) * len(self.first[part]), self.read(part, rows))

    def load(self, directory: Path) -> None:
        """Take up what ``save`` wrote; ``UserError`` if it is damaged, or of other rows."""
        content, file = (
            load_map(directory, self.growth, self.map.capacity, 0),
            rows_file(directory, self.name),
        )
        try:
            with safe_open(file, "numpy") as opened:
                for part, row in self.first.items():
                    found = opened.get_slice(part)
                    if found.get_shape() != [content.used, len(row)] or found.get_dtype() != "F64":
                        raise ValueError(f"{part} is {found.get_dtype()} {found.get_shape()}")
                self.map.load(content)
                for part, rows in ((part, rows) for part in self.first for rows in self._blocks()):
                    self.write(part, rows, opened.get_slice(part)[int(rows[0]) : int(rows[-1]) + 1])
        except (OSError, SafetensorError, ValueError) as fault:
            raise UserError(
                f"{file} has not the rows of {self.name}'s effect ({fault}): name another directory"
            ) from fault

    def _blocks(self) -> Iterator[Rows]:
        used = self.map.content.used
        for start in range(0, used, BLOCK):
            yield np.arange(start, min(used, start + BLOCK))

    def close(self) -> None:
        """Release memory and files."""
        for store in self._stores.values():
            store.close()


def rows_file(directory: Path, name: str) -> Path:
    """The file with the rows of a column's ids."""
    return directory / f"{quote(name, safe='')}.safetensors"


def _unused(row: Floats, _: str, start: int, stop: int) -> Records:
    """Records of rows that no id has got: 0, and the first row for missing values, which nobody meets."""
    records = np.zeros((stop - start, _WORDS * len(row)), np.float32)
    if start <= MISSING_ROW < stop:
        records[MISSING_ROW - start] = row.view(np.float32)
    return records
