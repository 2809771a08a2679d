"""Trained parameters as plain numpy files, for comparisons and for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np

from recpipe.checkpoint.table_files import read_along
from recpipe.common.meter import counting
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel
from recpipe.plugin.collection import TableCollection
from recpipe.plugin.tables import rows_in, to_numpy


def export_parameters(directory: Path, model: PlacedModel, writes: bool = True) -> None:
    """Write ``<table>.npy`` float32 [rows, D], ``<table>.state.npy`` float32 [rows, S] and ``dense.npz``.

    Every trainer calls it; only the one with ``writes`` writes the files.
    """
    if not writes:
        read_along(model.embeddings)
        return
    dense: dict[str, Any] = {n: to_numpy(p) for n, p in model.dense_parameters().items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        np.savez(directory / "dense.npz", **dense)
        _export_tables(directory, model.embeddings, model.embeddings.tables.shapes())
    except OSError as fault:
        raise UserError(
            f"cannot write task.export_parameters={directory}: {fault.strerror}; choose another directory"
        ) from fault


def _export_tables(
    directory: Path, storage: TableCollection, shapes: Mapping[str, tuple[int, int, int]]
) -> None:
    """Region by region, of which each is read once."""
    with counting("exporting rows", rows_in(storage.regions())) as add:
        for table, regions in groupby(storage.regions(), lambda region: region.table):
            rows, dim, width = shapes[table]
            name = quote(table, safe="")
            with (
                (directory / f"{name}.npy").open("wb") as weights,
                (directory / f"{name}.state.npy").open("wb") as states,
            ):
                _begin(weights, (rows, dim))
                _begin(states, (rows, width))
                for values in map(storage.read, regions):
                    for file, part in zip((weights, states), values, strict=True):
                        file.write(np.ascontiguousarray(part, "<f4").data)
                    add(len(values[0]))


def _begin(file: BinaryIO, shape: tuple[int, int]) -> None:
    """The header of a .npy file."""
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
