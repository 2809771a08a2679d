"""CUDA graphs: kernels that are recorded once, and started at once from then on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from recpipe.common.device import current_stream, lone_stream
from recpipe.errors import UserError, shown

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
        training = current_stream()
        self._stream.wait_stream(training)
        with _no_collection(), torch.cuda.stream(self._stream):
            # Other threads may allocate memory and wait for their streams meanwhile.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            except BaseException as fault:
                self._end(fault)
                raise
            self._end()
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


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected in the block: freeing another graph would end the recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
