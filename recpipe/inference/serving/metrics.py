"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from recpipe.inference.serving.gauges import Gauges
from recpipe.inference.serving.monitor import Monitor

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
SAMPLES = (1, 4, 16, 64, 256, 1024, 4096)


class Metrics:
    """The figures of one server; ``waiting`` tells how many requests are in the queue."""

    def __init__(self, model: str, waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        into = self._registry
        self.answers = Counter(
            "recpipe_requests", "Inference requests by HTTP status", ["status"], registry=into
        )
        self.refused = Counter(
            "recpipe_refused", "Requests that were not scored, by reason", ["reason"], registry=into
        )
        self.seconds = Histogram(
            "recpipe_request_seconds",
            "From the request's first byte read to its answer",
            buckets=SECONDS,
            registry=into,
        )
        self.samples = Counter("recpipe_samples", "Samples scored", registry=into)
        self.batch = Histogram("recpipe_batch_samples", "Samples of a batch", buckets=SAMPLES, registry=into)
        self.together = Histogram(
            "recpipe_batch_requests", "Requests of a batch", buckets=(1, 2, 4, 8, 16, 32, 64), registry=into
        )
        Gauge("recpipe_queue", "Requests that wait", registry=into).set_function(waiting)
        Gauge("recpipe_model", "The model that is served", ["name"], registry=into).labels(model).set(1)

    def saw(self, requests: int, samples: int) -> None:
        """Count a batch."""
        self.batch.observe(samples)
        self.together.observe(requests)
        self.samples.inc(samples)

    def show(self, counted: Callable[[], Mapping[str, float]]) -> None:
        """Show what a plugin has counted, too."""
        for name in counted():
            gauge = Gauge(f"recpipe_{name}", "Counted by the plugin that keeps rows", registry=self._registry)
            gauge.set_function(lambda name=name: counted()[name])  # type: ignore[misc]

    def watch(self, monitor: Monitor) -> None:
        """Show what ``monitor`` says, too."""
        self._registry.register(Gauges(monitor))

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)
