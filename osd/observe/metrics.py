"""Every metric of a deployment: name, type, help text, labels, and how it is read from the records.

    source                                read
    SpecWindow, SwapReport, MetricPoint   of the feed: what each adds to the sums
    Found                                 what the controller found in its last look

What replicas report of their speculation stands in `speculation_metrics.py`. `exposition.py` adds
up and renders; docs/metrics.md is made of these tables. Names follow vLLM's; units are base units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from osd.records import (
    BufferStats,
    Health,
    MetricPoint,
    ReplicaStatus,
    SpecWindow,
    SwapReport,
)

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the value."""
Counts = Iterable[Mapping[str, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the controller found in its last look.

    Example:
        Found(seen=(status,), living=(status,), health=Health(is_redis_up=True, ...))
    """

    seen: tuple[ReplicaStatus, ...] = ()
    """The last heartbeat of every replica there ever was: what one counted stays in the sums."""
    living: tuple[ReplicaStatus, ...] = ()
    buffer: BufferStats | None = None
    health: Health | None = None
    """None before the first look."""


@dataclass(frozen=True, slots=True)
class Series:
    """A metric.

    Example:
        Series("osd_swap_total", "counter", "Draft swaps by whether they succeeded.", ("ok",),
               SwapReport, lambda report: [((str(report.ok).lower(),), 1)])
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...]
    source: type[Any]
    """The record that `read` takes."""
    read: Callable[[Any], Samples] = field(repr=False)


def _windows(name: str, text: str, counter: str) -> Series:
    def read(window: SpecWindow) -> Samples:
        return [((window.draft, window.domain), getattr(window, counter))]

    return Series(name, "counter", text, ("draft", "domain"), SpecWindow, read)


def _sources(name: str, text: str) -> Series:
    def read(window: SpecWindow) -> Samples:
        sources = window.counters.by_source()
        return [((window.draft, window.domain, source), n) for source, n in sources.items()]

    return Series(name, "counter", text, ("draft", "domain", "source"), SpecWindow, read)


def _positions(name: str, text: str, counter: str) -> Series:
    def read(window: SpecWindow) -> Samples:
        return [((window.draft, str(i)), n) for i, n in enumerate(getattr(window, counter))]

    return Series(name, "counter", text, ("draft", "position"), SpecWindow, read)


def _points(name: str, text: str, *labels: str) -> Series:
    """What the controller says in `MetricPoint`s of this name."""

    def read(point: MetricPoint) -> Samples:
        if point.name != name:
            return []
        return [(tuple(point.labels.get(label, "") for label in labels), int(point.value))]

    return Series(name, "counter", text, labels, MetricPoint, read)


def _kept(name: str, text: str, label: str, counts: Callable[[Found], Counts]) -> Series:
    """What replicas and buffer count themselves."""

    def read(found: Found) -> Samples:
        return [sample for each in counts(found) for sample in by_label(each)]

    return Series(name, "counter", text, (label,), Found, read)


def _gauge(name: str, text: str, read: Callable[[Found], Samples], *labels: str) -> Series:
    return Series(name, "gauge", text, labels, Found, read)


def _buffer(name: str, text: str, value: Callable[[BufferStats], int]) -> Series:
    return _gauge(name, text, lambda f: [] if f.buffer is None else known(value(f.buffer)))


def _health(name: str, text: str, value: Callable[[Health], float | None]) -> Series:
    return _gauge(name, text, lambda f: [] if f.health is None else known(value(f.health)))


def known(value: float | None, *labels: str) -> Samples:
    return [] if value is None else [(labels, float(value))]


def by_label(values: Mapping[str, float]) -> Samples:
    return [((label,), value) for label, value in values.items()]


def _lagging(found: Found) -> Samples:
    if (health := found.health) is None:
        return []
    return [((s.replica,), float(s.replica in health.lagging)) for s in found.living]


DEPLOYMENT = (
    _windows("osd_spec_drafts_total", "Drafts proposed and verified.", "num_drafts"),
    _windows("osd_spec_draft_tokens_total", "Draft tokens proposed.", "num_draft_tokens"),
    _windows("osd_spec_accepted_tokens_total", "Draft tokens accepted.", "num_accepted_tokens"),
    _sources(
        "osd_spec_output_tokens_total",
        "Output tokens, by who brought them: the target itself, the draft model, the memory.",
    ),
    _positions(
        "osd_spec_position_tested_total",
        "Draft tokens at a position (0 = first) with all before them accepted.",
        "num_tested_per_pos",
    ),
    _positions(
        "osd_spec_position_accepted_total",
        "Draft tokens accepted at a position; over tested it is the conditional acceptance.",
        "num_accepted_tokens_per_pos",
    ),
    _kept(
        "osd_capture_rows_total",
        "Rows of target logits captured.",
        "kind",
        lambda found: [status.capture_rows for status in found.seen],
    ),
    _kept(
        "osd_capture_skipped_total",
        "Requests, steps or traces left out of capture.",
        "reason",
        lambda found: [status.capture_skipped for status in found.seen],
    ),
    Series(
        "osd_capture_traces_total",
        "counter",
        "Requests handed to the replay buffer as traces.",
        (),
        Found,
        lambda found: [((), sum(status.num_traces for status in found.seen))],
    ),
    _kept(
        "osd_buffer_dropped_total",
        "Traces the replay buffer could not take or give.",
        "reason",
        lambda found: [
            *(status.buffer_dropped for status in found.seen),
            found.buffer.dropped if found.buffer is not None else {},
        ],
    ),
    _points("osd_round_total", "Training rounds by what became of them.", "outcome"),
    _points(
        "osd_round_rows_total",
        "Rows of new traces by whether a round could train on them.",
        "kind",
    ),
    _health(
        "osd_round_taken_seconds",
        "Time that a training round takes from the engines.",
        lambda health: health.payback.taken_s if health.payback else None,
    ),
    _health(
        "osd_round_saved_seconds",
        "Time that it is expected to save them within trainer.payback_seconds.",
        lambda health: health.payback.saved_s if health.payback else None,
    ),
    _points("osd_trainer_failures_total", "Calls in which the trainer failed."),
    Series(
        "osd_swap_total",
        "counter",
        "Draft swaps by whether they succeeded.",
        ("ok",),
        SwapReport,
        lambda report: [((str(report.ok).lower(),), 1)],
    ),
    _points("osd_rollback_total", "Drafts taken back.", "reason"),
    _gauge(
        "osd_draft_info",
        "Always 1: which draft version a replica serves.",
        lambda found: [((s.draft, str(s.version), s.replica), 1.0) for s in found.living],
        "draft",
        "version",
        "replica",
    ),
    _buffer(
        "osd_buffer_traces",
        "Traces in the replay buffer, held-out ones included.",
        lambda buffer: buffer.num_traces + buffer.num_holdout,
    ),
    _buffer("osd_buffer_bytes", "Bytes in the replay buffer.", lambda buffer: buffer.num_bytes),
    _gauge(
        "osd_replicas",
        "Replicas that are alive.",
        lambda found: [] if found.health is None else known(len(found.living)),
    ),
    _health(
        "osd_replicas_wanted",
        "Replicas that are to serve, as the load asks.",
        lambda health: health.num_wanted,
    ),
    _gauge(
        "osd_replica_lagging",
        "1 while a replica has served another version than the wanted one for long.",
        _lagging,
        "replica",
    ),
    _health("osd_redis_up", "0 while Redis is away.", lambda health: health.is_redis_up),
    _health(
        "osd_trainer_up",
        "0 while the trainer fails; 1 also where none is wanted.",
        lambda health: health.is_trainer_up,
    ),
    _health(
        "osd_alarm",
        "1 while an engine seems to run something else than the serving draft.",
        lambda health: health.is_alarmed,
    ),
    Series(
        "osd_swap_pause_seconds",
        "histogram",
        "Time a swap blocked an engine.",
        (),
        SwapReport,
        lambda report: [((), report.pause_s)] if report.ok else [],
    ),
)
"""What is known of the whole deployment."""
