"""When this process began, for the time until a run's first trained step."""

from __future__ import annotations

from time import perf_counter

_imported: float | None = perf_counter()


def run_start() -> float:
    """``perf_counter()`` at recpipe's first line in this process; for a later run in it (a sweep's), now."""
    global _imported
    start, _imported = _imported, None
    return perf_counter() if start is None else start
