"""Writes safetensors files in parts, so that tensors may be larger than memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

Streamed = tuple[tuple[int, ...], Iterable[NDArray[np.float32]]]
"""A float32 tensor: its shape, and its rows in blocks."""
Put = Callable[[str, int, NDArray[Any]], None]
"""Writes values of the named tensor, beginning at the value with this number, counted row by row."""
FLUSH_BYTES = 256 << 20
"""After so many bytes a durable file is flushed to disk, while the next ones are written."""
_MEMORY = {"F32": "<f4", "I64": "<i8", "I32": "<i4", "U8": "u1"}
"""The types that are written, by their names in the header, in memory."""
_FLOAT32 = "F32"


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

    ``types``: the safetensors type (I64, I32, U8) of those that are not float32. Values are written at once
    to their places, in any order of tensors and rows; OSError if that fails. All values must be written.
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
