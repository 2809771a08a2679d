"""A stand-in for a CUDA graph, which repeats torch's operators in the same memory instead of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeGraph:
    """``kept``: what the work changes beside its own memory, such as a BatchNorm's statistics."""

    def __init__(self, kept: Sequence[torch.Tensor] = ()) -> None:
        self._kept = kept
        self._operators = _Operators()

    def record(self, work: Callable[[], None]) -> None:
        """As ``Graph.record``: the operators run for their results' shapes; what they change is undone."""
        before = [tensor.clone() for tensor in self._kept]
        with torch.random.fork_rng([]), self._operators:
            work()
        with torch.no_grad():
            for tensor, value in zip(self._kept, before, strict=True):
                tensor.copy_(value)

    def replay(self) -> None:
        """As ``Graph.replay``."""
        with torch.no_grad():
            for operator, arguments, named, results in self._operators.calls:
                again = operator(*arguments, **named)
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, results))
        return results
