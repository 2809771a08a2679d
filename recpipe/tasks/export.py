"""Trained parameters as plain numpy files, for comparisons and for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recpipe.checkpoint.table_files import read_along, save_tables
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel
from recpipe.tables.specs import to_numpy


def export_parameters(directory: Path, model: PlacedModel, writes: bool = True) -> None:
    """Write ``<table>.npy`` float32 [rows, D], ``<table>.state.npy`` float32 [rows, S] and ``dense.npz``.

    Every trainer calls it; the one that ``writes`` does.
    """
    if not writes:
        read_along(model.embeddings)
        return
    dense: dict[str, Any] = {n: to_numpy(p) for n, p in model.dense_parameters().items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        np.savez(directory / "dense.npz", **dense)
        save_tables(directory, model.embeddings, model.embeddings.tables.shapes(), weights_part="")
    except OSError as fault:
        raise UserError(
            f"cannot write task.export_parameters={directory}: {fault.strerror}; choose another directory"
        ) from fault
