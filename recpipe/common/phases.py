"""The parts of a training step by name, as ``task=profile`` times them; free when nobody profiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

PREFIX = "recpipe: "
"""Of the ranges' names in a trace."""
PHASES = (
    "input",
    "embedding forward",
    "interaction forward",
    "MLP forward",
    "dense forward",
    "dense backward",
    "MLP backward",
    "interaction backward",
    "embedding backward and update",
    "dense optimizer",
)
"""In the order of a step. A phase inside of another one does not count to it: "dense" is what a model does
beside its layers and interactions. What a step takes beyond their sum is overhead."""
BACKWARD = {
    "embedding forward": "embedding backward and update",
    **{f"{part} forward": f"{part} backward" for part in ("interaction", "MLP", "dense")},
}
"""Where the gradients of what a phase has computed are made."""
_OFF = nullcontext()
_watched = False


def watch(on: bool) -> None:
    """Whether all threads record ranges from now on: while torch's profiler runs."""
    global _watched
    _watched = on


def watched() -> bool:
    """Whether ranges are recorded."""
    return _watched


def phase(name: str) -> AbstractContextManager[None]:
    """A range of this name in the trace, where one is made; on a GPU it waits for its kernels."""
    return _range(name) if _watched else _OFF


@contextmanager
def _range(name: str) -> Iterator[None]:
    assert name in PHASES, name
    with torch.profiler.record_function(PREFIX + name):
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
