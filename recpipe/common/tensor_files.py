"""Tensors in safetensors files, some in several pieces: checked when opened, read in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
"""Types that a float32 is made of."""
INT64 = "I64"
_SHARDING = "DCP_SHARDING_INFO"
"""Where ``torch.distributed.checkpoint`` writes each piece's place in its tensor."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a matrix, or a whole tensor."""

    file: Path
    place: tuple[int, ...]
    """Its first index along each axis."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Place:
    saved_offsets: tuple[int, ...]


class TensorFiles:
    """What the files hold, by name; every tensor is whole."""

    def __init__(self, pieces: Mapping[str, list[Piece]]) -> None:
        self.pieces = pieces
        self._shapes = {name: _whole_shape(found) for name, found in pieces.items()}

    @classmethod
    def sharded(cls, directory: Path) -> TensorFiles:
        """Float32 matrices that the ranks of a run saved to ``directory``.

        Raises ``UserError`` on a file that is none, on another type, and where pieces are missing or overlap.
        """
        pieces: dict[str, list[Piece]] = {}
        for file in sorted(directory.glob("*.safetensors")):
            try:
                for name, piece in _opened(file, FLOAT32):
                    if len(piece.shape) != 2:
                        raise Damaged(f"'{name}' is {piece.shape}, not a matrix")
                    pieces.setdefault(name, []).append(piece)
            except (OSError, SafetensorError, ValueError) as fault:
                raise UserError(
                    f"{file} is no table file of a checkpoint ({fault}): resume from another checkpoint"
                ) from fault
        found = cls(pieces)
        for name, parts in pieces.items():
            rows, columns = found.shape(name)
            if not tiles(((*p.place, *p.shape) for p in parts), rows, columns):  # type: ignore[misc]
                raise UserError(
                    f"{directory}: the pieces of '{name}' do not cover its {rows} x {columns} values once; "
                    "resume from another checkpoint"
                )
        return found

    @classmethod
    def single(cls, file: Path, types: tuple[str, ...] = FLOATS) -> TensorFiles:
        """One file with whole tensors of ``types``; ``UserError`` where it is none."""
        try:
            return cls({name: [piece] for name, piece in _opened(file, types)})
        except (OSError, SafetensorError, ValueError) as fault:
            raise UserError(f"{file} is no safetensors file ({fault}); name one") from fault

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._shapes[name]

    def whole(self, name: str) -> torch.Tensor:
        """A tensor that is in one piece."""
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
                # Opened for these rows alone: what is read stays in memory until it is closed.
                with safe_open(piece.file, framework="pt") as opened:
                    part = opened.get_slice(name)[low - row : high - row].to(torch.float32)
                out[low - start : high - start, column : column + columns] = part.numpy()
        return out


def _opened(file: Path, types: tuple[str, ...]) -> Iterator[tuple[str, Piece]]:
    """Names and places of a file's tensors; the library has checked that they lie within the file."""
    with safe_open(file, framework="pt") as opened:
        told = (opened.metadata() or {}).get(_SHARDING)
        places = _places(told) if told else {}
        for name in opened.keys():  # noqa: SIM118
            tensor = opened.get_slice(name)
            shape = tuple(tensor.get_shape())
            if tensor.get_dtype() not in types:
                raise Damaged(f"'{name}' is {tensor.get_dtype()}, not {' or '.join(types)}")
            place = places.get(name, (0,) * len(shape))
            if len(place) != len(shape):
                raise Damaged(f"'{name}' is {shape} at {place}")
            yield name, Piece(file, place, shape)


def _places(text: str) -> dict[str, tuple[int, ...]]:
    found = typed_as(dict[str, _Place], parse_json(text), _SHARDING)
    return {name: place.saved_offsets for name, place in found.items()}


def _whole_shape(pieces: list[Piece]) -> tuple[int, ...]:
    ends = (tuple(p + n for p, n in zip(piece.place, piece.shape, strict=True)) for piece in pieces)
    return tuple(max(axis) for axis in zip(*ends, strict=True))
