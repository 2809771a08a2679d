"""Seconds of calls, compared in interleaved rounds.

What else the machine does comes and goes. In a round each call is timed in turn, so that all of them meet it
alike, and the median leaves out the rounds that were disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import ceil, inf
from statistics import median
from time import perf_counter

from recpipe.common.threads import using_threads

Run = Callable[[], object]
ROUNDS = 7
LEAST_SECONDS = 5e-3
"""Of one timing, far above what reading the clock takes."""
SHORTEST_CALL = 1e-6
"""Seconds; shorter calls are repeated as often as one of these."""


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
