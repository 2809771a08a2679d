"""Tables in safetensors files: one layout, whoever writes it, and that of ``torch.distributed.checkpoint``.

A file holds rectangles of tables, ``<table>.weight`` and ``<table>.state`` float32 [rows, columns], and says
where they lie in the whole tensors. A table without optimizer state has no ``<table>.state``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recpipe.common.tensors import SHARDING, TensorFiles, new_tensors
from recpipe.plugin.tables import SavedRows, Values, state_name, weight_name


@dataclass(frozen=True)
class Part:
    """A rectangle of a table, to be saved."""

    table: str
    place: tuple[int, int]
    """Its first row and column."""
    rows: int
    columns: int
    state: int
    """Floats of optimizer state a row."""
    values: Iterable[Values]
    """All rows in blocks, read once; a state of one column stands for each of ``state`` columns."""


def save_parts(file: Path, parts: Sequence[Part], add: Callable[[int], None]) -> None:
    """Write ``parts``, each of another table, to ``file``, some rows at a time; ``add`` is told how many."""
    sizes = {}
    for part in parts:
        sizes[weight_name(part.table)] = part, part.columns
        if part.state:
            sizes[state_name(part.table)] = part, part.state
    places = {name: {"saved_offsets": part.place} for name, (part, _) in sizes.items()}
    told = {SHARDING: json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
    shapes = {name: (part.rows, width) for name, (part, width) in sizes.items()}
    with new_tensors(file, shapes, told, durable=True) as put:
        for part in parts:
            row = 0
            for weights, state in part.values:
                put(weight_name(part.table), row * part.columns, weights)
                if part.state:
                    wide = np.broadcast_to(state, (len(state), part.state))
                    put(state_name(part.table), row * part.state, wide)
                row += len(weights)
                add(len(weights))


def saved_rows(files: TensorFiles, table: str, width: int) -> SavedRows:
    """A function that reads rows of ``table``, with ``width`` floats of optimizer state a row.

    A state with a column for each of the weights', where one is wanted, is the mean over them: what
    row-wise Adagrad would have without column-wise sharding. Of a table that was saved without state, it is
    zero.
    """

    def rows(start: int, stop: int) -> Values:
        weights = files.rows(weight_name(table), start, stop)
        if not width or state_name(table) not in files.pieces:
            return weights, np.zeros((len(weights), width), np.float32)
        state = files.rows(state_name(table), start, stop)
        if width == 1 and state.shape[1] > 1:
            state = state.mean(axis=1, keepdims=True, dtype=np.float32)
        return weights, state

    return rows
