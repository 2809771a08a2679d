"""A command of recpipe under torch's CUDA sanitizer, which reports each tensor that two streams use with no
order between them: ``python sanitized.py [--without wait_event] WORD...``

The sanitizer follows streams and events, not time, so it finds such a tensor however fast the GPU is. torch's
own watches the main thread; here it also watches those that recpipe starts, with one lock over its books.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import _sanitizer as sanitizer

BOOKS = threading.RLock()


def locked(note: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        with BOOKS:
            return note(*args, **named)

    return call


def with_memory(note: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out tensors without elements: torch knows them by the address of a Python object, which another
    one gets when they are gone."""

    def call(self: Any, value: Any, *args: Any, **named: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.numel():
            note(self, value, *args, **named)

    return call


def watch() -> None:
    """Watch this thread and all that begin later."""
    for name in vars(sanitizer.EventHandler).copy():
        if name.startswith("_handle"):
            setattr(sanitizer.EventHandler, name, locked(getattr(sanitizer.EventHandler, name)))
    sanitizer.ArgumentHandler._handle_argument = with_memory(sanitizer.ArgumentHandler._handle_argument)
    sanitizer.enable_cuda_sanitizer()
    watched = sanitizer.cuda_sanitizer.dispatch
    run = threading.Thread.run

    def run_watched(thread: threading.Thread) -> None:
        mode = type(watched)()
        mode.event_handler = watched.event_handler
        with mode:
            run(thread)

    threading.Thread.run = run_watched  # type: ignore[method-assign]


if __name__ == "__main__":
    watch()
    words = sys.argv[1:]
    if words[0] == "--without":
        setattr(torch.cuda.Stream, words[1], lambda *args: None)
        words = words[2:]
    from recpipe.cli import program

    sys.argv = ["recpipe", *words]
    program()
