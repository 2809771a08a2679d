"""A checkpoint's trainer.pt: plain values, tensors and numpy arrays, read back without pickle's powers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from recpipe.common.saved import Damaged, entries

_ARRAY = "numpy"


def save_trainer(content: dict[str, Any], file: Path) -> None:
    """``torch.save``, with the OSError of a file that cannot be written."""
    with file.open("wb") as stream:
        try:
            torch.save(_plain(content), stream)
        except RuntimeError as fault:
            # torch then trips over its own half-written archive, which hides the reason.
            if isinstance(fault.__context__, OSError):
                raise fault.__context__ from None
            raise


def load_trainer(file: Path) -> dict[str, Any]:
    """What ``save_trainer`` wrote; ``Damaged`` where it is no such file."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as fault:  # whatever bytes that are no pickle lead to, as pickle's documentation says
        reason = str(fault).strip().partition("\n")[0][:200]
        raise Damaged(f"it cannot be read ({type(fault).__name__}: {reason})") from fault
    entries({"global_step": int}, loaded)
    try:
        restored: dict[str, Any] = _restored(loaded)
    except RecursionError:
        raise Damaged("nested too deeply") from None
    return restored


def _plain(value: Any) -> Any:
    """``value`` with numpy arrays as tagged tensors, so that ``torch.load(weights_only=True)`` reads it."""
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(np.ascontiguousarray(value))}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(v) for v in value)
    return str(value) if isinstance(value, Path) else value


def _restored(value: Any) -> Any:
    """The inverse of ``_plain`` for arrays."""
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return _array(value[_ARRAY])
        return {k: _restored(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_restored(v) for v in value)
    return value


def _array(value: Any) -> Any:
    try:
        return value.numpy()
    except (AttributeError, TypeError, RuntimeError) as fault:
        raise Damaged(f"an array in it is none: {str(fault)[:100]}") from fault
