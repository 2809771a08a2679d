"""The named parts of a training step, as ``task=profile`` times them. They cost nothing without a profile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from recpipe.common.device import uses_gpu

PREFIX = "recpipe: "
"""Prefix of the ranges' names in a trace."""
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
"""The phases in the order of a step. A phase inside another one does not count as part of it: "dense" is what
a model does beside its layers and interactions. The rest of a step's time is overhead."""
BACKWARD = {
    "embedding forward": "embedding backward and update",
    **{f"{part} forward": f"{part} backward" for part in ("interaction", "MLP", "dense")},
}
"""The phase that computes the gradients of another phase's results."""
_OFF = nullcontext()
_watched = False


def watch(on: bool) -> None:
    """Switch the recording of ranges on or off, in all threads; it is on while torch's profiler runs."""
    global _watched
    _watched = on


def watched() -> bool:
    """Whether ranges are recorded."""
    return _watched


def phase(name: str) -> AbstractContextManager[None]:
    """In the block, record a range of this name if a trace is being made; on a GPU it waits for its
    kernels."""
    return _range(name) if _watched else _OFF


@contextmanager
def _range(name: str) -> Iterator[None]:
    assert name in PHASES, name
    with torch.profiler.record_function(PREFIX + name):
        yield
        if uses_gpu():
            torch.cuda.synchronize()
