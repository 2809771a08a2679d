"""Tables in files: one .npy for each table's weights and state, or safetensors that hold parts of them.

.npy files are written by one rank, a chunk of rows at a time, so that tables may be larger than memory.
Safetensors files are one for each rank, as ``torch.distributed.checkpoint`` writes them, or one in all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from recpipe.common.saved import Damaged
from recpipe.common.tensor_files import TensorFiles
from recpipe.common.tensor_writer import Streamed
from recpipe.errors import UserError
from recpipe.tables.collection import TableCollection
from recpipe.tables.saved_regions import region_values
from recpipe.tables.specs import FILL_ROWS, state_name, weight_name

Shapes = dict[str, tuple[int, int, int]]
"""Per table: rows, dimension, width of the optimizer state."""


def save_tables(
    directory: Path, storage: TableCollection, shapes: Shapes, weights_part: str = "weight"
) -> None:
    """Write every table's weights and optimizer state as .npy files, a chunk of rows at a time.

    ``weights_part`` names the weights' files as in ``table_file``.
    """
    files: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    for region in storage.regions():
        if region.table not in files:
            files.clear()
            files[region.table] = _create(directory, region.table, shapes[region.table], weights_part)
        weights, state = (_mapped(array, region.start, region.stop) for array in files[region.table])
        weights[:, region.left : region.right], state[:] = storage.read(region)


def read_along(storage: TableCollection) -> None:
    """Take part in ``save_tables`` on a rank that writes nothing: reading tables takes all trainers."""
    for region in storage.regions():
        storage.read(region)


def load_tables(directory: Path, storage: TableCollection, shapes: Shapes) -> None:
    """Read back ``save_tables``' files into ``storage``; ``UserError`` where they are not of its tables."""
    opened: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    for region in storage.regions():
        if region.table not in opened:
            opened.clear()
            opened[region.table] = _open(directory, region.table, shapes[region.table])
        weights, state = (_mapped(array, region.start, region.stop) for array in opened[region.table])
        storage.write(region, (np.array(weights[:, region.left : region.right]), np.array(state)))


def _mapped(array: NDArray[np.float32], start: int, stop: int) -> NDArray[np.float32]:
    """Rows [start, stop) of a file's ``array`` in a mapping of their own.

    What is read or written through ``array`` itself would stay in this process's memory as long as ``array``:
    a second copy of the table.
    """
    if not isinstance(array, np.memmap):
        return array[start:stop]
    file: Any = array  # numpy's stubs lack the file's name
    shape = (stop - start, array.shape[1])
    part: NDArray[np.float32] = np.memmap(
        file.filename, file.dtype, file.mode, file.offset + start * file.strides[0], shape
    )
    return part


def table_file(directory: Path, table: str, part: str) -> Path:
    """Where a table's ``weight`` or ``state`` lies ('': ``<table>.npy``); any table name is made safe."""
    return directory / f"{quote(table, safe='')}{part and '.'}{part}.npy"


def _create(
    directory: Path, table: str, shape: tuple[int, int, int], weights_part: str
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rows, dim, state = shape
    return new_array(table_file(directory, table, weights_part), (rows, dim)), new_array(
        table_file(directory, table, "state"), (rows, state)
    )


def new_array(path: Path, shape: tuple[int, int]) -> NDArray[np.float32]:
    """A new memory-mapped .npy file of float32 zeros (an array in memory when ``shape`` is empty)."""
    if 0 in shape:
        empty = np.zeros(shape, np.float32)
        np.save(path, empty)
        return empty
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    # Take the blocks now: on a full disk, writing to a sparse mapping ends the process by SIGBUS.
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def open_array(file: Path) -> NDArray[np.float32]:
    """A .npy file of float32 [rows, columns], mapped; ``UserError`` on any other kind of array.

    Only what ``new_array`` writes is read: other types, orders of axes or of bytes would scramble a table.
    """
    try:
        with file.open("rb") as stream:
            shape, fortran, dtype = _header(stream)
            start = stream.tell()
        if fortran or dtype != np.dtype("<f4") or len(shape) != 2 or min(shape) < 0:
            order = "Fortran" if fortran else "C"
            raise Damaged(f"{dtype.str} {shape} in {order} order, not <f4 with 2 axes in C order")
        size = file.stat().st_size
        if size != start + 4 * shape[0] * shape[1]:
            raise Damaged(f"{size} bytes do not hold {shape}")
        if 0 in shape:
            return np.zeros(shape, np.float32)
        return np.memmap(file, np.float32, "r", start, (shape[0], shape[1]))
    except (OSError, ValueError) as fault:
        raise UserError(
            f"{file} is no table file of a checkpoint ({fault}): resume from another checkpoint"
        ) from fault


def _header(stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran order, type; ``ValueError`` where it is none."""
    if np.lib.format.read_magic(stream) != (1, 0):
        raise Damaged("not a .npy file of version 1.0")
    try:
        return np.lib.format.read_array_header_1_0(stream)
    except Exception as fault:  # numpy parses it as Python source, with every fault that this can have
        raise Damaged("its header makes no sense") from fault


def _open(
    directory: Path, table: str, shape: tuple[int, int, int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rows, dim, state = shape
    arrays = []
    for part, expected in (("weight", (rows, dim)), ("state", (rows, state))):
        file = table_file(directory, table, part)
        if not file.is_file():
            raise UserError(
                f"{file} is missing: the checkpoint is of a model without table '{table}'; use its recipe"
            )
        array = open_array(file)
        if array.shape != expected:
            raise UserError(
                f"{file} holds {array.shape}, but the recipe's table has {expected}; use its recipe"
            )
        arrays.append(array)
    return arrays[0], arrays[1]


def check_tables(directory: Path, shapes: Shapes) -> TensorFiles | None:
    """``UserError`` unless ``directory`` holds all of the recipe's tables; its safetensors, if it has any."""
    files = _sharded(directory)
    if files is None:
        for table, shape in shapes.items():
            _open(directory, table, shape)
    else:
        check_shapes(files, shapes)
    return files


def _sharded(directory: Path) -> TensorFiles | None:
    """What the ranks of a sharded run saved; None where one process wrote .npy files."""
    if not any(directory.glob("*.safetensors")):
        return None
    if any(directory.glob("*.npy")):
        raise UserError(
            f"{directory} holds .npy and .safetensors files, and a checkpoint has one kind: use another"
        )
    return TensorFiles.sharded(directory)


def check_shapes(files: TensorFiles, shapes: Shapes) -> None:
    """``UserError`` where the files do not hold the recipe's tables."""
    for table, (rows, dim, width) in shapes.items():
        check_shape(files, weight_name(table), ((rows, dim),))
        if width:
            check_shape(files, state_name(table), ((rows, width), (rows, dim)))


def load_regions(files: TensorFiles, storage: TableCollection, shapes: Shapes) -> None:
    """As ``load_tables``, from what the ranks of a sharded run saved."""
    for region in storage.regions():
        storage.write(region, region_values(files, region, shapes[region.table][2]))


def check_shape(files: TensorFiles, name: str, allowed: tuple[tuple[int, ...], ...]) -> None:
    """``UserError`` where the tensor is missing or of another shape than the recipe's."""
    if name not in files.pieces:
        raise UserError(
            f"the checkpoint has no '{name}': it is of another model or optimizer; use its recipe"
        )
    if files.shape(name) not in allowed:
        raise UserError(
            f"the checkpoint's '{name}' is {files.shape(name)}, the recipe's {allowed[0]}; use its recipe"
        )


def saved_weights(directory: Path) -> dict[str, Streamed]:
    """The weights of every table in ``directory``, float32 [rows, D], whatever wrote them."""
    files, suffix = _sharded(directory), weight_name("")
    if files is not None:
        return {
            name.removesuffix(suffix): (shape, _blocks(partial(files.rows, name), shape[0]))
            for name, shape in ((name, files.shape(name)) for name in sorted(files.pieces))
            if name.endswith(suffix)
        }
    found: dict[str, Streamed] = {}
    weights, states = (
        {f.name.removesuffix(end): f for f in directory.glob(f"*{end}")}
        for end in (".weight.npy", ".state.npy")
    )
    alone = min(weights.keys() ^ states.keys(), default=None)
    if alone is not None:
        raise UserError(
            f"{directory}: table '{unquote(alone)}' lacks its weights or its state: use another checkpoint"
        )
    for name, file in sorted(weights.items()):
        array = open_array(file)
        found[unquote(name)] = (array.shape, _blocks(partial(_mapped, array), len(array)))
    return found


def _blocks(read: Callable[[int, int], NDArray[np.float32]], rows: int) -> Iterator[NDArray[np.float32]]:
    """All ``rows`` rows, some at a time."""
    return (read(start, min(start + FILL_ROWS, rows)) for start in range(0, rows, FILL_ROWS))
