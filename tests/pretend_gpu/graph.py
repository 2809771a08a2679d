"""Stand-ins for a CUDA graph, which repeat torch's operators in the same memory instead of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UNSAID = ("fbgemm::", "aten::native_batch_norm", "aten::cudnn_batch_norm")
"""Beginnings of the names of operators that do not say what they write to."""


class FakeCudaGraph:
    """For ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self._operators = _Operators()
        self._recording = ExitStack()

    def capture_begin(self, capture_error_mode: str = "global") -> None:
        """From now on operators run for their results' shapes; what they change will be undone."""
        self._recording.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        self._recording.enter_context(self._operators)

    def capture_end(self) -> None:
        """Undo what they have changed."""
        self._recording.close()
        with torch.no_grad():
            for tensor, before in self._operators.before:
                tensor.copy_(before)
        self._operators.before.clear()

    def replay(self) -> None:
        """Run them again."""
        with torch.no_grad():
            for operator, arguments, named, results in self._operators.calls:
                again = operator(*arguments, **named)
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class FakeGraph(FakeCudaGraph):
    """For ``recpipe.pipeline.cuda_graph.CudaGraph``."""

    def record(self, work: Callable[[], None]) -> None:
        """As ``Graph.record``."""
        self.capture_begin()
        try:
            work()
        finally:
            self.capture_end()


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What operators have written to, as it was before the first of them did."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        unsaid = func._schema.name.startswith(UNSAID)
        for place, argument in enumerate(func._schema.arguments):
            if unsaid or (argument.alias_info is not None and argument.alias_info.is_write):
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
