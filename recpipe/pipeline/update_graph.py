"""The dense optimizer's step, recorded once as a CUDA graph and replayed.

Python starts a step's few kernels by itself, in about a millisecond. They are the same in each step where
parameters, gradients and the optimizer's state stay in the same memory, as they do behind a ``StepGraph``,
and where nothing that Python computes for the kernels depends on the number of the step. Gradients of other
batches may be in the same memory twice by chance, which is not worth a recording.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from types import MethodType
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Optimizer

from recpipe import private_api
from recpipe.errors import shown
from recpipe.pipeline.cuda_graph import Graph, Unrecorded, record

log = logging.getLogger(__name__)


def record_steps(optimizer: Optimizer, make: Callable[[], Graph], in_place: Callable[[], bool]) -> None:
    """Let a graph of ``make`` make the steps of ``optimizer`` wherever they repeat the one before: those of
    SGD, and of Adagrad without ``lr_decay``. Others, whose kernels get the number of the step from Python,
    stay as they are.

    ``in_place``: whether the gradients of the batch at hand are in memory that is theirs in every step.
    """
    if type(optimizer) in (SGD, Adagrad):
        recorded = _Recorded(optimizer, make, in_place)
        # A method of it, since torch's schedulers bind it anew.
        step = MethodType(lambda _, closure=None: recorded.step(closure), optimizer)
        optimizer.step = step  # type: ignore[method-assign]


class _Recorded:
    def __init__(self, optimizer: Optimizer, make: Callable[[], Graph], in_place: Callable[[], bool]) -> None:
        self._optimizer, self._make, self._in_place = optimizer, make, in_place
        self._by_python = optimizer.step
        self._refused = False
        self._graph: Graph | None = None
        self._form: Hashable = None
        """What ``_form_now`` said when the graph was recorded."""
        self._latest: Hashable = None
        """What it said in the latest step by Python."""
        self._counted: list[torch.Tensor] = []
        """Numbers of steps that the graph counts if they are on a GPU: the optimizer's own are counted here,
        wherever they are."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the optimizer's step, by the graph where it repeats the one before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        form = self._form_now()
        if form is None or (form != self._latest and form != self._form):
            self._latest = form
            self._by_python()
            return loss
        if form != self._form:
            self._record(form)
        if self._graph is None:
            self._by_python()
            return loss
        self._graph.replay()
        private_api.add_to_each([state["step"] for state in self._states() if "step" in state], 1)
        return loss

    def _record(self, form: Hashable) -> None:
        """Record a graph; none if there cannot be one."""
        self._graph, self._form = None, form  # its memory is free for the next one
        steps = [(state, state["step"]) for state in self._states() if "step" in state]
        self._counted = [number.clone() for _, number in steps]
        graph = self._make()
        try:
            for (state, _), number in zip(steps, self._counted, strict=True):
                state["step"] = number
            record(graph, self._by_python, "the dense optimizer's step")
            self._graph = graph
        except (Unrecorded, torch.OutOfMemoryError) as fault:
            self._refused = True
            log.warning("the dense optimizer's steps are not recorded as a CUDA graph: %s", shown(fault, 300))
        finally:
            for state, number in steps:
                state["step"] = number

    def _states(self) -> Iterator[dict[str, Any]]:
        yield from self._optimizer.state.values()

    def _form_now(self) -> Hashable:
        """What must be as it was for kernels to be the same; None if they may not be."""
        optimizer = self._optimizer
        if self._refused or not self._in_place() or private_api.steps_are_watched(optimizer):
            return None
        form: list[Hashable] = []
        for group in optimizer.param_groups:
            knobs = {name: value for name, value in group.items() if name != "params"}
            if knobs.get("lr_decay") or any(isinstance(value, torch.Tensor) for value in knobs.values()):
                return None
            form += knobs.items()
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                form += (_place(parameter), _place(parameter.grad))
                form += ((name, _place(value)) for name, value in state.items() if name != "step")
        return tuple(form)


def _place(value: Any) -> Hashable:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value
