"""``recpipe bench-serve PACKAGE|MODEL``: the most requests a second whose latency stays within a bound."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recpipe.answers.command import TERMINAL, answering
from recpipe.answers.manifest import is_package, read_manifest
from recpipe.answers.words import of_plugins, parted
from recpipe.common.console import log
from recpipe.errors import UserError, shown
from recpipe.report.environment import environment
from recpipe.report.record import SCHEMA
from recpipe.tasks.process import interrupt_on_sigterm, prepare_process
from recpipe_deeprecsys.bounded import Bounded, best_of, measured
from recpipe_deeprecsys.config import BenchOptions
from recpipe_deeprecsys.engine import Batching, Engine, processes
from recpipe_deeprecsys.load import OFFLINE, SERVER, Load, Outcome, require_loadgen
from recpipe_deeprecsys.made import package_of
from recpipe_deeprecsys.requests import Candidates, Range, requests_of


def bench_serve(words: Sequence[str]) -> int:
    """``recpipe bench-serve PACKAGE|MODEL [key=value] ...``; returns 0."""
    prepare_process()
    with interrupt_on_sigterm():
        bench(words[0], words[1:])
    return 0


def bench(named: str, words: Sequence[str]) -> dict[str, Any]:
    """Measure the package or model ``named`` and write the report; returns the content of bench.json."""
    options, others, directory = parted(words, BenchOptions, "bench-serve")
    require_loadgen()
    rows, recipe = of_plugins(others)
    if recipe and is_package(Path(named).expanduser()):
        raise UserError(f"{shown(recipe[0])}: recpipe bench-serve has no such option of a package")
    workers = options.workers or len(os.sched_getaffinity(0))
    if rows and workers > 1:
        if options.workers:
            raise UserError(
                f"workers={workers} and a plugin that keeps rows: each process would keep its own; say "
                "workers=1"
            )
        workers = 1
    with answering(TERMINAL, directory) as run_dir:
        kept = run_dir.path / "model.recpipe" if options.package is None else Path(options.package)
        package = package_of(named, recipe, kept.expanduser())
        manifest = read_manifest(package, None)
        log.info("drawing %s candidates, %s ids", f"{options.candidates:,}", options.ids)
        requests = requests_of(options, options.candidates)
        drawn = (package, manifest, options.candidates, options.ids, options.seed)
        with processes(package, Candidates.drawn(*drawn), workers, options.threads, rows) as found:
            batching = Batching(options.batch, options.wait_ms, options.merge, workers)
            engine = Engine(found, requests, batching)
            try:
                load = Load(
                    *(len(requests), options.bound_ms, f"{options.percentile:g}", options.seconds),
                    *(options.queries, options.seed, run_dir.path / "loadgen"),
                )
                bounded = measured(engine, load, options.tolerance, said)
                extra = [load.run(engine, SERVER, rate) for rate in options.rates]
            finally:
                engine.close()
        report = report_of(package, options, workers, requests, bounded, extra)
        from recpipe_deeprecsys import show  # matplotlib, for the end

        show.write(report, run_dir.path)
        best = best_of(bounded)
        log.info(
            "%s requests/s, %s candidates/s within %g ms at p%g; see %s",
            f"{best.rate or 0:,.1f}",
            f"{report['candidates_per_second']:,.0f}",
            *(options.bound_ms, options.percentile, run_dir.path / "bench.html"),
        )
    return report


def said(outcome: Outcome) -> None:
    """A line for a run."""
    what = f" at {outcome.rate:,.1f} requests/s" if outcome.rate is not None else ""
    told = ", ".join(f"p{name} {outcome.latency_ms[name]:.2f} ms" for name in ("50", "95", "99"))
    if outcome.scenario == OFFLINE:
        told = f"{outcome.completed:,.1f} requests/s"
    log.info("%s%s: %s, %s", outcome.scenario, what, told, "VALID" if outcome.valid else "INVALID")


def report_of(
    package: Path,
    options: BenchOptions,
    workers: int,
    requests: Sequence[Range],
    bounded: Bounded,
    extra: Sequence[Outcome],
) -> dict[str, Any]:
    """The content of bench.json."""
    each = sum(high - low for low, high in requests) / len(requests)
    best = bounded.best
    return {
        "schema": SCHEMA,
        "task": "bench-serve",
        "package": str(package),
        "options": asdict(options) | {"workers": workers},
        "candidates_per_request": each,
        "best": None if best is None else asdict(best),
        "candidates_per_second": None if best is None or best.rate is None else best.rate * each,
        "why": bounded.why,
        "runs": [asdict(run) for run in (bounded.single, bounded.offline, *bounded.tried, *extra)],
        "environment": environment(),
    }
