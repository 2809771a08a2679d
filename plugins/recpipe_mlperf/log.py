"""MLPerf's log of a run, written from its record by MLPerf's own logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recpipe.common.files import unwritable
from recpipe.errors import UserError
from recpipe_mlperf.benchmarks import Benchmark, Facts
from recpipe_mlperf.score import Outcome

MISSING = "MLPerf's logs need the package mlperf-logging: pip install 'recpipe[mlperf]'"


@contextmanager
def installed() -> Iterator[None]:
    """``UserError`` if mlperf-logging is not, or lacks something."""
    try:
        yield
    except ModuleNotFoundError as fault:
        raise UserError(f"{MISSING} ({fault})") from fault


def require() -> None:
    """``UserError`` if mlperf-logging is not installed, before anything is trained."""
    with installed():
        import mlperf_logging.mllog  # noqa: F401


def result_file(folder: Path, number: int) -> Path:
    """The log of run ``number`` by the name that MLPerf's checkers look for."""
    return folder / f"result_{number}.txt"


class Log:
    """Writes the lines of one log into ``file``, with the times that they are of."""

    def __init__(self, file: Path) -> None:
        with installed():
            from mlperf_logging.mllog.mllog import MLLogger

        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._handler = logging.FileHandler(file, mode="w", encoding="utf-8")
        except OSError as fault:
            raise unwritable(file, fault) from fault
        lines = logging.Logger("recpipe_mlperf.log", logging.INFO)
        lines.addHandler(self._handler)
        self._lines = MLLogger(lines, root_dir=str(Path(__file__).parents[1]))

    def close(self) -> None:
        """Close the file."""
        self._handler.close()

    def write(
        self, division: str, names: tuple[str, str], benchmark: Benchmark, facts: Facts, run: Outcome
    ) -> None:
        """All lines of ``run``, in the order in which things happened; ``names``: organisation and
        platform."""
        log, timed, unit = self._lines, run.timed, benchmark.unit

        def at(seconds: float) -> int:
            return round(1000 * (timed.began + seconds))

        began, started = at(-run.set_up), at(0)
        # Nothing clears the system's caches here; the rules want to be told.
        log.event("cache_clear", False, time_ms=began)
        log.start("init_start", time_ms=began)
        log.event("submission_benchmark", benchmark.name, time_ms=began)
        log.event("submission_division", division, time_ms=began)
        log.event("submission_org", names[0], time_ms=began)
        log.event("submission_platform", names[1], time_ms=began)
        log.event("submission_status", "research", time_ms=began)
        log.event("global_batch_size", facts.global_batch_size, time_ms=began)
        log.event("gradient_accumulation_steps", facts.accumulated, time_ms=began)
        log.event("seed", run.seed, time_ms=began)
        for key, value in benchmark.settings(facts):
            log.event(key, value, time_ms=began)
        log.end("init_stop", time_ms=started)
        log.start("run_start", time_ms=started)
        log.event("train_samples", facts.sizes.train_samples, time_ms=started)
        log.event("eval_samples", facts.sizes.eval_samples, time_ms=started)
        log.start("epoch_start", metadata={unit: 0}, time_ms=started)
        place: dict[str, Any] = {unit: 0}
        for number, each in enumerate(timed.evaluations, 1):
            place = {unit: benchmark.place(number, each, facts.every)}
            log.start("eval_start", metadata=place, time_ms=at(each.start))
            log.event("eval_accuracy", each.value, metadata=place, time_ms=at(each.stop))
            log.end("eval_stop", metadata=place, time_ms=at(each.stop))
        log.end("epoch_stop", metadata=place, time_ms=at(timed.stop))
        log.end("run_stop", metadata={"status": timed.status, **place}, time_ms=at(timed.stop))


def write(
    file: Path,
    division: str,
    names: tuple[str, str],
    benchmark: Benchmark,
    facts: Facts,
    run: Outcome,
) -> None:
    """Write the log of ``run`` to ``file``; ``UserError`` without mlperf-logging."""
    log = Log(file)
    try:
        log.write(division, names, benchmark, facts, run)
    finally:
        log.close()
