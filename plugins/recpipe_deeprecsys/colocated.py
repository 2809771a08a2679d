"""Several models, or copies of one, on one machine: their throughput and their tails together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from recpipe_deeprecsys.config import PERCENTILES
from recpipe_deeprecsys.engine import Engine


class Colocated:
    """Hands requests to ``engines`` in turn (``Target``), so that each gets as many at the same time,
    and remembers the latency of each one's."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self.latency: list[list[float]] = [[] for _ in self.engines]
        """Seconds of each request since ``begin``, by engine."""
        self._turn = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Forget what was remembered."""
        with self._lock:
            self.latency = [[] for _ in self.engines]

    def submit(self, request: int, done: Callable[[], None]) -> None:
        """Have the next engine score a request."""
        with self._lock:
            number, self._turn = self._turn, (self._turn + 1) % len(self.engines)
            own = self.latency[number]
        began = perf_counter()

        def answered() -> None:
            own.append(perf_counter() - began)
            done()

        self.engines[number].submit(request, answered)

    def check(self) -> None:
        """``UserError`` if one of them could not score."""
        for engine in self.engines:
            engine.check()

    def figures(self) -> list[dict[str, Any]]:
        """Of each engine the requests since ``begin``, and their latency in ms by percentile."""
        found = []
        for own in self.latency:
            each = 1e3 * np.array(own or [np.nan])
            latency = {name: float(np.percentile(each, float(name))) for name in PERCENTILES}
            found.append({"queries": len(own), "latency_ms": latency})
        return found
