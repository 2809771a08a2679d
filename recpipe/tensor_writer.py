"""Safetensors files written a block of rows at a time: the tensors may be larger than memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Streamed = tuple[tuple[int, ...], Iterable[NDArray[np.float32]]]
"""A float32 tensor: its shape, and its rows in blocks."""


def write_tensors(
    file: Path, tensors: Mapping[str, Streamed], metadata: Mapping[str, str] | None = None
) -> None:
    """Write ``tensors`` to ``file`` in their order, after ``metadata``; it is durable on return.

    The format: the header's length in 8 bytes, the header as JSON, the data.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (shape, _) in tensors.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, blocks in tensors.values():
            for block in blocks:
                out.write(np.ascontiguousarray(block, "<f4").data)
        out.flush()
        os.fsync(out.fileno())
