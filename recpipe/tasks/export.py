"""Trained parameters as plain numpy files, for comparisons and for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recpipe.checkpoint import new_array
from recpipe.embedding.collection import TableCollection
from recpipe.embedding.tables import TableSet, to_numpy
from recpipe.errors import UserError
from recpipe.model.ranker import Ranker


def export_parameters(directory: Path, storage: TableCollection, tables: TableSet, ranker: Ranker) -> None:
    """Write ``<table>.npy`` float32 [rows, D], ``<table>.state.npy`` float32 [rows, S] and ``dense.npz``."""
    try:
        _write(directory, storage, tables, ranker)
    except OSError as fault:
        raise UserError(
            f"cannot write task.export_parameters={directory}: {fault.strerror}; choose another directory"
        ) from fault


def _write(directory: Path, storage: TableCollection, tables: TableSet, ranker: Ranker) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    dense: dict[str, Any] = {n: to_numpy(p) for n, p in ranker.dense_parameters().items()}
    np.savez(directory / "dense.npz", **dense)
    arrays = {}
    for name, (rows, dim, state) in tables.shapes().items():
        arrays[name] = (
            new_array(directory / f"{name}.npy", (rows, dim)),
            new_array(directory / f"{name}.state.npy", (rows, state)),
        )
    for region in storage.regions():
        weights, state_rows = arrays[region.table]
        rows_ = slice(region.start, region.stop)
        weights[rows_, region.left : region.right], state_rows[rows_] = storage.read(region)
