"""Writes safetensors files in parts, so that tensors may be larger than memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Streamed = tuple[tuple[int, ...], Iterable[NDArray[np.float32]]]
"""A float32 tensor: its shape, and its rows in blocks."""
Put = Callable[[str, int, NDArray[Any]], None]
"""Writes values of the named tensor, beginning at the value with this number, counted row by row."""
_TYPES = {True: ("I64", "<i8"), False: ("F32", "<f4")}
"""The type in the header and in memory, for tensors of floats (False) and of whole numbers (True)."""


@contextmanager
def new_tensors(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, str] | None = None,
    whole_numbers: Collection[str] = (),
) -> Iterator[Put]:
    """Make a new ``file`` with tensors of these names and ``shapes``; the block gets a function that writes
    their values.

    Those named in ``whole_numbers`` are int64, all others float32. Values are written at once to their
    places, in any order of tensors and rows; OSError if that fails. All values must be written.

    The format: the header's length in 8 bytes, the header as JSON, the data.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end, starts = 0, {}
    for name, shape in shapes.items():
        kind, memory = _TYPES[name in whole_numbers]
        starts[name], end = end, end + np.dtype(memory).itemsize * prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": (starts[name], end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    with file.open("wb") as out:
        first = out.write(len(text).to_bytes(8, "little") + text)

        def put(name: str, number: int, values: NDArray[Any]) -> None:
            memory = np.dtype(_TYPES[name in whole_numbers][1])
            out.seek(first + starts[name] + memory.itemsize * number)
            out.write(np.ascontiguousarray(values, memory).data)

        yield put


def write_tensors(file: Path, tensors: Mapping[str, Streamed], whole_numbers: Collection[str] = ()) -> None:
    """Write ``tensors`` to ``file`` one after the other, as ``new_tensors`` does."""
    with new_tensors(file, {name: shape for name, (shape, _) in tensors.items()}, None, whole_numbers) as put:
        for name, (_, blocks) in tensors.items():
            number = 0
            for block in blocks:
                put(name, number, block)
                number += block.size
