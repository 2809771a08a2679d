"""Python's garbage collector, kept from looking again and again at objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_kept = False
"""Whether ``keep_all`` has been called, after which nothing may be given back to the collector."""


@contextmanager
def importing() -> Iterator[None]:
    """In the block nothing is collected, and what has been made by its end stays as long as the process.

    For imports: torch and what belongs to it are 440,000 objects. To look through them each time that their
    number had grown by a quarter, and again at the process's end, took longer than to import torch.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        keep_all()
        if collects:
            gc.enable()


def keep_all() -> None:
    """Let the collector leave alone all that there is now, as long as the process lasts."""
    global _kept
    gc.freeze()
    _kept = True


@contextmanager
def old_objects_kept() -> Iterator[None]:
    """In the block the collector leaves alone what there was before it, most of it modules' objects."""
    if _kept:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
