"""Python's garbage collector, kept from looking again and again at objects that stay."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_kept = False
"""Whether ``keep_all`` has been called, after which nothing may be given back to the collector."""


@contextmanager
def importing() -> Iterator[None]:
    """In the block nothing is collected, and after imports what there is at its end stays as long as the
    process.

    torch and what belongs to it are 440,000 objects. To look through them each time that their number had
    grown by a quarter, and again at the process's end, took longer than to import torch.
    """
    collects, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:  # a sweep's second job would otherwise keep what the first has left
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
