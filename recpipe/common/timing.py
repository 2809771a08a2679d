"""Clocks: seconds of calls compared in interleaved rounds, of work that a GPU does later than it is asked
for, and the named parts of a training step, as ``task=profile`` times them.

What else the machine does comes and goes. In a round each call is timed in turn, so that all of them meet it
alike, and the median leaves out the rounds that were disturbed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import ceil, inf
from statistics import median
from time import perf_counter

import torch

from recpipe.common.device import current_stream, uses_gpu, using_threads

Run = Callable[[], object]
ROUNDS = 7
LEAST_SECONDS = 5e-3
"""Of one timing, far above what reading the clock takes."""
SHORTEST_CALL = 1e-6
"""Seconds; shorter calls are repeated as often as one of these."""
Mark = float | torch.cuda.Event
"""A point in the work of a thread: seconds of ``perf_counter``, or an event on the stream of a GPU."""
OPEN = 512
"""Spans of a GPU that are kept as events; of more, the earlier half is read, which has ended long since."""
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


def median_seconds(
    runs: Sequence[Run],
    rounds: int = ROUNDS,
    least: float = LEAST_SECONDS,
    threads: int | None = None,
    most: float = inf,
) -> list[float]:
    """Seconds of one call of each of ``runs``: its median over the rounds of ``seconds_by_round``."""
    return [median(times) for times in seconds_by_round(runs, rounds, least, threads, most)]


def seconds_by_round(
    runs: Sequence[Run],
    rounds: int = ROUNDS,
    least: float = LEAST_SECONDS,
    threads: int | None = None,
    most: float = inf,
) -> list[list[float]]:
    """Seconds of one call of each of ``runs`` in each of ``rounds``: a list for each run.

    Each is called twice before, to warm up and to find how many calls take ``least`` seconds together; so
    many are timed as one. ``threads``: of torch's operators, None: as many as they use now. A call must
    return only when its work is done: on a GPU it synchronizes. After ``most`` seconds no further round
    begins.
    """
    with nullcontext() if threads is None else using_threads(threads):
        begun = perf_counter()
        once = [min(_seconds(run, 1) for _ in range(2)) for run in runs]
        counts = [max(1, ceil(least / max(seconds, SHORTEST_CALL))) for seconds in once]
        found: list[list[float]] = [[] for _ in runs]
        for done in range(rounds):
            if done and perf_counter() - begun > most:
                break
            for run, count, times in zip(runs, counts, found, strict=True):
                times.append(_seconds(run, count))
    return found


def milliseconds(seconds: float) -> str:
    """Milliseconds as text: with one decimal, or with two digits if they are less than one (``0.042``)."""
    return f"{1e3 * seconds:.1f}" if seconds >= 1e-3 else f"{1e3 * seconds:.2g}"


def _seconds(run: Run, count: int) -> float:
    start = perf_counter()
    for _ in range(count):
        run()
    return (perf_counter() - start) / count


def mark(device: torch.device) -> Mark:
    """The end of the work that this thread has asked ``device`` for so far; does not wait for it."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(current_stream())
    return event


def synchronized_time(device: torch.device) -> float:
    """``perf_counter()`` when a GPU has done all work that it was asked for; on a CPU, now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


class Spans:
    """Seconds between pairs of marks, in their order. On a GPU they are read when they are asked for."""

    def __init__(self) -> None:
        self._read = array("d")
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def add(self, start: Mark, end: Mark) -> None:
        """Add the time from ``start`` to ``end``, two marks of one device."""
        if isinstance(start, float) and isinstance(end, float):
            self._read.append(end - start)
            return
        assert not isinstance(start, float), "both are of one device"
        assert not isinstance(end, float), "both are of one device"
        self._open.append((start, end))
        if len(self._open) > OPEN:
            self._settle(OPEN // 2)

    def each(self) -> Sequence[float]:
        """The seconds of all spans; waits for a GPU."""
        self._settle(len(self._open))
        return self._read

    def total(self) -> float:
        """Their sum; waits for a GPU."""
        return sum(self.each())

    def _settle(self, count: int) -> None:
        for start, end in self._open[:count]:
            end.synchronize()
            self._read.append(1e-3 * start.elapsed_time(end))
        del self._open[:count]


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
