"""A stand-in for a CUDA graph, which repeats torch's operators in the same memory instead of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeGraph:
    """``kept``: what the work changes without saying so, such as a BatchNorm's statistics."""

    def __init__(self, kept: Sequence[torch.Tensor] = ()) -> None:
        self._operators = _Operators()
        self._operators.keep(kept)

    def record(self, work: Callable[[], None]) -> None:
        """As ``Graph.record``: the operators run for their results' shapes; what they change is undone."""
        with torch.random.fork_rng([]), self._operators:
            work()
        with torch.no_grad():
            for tensor, before in self._operators.before:
                tensor.copy_(before)
        self._operators.before.clear()

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
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What operators have written to, as it was before the first of them did."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        tables = func.namespace == "fbgemm"  # whose operators do not say what they write to
        for place, argument in enumerate(func._schema.arguments):
            if tables or (argument.alias_info is not None and argument.alias_info.is_write):
                given = args[place] if place < len(args) else named.get(argument.name)
                self.keep([leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)])
        results = func(*args, **named)
        self.calls.append((func, args, named, results))
        return results

    def keep(self, written: Sequence[torch.Tensor]) -> None:
        """Note that an operator writes to these."""
        for tensor in written:
            if not any(tensor is known for known, _ in self.before):
                self.before.append((tensor, tensor.clone()))
