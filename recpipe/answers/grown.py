"""Ids that got their rows as they came: the rows that they have in a checkpoint, and a package's file of
these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.answers.score import DEFAULT_ROW, RowMap
from recpipe.common.tensors import save_tensors
from recpipe.data.id_mapper import MISSING_KEY
from recpipe.plugin.tables import SparseFeature
from recpipe.tables.dynamic.saved import load_map


@dataclass(frozen=True)
class GrownIds:
    """The ids of one table of the data. ``keys`` int64 [n]: of its rows, of which the first is that of
    missing values, and the second that of ids without a row, which has a key that none of them is."""

    keys: NDArray[np.int64]

    @classmethod
    def of(cls, tables: Path, feature: SparseFeature) -> GrownIds:
        """Those that ``feature`` looks up, of a checkpoint's ``tables``; ``UserError`` if they are damaged,
        or not there."""
        assert feature.growth is not None, "its ids grow"
        keys = load_map(tables, feature.growth, feature.rows, seed=0).records[::2].copy()
        known = set(keys[DEFAULT_ROW + 1 :].tolist())
        keys[0], keys[DEFAULT_ROW] = MISSING_KEY, next(key for key in range(len(keys)) if key not in known)
        return cls(keys)

    @cached_property
    def map(self) -> RowMap:
        """From keys to rows."""
        rows = np.delete(np.arange(len(self.keys), dtype=np.int32), DEFAULT_ROW)
        rows = rows[np.argsort(self.keys[rows])]
        return RowMap(torch.from_numpy(self.keys[rows]), torch.from_numpy(rows))

    def write(self, file: Path) -> None:
        """Write the map as a package's file."""
        save_tensors(file, {"keys": self.map.keys, "rows": self.map.rows})


def grown_in(tables: Path, features: Iterable[SparseFeature]) -> dict[str, GrownIds]:
    """By the table of the data, the ids that ``features`` look up whose tables grow."""
    found: dict[str, GrownIds] = {}
    for feature in features:
        if feature.growth is not None and feature.growth.table not in found:
            found[feature.growth.table] = GrownIds.of(tables, feature)
    return found
