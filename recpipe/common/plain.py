"""Plain values, tensors and numpy arrays as bytes that can be read without executing pickled code."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.saved import Damaged

_ARRAY = "numpy"


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
            return _array(value[_ARRAY])
        return {k: restored(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(restored(v) for v in value)
    return value


def _array(value: Any) -> Any:
    try:
        return value.numpy()
    except (AttributeError, TypeError, RuntimeError) as fault:
        raise Damaged(f"an array in it is none: {str(fault)[:100]}") from fault
