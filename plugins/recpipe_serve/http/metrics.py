"""What a server counts, and what its monitor says, for Prometheus."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from recpipe_serve.monitor.compared import Compared

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that prometheus_client reads when it is imported: where processes that are one
server write their figures."""
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
AT_ONCE = 128
"""Answers that one process counts at once."""
SAMPLES = (1, 4, 16, 64, 256, 1024, 4096)


class Labelled:
    """A metric whose first labels have always these values."""

    def __init__(self, metric: Any, values: Sequence[str]) -> None:
        self._metric, self._values = metric, values

    def labels(self, *values: str) -> Any:
        """The one with these other labels."""
        return self._metric.labels(*self._values, *values)


class DoorMetrics:
    """The figures of connections and of requests, whatever they are for. ``of``: labels that those of
    requests have, and their values."""

    def __init__(self, of: Mapping[str, str] | None = None) -> None:
        self.registry = CollectorRegistry()
        into, self.of = self.registry, of or {}
        self.answers = self._by(Counter, "recpipe_requests", "Inference requests by HTTP status", "status")
        self.refused = self._by(
            Counter, "recpipe_refused", "Requests that were not scored, by reason", "reason"
        )
        self.connections = Gauge(
            "recpipe_connections", "Open connections", registry=into, multiprocess_mode="livesum"
        )
        self.closed = Counter(
            "recpipe_connections_closed",
            "Connections that the server closed or refused, by reason",
            ["reason"],
            registry=into,
        )

    def _by(self, kind: Any, name: str, says: str, *labels: str, **more: Any) -> Labelled:
        """A metric with these ``labels`` beside those of all."""
        made = kind(name, says, [*self.of, *labels], registry=self.registry, **more)
        return Labelled(made, list(self.of.values()))

    def _one(self, kind: Any, name: str, says: str, **more: Any) -> Any:
        """A metric without any labels beside those of all."""
        made = kind(name, says, [*self.of], registry=self.registry, **more)
        return made.labels(*self.of.values()) if self.of else made


class Metrics(DoorMetrics):
    """The figures of one process, and of the monitor: ``compared`` gives those. ``several``: of all processes
    that write into ``DIRECTORY``, each before it answers, so that one that is killed has counted what it did.
    One process alone keeps answers and batches aside and counts many at once: prometheus_client's own work
    between two requests would be a tenth of what they cost."""

    def __init__(
        self,
        model: str,
        compared: Callable[[], Compared],
        several: bool = False,
        of: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(of)
        self.gauges = Gauges(compared)
        self._shown: list[tuple[Callable[[], Mapping[str, float]], dict[str, Any]]] = []
        self.several = several
        self._answers: deque[tuple[int, float, int | None]] = deque()
        """Answers that are not counted yet: status, seconds, requests that wait if it is known."""
        self._batches: deque[tuple[int, int]] = deque()
        """Batches that are not: requests, samples."""
        self._statuses: dict[int, Counter] = {}
        says = "From the request's first byte read to its answer"
        self.seconds = self._one(Histogram, "recpipe_request_seconds", says, buckets=SECONDS)
        self.samples = self._one(Counter, "recpipe_samples", "Samples scored")
        self.batch = self._one(Histogram, "recpipe_batch_samples", "Samples of a batch", buckets=SAMPLES)
        self.together = self._one(
            Histogram, "recpipe_batch_requests", "Requests of a batch", buckets=(1, 2, 4, 8, 16, 32, 64)
        )
        says = "Requests that wait, as of the last answer"
        self.queue = self._one(Gauge, "recpipe_queue", says, multiprocess_mode="livesum")
        self.reloads = self._by(Counter, "recpipe_reloads", "Packages loaded anew, by result", "result")
        says = "Labelled events, and bodies of them refused, by result"
        self.events = self._by(Counter, "recpipe_events", says, "result")
        says = "Processes that serve this model from the package whose manifest has this digest"
        self._model = self._by(Gauge, "recpipe_model", says, "name", "package", multiprocess_mode="livesum")
        self._name, self._package = model, ""

    def serves(self, package: str) -> None:
        """Show that requests are scored by ``package`` from now on."""
        if self._package:
            self._model.labels(self._name, self._package).set(0)
        self._package = package
        self._model.labels(self._name, package).set(1)

    def answered(self, status: int, seconds: float, waiting: int | None = None) -> None:
        """Count an answer; ``waiting``: the requests that wait now."""
        self._answers.append((status, seconds, waiting))
        if self.several or len(self._answers) >= AT_ONCE:
            self.count()

    def saw(self, requests: int, samples: int) -> None:
        """Count a batch."""
        self._batches.append((requests, samples))
        if self.several:
            self.count()

    def count(self) -> None:
        """Count what was kept aside; any thread may."""
        with suppress(IndexError):
            while True:
                requests, samples = self._batches.popleft()
                self.batch.observe(samples)
                self.together.observe(requests)
                self.samples.inc(samples)
        with suppress(IndexError):
            while True:
                status, seconds, waiting = self._answers.popleft()
                if status not in self._statuses:
                    self._statuses[status] = self.answers.labels(str(status))
                self._statuses[status].inc()
                self.seconds.observe(seconds)
                if waiting is not None:
                    self.queue.set(waiting)

    def show(self, counted: Callable[[], Mapping[str, float]], totals: bool = False) -> None:
        """Show what a plugin has counted, too; of several processes each one's own, under its ``pid``, or, of
        ``totals``, their sum, those of processes that have died among them."""
        told = "Counted by a plugin of the server"
        mode: Literal["sum", "liveall"] = "sum" if totals else "liveall"
        gauges = {
            name: self._one(Gauge, f"recpipe_{name}", told, multiprocess_mode=mode) for name in counted()
        }
        if self.several:  # whoever answers shows what all have written
            self._shown.append((counted, gauges))
            return
        for name, gauge in gauges.items():
            gauge.set_function(lambda name=name: counted()[name])

    def write(self) -> None:
        """Write what plugins have counted where the process that shows it finds it."""
        for counted, gauges in self._shown:
            for name, value in counted().items():
                gauges[name].set(value)

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        self.count()
        self.write()
        own = CollectorRegistry()
        own.register(self.gauges)
        if not self.several:
            return generate_latest(self.registry) + generate_latest(own)
        MultiProcessCollector(own)  # type: ignore[no-untyped-call]
        return generate_latest(own)


class Gauges(Collector):
    """Collects what the monitor says whenever the metrics are read; ``compared`` gives that."""

    def __init__(self, compared: Callable[[], Compared]) -> None:
        self._compared = compared

    def describe(self) -> list[Metric]:
        """Nothing, so that registering computes no figures."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All figures that are defined."""
        compared = self._compared()
        figures = compared.figures
        scores, ids, labels = figures["scores"], figures["ids"], figures["labels"]
        yield GaugeMetricFamily("recpipe_monitor_off", "Findings of the monitor", value=len(compared.off))
        yield _gauge("samples", "Samples that are compared", (), {(): figures["samples"]})
        for name, says in (
            ("drift", "Population stability index of scores against the reference"),
            ("mean", "Mean prediction"),
            ("saturated", "Share of probabilities next to 0 or 1"),
        ):
            yield _gauge(name, says, ("task",), {(task,): own.get(name, {}) for task, own in scores.items()})
        for name, says in (
            ("outside", "Share of scores outside of the reference's"),
            ("not_finite", "Share of scores that are no finite numbers"),
        ):
            gauge = GaugeMetricFamily(f"recpipe_monitor_{name}", says, labels=("task",))
            for task, own in scores.items():
                if name in own:
                    gauge.add_metric((task,), own[name])
            yield gauge
        for name, key, says in (
            ("row_0", "row_0", "Share of ids that are row 0, which stands for a missing value"),
            ("ids_per_sample", "per_sample", "Ids for each sample"),
        ):
            yield _gauge(name, says, ("feature",), {(feature,): own[key] for feature, own in ids.items()})
        shares: dict[tuple[str, ...], Any] = {
            (feature,): own["unknown"] for feature, own in ids.items() if "unknown" in own
        }
        says = "Share of ids without a row of their own"
        yield _gauge("unknown", says, ("feature",), shares)
        for name, key, says in (
            ("ids_out_of_range", "out_of_range", "Ids that were refused"),
            ("ids_unknown", "unknown_since_start", "Ids that were scored by the row of ids without one"),
        ):
            counter = CounterMetricFamily(f"recpipe_monitor_{name}", says, labels=("feature",))
            for feature, own in ids.items():
                if key in own:
                    counter.add_metric((feature,), own[key])
            yield counter
        posted = CounterMetricFamily(
            "recpipe_monitor_labels", "Requests whose labels came, by what was done", labels=("result",)
        )
        for result, number in labels["requests"].items():
            posted.add_metric((result,), number)
        yield posted
        refused, says = labels["refused_posts"], "Bodies of labels that were refused"
        yield CounterMetricFamily("recpipe_monitor_refused_posts", says, value=refused)
        quality: dict[tuple[str, ...], dict[str, float | None]] = {
            (task, figure): {"window": found["value"], "reference": (found["reference"] or {}).get("value")}
            for task, own in labels["tasks"].items()
            for figure, found in own.items()
        }
        yield _gauge("quality", "Quality over the latest labelled samples", ("task", "figure"), quality)


def _gauge(
    name: str, says: str, labels: tuple[str, ...], found: Mapping[tuple[str, ...], Mapping[str, float | None]]
) -> GaugeMetricFamily:
    """A gauge with the values that are defined of the window, since the start, and of the reference."""
    gauge = GaugeMetricFamily(f"recpipe_monitor_{name}", says, labels=(*labels, "of"))
    for own, values in found.items():
        for of in ("window", "since_start", "reference"):
            value = values.get(of)
            if value is not None:
                gauge.add_metric((*own, of), value)
    return gauge
