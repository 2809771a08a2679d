"""``recpipe bench-serve PACKAGE|MODEL``: the most requests a second whose latency stays within a bound."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from recpipe.answers.command import TERMINAL, answering
from recpipe.answers.manifest import is_package, read_manifest
from recpipe.answers.words import of_plugins, parted
from recpipe.common.console import log
from recpipe.errors import UserError, shown
from recpipe.report.environment import environment
from recpipe.report.record import SCHEMA
from recpipe.tasks.process import interrupt_on_sigterm, prepare_process
from recpipe_deeprecsys.bounded import BEGIN, Bounded, measured, valid_or_none
from recpipe_deeprecsys.colocated import Colocated
from recpipe_deeprecsys.config import BenchOptions
from recpipe_deeprecsys.engine import Batching, Engine, processes
from recpipe_deeprecsys.load import OFFLINE, SERVER, Load, Outcome, Target, require_loadgen
from recpipe_deeprecsys.made import package_of
from recpipe_deeprecsys.over_http import Served, bodies_of
from recpipe_deeprecsys.requests import Candidates, Range, requests_of
from recpipe_deeprecsys.search import SMALLEST, STATIC, Tried, axes_of, best_of, measuring, searched


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
    options = fitting(options, rows)
    with answering(TERMINAL, directory) as run_dir:
        kept = run_dir.path / "model.recpipe" if options.package is None else Path(options.package)
        package = package_of(named, recipe, kept.expanduser())
        report = measure(package, options, rows, run_dir.path)
        from recpipe_deeprecsys import show  # matplotlib, for the end

        show.write(report, run_dir.path)
        best = report["best"]
        if best is None:
            raise UserError(report["why"])
        log.info(
            "%s requests/s, %s candidates/s within %g ms at p%g; see %s",
            f"{best['rate']:,.1f}",
            f"{report['candidates_per_second']:,.0f}",
            *(options.bound_ms, options.percentile, run_dir.path / "bench.html"),
        )
    return report


def fitting(options: BenchOptions, rows: Sequence[str] = ()) -> BenchOptions:
    """The options with their number of workers; ``UserError`` for those that do not go together."""
    through_http = options.http or options.address is not None
    several = options.copies > 1 or bool(options.beside)
    wrong = {
        "beside= and copies= are for models in process: leave out http=, address=": through_http and several,
        "search=true is for one model: leave out beside= and copies=": options.search and several,
        "search=true starts servers itself: leave out address=": options.search and bool(options.address),
        "merge=false is for a model in process: leave out http= and address=": through_http
        and not options.merge,
    }
    for why, here in wrong.items():
        if here:
            raise UserError(why)
    workers = options.workers or len(os.sched_getaffinity(0))
    if rows and options.workers > 1:
        raise UserError(
            f"workers={workers} and a plugin that keeps rows: each process would keep its own; say workers=1"
        )
    return replace(options, workers=1 if rows else workers)


class Setup(Protocol):
    """What is measured, in any batching."""

    def use(self, batching: Batching) -> Target:
        """The target that batches so from now on."""


@dataclass
class InProcess:
    """Engines over processes; several of them share the load."""

    engines: Sequence[Engine]
    together: Colocated | None = None

    def use(self, batching: Batching) -> Target:
        for engine in self.engines:
            engine.use(batching)
        return self.together or self.engines[0]


@dataclass
class Measured:
    """All that was measured of a package."""

    bounded: Bounded
    extra: list[Outcome]
    batching: Batching
    fixed: Bounded | None = None
    """With every request cut over the processes (``cut_over_cores``)."""
    static: Bounded | None = None
    """With DeepRecSys's own parts (``deeprecsys_parts``)."""
    tried: list[Tried] = field(default_factory=list)
    each: list[dict[str, Any]] = field(default_factory=list)
    """Of several models the latency of each at the largest valid rate."""


@contextmanager
def set_up(
    package: Path, options: BenchOptions, rows: Sequence[str], directory: Path
) -> Iterator[tuple[Setup, list[Range]]]:
    """What is measured, and the requests."""
    with ExitStack() as stack:
        requests = requests_of(options, options.candidates)
        packages = [package, *(Path(other).expanduser() for other in options.beside)] * options.copies
        engines: list[Engine] = []
        for place in packages:
            manifest = read_manifest(place, None)
            log.info("drawing %s candidates of %s, %s ids", f"{options.candidates:,}", place, options.ids)
            drawn = Candidates.drawn(place, manifest, options.candidates, options.ids, options.seed)
            if options.http or options.address is not None:
                bodies = bodies_of(manifest, drawn, requests)
                own = (options.connections, rows, directory / "serve.log", options.address)
                served = Served(place, bodies, *own)
                stack.callback(served.close)
                yield served, requests[: len(bodies)]
                return
            found = stack.enter_context(processes(place, drawn, options.workers, options.threads, rows))
            engines.append(Engine(found, requests, batching_of(options), 1 if rows else 0))
            stack.callback(engines[-1].close)
        yield InProcess(engines, Colocated(engines) if len(engines) > 1 else None), requests


def batching_of(options: BenchOptions) -> Batching:
    """The one that the options say."""
    return Batching(options.batch, options.wait_ms, options.merge, options.workers, options.threads)


def measure(package: Path, options: BenchOptions, rows: Sequence[str], directory: Path) -> dict[str, Any]:
    """Measure the package; returns the content of bench.json. Files of the way go into ``directory``."""
    with set_up(package, options, rows, directory) as (setup, requests):
        load = Load(
            *(len(requests), options.bound_ms, f"{options.percentile:g}", options.seconds),
            *(options.queries, options.seed, directory / "loadgen"),
        )
        found = searching(setup, load, options, requests) if options.search else plain(setup, load, options)
    return report_of(package, options, requests, found)


def plain(setup: Setup, load: Load, options: BenchOptions) -> Measured:
    """The largest rate in the batching of the options, and latencies at other rates."""
    batching = batching_of(options)
    target = setup.use(batching)
    bounded = measured(target, load, options.tolerance, said)
    extra = [load.run(target, SERVER, rate) for rate in options.rates]
    each: list[dict[str, Any]] = []
    if isinstance(target, Colocated) and bounded.best is not None:
        target.begin()
        extra.append(load.run(target, SERVER, bounded.best.rate))
        each = target.figures()
    return Measured(bounded, extra, batching, each=each)


def searching(setup: Setup, load: Load, options: BenchOptions, requests: Sequence[Range]) -> Measured:
    """The batchings that the search is compared with, the search, and then the largest rate in the best
    one."""
    fixed = static = None
    if not options.http:
        cut, parts = cut_over_cores(options), deeprecsys_parts(options)
        log.info("parts of %d candidates, as DeepRecSys's baseline has them:", parts.batch)
        static = measured(setup.use(parts), load, options.tolerance, said)
        log.info("every request cut over %d processes at %d candidates:", options.workers, cut.batch)
        fixed = measured(setup.use(cut), load, options.tolerance, said)
    before, tried = climbed(setup, load, options, [high - low for low, high in requests])
    if not tried:
        return Measured(before, [], batching_of(options), fixed, static)
    best = best_of(tried)
    log.info("the best one, %s:", told(best.batching))
    target = setup.use(best.batching)
    bounded = measured(target, load, options.tolerance, said, best.rate)
    extra = [load.run(target, SERVER, rate) for rate in options.rates]
    return Measured(bounded, extra, best.batching, fixed, static, tried)


def deeprecsys_parts(options: BenchOptions) -> Batching:
    """DeepRecSys's own baseline: parts of a size that is the same for all models, none of which are put
    together."""
    return Batching(STATIC, 0.0, False, options.workers)


def cut_over_cores(options: BenchOptions) -> Batching:
    """What that baseline is on these cores: parts as large as the largest request's are when it is cut evenly
    over the processes."""
    return Batching(-(-options.size_max // options.workers), 0.0, False, options.workers)


def climbed(
    setup: Setup, load: Load, options: BenchOptions, sizes: Sequence[int]
) -> tuple[Bounded, list[Tried]]:
    """What the search has found first, and all that it has tried, for requests with so many candidates;
    nothing if no rate is within the bound.

    It begins with the options' batching; where requests are cut and no rate of that is valid, with half as
    large parts, and so on. A server cuts none: smaller batches than most requests are the same there."""

    def fitted(batching: Batching) -> Batching:
        """A server's process scores with the cores that would have nothing to do; a part of one request waits
        for no other one."""
        cores = len(os.sched_getaffinity(0)) // batching.workers
        if options.http:
            return replace(batching, threads=max(options.threads, cores))
        return batching if batching.merge else replace(batching, wait_ms=0.0)

    start, load = fitted(batching_of(options)), replace(load, hasty=True)
    while True:
        log.info("the search from %s on:", told(start))
        before = measured(setup.use(start), load, options.tolerance, said)
        smaller = replace(start, batch=start.batch // 2)
        if before.best is not None or options.http or smaller.batch < SMALLEST:
            break
        start = smaller
    if before.best is None:
        return before, []
    climb = measuring(setup.use, load, options.tolerance, BEGIN * before.offline.completed, said)
    smallest = sorted(sizes)[len(sizes) // 2] if options.http else SMALLEST

    def own(batching: Batching, floor: float) -> float | None:
        found = valid_or_none(before) if batching == start else climb(batching, floor)
        log.info("%s: %s requests/s", told(batching), f"{found:,.1f}" if found else f"not above {floor:,.1f}")
        return found

    merges = () if options.http else (False, True)
    axes = axes_of(start, max(sizes), options.bound_ms, smallest, merges)
    return before, searched(start, axes, own, fitted)


def told(batching: Batching) -> str:
    """A batching in a few words."""
    threads = f" threads={batching.threads}" if batching.threads > 1 else ""
    merge = "" if batching.merge else " merge=false"
    return f"batch={batching.batch} wait_ms={batching.wait_ms:g} workers={batching.workers}{merge}{threads}"


def said(outcome: Outcome) -> None:
    """A line for a run."""
    what = f" at {outcome.rate:,.1f} requests/s" if outcome.rate is not None else ""
    told = ", ".join(f"p{name} {outcome.latency_ms[name]:.2f} ms" for name in ("50", "95", "99"))
    if outcome.scenario == OFFLINE:
        told = f"{outcome.completed:,.1f} requests/s"
    if outcome.cut:
        told = "ended early, since too many were late"
    log.info("%s%s: %s, %s", outcome.scenario, what, told, "VALID" if outcome.valid else "INVALID")


def report_of(
    package: Path, options: BenchOptions, requests: Sequence[Range], found: Measured
) -> dict[str, Any]:
    """The content of bench.json."""
    each = sum(high - low for low, high in requests) / len(requests)
    bounded, best, rate = found.bounded, found.bounded.best, valid_or_none(found.bounded)

    def beside(other: Bounded | None) -> tuple[dict[str, Any] | None, float | None]:
        """The largest valid rate of another batching, and how many times that this one is."""
        if other is None or other.best is None or not other.best.rate:
            return None, None
        return asdict(other.best), None if rate is None else rate / other.best.rate

    (fixed, gain), (static, static_gain) = beside(found.fixed), beside(found.static)
    return {
        "schema": SCHEMA,
        "task": "bench-serve",
        "package": str(package),
        "options": asdict(options),
        "batching": asdict(found.batching),
        "candidates_per_request": each,
        "best": None if best is None else asdict(best),
        "candidates_per_second": None if rate is None else rate * each,
        "why": bounded.why,
        "runs": [asdict(run) for run in (bounded.single, bounded.offline, *bounded.tried, *found.extra)],
        "fixed": fixed,
        "gain": gain,
        "static": static,
        "static_gain": static_gain,
        "search": [asdict(one) for one in found.tried],
        "models": found.each,
        "environment": environment(),
    }
