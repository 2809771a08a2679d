"""Reads tables of earlier versions' checkpoints: ``<table>.weight.npy`` and ``<table>.state.npy``.

They are read as matrices in one piece, like those in safetensors files. They are not written any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from recpipe.common.saved import Damaged
from recpipe.common.tensors import Piece, TensorFiles, no_table_file
from recpipe.errors import UserError
from recpipe.plugin.tables import state_name, weight_name

_WEIGHT, _STATE = weight_name(""), state_name("")


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
            shape, fortran, dtype = _header(stream)
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


def _header(stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran order, and type; ``ValueError`` if it is not a header."""
    if np.lib.format.read_magic(stream) != (1, 0):
        raise Damaged("not a .npy file of version 1.0")
    try:
        return np.lib.format.read_array_header_1_0(stream)
    except Exception as fault:  # numpy parses it as Python source, which can raise any of these errors
        raise Damaged("its header makes no sense") from fault
