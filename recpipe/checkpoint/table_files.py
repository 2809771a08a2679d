"""Tables as files: a checkpoint's, saved, opened and checked, loaded; and exports as plain numpy files.

Those of a checkpoint are safetensors files in the layout of ``torch.distributed.checkpoint``: one for each
table if one process writes them (here), or one or several for each rank if tables are sharded
(``recpipe.tables.sharding.tables``). Tables may be larger than memory. Those of earlier versions,
``<table>.weight.npy`` and ``<table>.state.npy``, are read as matrices in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from recpipe.common.meter import counting
from recpipe.common.saved import Damaged
from recpipe.common.tensors import Piece, Streamed, TensorFiles, no_table_file
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel
from recpipe.plugin.collection import TableCollection
from recpipe.plugin.tables import FILL_ROWS, SavedRows, rows_in, state_name, to_numpy, weight_name
from recpipe.tables.saved_parts import Part, save_parts, saved_rows

Shapes = dict[str, tuple[int, int, int]]
"""For each table: rows, dimension, width of the optimizer state."""

_REMEDY = "use the checkpoint's recipe"
_WEIGHT, _STATE = weight_name(""), state_name("")


def save_tables(directory: Path, storage: TableCollection, shapes: Shapes) -> None:
    """Write a file for each table, region by region; each region is read once."""
    with counting("writing rows to the checkpoint", rows_in(storage.regions())) as add:
        for table, regions in groupby(storage.regions(), lambda region: region.table):
            part = Part(table, (0, 0), *shapes[table], map(storage.read, regions))
            save_parts(table_file(directory, table), [part], add)


def read_along(storage: TableCollection) -> None:
    """Take part in ``save_tables`` on a rank that writes nothing, since reading tables needs all trainers."""
    for region in storage.regions():
        storage.read(region)


def table_file(directory: Path, table: str) -> Path:
    """The file of a whole table; its name is safe for any table's name."""
    return directory / f"{quote(table, safe='')}.safetensors"


def open_tables(directory: Path) -> TensorFiles:
    """Open the tables of a checkpoint of any version and number of ranks; ``UserError`` if they are not
    complete."""
    files = npy_tables(directory) if holds_npy(directory) else TensorFiles.sharded(directory)
    weight, state = _WEIGHT, _STATE
    for name, pieces in files.pieces.items():
        if not name.endswith((weight, state)):
            raise UserError(f"{pieces[0].file}: '{name}' is of no table: use another checkpoint")
        if weight_name(name.removesuffix(state)) not in files.pieces and not name.endswith(weight):
            raise UserError(f"{directory} has '{name}' and not that table's weights: use another checkpoint")
    return files


def check_tables(directory: Path, shapes: Shapes, scoring: bool = False) -> TensorFiles:
    """Open the tables in ``directory``; ``UserError`` unless they are exactly the recipe's tables.

    ``scoring``: only weights are needed, so that a table may have been frozen in one of the two.
    """
    files = open_tables(directory)
    wanted: dict[str, tuple[tuple[int, int], ...]] = {}
    for table, (rows, dim, width) in shapes.items():
        weight = weight_name(table)
        wanted[weight] = ((rows, dim),)
        if width:  # if rows were cut, a state is repeated for each column
            cut = any(piece.shape[1] < dim for piece in files.pieces.get(weight, ()))
            wanted[state_name(table)] = ((rows, width), (rows, dim)) if cut else ((rows, width),)
    for name, allowed in wanted.items():
        if name not in files.pieces:
            if scoring and name.endswith(state_name("")):
                continue
            what = _by_averages(name, allowed[0][1], shapes)
            raise UserError(
                f"{directory} has no '{name}': it is of another model or optimizer{what}, or the table was "
                f"frozen; {_REMEDY}"
            )
        if files.shape(name) not in allowed:
            file, found = files.pieces[name][0].file, files.shape(name)
            what = _by_averages(name, abs(found[-1] - allowed[0][1]), shapes)
            raise UserError(f"{file}: '{name}' is {found}, but the recipe's is {allowed[0]}{what}; {_REMEDY}")
    unneeded = {state_name(table) for table in shapes} if scoring else set()
    more = min(files.pieces.keys() - wanted.keys() - unneeded, default=None)
    if more is not None:
        frozen = " (frozen tables have no state)" if more.endswith(state_name("")) else ""
        raise UserError(f"{directory} has '{more}', which the recipe's tables have not{frozen}; {_REMEDY}")
    return files


def _by_averages(name: str, more: int, shapes: Shapes) -> str:
    """What is said of ``name`` if its width differs by ``more``: averages, where that is their width."""
    fits = name.endswith(_STATE) and more == shapes[name.removesuffix(_STATE)][1] + 1
    return " (averages, trainer.ema and trainer.swa, have as much more)" if fits else ""


def load_regions(files: TensorFiles, storage: TableCollection, shapes: Shapes) -> None:
    """Read all rows into ``storage``, some at a time."""
    rows = rows_of_tables(files, shapes)
    with counting("loading rows", rows_in(storage.regions())) as add:
        for region in storage.regions():
            storage.write(region, rows[region.table](region.start, region.stop))
            add(region.stop - region.start)


def rows_of_tables(files: TensorFiles, shapes: Shapes) -> dict[str, SavedRows]:
    """For each table in ``shapes`` a function that reads its rows."""
    return {table: saved_rows(files, table, width) for table, (_, _, width) in shapes.items()}


def saved_weights(files: TensorFiles) -> dict[str, Streamed]:
    """The weights of every table in ``files``, float32 [rows, D], in any layout."""
    suffix = weight_name("")
    return {
        name.removesuffix(suffix): (files.shape(name), _blocks(files, name))
        for name in sorted(files.pieces)
        if name.endswith(suffix)
    }


def _blocks(files: TensorFiles, name: str) -> Iterator[NDArray[np.float32]]:
    """All rows, some at a time."""
    rows = files.shape(name)[0]
    return (files.rows(name, start, min(start + FILL_ROWS, rows)) for start in range(0, rows, FILL_ROWS))


def holds_npy(directory: Path) -> bool:
    """Whether ``directory`` has .npy files; ``UserError`` if it has both kinds."""
    found = any(directory.glob("*.npy"))
    if found and any(directory.glob("*.safetensors")):
        raise UserError(
            f"{directory} holds .npy and .safetensors files, and a checkpoint has one kind: use another"
        )
    return found


def npy_tables(directory: Path) -> TensorFiles:
    """The matrices under their names in safetensors files; a state without columns is left out.

    ``UserError`` for any other file, and if a table lacks one of its two files.
    """
    pieces = [_opened(file) for file in sorted(directory.glob("*.npy"))]
    weights, states = (
        {p.name.removesuffix(end) for p in pieces if p.name.endswith(end)} for end in (_WEIGHT, _STATE)
    )
    alone = min(weights ^ states, default=None)
    if alone is not None:
        raise UserError(
            f"{directory}: table '{alone}' lacks its weights or its state: use another checkpoint"
        )
    return TensorFiles.matrices(directory, (p for p in pieces if p.shape[1] or p.name.endswith(_WEIGHT)))


@dataclass(frozen=True)
class _Array(Piece):
    """A .npy file with a float32 matrix."""

    start: int
    """The offset of its values, in bytes."""

    def rows(self, low: int, high: int) -> NDArray[np.float32]:
        """Its rows [low, high)."""
        columns = self.shape[1]
        values = np.fromfile(self.file, "<f4", (high - low) * columns, offset=self.start + 4 * low * columns)
        return values.reshape(high - low, columns)


def _opened(file: Path) -> _Array:
    """Open a .npy file. Only float32 matrices as numpy writes them are accepted, since other types, orders of
    axes or of bytes would scramble a table. Nothing is unpickled."""
    try:
        with file.open("rb") as stream:
            if np.lib.format.read_magic(stream) != (1, 0):
                raise Damaged("not a .npy file of version 1.0")
            try:
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
            except Exception as fault:  # numpy parses it as Python source, which can raise any error
                raise Damaged("its header makes no sense") from fault
            start = stream.tell()
        if fortran or dtype != np.dtype("<f4") or len(shape) != 2 or min(shape) < 0:
            order = "Fortran" if fortran else "C"
            raise Damaged(f"{dtype.str} {shape} in {order} order, not <f4 with 2 axes in C order")
        size = file.stat().st_size
        if size != start + 4 * shape[0] * shape[1]:
            raise Damaged(f"{size} bytes do not hold {shape}")
        return _Array(file, unquote(file.name.removesuffix(".npy")), (0, 0), shape, start)
    except (OSError, ValueError) as fault:
        raise no_table_file(file, fault) from fault


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
