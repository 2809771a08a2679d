"""The start of this process or run, to measure the time until the first trained step."""

from __future__ import annotations

from time import perf_counter

_imported: float | None = perf_counter()


def run_start() -> float:
    """``perf_counter()`` at recpipe's first line in this process. For later runs of the process (a sweep's),
    the time of this call."""
    global _imported
    start, _imported = _imported, None
    return perf_counter() if start is None else start
