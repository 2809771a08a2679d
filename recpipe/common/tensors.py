"""Tensors in files: safetensors read in blocks, also from several files, and written in parts, so that they
may be larger than memory; and plain values with arrays as bytes, read without executing pickled code."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from recpipe.common.saved import Damaged, parse_json, typed_as
from recpipe.errors import UserError

FLOAT32 = ("F32",)
FLOATS = ("F32", "F16", "BF16", "F64")
"""Types that can be converted to float32."""
INT64 = "I64"
SHARDING = "DCP_SHARDING_INFO"
"""The metadata key under which ``torch.distributed.checkpoint`` writes each piece's place in its tensor."""
Streamed = tuple[tuple[int, ...], Iterable[NDArray[np.float32]]]
"""A float32 tensor: its shape, and its rows in blocks."""
Put = Callable[[str, int, NDArray[Any]], None]
"""Writes values of the named tensor, beginning at the value with this number, counted row by row."""
FLUSH_BYTES = 256 << 20
"""After so many bytes a durable file is flushed to disk, while the next ones are written."""
_MEMORY = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "U8": "u1"}
"""The types that are written, by their names in the header, in memory."""
_FLOAT32 = "F32"
Part = tuple[int, int, int, int]
"""First row, first column, rows, columns."""
_ARRAY = "numpy"


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
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, parts in self.pieces.items():
            ends = (tuple(p + n for p, n in zip(part.place, part.shape, strict=True)) for part in parts)
            self._shapes[name] = tuple(max(axis) for axis in zip(*ends, strict=True))

    @classmethod
    def sharded(cls, directory: Path) -> TensorFiles:
        """Open the float32 matrices in the safetensors files of ``directory``, each in one or several files.

        Raises ``UserError`` if a file is not safetensors, for other types, and if pieces are missing or
        overlap.
        """
        pieces: list[Piece] = []
        for file in sorted(directory.glob("*.safetensors")):
            try:
                for piece in _opened(file, FLOAT32):
                    if len(piece.shape) != 2:
                        raise Damaged(f"'{piece.name}' is {piece.shape}, not a matrix")
                    pieces.append(piece)
            except (OSError, SafetensorError, ValueError) as fault:
                raise no_table_file(file, fault) from fault
        return cls.matrices(directory, pieces)

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


def no_table_file(file: Path, fault: Exception) -> UserError:
    """The error for a checkpoint's file that has no table, or not a whole one."""
    return UserError(f"{file} is no table file of a checkpoint ({fault}): resume from another checkpoint")


def _opened(file: Path, types: tuple[str, ...]) -> Iterator[Piece]:
    """A file's tensors and their places; the library has checked that they lie within the file."""
    with safe_open(file, framework="pt") as opened:
        told = (opened.metadata() or {}).get(SHARDING)
        places = typed_as(dict[str, _Place], parse_json(told), SHARDING) if told else {}
        for name in opened.keys():  # noqa: SIM118
            tensor = opened.get_slice(name)
            shape = tuple(tensor.get_shape())
            if tensor.get_dtype() not in types:
                raise Damaged(f"'{name}' is {tensor.get_dtype()}, not {' or '.join(types)}")
            place = places[name].saved_offsets if name in places else (0,) * len(shape)
            if len(place) != len(shape):
                raise Damaged(f"'{name}' is {shape} at {place}")
            yield Piece(file, name, place, shape)


def save_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``tensors``, which fit in memory twice; OSError if that fails.

    safetensors' ``save_file`` does the same, but fails with an error that has no number.
    """
    file.write_bytes(save({name: value.contiguous() for name, value in tensors.items()}))


@contextmanager
def new_tensors(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, str] | None = None,
    types: Mapping[str, str] = MappingProxyType({}),
    durable: bool = False,
) -> Iterator[Put]:
    """Make a new ``file`` with tensors of these names and ``shapes``; the block gets a function that writes
    their values.

    ``types``: the safetensors type (F64, I64, I32, U8) of those that are not float32. Values are written at
    once to their places, in any order of tensors and rows; OSError if that fails. All values must be written.
    ``durable``: they are flushed to disk on the way, so that the last flush, which is the caller's, is short.

    The format: the header's length in 8 bytes, the header as JSON, the data.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end, starts = 0, {}
    for name, shape in shapes.items():
        kind = types.get(name, _FLOAT32)
        starts[name], end = end, end + np.dtype(_MEMORY[kind]).itemsize * prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": (starts[name], end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    with file.open("wb") as out, ThreadPoolExecutor(1, "recpipe-flush") as flusher:
        first = out.write(len(text).to_bytes(8, "little") + text)
        flushed, written = Future[None](), 0
        flushed.set_result(None)

        def put(name: str, number: int, values: NDArray[Any]) -> None:
            nonlocal flushed, written
            memory = np.dtype(_MEMORY[types.get(name, _FLOAT32)])
            out.seek(first + starts[name] + memory.itemsize * number)
            written += out.write(np.ascontiguousarray(values, memory).data)
            if durable and written >= FLUSH_BYTES:
                flushed.result()
                flushed, written = flusher.submit(os.fdatasync, out.fileno()), 0

        yield put
        flushed.result()


def write_tensors(
    file: Path, tensors: Mapping[str, Streamed], types: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write ``tensors`` to ``file`` one after the other, as ``new_tensors`` does, ``durable``."""
    shapes = {name: shape for name, (shape, _) in tensors.items()}
    with new_tensors(file, shapes, None, types, durable=True) as put:
        for name, (_, blocks) in tensors.items():
            number = 0
            for block in blocks:
                put(name, number, block)
                number += block.size


def tiles(parts: Iterable[Part], rows: int, columns: int) -> bool:
    """Whether each of ``rows`` x ``columns`` values is in exactly one of ``parts``."""
    area = 0
    reached: list[Part] = []
    for part in sorted(p for p in parts if p[2] and p[3]):
        row, column, height, width = part
        if min(part) < 0 or row + height > rows or column + width > columns:
            return False
        reached = [p for p in reached if p[0] + p[2] > row]
        if any(p[1] < column + width and column < p[1] + p[3] for p in reached):
            return False
        reached.append(part)
        area += height * width
    return area == rows * columns


def packed(value: Any) -> NDArray[np.uint8]:
    """``value`` as bytes, uint8 [n], for another process of the run."""
    stream = io.BytesIO()
    torch.save(plain(value), stream)
    return np.frombuffer(stream.getvalue(), np.uint8)


def unpacked(content: NDArray[np.uint8]) -> Any:
    """The inverse of ``packed``. Only plain values come out, whoever has sent the bytes."""
    return restored(torch.load(io.BytesIO(content.tobytes()), weights_only=True))


def plain(value: Any) -> Any:
    """``value`` with numpy arrays as tagged tensors, so that ``torch.load(weights_only=True)`` reads it."""
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(np.ascontiguousarray(value))}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(v) for v in value)
    return str(value) if isinstance(value, Path) else value


def restored(value: Any) -> Any:
    """The inverse of ``plain`` for arrays; ``Damaged`` if a tagged value is not an array."""
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            try:
                return value[_ARRAY].numpy()
            except (AttributeError, TypeError, RuntimeError) as fault:
                raise Damaged(f"an array in it is none: {str(fault)[:100]}") from fault
        return {k: restored(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(restored(v) for v in value)
    return value
