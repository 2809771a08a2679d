"""Tensors in safetensors files, possibly in several pieces; checked when opened, read in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from recpipe.common.saved import Damaged, parse_json, typed_as
from recpipe.common.tiling import tiles
from recpipe.errors import UserError

FLOAT32 = ("F32",)
FLOATS = ("F32", "F16", "BF16", "F64")
"""Types that can be converted to float32."""
INT64 = "I64"
SHARDING = "DCP_SHARDING_INFO"
"""The metadata key under which ``torch.distributed.checkpoint`` writes each piece's place in its tensor."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a matrix, or a whole tensor."""

    file: Path
    name: str
    """The name of its tensor."""
    place: tuple[int, ...]
    """Its offset along each axis of the tensor."""
    shape: tuple[int, ...]

    def rows(self, low: int, high: int) -> NDArray[np.float32]:
        """Its rows [low, high), if it is part of a matrix."""
        # Opened anew for these rows: what has been read stays in memory until the file is closed.
        with safe_open(self.file, framework="pt") as opened:
            found: torch.Tensor = opened.get_slice(self.name)[low:high]
        return found.to(torch.float32).numpy()


@dataclass(frozen=True)
class _Place:
    saved_offsets: tuple[int, ...]


class TensorFiles:
    """The tensors in the files by name; every tensor is complete."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self.pieces.setdefault(piece.name, []).append(piece)
        self._shapes = {name: _whole_shape(found) for name, found in self.pieces.items()}

    @classmethod
    def sharded(cls, directory: Path) -> TensorFiles:
        """Open the float32 matrices in the safetensors files of ``directory``, each in one or several files.

        Raises ``UserError`` if a file is not safetensors, for other types, and if pieces are missing or
        overlap.
        """
        files = sorted(directory.glob("*.safetensors"))
        return cls.matrices(directory, (piece for file in files for piece in _matrices_in(file)))

    @classmethod
    def matrices(cls, directory: Path, pieces: Iterable[Piece]) -> TensorFiles:
        """Matrices of these ``pieces``; ``UserError`` if some are missing or overlap."""
        found = cls(pieces)
        for name, parts in found.pieces.items():
            rows, columns = found.shape(name)
            if not tiles(((*p.place, *p.shape) for p in parts), rows, columns):  # type: ignore[misc]
                raise UserError(
                    f"{directory}: the pieces of '{name}' do not cover its {rows} x {columns} values once; "
                    "resume from another checkpoint"
                )
        return found

    @classmethod
    def single(cls, file: Path, types: tuple[str, ...] = FLOATS) -> TensorFiles:
        """Open one file with whole tensors of ``types``; ``UserError`` if it is not such a file."""
        try:
            return cls(_opened(file, types))
        except (OSError, SafetensorError, ValueError) as fault:
            raise UserError(f"{file} is no safetensors file ({fault}); name one") from fault

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._shapes[name]

    def whole(self, name: str) -> torch.Tensor:
        """Read a tensor that is in one piece."""
        (piece,) = self.pieces[name]
        with safe_open(piece.file, framework="pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
        return found

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop) of a matrix, float32."""
        out = np.empty((stop - start, self.shape(name)[1]), np.float32)
        for piece in self.pieces[name]:
            (row, column), (rows, columns) = piece.place, piece.shape
            low, high = max(start, row), min(stop, row + rows)
            if low < high:
                part = piece.rows(low - row, high - row)
                out[low - start : high - start, column : column + columns] = part
        return out


def _matrices_in(file: Path) -> Iterator[Piece]:
    try:
        for piece in _opened(file, FLOAT32):
            if len(piece.shape) != 2:
                raise Damaged(f"'{piece.name}' is {piece.shape}, not a matrix")
            yield piece
    except (OSError, SafetensorError, ValueError) as fault:
        raise no_table_file(file, fault) from fault


def no_table_file(file: Path, fault: Exception) -> UserError:
    """The error for a checkpoint's file that has no table, or not a whole one."""
    return UserError(f"{file} is no table file of a checkpoint ({fault}): resume from another checkpoint")


def _opened(file: Path, types: tuple[str, ...]) -> Iterator[Piece]:
    """A file's tensors and their places; the library has checked that they lie within the file."""
    with safe_open(file, framework="pt") as opened:
        told = (opened.metadata() or {}).get(SHARDING)
        places = _places(told) if told else {}
        for name in opened.keys():  # noqa: SIM118
            tensor = opened.get_slice(name)
            shape = tuple(tensor.get_shape())
            if tensor.get_dtype() not in types:
                raise Damaged(f"'{name}' is {tensor.get_dtype()}, not {' or '.join(types)}")
            place = places.get(name, (0,) * len(shape))
            if len(place) != len(shape):
                raise Damaged(f"'{name}' is {shape} at {place}")
            yield Piece(file, name, place, shape)


def _places(text: str) -> dict[str, tuple[int, ...]]:
    found = typed_as(dict[str, _Place], parse_json(text), SHARDING)
    return {name: place.saved_offsets for name, place in found.items()}


def _whole_shape(pieces: list[Piece]) -> tuple[int, ...]:
    ends = (tuple(p + n for p, n in zip(piece.place, piece.shape, strict=True)) for piece in pieces)
    return tuple(max(axis) for axis in zip(*ends, strict=True))
