"""The figures of several models for Prometheus: those of each have its name and version as labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from recpipe_serve.http.metrics import DoorMetrics, Metrics

OF_DOOR = ("recpipe_connections", "recpipe_connections_closed")
"""What is the server's, and no model's."""


def together(
    door: DoorMetrics,
    models: Mapping[tuple[str, str], Metrics],
    routes: Iterable[Mapping[str, Any]],
    several: bool = False,
) -> bytes:
    """All figures in Prometheus' text format: of the server, of its ``models`` by name and version, and of
    the shadows that ``routes`` tell of. ``several``: of all processes that are this server."""
    for own in models.values():
        own.count()
        own.write()
    registry = CollectorRegistry()
    if several:
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    registry.register(_Together(door, models, list(routes), several))
    return generate_latest(registry)


class _Together(Collector):
    def __init__(
        self,
        door: DoorMetrics,
        models: Mapping[tuple[str, str], Metrics],
        routes: list[Mapping[str, Any]],
        several: bool,
    ) -> None:
        self.door, self.models, self.routes, self.several = door, models, routes, several

    def describe(self) -> list[Metric]:
        """Nothing, so that registering computes no figures."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of them, each name once."""
        found: dict[str, Metric] = {}
        if not self.several:  # else what all processes have written is there
            _take(found, self.door.registry.collect(), {})
        for (name, version), own in self.models.items():
            metrics = chain([] if self.several else own.registry.collect(), own.gauges.collect())
            labels = {"model": name, "version": version}
            _take(found, (metric for metric in metrics if metric.name not in OF_DOOR), labels)
        yield from found.values()
        yield from self._shadows()

    def _shadows(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "recpipe_shadow_requests",
            "Requests that a shadow was to score, by what was done",
            labels=("model", "version", "result"),
        )
        outputs = GaugeMetricFamily(
            "recpipe_shadow",
            "Outputs of a shadow beside those that were answered",
            labels=("model", "version", "output", "of"),
        )
        for told in self.routes:
            shadow = told["shadow"]
            if shadow is None:
                continue
            own = told["name"], str(shadow["version"])
            for result, key in (("scored", "requests"), ("failed", "failed"), ("dropped", "dropped")):
                requests.add_metric((*own, result), shadow[key])
            for output, figures in shadow["outputs"].items():
                for of, value in figures.items():
                    if value is not None:
                        outputs.add_metric((*own, output, of), value)
        yield requests
        yield outputs


def _take(found: dict[str, Metric], metrics: Iterable[Metric], labels: Mapping[str, str]) -> None:
    """Add the samples of these metrics to those of their names, with these ``labels`` as well."""
    for metric in metrics:
        own = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        own.samples += [one._replace(labels={**one.labels, **labels}) for one in metric.samples]
