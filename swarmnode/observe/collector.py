"""Collect the metrics of `metrics.py` from a snapshot at each scrape, for prometheus_client."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from swarmnode.histogram import Histogram
from swarmnode.observe.computed import Labels
from swarmnode.observe.metrics import METRICS, Metric
from swarmnode.observe.snapshot import NodeSnapshot

MAX_SERIES = 128
"""Series of one metric. Further ones are summed up."""
OTHER = "other"
"""Label value of surplus series, and of values that are no plain word."""
LABEL_VALUE = re.compile(r"[A-Za-z0-9_./+-]{1,64}")


def at(snapshot: object, path: str) -> object:
    """Return the value at `path` below `snapshot`.

    The value is None if a part of the path is None, and 0 for a missing key of a dict.
    """
    found = snapshot
    for name in path.split("."):
        if found is None:
            return None
        found = found.get(name, 0) if isinstance(found, Mapping) else getattr(found, name)
    return found


def value_of(metric: Metric, snapshot: NodeSnapshot) -> object:
    """Return a number, a histogram, or numbers by label values.

    None if it is not measured or does not exist on this node.
    """
    if not metric.exists(snapshot):
        return None
    if callable(metric.source):
        return metric.source(snapshot)
    if isinstance(metric.source, str):
        return at(snapshot, metric.source)
    return {
        labels: number
        for label, path in metric.source.items()
        for labels, number in _labelled(at(snapshot, path), label)
    }


def _labelled(found: object, label: str) -> Iterator[tuple[Labels, object]]:
    """Yield a number with `label`, or each number of a dict with its key and `label`."""
    if isinstance(found, Mapping):
        yield from (((str(key), label), number) for key, number in found.items())
    else:
        yield (label,), found


def collect(metric: Metric, snapshot: NodeSnapshot) -> Family:
    """Return one metric of a snapshot."""
    value = value_of(metric, snapshot)
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help)
        if isinstance(value, Histogram):
            bounds = [*(str(float(b)) for b in value.bounds), "+Inf"]
            histogram.add_metric(
                [], list(zip(bounds, accumulate(value.counts), strict=True)), value.sum
            )
        return histogram
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=metric.labels)
    if not metric.labels:
        if isinstance(value, int | float):
            family.add_metric([], value)
    elif isinstance(value, Mapping):
        for labels, number in _bounded(metric, value).items():
            family.add_metric(labels, number)
    return family


def _bounded(metric: Metric, value: Mapping[object, object]) -> dict[Labels, float]:
    """Return numbers by label values. Strange and surplus values are summed up as `other`."""
    found: dict[Labels, float] = {}
    for key, number in value.items():
        if not isinstance(number, int | float):
            continue  # not measured
        labels = tuple(map(str, key)) if isinstance(key, tuple) else (str(key),)
        if metric.kind != "info":
            labels = tuple(each if LABEL_VALUE.fullmatch(each) else OTHER for each in labels)
            if labels not in found and len(found) >= MAX_SERIES:
                labels = (OTHER,) * len(labels)
            number += found.get(labels, 0)
        found[labels] = number
    return found


class NodeCollector(Collector):
    """Takes one snapshot per scrape, so that the numbers of a scrape are consistent."""

    def __init__(self, snapshot: Callable[[], NodeSnapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Family]:
        """Return names and types, because registration does not need a running node."""
        return [
            Family(metric.name, metric.help, "gauge" if metric.kind == "info" else metric.kind)
            for metric in METRICS
        ]

    def collect(self) -> Iterable[Family]:
        snapshot = self._snapshot()
        for metric in METRICS:
            yield collect(metric, snapshot)


def make_registry(snapshot: Callable[[], NodeSnapshot]) -> CollectorRegistry:
    """Return a registry without the metrics that libraries register globally."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(snapshot))
    return registry
