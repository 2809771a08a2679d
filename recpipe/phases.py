"""The parts of a training step by name, as ``task=profile`` times them; free when nobody profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

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
_watched = False


def watch(on: bool) -> None:
    """Whether all threads record ranges from now on: while torch's profiler runs."""
    global _watched
    _watched = on


def phase(name: str) -> AbstractContextManager[None]:
    """A range of this name in the trace, where one is made; on a GPU it waits for its kernels."""
    return _range(name) if _watched else _OFF


def ranged(part: str, module: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """``module(*inputs)`` in a range "<part> forward", and its backward pass in one "<part> backward"."""
    if not _watched:
        return module(*inputs)
    anchor = torch.zeros(0, requires_grad=True)  # makes autograd call it where no input has a gradient
    out: torch.Tensor = _Ranged.apply(anchor, part, module, *inputs)  # type: ignore[no-untyped-call]
    return out


class _Ranged(torch.autograd.Function):
    """Runs a module's backward pass as a step of its own, so that it can be timed."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, part: str, module: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.part = part
        with phase(f"{part} forward"), torch.enable_grad():
            ctx.leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
            ctx.out = module(*ctx.leaves)
        found: torch.Tensor = ctx.out.detach()
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with phase(f"{ctx.part} backward"):
            torch.autograd.backward(ctx.out, gradient)
        return None, None, None, *(leaf.grad for leaf in ctx.leaves)


@contextmanager
def _range(name: str) -> Iterator[None]:
    assert name in PHASES, name
    with torch.profiler.record_function(PREFIX + name):
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
