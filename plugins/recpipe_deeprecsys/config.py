"""The options of ``recpipe bench-serve``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Interval
from pydantic import AfterValidator

from recpipe.common.validation import FilePath, Positive, Text, one_of
from recpipe_deeprecsys.shapes import IDS

PERCENTILES = {"50": "50.00", "90": "90.00", "95": "95.00", "97": "97.00", "99": "99.00", "99.9": "99.90"}
"""Those that LoadGen tells of a run, and how it writes them."""


def _told(percentile: float) -> float:
    if f"{percentile:g}" not in PERCENTILES:
        raise ValueError(f"LoadGen tells of {', '.join(PERCENTILES)}: choose one of these")
    return percentile


@dataclass(frozen=True)
class BenchOptions:
    """The options of ``recpipe bench-serve``. A request has some candidates, all of which are scored."""

    bound_ms: Annotated[float, Gt(0)] = 25.0
    """Milliseconds within which ``percentile`` percent of the requests must be answered."""
    percentile: Annotated[float, AfterValidator(_told)] = 95
    rates: tuple[Annotated[float, Gt(0)], ...] = ()
    """Requests a second at which latency is measured beside the search for the largest rate."""
    sizes: Text | Positive = "lognormal"
    """How many candidates a request has: ``lognormal``, a number, or a file with one number a line, of which
    requests are drawn."""
    size_mu: float = 5.1
    """Of the log-normal sizes: the mean of the logarithm, as DeepRecSys has it."""
    size_sigma: Annotated[float, Ge(0)] = 0.2
    size_max: Annotated[int, Interval(ge=1, le=65536)] = 1024
    """Larger requests are cut to so many candidates."""
    ids: Annotated[str, one_of(*IDS)] = "uniform"
    """How ids of candidates are drawn: ``skewed`` as ``data=synthetic`` has them."""
    candidates: Annotated[int, Interval(ge=1, le=10**7)] = 8192
    """Different candidates that are drawn, of which each request has some that follow each other."""
    workers: Annotated[int, Interval(ge=0, le=1024)] = 0
    """Processes that score, each on a core of its own, over the same tables; 0: one for each core."""
    threads: Positive = 1
    """Threads of each."""
    batch: Positive = 256
    """Most candidates that are scored together: larger requests are cut into equal parts of at most so many,
    smaller ones that wait are put together."""
    wait_ms: Annotated[float, Interval(ge=0, le=1000)] = 0.0
    """Milliseconds that a batch which is not full waits for more."""
    merge: bool = True
    """Whether parts of several requests are put together; false: a batch is a part of one request."""
    search: bool = False
    """Whether ``batch``, ``wait_ms`` and ``workers`` are searched for from these on. What is measured first
    are two batchings that are not searched: parts as DeepRecSys's baseline has them, and every request cut
    over the processes at its largest size."""
    http: bool = False
    """Whether requests go through HTTP, to a ``recpipe serve`` that is started for them."""
    address: Text | None = None
    """And to this one instead: http://HOST:PORT/v2/models/NAME, of the same package."""
    connections: Annotated[int, Interval(ge=1, le=4096)] = 32
    """Of the client, through HTTP."""
    beside: tuple[FilePath, ...] = ()
    """Other packages that are loaded at the same time, each with processes of its own."""
    copies: Positive = 1
    """How many of each package there are."""
    seconds: Annotated[float, Interval(ge=0.05, le=3600)] = 5.0
    """How long LoadGen issues requests in each run, at least; twenty times the bound if that is longer."""
    queries: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """And how many, at least; 0: five times as many as it needs if none is late."""
    tolerance: Annotated[float, Interval(gt=0, le=1)] = 0.03
    """The search ends where a rate that is valid and one that is not are so near."""
    seed: Annotated[int, Interval(ge=0, le=2**31 - 1)] = 1
    package: FilePath | None = None
    """Of a MODEL: where its package is written to, or lies already; None: in the run's directory."""
