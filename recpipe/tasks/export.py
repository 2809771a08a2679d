"""Trained parameters as plain numpy files, for comparisons and for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recpipe.embedding.collection import TableCollection
from recpipe.embedding.tables import TableSet, to_numpy
from recpipe.errors import UserError
from recpipe.model.ranker import Ranker
from recpipe.table_files import read_along, save_tables


def export_parameters(
    directory: Path, storage: TableCollection, tables: TableSet, ranker: Ranker, writes: bool = True
) -> None:
    """Write ``<table>.npy`` float32 [rows, D], ``<table>.state.npy`` float32 [rows, S] and ``dense.npz``.

    Every trainer calls it; the one that ``writes`` does.
    """
    if not writes:
        read_along(storage)
        return
    dense: dict[str, Any] = {n: to_numpy(p) for n, p in ranker.dense_parameters().items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        np.savez(directory / "dense.npz", **dense)
        save_tables(directory, storage, tables.shapes(), weights_part="")
    except OSError as fault:
        raise UserError(
            f"cannot write task.export_parameters={directory}: {fault.strerror}; choose another directory"
        ) from fault
