"""The metrics of a deployment, as Prometheus text. Names follow vLLM's; units are base units."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from osd.exchange.registry import FeedRecord
from osd.observe.status import speculation_figures
from osd.records import BufferStats, Health, MetricPoint, ReplicaStatus, SpecWindow, SwapReport

disable_created_metrics()  # a service that was restarted counts on from its feed

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "osd_spec_drafts_total": ("Drafts proposed and verified.", ("draft", "domain")),
    "osd_spec_draft_tokens_total": ("Draft tokens proposed.", ("draft", "domain")),
    "osd_spec_accepted_tokens_total": ("Draft tokens accepted.", ("draft", "domain")),
    "osd_spec_position_tested_total": (
        "Draft tokens at a position (0 = first) with all before them accepted.",
        ("draft", "position"),
    ),
    "osd_spec_position_accepted_total": (
        "Draft tokens accepted at a position; over tested it is the conditional acceptance.",
        ("draft", "position"),
    ),
    "osd_capture_rows_total": ("Rows of target logits captured.", ("kind",)),
    "osd_capture_skipped_total": ("Requests, steps or traces left out of capture.", ("reason",)),
    "osd_capture_traces_total": ("Requests handed to the replay buffer as traces.", ()),
    "osd_buffer_dropped_total": ("Traces the replay buffer could not take or give.", ("reason",)),
    "osd_round_total": ("Training rounds by what became of them.", ("outcome",)),
    "osd_round_rows_total": (
        "Rows of new traces by whether a round could train on them.",
        ("kind",),
    ),
    "osd_trainer_failures_total": ("Calls in which the trainer failed.", ()),
    "osd_swap_total": ("Draft swaps by whether they succeeded.", ("ok",)),
    "osd_rollback_total": ("Drafts taken back.", ("reason",)),
}
"""Name -> help text and labels of every counter."""

OBSERVED = (
    "osd_capture_rows_total",
    "osd_capture_skipped_total",
    "osd_capture_traces_total",
    "osd_buffer_dropped_total",
)
"""Counters that replicas and buffer keep themselves."""
Tally = collections.Counter[tuple[str, ...]]
"""Values of the labels -> how many."""

GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "osd_draft_info": (
        "Always 1: which draft version a replica serves.",
        ("draft", "version", "replica"),
    ),
    "osd_buffer_traces": ("Traces in the replay buffer, held-out ones included.", ()),
    "osd_buffer_bytes": ("Bytes in the replay buffer.", ()),
    "osd_replicas": ("Replicas that are alive.", ()),
    "osd_replicas_wanted": ("Replicas that are to serve, as the load asks.", ()),
    "osd_replica_lagging": (
        "1 while a replica has served another version than the wanted one for long.",
        ("replica",),
    ),
    "osd_redis_up": ("0 while Redis is away.", ()),
    "osd_trainer_up": ("0 while the trainer fails; 1 also where none is wanted.", ()),
    "osd_alarm": ("1 while an engine seems to run something else than the serving draft.", ()),
}

SPECULATION: dict[str, tuple[str, tuple[str, ...]]] = {
    "osd_speculation_steps_total": (
        "Pure decoding steps by what was speculated.",
        ("replica", "plan"),
    ),
    "osd_speculation_seconds_total": ("Time of these steps.", ("replica", "plan")),
    "osd_speculation_tokens_total": ("Tokens these steps brought.", ("replica", "plan")),
    "osd_step_seconds_total": ("Host time of the worker by part of a step.", ("replica", "part")),
    "osd_speculation_probes_total": ("Times an unused draft was tried.", ("replica",)),
    "osd_speculation_undrafted_requests_total": (
        "Requests that are not drafted for, by the parameter that forbids it.",
        ("replica", "reason"),
    ),
    "osd_speculation_position_tested_total": (
        "Draft tokens at a position (0 = first) with all before them accepted.",
        ("replica", "position"),
    ),
    "osd_speculation_position_accepted_total": (
        "Draft tokens accepted at a position; over tested it is the conditional acceptance.",
        ("replica", "position"),
    ),
    "osd_speculation_context_tested_total": (
        "Draft tokens tested, by the length of the context in tokens.",
        ("replica", "context"),
    ),
    "osd_speculation_context_accepted_total": (
        "Draft tokens accepted, by the length of the context in tokens.",
        ("replica", "context"),
    ),
    "osd_speculation_k": ("Draft tokens that the present plan proposes.", ("replica",)),
    "osd_speculation_predicted_tokens_per_second": (
        "Estimated for the present plan: tokens expected of a step over its expected time.",
        ("replica",),
    ),
    "osd_speculation_net_ratio": (
        "Measured speed with speculation over without: mean, and the ends of its 95 % interval.",
        ("replica", "bound"),
    ),
}
"""Name -> help text and labels of what living replicas report of their speculation; shown once
there is any."""

PAUSE_HISTOGRAM = ("osd_swap_pause_seconds", "Time a swap blocked an engine.")
PAUSE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Totals(Collector):
    """Sums since the feed begins. Not thread-safe: `History` holds the lock."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._counters = {
            name: Counter(name, text, labels, registry=self._registry)
            for name, (text, labels) in COUNTERS.items()
            if name not in OBSERVED
        }
        self._pauses = Histogram(*PAUSE_HISTOGRAM, buckets=PAUSE_BUCKETS, registry=self._registry)
        self._seen: dict[tuple[str, float], ReplicaStatus] = {}
        """(replica, started_at) -> its last heartbeat: the counts of a replica that has gone stay
        in the sums"""
        self._living: list[ReplicaStatus] = []
        self._buffer: BufferStats | None = None
        self._health: Health | None = None
        """None before the controller's first look"""
        self._registry.register(self)

    def add(self, record: FeedRecord) -> None:
        match record:
            case SpecWindow():
                self._add_window(record)
            case SwapReport():
                self._count("osd_swap_total", (str(record.ok).lower(),), 1)
                if record.ok:
                    self._pauses.observe(record.pause_s)
            case MetricPoint(name=name) if name in self._counters:
                labels = tuple(record.labels.get(label, "") for label in COUNTERS[name][1])
                self._count(name, labels, int(record.value))
            case _:
                pass

    def observe(self, replicas: Iterable[ReplicaStatus], buffer: BufferStats | None) -> None:
        self._living = list(replicas)
        self._seen |= {(status.replica, status.started_at): status for status in self._living}
        self._buffer = buffer or self._buffer

    def observe_health(self, health: Health) -> None:
        self._health = health

    def total(self, name: str) -> int:
        """Sum over the labels of a counter that the feed adds to."""
        samples = (sample for family in self._counters[name].collect() for sample in family.samples)
        return round(sum(sample.value for sample in samples))

    def render(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        """The metrics that are not counted here; `prometheus_client` calls this when it renders."""
        for name, counts in self._observed().items():
            text, labels = COUNTERS[name]
            counter = CounterMetricFamily(name, text, labels=labels)
            for values, value in sorted(counts.items()):
                counter.add_metric(values, value)
            yield counter
        gauges = self._gauges() | self._parts()
        for name, (text, labels) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for values, number in gauges.get(name, {}).items():
                gauge.add_metric(values, number)
            yield gauge
        yield from self._speculation()

    def _count(self, name: str, labels: tuple[str, ...], num: int) -> None:
        counter = self._counters[name]
        # A counter that is told to fall raises, which would end the control plane.
        (counter.labels(*labels) if labels else counter).inc(max(0, num))

    def _add_window(self, window: SpecWindow) -> None:
        labels = (window.draft, window.domain)
        self._count("osd_spec_drafts_total", labels, window.num_drafts)
        self._count("osd_spec_draft_tokens_total", labels, window.num_draft_tokens)
        self._count("osd_spec_accepted_tokens_total", labels, window.num_accepted_tokens)
        for kind, counts in (
            ("tested", window.num_tested_per_pos),
            ("accepted", window.num_accepted_tokens_per_pos),
        ):
            for position, num in enumerate(counts):
                at = (window.draft, str(position))
                self._count(f"osd_spec_position_{kind}_total", at, num)

    def _observed(self) -> dict[str, Tally]:
        """Counters that replicas and buffer keep themselves, summed over all ever seen."""
        rows, skipped, dropped = Tally(), Tally(), Tally()
        for status in self._seen.values():
            rows.update({(kind,): num for kind, num in status.capture_rows.items()})
            skipped.update({(reason,): num for reason, num in status.capture_skipped.items()})
            dropped.update({(reason,): num for reason, num in status.buffer_dropped.items()})
        if self._buffer is not None:
            dropped.update({(reason,): num for reason, num in self._buffer.dropped.items()})
        traces = Tally({(): sum(status.num_traces for status in self._seen.values())})
        return dict(zip(OBSERVED, (rows, skipped, traces, dropped), strict=True))

    def _gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        info: dict[tuple[str, ...], float] = {
            (s.draft, str(s.version), s.replica): 1.0 for s in self._living
        }
        buffer = self._buffer
        return {
            "osd_draft_info": info,
            "osd_buffer_traces": {(): float(buffer.num_traces + buffer.num_holdout)}
            if buffer
            else {},
            "osd_buffer_bytes": {(): float(buffer.num_bytes)} if buffer else {},
        }

    def _parts(self) -> dict[str, dict[tuple[str, ...], float]]:
        """The gauges of `Health`."""
        health = self._health
        if health is None:
            return {}
        return {
            "osd_replicas": {(): float(len(self._living))},
            "osd_replicas_wanted": {(): float(health.num_wanted)}
            if health.num_wanted is not None
            else {},
            "osd_replica_lagging": {
                (s.replica,): float(s.replica in health.lagging) for s in self._living
            },
            "osd_redis_up": {(): float(health.is_redis_up)},
            "osd_trainer_up": {(): float(health.is_trainer_up)},
            "osd_alarm": {(): float(health.is_alarmed)},
        }

    def _speculation(self) -> Iterator[Metric]:
        """The families of `SPECULATION` that have a sample. A restarted engine counts from 0 again,
        as its own."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for status in self._living:
            for name, labels, value in _speculation_samples(status):
                family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                if name not in families:
                    families[name] = family(name, SPECULATION[name][0], labels=SPECULATION[name][1])
                families[name].add_metric((status.replica, *labels), value)
        return iter(families.values())


def _speculation_samples(status: ReplicaStatus) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """(name, labels after the replica, value) of the figures that one replica reports."""
    figures = speculation_figures(status.speculation)
    if figures is None:
        return
    for plan, totals in figures.plans.items():
        for name in ("steps", "seconds", "tokens"):
            yield f"osd_speculation_{name}_total", (plan,), getattr(totals, name)
    for part, seconds in figures.seconds_per_part.items():
        yield "osd_step_seconds_total", (part,), seconds
    for reason, requests in figures.undrafted.items():
        yield "osd_speculation_undrafted_requests_total", (reason,), requests
    tallies = {"position": enumerate(figures.positions), "context": figures.contexts.items()}
    for kind, items in tallies.items():
        for label, (tested, accepted) in items:
            yield f"osd_speculation_{kind}_tested_total", (str(label),), tested
            yield f"osd_speculation_{kind}_accepted_total", (str(label),), accepted
    for name, bound, known in (
        ("osd_speculation_probes_total", (), figures.num_probes),
        ("osd_speculation_k", (), figures.k),
        ("osd_speculation_predicted_tokens_per_second", (), figures.predicted_tokens_per_second),
        ("osd_speculation_net_ratio", ("mean",), figures.net_ratio),
        ("osd_speculation_net_ratio", ("low",), figures.net_low),
        ("osd_speculation_net_ratio", ("high",), figures.net_high),
    ):
        if known is not None:
            yield name, bound, known
