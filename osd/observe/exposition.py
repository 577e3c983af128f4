"""The metrics of a deployment, as Prometheus text: the sums behind the tables in `metrics.py` and
`speculation_metrics.py`."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from osd.exchange.registry import FEED_TYPES, FeedRecord
from osd.observe.happened import MOST_GONE
from osd.observe.metrics import DEPLOYMENT, Found, Series
from osd.observe.speculation_metrics import SPECULATION
from osd.observe.status import speculation_figures
from osd.records import BufferStats, Health, ReplicaStatus, SpeculationFigures, SpecWindow

disable_created_metrics()  # a service that was restarted counts on from its feed

PAUSE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds."""
EARLIER = ("", 0.0)
"""The replica, and its start, that stands for all that ended before the last `MOST_GONE`: of these
what they counted is kept, all together."""
MAX_DOMAINS = 256
"""Classes of traffic counted apart; the first to come. Engines send some of their own each, and
others with every start."""
OTHER_CLASSES = "(other classes)"
OF_THE_FEED = {
    source: [series for series in DEPLOYMENT if series.source is source]
    for source in FEED_TYPES.values()
}
"""Record of the feed -> what it adds to."""
SERIES = {series.name: series for series in (*DEPLOYMENT, *SPECULATION)}
"""All by name."""
Family = CounterMetricFamily | GaugeMetricFamily


class Totals(Collector):
    """Sums since the feed begins. Not thread-safe: `History` holds the lock."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._sums = {
            series.name: self._sum_of(series)
            for all_of in OF_THE_FEED.values()
            for series in all_of
        }
        self._seen: dict[tuple[str, float], ReplicaStatus] = {}
        """(replica, started_at) -> its last heartbeat"""
        self._domains: set[str] = set()
        self._found = Found()
        self._registry.register(self)

    def _sum_of(self, series: Series) -> Counter | Histogram:
        if series.kind == "histogram":
            return Histogram(
                series.name, series.text, buckets=PAUSE_BUCKETS, registry=self._registry
            )
        return Counter(series.name, series.text, series.labels, registry=self._registry)

    def add(self, record: FeedRecord) -> None:
        if isinstance(record, SpecWindow) and not self._is_apart(record.domain):
            record = replace(record, domain=OTHER_CLASSES)
        for series in OF_THE_FEED.get(type(record), ()):
            total = self._sums[series.name]
            for labels, value in series.read(record):
                if isinstance(total, Histogram):
                    total.observe(value)
                else:
                    # A counter that is told to fall raises, which would end the control plane.
                    (total.labels(*labels) if labels else total).inc(max(0, value))

    def _is_apart(self, domain: str) -> bool:
        if domain and len(self._domains) < MAX_DOMAINS:
            self._domains.add(domain)
        return not domain or domain in self._domains

    def observe(self, replicas: Iterable[ReplicaStatus], buffer: BufferStats | None) -> None:
        living = tuple(replicas)
        for status in living:
            # To the end, as the newest.
            self._seen.pop(life := (status.replica, status.started_at), None)
            self._seen[life] = replace(status, speculation=None)
        self._forget_lives(len(living))
        self._found = replace(
            self._found,
            seen=tuple(self._seen.values()),
            living=living,
            buffer=buffer or self._found.buffer,
        )

    def _forget_lives(self, num_living: int) -> None:
        gone = [life for life in self._seen if life != EARLIER]
        for life in gone[: max(0, len(gone) - num_living - MOST_GONE)]:
            ended, earlier = self._seen.pop(life), self._seen.get(EARLIER)
            self._seen[EARLIER] = ended if earlier is None else _together(earlier, ended)

    def observe_health(self, health: Health) -> None:
        self._found = replace(self._found, health=health)

    def total(self, name: str) -> int:
        """Sum over the labels of a counter that the feed adds to."""
        samples = (sample for family in self._sums[name].collect() for sample in family.samples)
        return round(sum(sample.value for sample in samples))

    def render(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        """The metrics that are not summed up here; `prometheus_client` calls this when it
        renders."""
        for series in DEPLOYMENT:
            if series.source is Found:
                yield _found_family(series, self._found)
        yield from self._speculation()

    def _speculation(self) -> Iterator[Metric]:
        """Those that have a sample. A restarted engine counts from 0 again, as its own."""
        said = [(s.replica, speculation_figures(s.speculation)) for s in self._found.living]
        figures = [(replica, figure) for replica, figure in said if figure is not None]
        for series in SPECULATION:
            family = _speculation_family(series, figures)
            if family.samples:
                yield family


def _together(one: ReplicaStatus, other: ReplicaStatus) -> ReplicaStatus:
    """What both have counted."""

    def added(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
        return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}

    return replace(
        one,
        num_traces=one.num_traces + other.num_traces,
        capture_rows=added(one.capture_rows, other.capture_rows),
        capture_skipped=added(one.capture_skipped, other.capture_skipped),
        buffer_dropped=added(one.buffer_dropped, other.buffer_dropped),
    )


def _found_family(series: Series, found: Found) -> Family:
    family = _family(series)
    if series.kind == "gauge":
        for labels, value in series.read(found):
            family.add_metric(labels, value)
        return family
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    for labels, value in series.read(found):
        counts[labels] += int(value)
    for labels, num in sorted(counts.items()):
        family.add_metric(labels, num)
    return family


def _speculation_family(
    series: Series, figures: Iterable[tuple[str, SpeculationFigures]]
) -> Family:
    family = _family(series)
    for replica, figure in figures:
        for labels, value in series.read(figure):
            family.add_metric((replica, *labels), value)
    return family


def _family(series: Series) -> Family:
    kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
    return kind(series.name, series.text, labels=series.labels)
