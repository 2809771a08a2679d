"""A monitor's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from recpipe_serve.monitor.compared import Compared

_OF = ("window", "since_start", "reference")


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
        yield GaugeMetricFamily("recpipe_monitor_off", "Findings of the monitor", value=len(compared.off))
        samples = _gauge("samples", "Samples that are compared", ("of",))
        _each(samples, (), figures["samples"])
        yield samples
        yield from _scores(figures["scores"])
        yield from _ids(figures["ids"])
        yield from _labels(figures["labels"])


def _scores(scores: Mapping[str, Any]) -> Iterator[Metric]:
    for name, says in (
        ("drift", "Population stability index of scores against the reference"),
        ("mean", "Mean prediction"),
        ("saturated", "Share of probabilities next to 0 or 1"),
    ):
        gauge = _gauge(name, says, ("task", "of"))
        for task, own in scores.items():
            _each(gauge, (task,), own.get(name, {}))
        yield gauge
    for name, says in (
        ("outside", "Share of scores outside of the reference's"),
        ("not_finite", "Share of scores that are no finite numbers"),
    ):
        gauge = _gauge(name, says, ("task",))
        for task, own in scores.items():
            if name in own:
                gauge.add_metric((task,), own[name])
        yield gauge


def _ids(ids: Mapping[str, Any]) -> Iterator[Metric]:
    first = _gauge(
        "row_0", "Share of ids that are row 0, which stands for a missing value", ("feature", "of")
    )
    count = _gauge("ids_per_sample", "Ids for each sample", ("feature", "of"))
    wrong = CounterMetricFamily(
        "recpipe_monitor_ids_out_of_range", "Ids that were refused", labels=("feature",)
    )
    for feature, own in ids.items():
        _each(first, (feature,), own["row_0"])
        _each(count, (feature,), own["per_sample"])
        wrong.add_metric((feature,), own["out_of_range"])
    yield from (first, count, wrong)


def _labels(labels: Mapping[str, Any]) -> Iterator[Metric]:
    posted = CounterMetricFamily(
        "recpipe_monitor_labels", "Requests whose labels came, by what was done", labels=("result",)
    )
    for result, number in labels["requests"].items():
        posted.add_metric((result,), number)
    yield posted
    yield CounterMetricFamily(
        "recpipe_monitor_refused_posts", "Bodies of labels that were refused", value=labels["refused_posts"]
    )
    quality = _gauge("quality", "Quality over the latest labelled samples", ("task", "figure", "of"))
    for task, own in labels["tasks"].items():
        for figure, found in own.items():
            known = found["reference"] or {}
            _each(quality, (task, figure), {"window": found["value"], "reference": known.get("value")})
    yield quality


def _gauge(name: str, says: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"recpipe_monitor_{name}", says, labels=labels)


def _each(gauge: GaugeMetricFamily, labels: tuple[str, ...], found: Mapping[str, float | None]) -> None:
    for of in _OF:
        value = found.get(of)
        if value is not None:
            gauge.add_metric((*labels, of), value)
