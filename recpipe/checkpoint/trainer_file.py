"""A checkpoint's trainer.pt: plain values, tensors and numpy arrays, read without executing pickled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recpipe.common.saved import Damaged, entries
from recpipe.common.tensors import plain, restored


def save_trainer(content: dict[str, Any], file: Path) -> None:
    """``torch.save``, which raises the OSError of a file that cannot be written."""
    with file.open("wb") as stream:
        try:
            torch.save(plain(content), stream)
        except RuntimeError as fault:
            # torch then raises another error about its half-written archive, which hides the reason.
            if isinstance(fault.__context__, OSError):
                raise fault.__context__ from None
            raise


def load_trainer(file: Path) -> dict[str, Any]:
    """Read what ``save_trainer`` wrote; ``Damaged`` if it is not such a file."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # The errors that bytes other than a pickle can raise, by pickle's documentation.
    except Exception as fault:
        reason = str(fault).strip().partition("\n")[0][:200]
        raise Damaged(f"it cannot be read ({type(fault).__name__}: {reason})") from fault
    entries({"global_step": int}, loaded)
    try:
        found: dict[str, Any] = restored(loaded)
    except RecursionError:
        raise Damaged("nested too deeply") from None
    return found
