"""``recpipe answer-cache``: what a cache of answers gains on a trace, and what it costs in error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from recpipe_serve import PackageError, Scorer
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.http.features import Features
from rich import box
from rich.console import Console
from rich.table import Table

from recpipe.answers.command import TERMINAL, answering
from recpipe.answers.trained import open_trained
from recpipe.answers.words import of_plugins, parted, the_plugin
from recpipe.common.console import log, show
from recpipe.common.validation import Count, FilePath, Positive, Text, no_value
from recpipe.errors import UserError
from recpipe.tasks.process import interrupt_on_sigterm, prepare_process
from recpipe_answer_cache.cache import Cache, InFront
from recpipe_answer_cache.candidates import made_cache
from recpipe_answer_cache.clusters import UserClusters
from recpipe_answer_cache.config import CacheConfig
from recpipe_answer_cache.control import Setting
from recpipe_answer_cache.plugin import ApproximateKeys
from recpipe_answer_cache.replay import Replayed, policy_hits, replay, true_errors
from recpipe_answer_cache.similar import SimilarityCache
from recpipe_answer_cache.trace import Trace, made_trace, rows_of

RESULT = "answer_cache.json"
SHARES = (0.01, 0.05, 0.25)
"""Of the trace's different keys, the capacities at which policies are compared."""
QUANTILES = (0.05, 0.15, 0.3, 0.5, 0.7)
"""Of the distances between a request and the nearest one before it, the radii that are tried."""


@dataclass(frozen=True)
class ReplayOptions:
    """The options of ``recpipe answer-cache``."""

    package: FilePath | None = None
    """The checkpoint's package, which scores."""
    items: tuple[Text, ...] = ()
    """The features of a candidate; the others are the user's. (): each row is a request of one sample."""
    candidates: Positive = 64
    """Of a request: those that come most often among the rows."""
    pool: Positive | None = None
    """Each request asks for some of so many that come most often, drawn by how often they do; None: all ask
    for the same."""
    visit: tuple[Text, ...] = ()
    """Rows that follow each other and are alike in these columns are one request."""
    time: Text | None = None
    """The column of times, for ``ttl``."""
    requests: Positive = 20_000
    """At most so many."""
    skip: Count = 0
    """Requests at the data's beginning that are left out."""
    warm: Count = 0
    """Of these, the first ones fill the caches and are not measured."""
    rounds: Positive = 1
    """Passes over the trace by each way in turn; times are their medians."""
    similar: bool = True
    """Whether similarity caching is compared, which needs FAISS, and the same candidates in each request."""


def answer_cache_command(words: Sequence[str]) -> int:
    """``recpipe answer-cache CHECKPOINT package=PACKAGE key=value ...``; returns 0."""
    prepare_process()
    with interrupt_on_sigterm():
        compare_caches(Path(words[0]), words[1:])
    return 0


def compare_caches(checkpoint: Path, words: Sequence[str]) -> dict[str, Any]:
    """Write answer_cache.json, and print a row for each way to answer."""
    mine, others = of_plugins(words)
    options, overrides, directory = parted(others, ReplayOptions, "answer-cache")
    if options.package is None:
        raise no_value("package")
    chosen = [word for word in mine if word.lstrip("+").startswith("plugin=")]
    plugin = the_plugin(
        [*([] if chosen else ["+plugin=answer_cache"]), *mine],
        ApproximateKeys,
        "answer-cache",
        "answer_cache",
    )
    config = plugin.config
    with answering(TERMINAL, directory) as run_dir:
        try:
            scorer = Scorer(Path(options.package).expanduser())
        except PackageError as fault:
            raise UserError(str(fault)) from fault
        trained = open_trained(checkpoint, overrides)
        if (trained.step, len(trained.schema.sparse)) != (
            scorer.manifest["step"],
            len(scorer.manifest["sparse"]),
        ):
            raise UserError(f"package={options.package} is of another checkpoint than {trained.directory}")
        rows = rows_of(trained, options.visit, options.time, options.requests, options.skip)
        features = Features(scorer.manifest, max(options.candidates, 1), scorer.maps)
        trace = made_trace(trained.schema, features, rows, options.items, options.candidates, options.pool)
        if options.warm >= len(rows):
            raise UserError(f"warm={options.warm}: the trace has {len(rows):,} requests, and none is left")
        log.info(
            "%s requests of %s samples, by %s different users",
            *(f"{len(trace.asked):,}", trace.asked[0].samples, f"{trace.users:,}"),
        )
        told = Comparison(scorer, trace, config, options).told()
        (run_dir.path / RESULT).write_text(json.dumps(told, indent=1) + "\n")
        print_table(told)
        log.info("see %s", run_dir.path / RESULT)
    return told


class Comparison:
    """The ways to answer one trace."""

    def __init__(self, scorer: Scorer, trace: Trace, config: CacheConfig, options: ReplayOptions) -> None:
        self.scorer, self.trace, self.config, self.options = scorer, trace, config, options
        self.score = RequestScorer(scorer)
        self.model: Replayed = replay(self.score, trace.asked, None)
        """What the model alone answers."""
        self._known = self.model.answers[: options.warm]
        self._now = 0.0

    def told(self) -> dict[str, Any]:
        """All figures, for JSON."""
        makes: dict[str, Callable[[], InFront | None]] = {
            "model": lambda: None,
            "exact": lambda: self.cache(replace(self.config, bound=0.0)),
            "approximate": lambda: self.cache(self.config),
        }
        settled = self.settled()
        if settled.level and not self._known:
            makes["approximate, settled"] = lambda: self.cache(self.config, settled)
        if self.config.unit == "candidate":
            whole = replace(self.config, unit="request")
            makes["approximate, whole requests"] = lambda: self.cache(whole)
        if self.options.similar and self.options.pool is None:
            radius = self.radius()
            makes["similar"] = lambda: SimilarityCache(self.scorer, self.trace.user, radius)
        passes: dict[str, list[Replayed]] = {name: [] for name in makes}
        last: dict[str, InFront | None] = {}
        for _ in range(self.options.rounds):
            for name, make in makes.items():
                last[name] = make()
                passes[name].append(self._replayed(last[name]))
        ways = [self._way(name, passes[name], last[name]) for name in makes]
        for own, way in zip(passes.values(), ways, strict=True):
            ratios = [one.rate / base.rate for one, base in zip(own, passes["model"], strict=True)]
            way["over_model"] = [float(f(ratios)) for f in (np.median, np.min, np.max)]
        return {
            "schema": 1,
            "task": "answer-cache",
            "package": str(self.options.package),
            "requests": len(self.trace.asked),
            "samples": self.trace.asked[0].samples,
            "users": self.trace.users,
            "config": asdict(self.config),
            "settled": asdict(settled),
            "ways": ways,
            "policies": [asdict(one) for one in self._policies(settled.level)],
        }

    def cache(self, config: CacheConfig, fixed: Setting | None = None) -> Cache:
        """A cache whose clock is the trace's, if it has one."""
        clock = monotonic if self.trace.times is None else lambda: self._now
        made = made_cache(config, self.scorer.manifest, fixed=fixed, clock=clock)
        if made.keys.of_clusters:
            made.keys.clusters = UserClusters(self.scorer, made.keys)
        return made

    def _at(self, number: int) -> None:
        if self.trace.times is not None:
            self._now = float(self.trace.times[number])

    def settled(self) -> Setting:
        """The setting that the controller ends with."""
        cache = self.cache(self.config)
        self._replayed(cache)
        return cache.controller.setting

    def _replayed(self, cache: InFront | None) -> Replayed:
        return replay(self.score, self.trace.asked, cache, self._at, self._known)

    def radius(self) -> float:
        """Of the radii that are tried the largest one whose true error is within the bound: nobody knows that
        error beforehand, which is to similarity caching's advantage."""
        probe = SimilarityCache(self.scorer, self.trace.user, -1.0)
        self._replayed(probe)
        best = 0.0
        for radius in sorted(
            {0.0, *np.quantile(probe.nearest, QUANTILES).tolist()} if probe.nearest else {0.0}
        ):
            found = self._replayed(SimilarityCache(self.scorer, self.trace.user, radius))
            if self._errors(found)[self.config.error] > self.config.bound:
                break
            best = radius
        return best

    def _errors(self, found: Replayed) -> dict[str, Any]:
        outputs = self.scorer.manifest["outputs"]
        return asdict(
            true_errors(found.answers, self.model.answers[len(self._known) :], outputs, self.config.k)
        )

    def _way(self, name: str, passes: Sequence[Replayed], cache: InFront | None) -> dict[str, Any]:
        one, count = passes[-1], len(passes[-1].answers)
        p50, p99 = np.median([np.quantile(each.latencies, (0.5, 0.99)) * 1e3 for each in passes], axis=0)
        rates = [each.rate for each in passes]
        return {
            "name": name,
            "rate": [float(f(rates)) for f in (np.median, np.min, np.max)],
            "processor_ms": float(np.median([each.processor_seconds / count * 1e3 for each in passes])),
            "p50_ms": float(p50),
            "p99_ms": float(p99),
            "inferred": one.inferred / count,
            "errors": self._errors(one),
            "cache": cache.told() if isinstance(cache, Cache) else None,
            "radius": cache.radius if isinstance(cache, SimilarityCache) else None,
        }

    def _policies(self, level: int) -> list[Any]:
        """The policies' hits by the keys of a level."""
        cache = self.cache(self.config)
        found = (cache.keys.of(asked, level) for asked in self.trace.asked)
        keys = [key for key in found if key is not None]
        distinct = len({*keys})
        return policy_hits(keys, [max(1, round(share * distinct)) for share in SHARES]) if keys else []


def print_table(told: dict[str, Any]) -> None:
    """A row for each way: requests/s, over the model alone, p99, the share that the cache has answered, the
    mean error, the shares of requests with another top k, and how many with other bits; and the hits of
    policies at some capacities, beside those by the analytic model."""
    ways, policies = (Table(box=box.SIMPLE_HEAD, pad_edge=False) for _ in range(2))
    ways.add_column("answered by", no_wrap=True)
    for head in ("req/s", "ratio", "p99, ms", "cached", "error", "top k", "bits"):
        ways.add_column(head, justify="right", no_wrap=True)
    for way in told["ways"]:
        errors = way["errors"]
        ways.add_row(
            *(way["name"], f"{way['rate'][0]:,.0f}", f"{way['over_model'][0]:.2f}", f"{way['p99_ms']:.2f}"),
            *(f"{1 - way['inferred']:.1%}", f"{errors['score']:.3%}", f"{errors['top_k']:.2%}"),
            f"{errors['other_bits']:,}",
        )
    policies.add_column("capacity", no_wrap=True)
    heads = ("lru", "lfu", "ideal", "bound")
    for head in (*heads, "lru, model", "ideal, model"):
        policies.add_column(head, justify="right", no_wrap=True)
    for one in told["policies"]:
        measured = [one["measured"][name] for name in heads]
        predicted = [one["predicted"][name] for name in ("lru", "ideal")]
        policies.add_row(f"{one['capacity']:,}", *(f"{value:.1%}" for value in measured + predicted))

    def draw(out: Console) -> None:
        out.print(ways)
        for way in told["ways"]:
            if way["cache"] is not None and way["cache"]["off"] is not None:
                out.print(f"{way['name']} was switched off: {way['cache']['off']}")
        out.print(policies)

    show(draw)
