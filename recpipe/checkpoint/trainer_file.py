"""A checkpoint's trainer.pt: plain values, tensors and numpy arrays, read back without pickle's powers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recpipe.common.plain import plain, restored
from recpipe.common.saved import Damaged, entries


def save_trainer(content: dict[str, Any], file: Path) -> None:
    """``torch.save``, with the OSError of a file that cannot be written."""
    with file.open("wb") as stream:
        try:
            torch.save(plain(content), stream)
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
        found: dict[str, Any] = restored(loaded)
    except RecursionError:
        raise Damaged("nested too deeply") from None
    return found
