"""MLPerf's LoadGen: the load, and its own word on whether a run is valid. The one module that knows it."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from recpipe.common.process import old_objects_kept
from recpipe.errors import UserError
from recpipe_deeprecsys.config import PERCENTILES

SERVER, OFFLINE, SINGLE_STREAM = "Server", "Offline", "SingleStream"
LOGS = ("mlperf_log_summary.txt", "mlperf_log_detail.txt")
LATE, HASTY, FEW = 20, 5, 16
"""A server with so many bounds' worth of requests waiting is taken to be overloaded, and the run ends, a
hasty one sooner; so many requests may wait in any case."""
MORE = 1.3
"""LoadGen hardly issues more than so many times the requests that a run is to have: their times are
random."""
BOUNDS = 20
"""A run takes so many times the bound, at least: in a shorter one the queue of an overloaded server need not
grow beyond the bound, and LoadGen would call it valid."""
CONFIDENCE = 0.99
"""With which LoadGen's early stopping says that a percentile is within the bound."""


class Target(Protocol):
    """What is loaded."""

    def submit(self, request: int, done: Callable[[], None]) -> None:
        """Have a request scored, by its number, and return; ``done`` is called from any thread after that."""

    def check(self) -> None:
        """``UserError`` if it could not score some of what it was given."""


@dataclass(frozen=True)
class Outcome:
    """One run, as LoadGen tells of it."""

    scenario: str
    valid: bool
    rate: float | None
    """Requests a second that were asked for; None: as many as the target takes."""
    completed: float
    """Requests a second."""
    scheduled: float = 0.0
    """Requests a second that came, of a server."""
    latency_ms: dict[str, float] = field(default_factory=dict)
    """By percentile."""
    queries: int = 0
    why: tuple[str, ...] = ()
    """Why it is not valid, in LoadGen's words."""
    cut: bool = False
    """Whether it ended when it was sure not to be valid (``Load.hasty``): latencies are then no measure."""


@dataclass(frozen=True)
class Load:
    """How LoadGen loads: the bound on a percentile of the latency, and how long a run is, at least."""

    requests: int
    bound_ms: float
    percentile: str
    seconds: float
    queries: int
    seed: int
    logs: Path | None = None
    """Where LoadGen's own logs of the latest run of each scenario are kept; None: nowhere."""
    hasty: bool = False
    """Whether a server's run ends as soon as it is sure not to be valid."""

    @property
    def least(self) -> int:
        """The fewest requests by which LoadGen can say that a run is valid, if none is late."""
        return fewest(float(self.percentile))

    def run(self, target: Target, scenario: str, rate: float | None = None) -> Outcome:
        """One run. ``rate``: of ``Server`` the requests a second, of ``Offline`` about how many it takes."""
        import mlperf_loadgen as lg

        settings = lg.TestSettings()
        settings.scenario = getattr(lg.TestScenario, scenario)
        settings.mode = lg.TestMode.PerformanceOnly
        settings.min_duration_ms = max(1, round(max(1e3 * self.seconds, BOUNDS * self.bound_ms)))
        settings.min_query_count = self.queries or 5 * self.least
        share = float(self.percentile) / 100
        settings.single_stream_target_latency_percentile = share
        settings.qsl_rng_seed = self.seed
        settings.sample_index_rng_seed = self.seed + 1
        settings.schedule_rng_seed = self.seed + 2
        if rate is not None:
            settings.server_target_qps = settings.offline_expected_qps = rate
        if scenario == SERVER and rate is not None:
            settings.server_target_latency_ns = round(1e6 * self.bound_ms)
            settings.server_target_latency_percentile = share
            bounds = HASTY if self.hasty else LATE
            settings.server_max_async_queries = FEW + math.ceil(rate * bounds * self.bound_ms / 1e3)
        watched = Watched(target, math.inf, 0)
        if scenario == SERVER and rate is not None and self.hasty:
            expected = max(settings.min_query_count, rate * settings.min_duration_ms / 1e3)
            watched = Watched(target, self.bound_ms / 1e3, (1 - share) * MORE * expected)
        with old_objects_kept(), tempfile.TemporaryDirectory(prefix="recpipe-loadgen-") as folder:
            logs = lg.LogSettings()
            logs.enable_trace = False
            output = lg.LogOutputSettings()
            output.outdir, output.copy_summary_to_stdout = folder, False
            logs.log_output = output
            complete, response = lg.QuerySamplesComplete, lg.QuerySampleResponse

            def issue(samples: Sequence[Any]) -> None:
                for sample in samples:
                    one = response(sample.id, 0, 0)
                    watched.submit(sample.index, lambda one=one: complete([one]))  # type: ignore[misc]

            tested = lg.ConstructSUT(issue, watched.release)
            library = lg.ConstructQSL(self.requests, self.requests, _nothing, _nothing)
            try:
                lg.StartTestWithLogSettings(tested, library, settings, logs, "")
            finally:
                lg.DestroyQSL(library)
                lg.DestroySUT(tested)
            target.check()
            if self.logs is not None:
                self.logs.mkdir(parents=True, exist_ok=True)
                for name in LOGS:
                    shutil.copyfile(Path(folder) / name, self.logs / f"{scenario}_{name}")
            return replace(_told(Path(folder) / LOGS[1], scenario, rate), cut=watched.lost)


class Watched:
    """Hands requests to ``target`` until more than ``most`` of them were answered later than ``bound``
    seconds. Later ones wait until ``release``, so that LoadGen, which asks nobody, finds too many waiting and
    ends the run."""

    def __init__(self, target: Target, bound: float, most: float) -> None:
        self.target, self.bound, self.most = target, bound, most
        self.late = 0
        self._held: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def lost(self) -> bool:
        """Whether so many are late that the run cannot be valid."""
        return self.late > self.most

    def submit(self, request: int, done: Callable[[], None]) -> None:
        """Have a request scored, or let it wait."""
        with self._lock:
            if self.lost:
                self._held.append(done)
                return
        began = perf_counter()

        def answered() -> None:
            if perf_counter() - began > self.bound:
                with self._lock:
                    self.late += 1
            done()

        self.target.submit(request, answered)

    def release(self) -> None:
        """Answer all that wait: LoadGen has issued its last request."""
        with self._lock:
            held, self._held = self._held, []
        for done in held:
            done()


def _nothing(*_: object) -> None:
    pass


def fewest(percentile: float) -> int:
    """The fewest requests by which LoadGen can say that a percentile is within its bound, if none is late."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(percentile / 100))


def require_loadgen() -> None:
    """``UserError`` if LoadGen is not installed."""
    if find_spec("mlperf_loadgen") is None:
        raise UserError(
            "the load is that of MLPerf's LoadGen, which is not installed here: "
            "pip install 'recpipe[loadgen]'"
        )


def _told(detail: Path, scenario: str, rate: float | None) -> Outcome:
    """What a run's detailed log says."""
    found: dict[str, Any] = {}
    why: list[str] = []
    for line in detail.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith(":::MLLOG "):
            continue
        said = json.loads(line.removeprefix(":::MLLOG "))
        key, value = said["key"], said["value"]
        if key == "result_invalid_reason":
            why += str(value).strip().splitlines()
        elif key.startswith("result_"):
            found[key.removeprefix("result_")] = value
        elif said["metadata"].get("is_error"):
            why.append(f"{key}: {value}")
    completed = next(
        float(found[key])
        for key in ("completed_samples_per_sec", "samples_per_second", "qps_with_loadgen_overhead")
        if key in found
    )
    latency = {p: found[f"{key}_percentile_latency_ns"] / 1e6 for p, key in PERCENTILES.items()}
    return Outcome(
        scenario,
        found["validity"] == "VALID",
        rate if scenario == SERVER else None,
        completed,
        float(found.get("scheduled_samples_per_sec", 0.0)),
        latency,
        int(found["query_count"]),
        tuple(why),
    )
