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
    "MLP backward",
    "interaction backward",
    "embedding backward and update",
    "dense optimizer",
)
"""In the order of a step. They do not overlap; what a step takes beyond their sum is overhead."""
_OFF = nullcontext()


def phase(name: str) -> AbstractContextManager[None]:
    """A range of this name in the trace, where torch's profiler runs; on a GPU it waits for its kernels."""
    return _range(name) if torch.autograd._profiler_enabled() else _OFF


@contextmanager
def _range(name: str) -> Iterator[None]:
    assert name in PHASES, name
    with torch.profiler.record_function(PREFIX + name):
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
