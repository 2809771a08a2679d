"""Safetensors files written a block of rows at a time: the tensors may be larger than memory."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Streamed = tuple[tuple[int, ...], Iterable[NDArray[np.float32]]]
"""A float32 tensor: its shape, and its rows in blocks."""
_TYPES = {True: ("I64", "<i8"), False: ("F32", "<f4")}
"""By whether a tensor is of whole numbers: its type in the header, and in memory."""


def write_tensors(
    file: Path,
    tensors: Mapping[str, Streamed],
    metadata: Mapping[str, str] | None = None,
    whole_numbers: Collection[str] = (),
) -> None:
    """Write ``tensors`` to ``file`` in their order, after ``metadata``; it is durable on return.

    Those named in ``whole_numbers`` become int64.

    The format: the header's length in 8 bytes, the header as JSON, the data.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (shape, _) in tensors.items():
        kind, memory = _TYPES[name in whole_numbers]
        start, end = end, end + np.dtype(memory).itemsize * prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, (_, blocks) in tensors.items():
            for block in blocks:
                out.write(np.ascontiguousarray(block, _TYPES[name in whole_numbers][1]).data)
        out.flush()
        os.fsync(out.fileno())
