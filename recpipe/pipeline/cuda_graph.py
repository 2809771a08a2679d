"""CUDA graphs: kernels that are recorded once, and started at once from then on.

Python starts the few kernels of the dense optimizer's step by itself in about a millisecond. They are the
same in each step where parameters, gradients and the optimizer's state stay in the same memory, as they do
behind a ``StepGraph``, and where nothing that Python computes for the kernels depends on the number of the
step. Gradients of other batches may be in the same memory twice by chance, which is not worth a recording.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable
from types import MethodType
from typing import Any, Protocol

import torch
from torch.optim import SGD, Adagrad, Optimizer

from recpipe import private_api
from recpipe.common.device import current_stream, lone_stream
from recpipe.errors import UserError, shown

log = logging.getLogger(__name__)
REMEDY = "set trainer.backend=auto"


class Unrecorded(UserError):
    """A graph could not be recorded, for this reason; the run can go on without it."""


class Spoilt(RuntimeError):
    """CUDA has given a recording up, of which torch goes on to believe that it lasts: memory that several
    streams have used is never free again in this process."""


class Graph(Protocol):
    """Kernels that are started at once."""

    def record(self, work: Callable[[], None]) -> None:
        """Keep what ``work`` does on the GPU, which is not done now."""

    def replay(self) -> None:
        """Do it, on this thread's stream."""


class CudaGraph:
    """torch's, recorded on a stream of its own while other threads go on to use the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._stream = lone_stream(device)

    def record(self, work: Callable[[], None]) -> None:
        """Capture what ``work`` does on the GPU, which is not done now."""
        training, was_collecting = current_stream(), gc.isenabled()
        self._stream.wait_stream(training)
        gc.disable()  # freeing another graph would end the recording
        try:
            with torch.cuda.stream(self._stream):
                # Other threads may allocate memory and wait for their streams meanwhile.
                self._graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                except BaseException as fault:
                    self._end(fault)
                    raise
                self._end()
        finally:
            if was_collecting:
                gc.enable()
        training.wait_stream(self._stream)

    def _end(self, first: BaseException | None = None) -> None:
        """End the recording, which ``first`` has interrupted: it says more than CUDA does then."""
        try:
            self._graph.capture_end()
        except RuntimeError as fault:
            raise Spoilt(str(first or fault)) from (first or fault)

    def replay(self) -> None:
        """Start the captured kernels on this thread's stream."""
        self._graph.replay()


def record(graph: Graph, work: Callable[[], None], what: str) -> None:
    """Let ``graph`` record ``work``. ``Unrecorded``, which calls it ``what``, or torch's ``OutOfMemoryError``
    if it cannot; another ``UserError`` if the run cannot go on after that."""
    try:
        graph.record(work)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as fault:  # the model or the optimizer runs, which can raise anything
        said = f"{what} cannot be recorded as a CUDA graph ({shown(fault, 200)})"
        if isinstance(fault, Spoilt):
            raise UserError(f"{said}; {REMEDY}") from fault
        raise Unrecorded(said) from fault


def record_steps(optimizer: Optimizer, make: Callable[[], Graph], in_place: Callable[[], bool]) -> None:
    """Let a graph of ``make`` make the steps of ``optimizer`` wherever they repeat the one before: those of
    SGD, and of Adagrad without ``lr_decay``. Others, whose kernels get the number of the step from Python,
    stay as they are.

    ``in_place``: whether the gradients of the batch at hand are in memory that is theirs in every step.
    """
    if type(optimizer) in (SGD, Adagrad):
        recorded = _RecordedSteps(optimizer, make, in_place)
        # A method of it, since torch's schedulers bind it anew.
        step = MethodType(lambda _, closure=None: recorded.step(closure), optimizer)
        optimizer.step = step  # type: ignore[method-assign]


class _RecordedSteps:
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
        private_api.add_to_each(
            [state["step"] for state in self._optimizer.state.values() if "step" in state], 1
        )
        return loss

    def _record(self, form: Hashable) -> None:
        """Record a graph; none if there cannot be one."""
        self._graph, self._form = None, form  # its memory is free for the next one
        steps = [(state, state["step"]) for state in self._optimizer.state.values() if "step" in state]
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
