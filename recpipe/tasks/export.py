"""Trained parameters as plain numpy files, for comparisons and for other programs."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from recpipe.checkpoint.table_files import read_along
from recpipe.common.meter import counting
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel
from recpipe.plugin.tables import rows_in, to_numpy


def export_parameters(directory: Path, model: PlacedModel, writes: bool = True) -> None:
    """Write ``<table>.npy`` float32 [rows, D], ``<table>.state.npy`` float32 [rows, S] and ``dense.npz``.

    Every trainer calls it; only the one with ``writes`` writes the files.
    """
    if not writes:
        read_along(model.embeddings)
        return
    dense: dict[str, Any] = {n: to_numpy(p) for n, p in model.dense_parameters().items()}
    storage, shapes = model.embeddings, model.embeddings.tables.shapes()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        np.savez(directory / "dense.npz", **dense)
        with counting("exporting rows", rows_in(storage.regions())) as add:
            for table, regions in groupby(storage.regions(), lambda region: region.table):
                rows, dim, width = shapes[table]
                name = quote(table, safe="")
                with (
                    (directory / f"{name}.npy").open("wb") as weights,
                    (directory / f"{name}.state.npy").open("wb") as states,
                ):
                    for file, columns in ((weights, dim), (states, width)):
                        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, columns)}
                        np.lib.format.write_array_header_1_0(file, header)
                    for values in map(storage.read, regions):  # each region is read once
                        for file, part in zip((weights, states), values, strict=True):
                            file.write(np.ascontiguousarray(part, "<f4").data)
                        add(len(values[0]))
    except OSError as fault:
        raise UserError(
            f"cannot write task.export_parameters={directory}: {fault.strerror}; choose another directory"
        ) from fault
