"""What a shard counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from recpipe.errors import UserError, shown

if TYPE_CHECKING:
    from recpipe_scale_out.serving import ShardModels


class ShardFigures(Collector):
    """The totals of each version that a shard answers for, whenever they are read."""

    def __init__(self, models: ShardModels) -> None:
        self.models = models

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the versions."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All figures."""
        labels = ("shard", "version")
        requests = CounterMetricFamily(
            "recpipe_shard_requests", "Questions, by what became of them", labels=(*labels, "result")
        )
        seconds = CounterMetricFamily(
            "recpipe_shard_seconds", "From a question's message to its answer", labels=(*labels, "result")
        )
        lookups = CounterMetricFamily("recpipe_shard_lookups", "Lookups of a table", labels=labels)
        took = CounterMetricFamily("recpipe_shard_lookup_seconds", "That lookups took", labels=labels)
        for own in self.models.every():
            named, counted = (own.name, own.version), own.counted
            for result in ("answered", "refused"):
                requests.add_metric((*named, result), counted[result])
                seconds.add_metric((*named, result), counted[f"{result}_ns"] / 1e9)
            lookups.add_metric(named, counted["lookups"])
            took.add_metric(named, counted["lookup_ns"] / 1e9)
        yield from (requests, seconds, lookups, took)


@contextmanager
def figures_at(host: str, port: int, models: ShardModels) -> Iterator[int]:
    """In the block a thread answers ``/metrics`` over HTTP, at the port that is given. ``UserError`` if
    another program answers there."""
    registry = CollectorRegistry()
    registry.register(ShardFigures(models))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as fault:
        raise UserError(
            f"metrics_port={port}: cannot listen on {shown(host)} port {port}: {fault.strerror}; choose "
            "another metrics_port="
        ) from fault
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
