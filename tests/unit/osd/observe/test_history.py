"""History turns windows and reports into columns, sums, marks and Prometheus text."""

from __future__ import annotations

import math
import re
import sqlite3
import stat
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from osd.observe.exposition import MAX_DOMAINS, SERIES
from osd.observe.happened import MAX_CHANGES, MAX_LISTED, MOST_GONE
from osd.observe.history import MAX_CLASSES, OTHER_CLASSES, UNLABELLED, History
from osd.observe.history_file import HistoryFile, Minute
from osd.observe.series import COLUMNS, MAX_LINES
from osd.observe.slots import NARROW_FOR_S
from osd.observe.speculation_metrics import SPECULATION
from osd.observe.status import speculation_figures
from osd.records import (
    SOURCES,
    BufferStats,
    Counters,
    Event,
    Health,
    MetricPoint,
    Payback,
    ReplicaStatus,
    RoundOutcome,
    SpeculationReport,
    SpecWindow,
    SwapReport,
)

START = 1_700_000_000.0

REPORT = {
    "mode": "auto",
    "plan": "draft 3",
    "k": 3,
    "batch": 8,
    "predicted_tokens_per_second": 812.5,
    "plans": {
        "draft 3": {"steps": 88, "seconds": 2.0, "tokens": 1580, "predicted_seconds": 1.9},
        "off": {"steps": 12, "seconds": 0.5, "tokens": 96, "predicted_seconds": 0.4},
    },
    "changes": [],
    "num_probes": 2,
    "net": {"ratio": 1.31, "low": 1.22, "high": 1.41, "windows": 6, "discarded": 1},
    "tested_per_position": [88, 70, 49],
    "accepted_per_position": [70, 49, 30],
    "by_context": {"<64": [200, 149], ">=64": [7, 0]},
    "by_output": {"<16": [150, 120]},
    "spread": {"0.5": 0.72},
    "undrafted": {"min_p": 4},
    "sources": {"draft": [90, 60], "memory": [40, 30]},
    "problem": "",
    "split": {"steps": 100, "draft": 0.4, "verify": 1.2, "sample": 0.2, "other": 0.2},
}
"""What `serving/speculation/control.py`, the scheduler and the worker say together."""


def window(at: float, **fields: object) -> SpecWindow:
    """100 drafts of 2: 80 accepted at first, 40 of these 80 at second. α = 120 / 180."""
    values = {
        "at": START + at,
        "replica": "replica-0",
        "version": 1,
        "seconds": 0.25,
        "k": 2,
        "num_drafts": 100,
        "num_draft_tokens": 200,
        "num_accepted_tokens": 120,
        "num_accepted_tokens_per_pos": (80, 40),
        "num_tested_per_pos": (100, 80),
        "num_output_tokens": 220,
        "num_finished": 2,
        "decode_seconds": 1.0,
        "num_decode_tokens": 200,
    }
    return SpecWindow(**(values | fields))  # type: ignore[arg-type]


def swap(
    at: float, version: int, previous: int, replica: str = "replica-0", **fields: object
) -> SwapReport:
    values = {
        "at": START + at,
        "replica": replica,
        "version": version,
        "previous": previous,
        "ok": True,
    }
    return SwapReport(**(values | {"stage_s": 0.1, "pause_s": 0.006} | fields))  # type: ignore[arg-type]


def status(name: str = "replica-0", **fields: object) -> ReplicaStatus:
    values = {
        "at": START,
        "replica": name,
        "url": "http://x",
        "version": 1,
        "target_id": "9f2c",
        "k": 2,
        "pid": 1,
    }
    report = msgspec.convert(fields.pop("speculation", None), SpeculationReport | None)
    values |= {"started_at": START, "engine": "fake", "speculation": report}
    return ReplicaStatus(**(values | fields))  # type: ignore[arg-type]


ROUND = RoundOutcome(
    base_version=1,
    path="",
    num_steps=1,
    num_tokens=1,
    loss_first=1.0,
    loss_last=1.0,
    seconds=1.0,
    trace_age_mean_s=1.0,
    trace_age_max_s=1.0,
    eval=None,
)


def filled(*records: object) -> History:
    history = History()
    for record in records:
        history.add(record)  # type: ignore[arg-type]
    return history


def samples(history: History) -> dict[tuple[str, ...], float]:
    """(name, label=value, ...) -> value, read by Prometheus' own parser."""
    families = text_string_to_metric_families(history.prometheus())
    return {
        (
            sample.name,
            *(f"{name}={value}" for name, value in sorted(sample.labels.items())),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_series_of_nothing_is_empty_columns() -> None:
    assert History().series(0.0, 1.0) == {name: [] for name in COLUMNS}


def test_series_follows_the_three_formulas() -> None:
    columns = filled(window(0.0)).series(START, 1.0)
    row = {name: values[0] for name, values in columns.items() if values != [None]}
    assert row == {
        "at": START,
        "alpha": 0.666667,
        "acceptance_rate": 120 / 200,
        "acceptance_length": 1 + 120 / 100,
        "tested": 180,
        "tokens_per_second": 220 / 0.25,
        "tpot_ms": 5.0,
        "version": 1,
        "k": 2,
        "requests": 2,
        "steps": 0,
        "verified_draft": 200,
        "verified_memory": 0,
        "tokens_target": 100,
        "tokens_draft": 120,
        "tokens_memory": 0,
    }


def test_k_is_what_was_proposed_per_request_and_step() -> None:
    busy = window(0.1, k=5, num_steps=100, num_draft_tokens=200)
    idle = window(0.2, k=5, num_steps=50, num_draft_tokens=0, num_drafts=0)
    assert filled(busy).series(START, 1.0)["k"] == [2.0]
    assert filled(busy, idle).series(START, 1.0)["k"] == [1.33], "steps without a draft count"
    assert filled(idle).series(START, 1.0)["k"] == [0.0], "no speculation is no unknown k"
    uncounted = window(0.3, replica="replica-1", k=5, num_draft_tokens=9000)
    assert filled(busy, uncounted).series(START, 1.0)["k"] == [2.0], "from where steps were counted"
    assert filled(uncounted).series(START, 1.0)["k"] == [5]
    ended = window(0.4, k=5, num_draft_tokens=0, num_drafts=0, num_output_tokens=0)
    assert filled(ended).series(START, 1.0)["k"] == [None], "a request ended, and no step was taken"


def test_series_has_a_row_per_bucket_and_none_where_nothing_was_seen() -> None:
    columns = filled(window(0.0), window(1.0), window(30.0)).series(START, 10.0)
    assert columns["at"] == [START, START + 10, START + 20, START + 30]
    assert columns["requests"] == [4, None, None, 2]
    assert columns["alpha"][1] is None
    assert columns["version"] == [1, None, None, 1]


def test_series_starts_at_since() -> None:
    columns = filled(*(window(float(at)) for at in range(100))).series(START + 90, 1.0)
    assert columns["at"] == [START + at for at in range(90, 100)]


def test_series_without_drafts_or_finished_requests_says_none() -> None:
    plain = window(
        0.0,
        num_drafts=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_accepted_tokens_per_pos=(0, 0),
        num_tested_per_pos=(0, 0),
        num_decode_tokens=0,
        num_finished=0,
    )
    columns = filled(plain).series(START, 1.0)
    names = ("alpha", "acceptance_rate", "acceptance_length", "tpot_ms")
    assert [columns[name] for name in names] == [[None]] * 4
    assert columns["tokens_per_second"] == [880.0]


def test_speeds_of_replicas_add_up_and_domains_share_their_seconds() -> None:
    columns = filled(
        window(0.1, domain="code"), window(0.1, domain="chat"), window(0.2, replica="replica-1")
    ).series(START, 1.0)
    assert columns["tokens_per_second"] == [440 / 0.25 + 220 / 0.25]
    history = filled(window(0.1), window(0.1, replica="replica-1"))
    assert history.series(START, 0.0)["tokens_per_second"] == [2 * 220 / 0.25], (
        "looks of two at once are two"
    )


def test_bucket_shows_the_version_most_tokens_came_from() -> None:
    history = filled(window(0.0), window(0.3, version=2, num_output_tokens=500), window(0.6))
    assert history.series(START, 1.0)["version"] == [2]


def test_window_is_the_sum_of_what_was_seen() -> None:
    parts = [window(0.1, num_steps=7), window(0.4, domain="code"), window(1.2, num_steps=9)]
    parts.append(window(1.3, replica="replica-1"))
    merged, expected = filled(*parts).window(), Counters()
    for part in parts:
        expected.add(part.counters)
    assert merged is not None
    assert (merged.num_steps, merged.at, merged.version) == (16, START + 1.3, 1)
    assert replace(merged, seconds=0.0).counters == structs.replace(expected, seconds=0.0)
    assert math.isclose(merged.seconds, 1.0)


def test_window_of_a_version_and_a_time() -> None:
    history = filled(window(0.0), window(5.0, version=2), window(10.0, version=2))
    assert (both := history.window()) is not None and both.num_drafts == 300
    assert (two := history.window(version=2)) is not None and (two.num_drafts, two.version) == (
        200,
        2,
    )
    late = history.window(version=2, since=START + 7)
    assert late is not None and late.num_drafts == 100
    assert history.window(version=3) is None
    assert history.window(since=START + 11) is None


def test_old_windows_are_folded_then_forgotten_and_sums_stay_true() -> None:
    history = History(history_seconds=4 * NARROW_FOR_S)
    for at in range(0, int(3 * NARROW_FOR_S), 30):
        history.add(window(float(at)))
    total = history.window()
    assert total is not None and total.num_drafts == 100 * 3 * NARROW_FOR_S / 30
    columns = history.series(START, 60.0)
    assert set(columns["alpha"]) == {0.666667}
    assert sum(columns["requests"]) == 2 * 3 * NARROW_FOR_S / 30
    history.add(window(4 * NARROW_FOR_S + 100))
    assert history.series(0.0, 60.0)["at"][0] >= START
    history.add(window(10 * NARROW_FOR_S))
    assert (rest := history.window()) is not None and rest.num_drafts == 100


def test_marks_are_where_the_deployment_changed_version() -> None:
    history = filled(
        swap(1, 2, 1),
        swap(1.5, 2, 1, replica="replica-1"),
        swap(3, 3, 2, replica="replica-1"),
        swap(3.2, 3, 2, ok=False, error="shape"),
        swap(4, 4, 3, replica="replica-1"),
        swap(5, 3, 2),
        swap(5.5, 4, 3),
        swap(6, 3, 4),
        swap(6.1, 3, 4, replica="replica-1"),
    )
    marks = [(mark["at"] - START, mark["version"]) for mark in history.marks()]
    assert marks == [(1, 2), (3, 3), (4, 4), (6, 3)], "late replicas mark nothing, a rollback does"


def test_a_mark_is_where_a_swap_first_succeeded_and_says_what_it_cost() -> None:
    history = filled(
        swap(4, 3, 2, proved=True, pause_s=0.02),
        swap(1, 2, 1, ok=False, error="shape"),
        swap(2, 2, 1, replica="replica-1"),
    )
    assert history.marks() == [
        {"at": START + 2, "version": 2, "previous": 1, "pause_s": 0.006, "proved": False},
        {"at": START + 4, "version": 3, "previous": 2, "pause_s": 0.02, "proved": True},
    ]
    assert [event.text for event in history.events()] == [
        "replica-0 keeps v1, v2 was refused: shape",
        "replica-1: v1 -> v2, engine paused 6.0 ms",
        "replica-0: v2 -> v3, engine paused 20.0 ms, weights read back and equal",
    ]


def test_marks_of_weeks_of_swaps_are_told_at_once() -> None:
    """Whoever has the page open asks for them each second."""
    history = filled(*(swap(at, at + 2, at + 1) for at in range(MAX_LISTED)))

    def seconds() -> float:
        began = time.perf_counter()
        assert len(history.marks()) == MAX_LISTED
        return time.perf_counter() - began

    assert min(seconds() for _ in range(3)) < 0.1


def test_events_are_in_time_and_swaps_are_among_them() -> None:
    history = filled(
        Event(at=START + 9, kind="published", text="v2", version=2),
        swap(10, 2, 1),
        swap(11, 2, 1, replica="replica-1", ok=False, error="missing tensor"),
        Event(at=START + 1, kind="refused", text="no gain"),
    )
    assert [event.kind for event in history.events()] == [
        "refused",
        "published",
        "swapped",
        "swap_failed",
    ]
    assert [event.kind for event in history.events(2)] == ["swapped", "swap_failed"]
    assert history.events(2)[1].text == "replica-1 keeps v1, v2 was refused: missing tensor"


def test_rounds_and_swaps_are_listed() -> None:
    history = filled(ROUND, swap(1, 2, 1))
    assert history.rounds() == [ROUND]
    assert history.swaps() == [swap(1, 2, 1)]


def change(at: float, after: str, reason: str = "goodput") -> dict[str, object]:
    return {"at": START + at, "from": "off", "to": after, "batch": 8, "reason": reason}


def test_a_change_of_plan_is_kept_once_though_its_heartbeat_is_seen_again() -> None:
    history = History()
    first = status(
        speculation=REPORT | {"changes": [change(1, "draft 2", "probe"), change(2, "off")]}
    )
    other = status("replica-1", speculation=REPORT | {"changes": [change(1.5, "memory 8")]})
    for seen in ([first, other], [first, other], [first]):
        history.observe(seen, None)
    history.observe([status(speculation=REPORT | {"changes": [change(3, "draft 4")]})], None)
    history.observe([status(speculation=REPORT)], None)
    assert [(c.replica, c.new) for c in history.changes()] == [
        ("replica-0", "draft 2"),
        ("replica-1", "memory 8"),
        ("replica-0", "off"),
        ("replica-0", "draft 4"),
    ]
    (newest,) = history.changes(1)
    assert msgspec.to_builtins(newest) == change(3, "draft 4") | {"replica": "replica-0"}


def test_changes_of_plan_are_bounded() -> None:
    history = History()
    for at in range(3 * MAX_CHANGES):
        history.observe([status(speculation={"changes": [change(at, "draft 1")]})], None)
    kept = [c.at - START for c in history.changes(10 * MAX_CHANGES)]
    assert kept == list(range(2 * MAX_CHANGES, 3 * MAX_CHANGES))
    assert [c.at - START for c in history.changes()] == kept[-50:]


def test_prometheus_shows_the_control_of_speculation() -> None:
    history = History()
    history.observe([status(speculation=REPORT), status("replica-1")], None)
    found = samples(history)
    speculation = {
        name: value
        for name, value in found.items()
        if name[0].startswith(("osd_speculation", "osd_step"))
    }
    who = "replica=replica-0"
    assert speculation == {
        ("osd_speculation_steps_total", "plan=draft 3", who): 88,
        ("osd_speculation_steps_total", "plan=off", who): 12,
        ("osd_speculation_seconds_total", "plan=draft 3", who): 2.0,
        ("osd_speculation_seconds_total", "plan=off", who): 0.5,
        ("osd_speculation_tokens_total", "plan=draft 3", who): 1580,
        ("osd_speculation_tokens_total", "plan=off", who): 96,
        ("osd_step_seconds_total", "part=draft", who): 0.4,
        ("osd_step_seconds_total", "part=verify", who): 1.2,
        ("osd_step_seconds_total", "part=sample", who): 0.2,
        ("osd_step_seconds_total", "part=other", who): 0.2,
        ("osd_speculation_position_tested_total", "position=0", who): 88,
        ("osd_speculation_position_tested_total", "position=1", who): 70,
        ("osd_speculation_position_tested_total", "position=2", who): 49,
        ("osd_speculation_position_accepted_total", "position=0", who): 70,
        ("osd_speculation_position_accepted_total", "position=1", who): 49,
        ("osd_speculation_position_accepted_total", "position=2", who): 30,
        ("osd_speculation_context_tested_total", "context=<64", who): 200,
        ("osd_speculation_context_tested_total", "context=>=64", who): 7,
        ("osd_speculation_context_accepted_total", "context=<64", who): 149,
        ("osd_speculation_context_accepted_total", "context=>=64", who): 0,
        ("osd_speculation_probes_total", who): 2,
        ("osd_speculation_undrafted_requests_total", "reason=min_p", who): 4,
        ("osd_speculation_verified_tokens_total", "proposer=draft", who): 90,
        ("osd_speculation_verified_tokens_total", "proposer=memory", who): 40,
        ("osd_speculation_accepted_tokens_total", "proposer=draft", who): 60,
        ("osd_speculation_accepted_tokens_total", "proposer=memory", who): 30,
        ("osd_speculation_k", who): 3,
        ("osd_speculation_predicted_tokens_per_second", who): 812.5,
        ("osd_speculation_net_ratio", "bound=mean", who): 1.31,
        ("osd_speculation_net_ratio", "bound=low", who): 1.22,
        ("osd_speculation_net_ratio", "bound=high", who): 1.41,
    }
    types = dict(
        re.findall(r"^# TYPE (osd_(?:speculation|step)_\w+) (\w+)$", history.prometheus(), re.M)
    )
    assert {name: kind for name, kind in types.items() if kind != "counter"} == {
        "osd_speculation_k": "gauge",
        "osd_speculation_predicted_tokens_per_second": "gauge",
        "osd_speculation_net_ratio": "gauge",
    }
    assert set(types) == {series.name for series in SPECULATION}


def test_what_prometheus_reads_is_what_the_table_says() -> None:
    """Type, help text, order and labels of every metric; none besides."""
    history = filled(window(0.0), swap(1.0, 2, 1))
    for name in ("osd_round_total", "osd_round_rows_total", "osd_rollback_total"):
        history.add(MetricPoint(at=START, name=name, value=1))
    counts = {"capture_rows": {"a": 1}, "capture_skipped": {"a": 1}, "buffer_dropped": {"a": 1}}
    stats = BufferStats(num_traces=1, num_holdout=1, num_bytes=1, num_put=1, oldest_at=0)
    history.observe([status(speculation=REPORT, **counts)], stats)
    history.observe_health(
        Health(
            is_redis_up=True,
            is_trainer_up=True,
            is_alarmed=False,
            num_wanted=1,
            payback=Payback(taken_s=2.0, saved_s=30.0, within_s=600.0, slowdown=1.2),
        )
    )
    found = {family.name: family for family in text_string_to_metric_families(history.prometheus())}
    table = {series.name.removesuffix("_total"): series for series in SERIES.values()}
    assert found.keys() == table.keys()
    for name, family in found.items():
        series = table[name]
        assert (family.type, family.documentation) == (series.kind, series.text)
        assert family.samples, f"nothing is read for {name}"
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(series.labels), name


def test_prometheus_leaves_out_what_is_not_known_of_speculation() -> None:
    history = History()
    history.observe([status()], None)
    assert "osd_speculation" not in history.prometheus()
    unknown = {
        "net": {"ratio": 1.2, "low": None, "high": None, "windows": 1},
        "predicted_tokens_per_second": 0.0,
    }
    history.observe([status(speculation=REPORT | unknown)], None)
    found = {name for name in samples(history) if re.search("net_ratio|predicted", name[0])}
    assert found == {("osd_speculation_net_ratio", "bound=mean", "replica=replica-0")}
    history.observe([], None)
    assert "osd_speculation" not in history.prometheus(), "of the living alone"


def test_prometheus_counts_windows_by_domain_and_position() -> None:
    found = samples(filled(window(0.0), window(1.0, domain="code"), window(2.0, domain="code")))
    assert found["osd_spec_drafts_total", "domain=", "draft=default"] == 100
    assert found["osd_spec_drafts_total", "domain=code", "draft=default"] == 200
    assert found["osd_spec_draft_tokens_total", "domain=code", "draft=default"] == 400
    assert found["osd_spec_accepted_tokens_total", "domain=code", "draft=default"] == 240
    assert found["osd_spec_position_tested_total", "draft=default", "position=1"] == 240
    assert found["osd_spec_position_accepted_total", "draft=default", "position=0"] == 240


def test_prometheus_counts_output_tokens_by_who_brought_them() -> None:
    """All of them are served: what was accepted beyond a request's end is in none."""
    fields = {
        "num_accepted_tokens": 30,
        "num_cut_draft_tokens": 4,
        "num_memory_tokens": 50,
        "num_accepted_memory_tokens": 20,
        "num_cut_memory_tokens": 1,
    }
    found = samples(
        filled(
            window(0.0, domain="sql", num_output_tokens=100, **fields),
            window(1.0, domain="sql", num_output_tokens=10, num_accepted_tokens=0),
        )
    )
    name, *labels = "osd_spec_output_tokens_total", "domain=sql", "draft=default"
    assert {source: found[name, *labels, f"source={source}"] for source in SOURCES} == {
        "target": 65,
        "draft": 26,
        "memory": 19,
    }


def test_prometheus_shows_an_acceptance_of_nothing() -> None:
    found = samples(filled(window(0.0, num_accepted_tokens=0, num_accepted_tokens_per_pos=(0, 0))))
    assert found["osd_spec_accepted_tokens_total", "domain=", "draft=default"] == 0
    assert found["osd_spec_position_accepted_total", "draft=default", "position=0"] == 0


def test_prometheus_says_which_parts_work_once_the_controller_looked() -> None:
    history = History()
    names = (
        "osd_replicas",
        "osd_replicas_wanted",
        "osd_replica_lagging",
        "osd_redis_up",
        "osd_trainer_up",
        "osd_alarm",
    )

    def said() -> dict[tuple[str, ...], float]:
        return {name: value for name, value in samples(history).items() if name[0] in names}

    history.observe([status(), status("replica-1")], None)
    assert said() == {}, "nobody has looked"
    health = Health(
        is_redis_up=True, is_trainer_up=False, is_alarmed=True, lagging=("replica-1", "gone")
    )
    history.observe_health(health)
    assert said() == {
        ("osd_replicas",): 2,
        ("osd_replica_lagging", "replica=replica-0"): 0,
        ("osd_replica_lagging", "replica=replica-1"): 1,
        ("osd_redis_up",): 1,
        ("osd_trainer_up",): 0,
        ("osd_alarm",): 1,
    }
    history.observe([], None)
    history.observe_health(replace(health, is_redis_up=False))
    assert (said()["osd_replicas",], said()["osd_redis_up",], len(said())) == (0, 0, 4)
    history.observe_health(replace(health, num_wanted=3))
    assert said()["osd_replicas_wanted",] == 3


def test_prometheus_histogram_of_pauses() -> None:
    reports = [
        swap(1, 2, 1, pause_s=0.01),
        swap(2, 3, 2, pause_s=0.296),
        swap(3, 4, 3, ok=False, pause_s=9.0),
    ]
    found = samples(filled(*reports))
    assert found["osd_swap_total", "ok=true"] == 2
    assert found["osd_swap_total", "ok=false"] == 1
    assert found["osd_swap_pause_seconds_bucket", "le=0.005"] == 0
    assert found["osd_swap_pause_seconds_bucket", "le=0.01"] == 1
    assert found["osd_swap_pause_seconds_bucket", "le=+Inf"] == 2
    assert found["osd_swap_pause_seconds_count",] == 2
    assert math.isclose(found["osd_swap_pause_seconds_sum",], 0.306)


def test_prometheus_rounds_and_rollbacks_come_as_points() -> None:
    points = [
        MetricPoint(at=START, name="osd_round_total", value=1, labels={"outcome": outcome})
        for outcome in ("published", "refused", "refused")
    ]
    back = MetricPoint(
        at=START, name="osd_rollback_total", value=1, labels={"reason": "disappointed"}
    )
    rows = MetricPoint(
        at=START, name="osd_round_rows_total", value=40, labels={"kind": "trainable"}
    )
    history = filled(
        *points, back, rows, rows, MetricPoint(at=START, name="unknown_total", value=1)
    )
    found = samples(history)
    assert found["osd_round_rows_total", "kind=trainable"] == 80
    assert found["osd_round_total", "outcome=refused"] == 2
    assert found["osd_rollback_total", "reason=disappointed"] == 1
    assert history.total("osd_round_total") == 3
    assert "unknown_total" not in history.prometheus()


def test_prometheus_counters_of_replicas_never_fall() -> None:
    """Two replicas; one restarts, one goes and comes back, both are gone, and a heartbeat comes
    twice."""

    def seen(name: str, started_at: float, num: int) -> ReplicaStatus:
        counts = {
            "capture_rows": {"rejected": num},
            "capture_skipped": {"gap": num},
            "buffer_dropped": {"redis": num},
        }
        return status(name, started_at=START + started_at, num_traces=num, **counts)

    looks = [
        ([seen("a", 0, 100), seen("b", 0, 5)], 105),
        ([seen("a", 0, 130), seen("b", 0, 5)], 135),
        ([seen("a", 60, 1), seen("b", 0, 7)], 138),
        ([seen("a", 60, 2)], 139),
        ([], 139),
        ([seen("b", 0, 9), seen("a", 60, 2)], 141),
        ([seen("a", 60, 2), seen("b", 90, 0)], 141),
        ([seen("a", 120, 4), seen("b", 90, 3), seen("c", 0, 1)], 149),
    ]
    history, told = History(), []
    for replicas, _ in looks:
        history.observe(iter(replicas), None)
        told.append(samples(history))
    for name, label in (
        ("osd_capture_rows_total", "kind=rejected"),
        ("osd_capture_skipped_total", "reason=gap"),
        ("osd_buffer_dropped_total", "reason=redis"),
    ):
        assert [found[name, label] for found in told] == [total for _, total in looks], name
    assert [found["osd_capture_traces_total",] for found in told] == [total for _, total in looks]


def test_of_replicas_that_were_started_anew_for_weeks_the_sum_is_kept_and_not_each() -> None:
    history = History()
    for num in range(2000):
        lives = [status("a", started_at=float(num), num_traces=2, capture_rows={"rejected": 1})]
        history.observe([*lives, status("b", num_traces=num, buffer_dropped={"redis": 0})], None)
    found = samples(history)
    assert found["osd_capture_traces_total",] == 2 * 2000 + 1999
    assert found["osd_capture_rows_total", "kind=rejected"] == 2000
    assert found["osd_buffer_dropped_total", "reason=redis"] == 0
    assert len(history._totals._seen) == MOST_GONE + 3, "both that live, and all earlier ones"


def test_labels_that_came_over_many_lives_of_engines_are_bounded_and_none_is_lost() -> None:
    history = History()
    for number in range(MAX_DOMAINS + 50):
        history.add(window(float(number), domain=f"class {number}"))
    history.add(window(0.0))
    history.add(window(0.0, domain="class 0"))
    found = {
        labels: value
        for (name, *labels_), value in samples(history).items()
        if name == "osd_spec_drafts_total"
        for labels in [next(label for label in labels_ if label.startswith("domain="))]
    }
    assert len(found) == MAX_DOMAINS + 2
    assert found[f"domain={OTHER_CLASSES}"] == 50 * 100
    assert (found["domain=class 0"], found["domain="]) == (200, 100)


def test_prometheus_shows_what_lives_now_and_what_the_buffer_held_last() -> None:
    history = History()
    stats = BufferStats(
        num_traces=9,
        num_holdout=2,
        num_bytes=80,
        num_put=11,
        oldest_at=START,
        dropped={"schema": 3},
    )
    assert not [name for name in samples(history) if name[0].startswith("osd_buffer_")], (
        "nobody has looked"
    )
    history.observe(
        [status(buffer_dropped={"redis": 1, "schema": 4}), status("replica-1", version=2)], stats
    )
    history.observe([status("replica-1", version=3, draft="other")], None)
    found = samples(history)
    assert found["osd_buffer_dropped_total", "reason=redis"] == 1
    assert found["osd_buffer_dropped_total", "reason=schema"] == 7, (
        "of replicas and of the buffer's own"
    )
    assert (found["osd_buffer_traces",], found["osd_buffer_bytes",]) == (11, 80)
    assert {name: value for name, value in found.items() if name[0] == "osd_draft_info"} == {
        ("osd_draft_info", "draft=other", "replica=replica-1", "version=3"): 1
    }


def test_prometheus_names_every_promised_series() -> None:
    text = History().prometheus()
    promised = "spec_drafts spec_draft_tokens spec_accepted_tokens spec_position_tested "
    promised += "spec_position_accepted capture_rows capture_skipped buffer_dropped round swap "
    promised += "rollback"
    for name in promised.split():
        assert f"# TYPE osd_{name}_total counter" in text
    for line in ("osd_draft_info gauge", "osd_buffer_traces gauge", "osd_buffer_bytes gauge"):
        assert f"# TYPE {line}" in text
    assert "# TYPE osd_swap_pause_seconds histogram" in text


def test_threads_share_one_history() -> None:
    history = History()

    def write(replica: str) -> None:
        for at in range(500):
            history.add(window(at / 10, replica=replica))

    threads = [threading.Thread(target=write, args=(f"replica-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        history.series(0.0, 1.0)
        history.prometheus()
    for thread in threads:
        thread.join()
    assert (total := history.window()) is not None and total.num_drafts == 4 * 500 * 100


# -- lines of classes, replicas and positions -----------------------------------------------------


def line(history: History, by: str, bucket_s: float = 1.0) -> dict[str, list[float | None]]:
    return {
        name: values["alpha"]
        for name, values in history.series(START, bucket_s, by)["lines"].items()
    }


def poor(at: float, **fields: object) -> SpecWindow:
    """100 drafts of which 20 have their first token accepted, and no second."""
    return window(
        at,
        num_accepted_tokens=20,
        num_accepted_tokens_per_pos=(20, 0),
        num_tested_per_pos=(100, 20),
        **fields,
    )


def test_each_class_has_a_line_of_its_own() -> None:
    history = filled(
        window(0.0, domain="sql"), poor(0.0, domain="chat"), window(6.0), poor(6.0, domain="sql")
    )
    assert line(history, "class", 5.0) == {
        "sql": [0.666667, 0.166667],
        "chat": [0.166667, None],
        UNLABELLED: [None, 0.666667],
    }


def test_each_replica_and_each_position_has_a_line() -> None:
    history = filled(window(0.0), poor(0.0, replica="replica-1"), window(1.0))
    assert line(history, "replica") == {"replica-0": [0.666667] * 2, "replica-1": [0.166667, None]}
    assert line(history, "position") == {"1": [100 / 200, 0.8], "2": [40 / 100, 0.5]}


def test_lines_have_a_value_for_each_row() -> None:
    history = filled(window(0.0, domain="sql"), window(100.0, domain="sql"))
    columns = history.series(START, 7.0, "class")
    assert columns["at"][0] <= START < columns["at"][1]
    assert [
        at
        for at, alpha in zip(columns["at"], columns["lines"]["sql"]["alpha"], strict=True)
        if alpha
    ] == [columns["at"][0], columns["at"][-1]]


def test_labels_of_clients_make_no_endless_number_of_lines() -> None:
    history = filled(*(window(0.1 * i, domain=f"class {i}", num_finished=1) for i in range(50)))
    names = line(history, "class")
    assert len(names) == MAX_CLASSES + 1 <= MAX_LINES and OTHER_CLASSES in names
    history = filled(*(window(0.0, replica=f"replica-{i}") for i in range(50)))
    assert len(line(history, "replica")) == MAX_LINES


def test_the_first_classes_to_come_have_lines_and_the_others_share_one() -> None:
    first = [f"class {i}" for i in range(MAX_CLASSES)]
    history = filled(
        *(window(0.0, domain=name) for name in first),
        poor(0.0, domain="late"),
        poor(0.0, domain="later"),
    )
    history.add(window(0.0))
    history.add(poor(0.0, domain="class 0"))
    found = line(history, "class", 5.0)
    assert set(found) == {*first, OTHER_CLASSES, UNLABELLED}
    assert found[OTHER_CLASSES] == [round(40 / 240, 6)] and found["class 0"] == [
        round(140 / 300, 6)
    ]
    assert found[UNLABELLED] == [0.666667], "is not counted among them"


def test_a_class_that_is_gone_from_the_history_makes_room_for_one_that_comes() -> None:
    history = History(history_seconds=3600.0)
    for number in range(MAX_CLASSES):
        history.add(window(0.0, domain=f"class {number}"))
    for at, shown in ((1800.0, OTHER_CLASSES), (6000.0, "new")):
        history.add(window(at, domain="class 0"))
        history.add(window(at, domain="new"))
        assert set(line(history, "class", 600.0)) >= {"class 0", shown}
    assert set(line(history, "class", 600.0)) == {"class 0", "new"}


def test_classes_of_the_file_are_known_again_and_what_they_shared_is_none(path: Path) -> None:
    known = [f"class {i}" for i in range(MAX_CLASSES - 1)]
    counts = Counters(num_tested_per_pos=[4], num_accepted_tokens_per_pos=[1])
    HistoryFile(path).write(
        [("class", (NOW, name), counts) for name in (OTHER_CLASSES, *known)], [], oldest=0.0
    )
    history = History(7 * 86400, HistoryFile(path))
    for name in ("eighth", "ninth", "class 0"):
        history.add(recent(3600.0, domain=name))
    names = set(history.series(NOW, 60.0, "class")["lines"])
    assert names == {*known, OTHER_CLASSES, "eighth"}


# -- speculation over time ------------------------------------------------------------------------


def working(
    at: float, seconds: float, ratio: float | None, name: str = "replica-0"
) -> ReplicaStatus:
    net = {"ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1} if ratio else {}
    report = REPORT | {"net": net, "split": {"draft": 0.25 * seconds, "verify": 0.75 * seconds}}
    return status(name, at=START + at, speculation=report)


def test_the_measured_gain_and_the_parts_of_a_step_are_columns() -> None:
    history = filled(*(window(float(at)) for at in range(0, 50, 10)))
    history.observe([working(0, 100.0, 1.5)], None)
    assert history.series(START, 10.0)["net_ratio"] == [None] * 5, (
        "what was before this process is not a span"
    )
    history.observe([working(10, 104.0, 1.6)], None)
    history.observe([working(10, 104.0, 1.6)], None)
    history.observe([working(20, 108.0, None), working(20, 1.0, 1.0, "replica-1")], None)
    history.observe([working(30, 109.0, 2.0), working(30, 9.0, 1.0, "replica-1")], None)
    columns = history.series(START, 10.0)
    assert columns["net_ratio"] == [None, 1.6, None, 1.5, None]
    assert columns["share_draft"] == pytest.approx([None, 0.25, 0.25, 0.25, None])
    assert columns["net_low"][1] == pytest.approx(1.5) and columns["net_high"][1] == pytest.approx(
        1.7
    )


def test_a_restarted_replica_counts_from_nothing() -> None:
    history = filled(*(window(float(at)) for at in range(0, 40, 10)))
    history.observe([working(0, 100.0, 1.5)], None)
    history.observe([working(10, 104.0, 1.6)], None)
    again = [
        replace(working(at, seconds, 1.2), started_at=START + 15)
        for at, seconds in ((20, 204.0), (30, 212.0))
    ]
    for seen in again:
        history.observe([seen], None)
    columns = history.series(START, 10.0)
    assert columns["net_ratio"] == [None, 1.6, None, 1.2], "its first heartbeat is no span"
    assert columns["share_verify"] == pytest.approx([None, 0.75, None, 0.75])


@pytest.mark.parametrize("wrong_by", [0.0, -5400.0, 5400.0])
def test_what_a_replica_measured_stands_beside_its_windows_whatever_its_clock(
    wrong_by: float,
) -> None:
    """Those have the times at which they came."""
    history = filled(*(window(float(at)) for at in range(0, 50, 10)))
    for at, seconds in ((0, 100.0), (10, 104.0), (20, 108.0)):
        seen = working(at + wrong_by, seconds, 1.6)
        for later in (0.2, 1.2):
            history.observe([seen], None, now=START + at + later)
    assert history.series(START, 10.0)["net_ratio"] == [None, 1.6, 1.6, None, None]
    assert len(history.series(START - 7200, 10.0)["at"]) == 5


# -- bounds and clocks ----------------------------------------------------------------------------


def test_of_engines_that_were_started_anew_for_weeks_the_newest_are_known() -> None:
    """Each under a name of its own, as on Kubernetes."""
    history = History()
    for number in range(3 * MOST_GONE):
        name = f"pod-{number}"
        changes = [change(number, "draft 2")]
        seen = status(name, started_at=START + number, speculation=REPORT | {"changes": changes})
        history.add(window(number, replica=name))
        history.observe([seen], None)
        history.observe([seen], None)
    assert len(history.changes()) == 50, "each change once"
    assert (whole := history.window()) is not None and whole.at == START + 3 * MOST_GONE - 1
    known = history._ends, history._seconds_per_part, history._happened._changed_at
    assert [len(of) for of in known] == [MOST_GONE + 1] * 3


def test_what_is_listed_is_bounded_and_the_newest_stays() -> None:
    history = History()
    for at in range(MAX_LISTED + 10):
        history.add(Event(at=START + at, kind="kept", text=""))
    assert [event.at - START for event in history.events(2 * MAX_LISTED)] == list(
        range(10, MAX_LISTED + 10)
    )
    assert [event.at - START for event in history.events()] == list(
        range(MAX_LISTED - 90, MAX_LISTED + 10)
    )
    for at in range(MAX_LISTED + 10):
        history.add(swap(float(at), 2, 1))
    assert [report.at - START for report in history.swaps()] == list(range(10, MAX_LISTED + 10))
    for number in range(MAX_LISTED + 1):
        history.add(replace(ROUND, base_version=number))
    assert [outcome.base_version for outcome in history.rounds()] == list(range(1, MAX_LISTED + 1))
    assert (MAX_LISTED, MAX_CHANGES, MAX_CLASSES) == (2000, 200, 8), (
        "what memory and the page are laid out for"
    )


def test_nothing_older_than_the_history_is_kept_of_any_kind() -> None:
    history = History(history_seconds=600.0)
    history.observe([working(0, 1.0, 1.5)], None)
    history.observe([working(5, 2.0, 1.5)], None)
    history.add(window(0.0, domain="old"))
    history.add(window(599.0, domain="new"))
    assert set(line(history, "class", 5.0)) == {"old", "new"}
    assert history.series(START, 5.0)["net_ratio"][1] is None
    assert history.series(START, 10.0)["net_ratio"][0] == 1.5
    history.add(window(620.0, domain="new"))
    assert set(line(history, "class", 5.0)) == {"new"}
    assert history.series(0.0, 1.0)["at"][0] == START + 599
    history.add(window(5.0, domain="new"))
    found = history.series(START, 10.0)
    assert found["at"][0] == START and found["net_ratio"][0] is None


def test_a_clock_that_was_set_back_counts_on(path: Path) -> None:
    history = kept_in(path, recent(0.0), recent(1000.0), now=NOW + 2000)
    told = [recent(500.0), recent(501.0)]
    for record in told:
        history.add(record)
    assert [n for n in history.series(NOW + 400, 60.0)["requests"] if n] == [4, 2]
    assert (whole := history.window()) is not None and whole.num_drafts == 400
    history.save(NOW + 520)
    assert drafts_of_minutes(path) == {0.0: 100, 960.0: 100}
    history.save(NOW + 590)
    assert drafts_of_minutes(path) == {0.0: 100, 480.0: 200, 960.0: 100}, (
        "long before the time is reached at which the clock was"
    )
    history.add(recent(970.0))
    history.save(NOW + 2100)
    assert drafts_of_minutes(path) == {0.0: 100, 480.0: 200, 960.0: 200}, (
        "a minute that came twice has all that was counted in it"
    )


def drafts_of_minutes(path: Path) -> dict[float, int]:
    return {
        key[0] - NOW: value.num_drafts
        for kind, key, value in HistoryFile(path).minutes(0.0)
        if kind == "class"
    }


def test_a_file_that_is_ahead_of_a_clock_that_was_set_back_hides_nothing_new(path: Path) -> None:
    ahead = 7200.0
    kept_in(path, recent(0.0), recent(ahead), now=NOW + ahead + 200)
    after = History(7 * 86400, HistoryFile(path))
    at = math.ceil(time.time() - NOW) + 1.0
    after.add(recent(ahead + 60))  # told again by the feed
    after.add(recent(at))
    assert (now := after.window(since=NOW + at, until=NOW + at)) is not None
    assert now.num_drafts == 100
    after.save(NOW + at + 200)
    assert drafts_of_minutes(path)[math.floor(at / 60) * 60.0] == 100


def test_what_a_clock_counted_that_was_ahead_makes_no_rows_until_then() -> None:
    ahead = filled(recent(86_400.0), recent(-30.0), recent(0.0))
    at = ahead.series(NOW - 60, 1.0)["at"]
    assert (at[0], len(at)) == (NOW - 30, 31)


def test_a_window_of_a_version_until_a_time() -> None:
    history = filled(window(0.0), window(5.0), window(5.5), window(10.0))
    assert (found := history.window(until=START + 5)) is not None and found.num_drafts == 300
    assert (found.at, found.num_drafts) == (START + 10, 300)
    assert history.window(since=START + 6, until=START + 9) is None


# -- the file -------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history.db"


def kept_in(path: Path, *records: object, now: float | None = None) -> History:
    """A history that took the records, after it was saved."""
    history = History(7 * 86400, HistoryFile(path))
    for record in records:
        history.add(record)  # type: ignore[arg-type]
    history.save(now)
    return history


def recent(at: float, **fields: object) -> SpecWindow:
    return replace(window(at, **fields), at=NOW + at)


NOW = math.floor(time.time() / 60) * 60.0 - 3600
"""An hour ago, on a minute: the file forgets by the clock."""


def test_history_is_found_again_when_the_feed_is_gone(path: Path) -> None:
    old = [recent(10.0 * i, domain="sql", num_steps=10) for i in range(60)]
    before = kept_in(
        path, *old, swap(1, 2, 1), Event(at=START, kind="published", text="v2", version=2)
    )
    after = History(7 * 86400, HistoryFile(path))
    assert after.events() == before.events()
    assert after.swaps() == before.swaps()
    assert after.marks() == before.marks()
    assert after.series(NOW, 60.0, "class") == before.series(NOW, 60.0, "class")
    assert (then := before.window()) is not None and (now := after.window()) is not None
    assert (now.num_drafts, now.num_tested_per_pos, now.num_steps) == (
        6000,
        then.num_tested_per_pos,
        600,
    )
    after.add(recent(601.0))
    assert (now := after.window()) is not None and now.num_drafts == 6100


@pytest.mark.parametrize("first", [0, 1, 7, 17, 59])
def test_what_the_feed_tells_again_is_counted_once(path: Path, first: int) -> None:
    told = [recent(10.0 * i, domain="sql") for i in range(60)]
    event = Event(at=START, kind="published", text="v2", version=2)
    before = kept_in(path, *told, event, swap(1, 2, 1))
    after = History(7 * 86400, HistoryFile(path))
    for record in [*told[first:], event, swap(1, 2, 1), event]:
        after.add(record)
    assert after.series(NOW, 60.0, "class") == before.series(NOW, 60.0, "class")
    assert len(after.events()) == len(before.events()) == 2
    after.save()
    assert History(7 * 86400, HistoryFile(path)).series(NOW, 60.0) == before.series(NOW, 60.0)


class Sheet(HistoryFile):
    """A file that is a list of what it was asked to write."""

    def __init__(self) -> None:
        self.written: list[tuple[list[tuple[str, float]], list[object], float]] = []

    def minutes(self, since: float) -> list[Minute]:
        return []

    def events(self) -> list[Event | SwapReport]:
        return []

    def write(
        self, minutes: Iterable[Minute], events: Iterable[Event | SwapReport], oldest: float
    ) -> None:
        self.written.append(
            ([(kind, key[0] - NOW) for kind, key, _ in minutes], list(events), oldest - NOW)
        )


def test_an_event_that_comes_while_the_file_is_written_is_written_next() -> None:
    class Busy(Sheet):
        def write(
            self, minutes: Iterable[Minute], events: Iterable[Event | SwapReport], oldest: float
        ) -> None:
            super().write(minutes, events, oldest)
            if len(self.written) == 1:
                history.add(later)

    first, later = (Event(at=NOW + i, kind="published", text=f"v{i}", version=i) for i in (2, 3))
    history = History(1000.0, sheet := Busy())
    history.add(first)
    history.save(NOW + 10)
    history.save(NOW + 20)
    assert [events for _, events, _ in sheet.written] == [[first], [later]]


def test_a_late_window_is_in_its_minute_and_each_minute_and_event_is_written_once() -> None:
    """Windows come up to 45 seconds late: a minute is written when nothing more is expected of
    it."""
    history = History(1000.0, sheet := Sheet())
    history.add(recent(58.0))
    history.add(event := Event(at=NOW, kind="published", text="v2", version=2))
    history.save(NOW + 104.5)
    assert sheet.written.pop() == ([], [event], -895.5)
    history.add(recent(61.0))
    history.add(recent(59.0, replica="replica-1"))
    history.save(NOW + 105)
    (minutes, events, _) = sheet.written.pop()
    assert sorted(minutes) == [("class", 0.0), ("replica", 0.0), ("replica", 0.0)] and events == []
    history.add(report := swap(62.0, 3, 2))
    history.save(NOW + 164)
    history.save(NOW + 165)
    assert sheet.written == [
        ([], [report], -836.0),
        ([("replica", 60.0), ("class", 60.0)], [], -835.0),
    ]


def minutes_in(path: Path) -> dict[tuple[str, float], int]:
    """(kind, seconds after NOW) -> drafts in the file"""
    return {
        (kind, key[0] - NOW): value.num_drafts
        for kind, key, value in HistoryFile(path).minutes(0.0)
        if kind != "speculation"
    }


def test_what_came_late_since_redis_was_away_is_in_the_file_too(path: Path) -> None:
    history = kept_in(path, recent(0.0), recent(600.0), now=NOW + 900)
    for at in (10.0, 300.0, 310.0, 901.0):
        history.add(recent(at))
    history.save(NOW + 930)
    expected = {0.0: 200, 300.0: 200, 600.0: 100}
    assert minutes_in(path) == {
        (k, at): n for k in ("replica", "class") for at, n in expected.items()
    }
    assert History(7 * 86400, HistoryFile(path)).served(1) == (5 * 180, 5 * 120)


def test_what_the_feed_tells_again_in_part_takes_nothing_from_the_file(path: Path) -> None:
    """Its first window came late: of the minutes after it the feed has no longer all."""
    before = kept_in(path, *(recent(10.0 * i) for i in range(60)))
    after = History(7 * 86400, HistoryFile(path))
    for at in (120.0, 590.0, 1000.0):
        after.add(recent(at))
    after.save()
    kept = HistoryFile(path).minutes(0.0)
    assert sum(value.num_drafts for kind, _, value in kept if kind == "replica") == 6100
    assert before.served(1) == (60 * 180, 60 * 120)


def test_what_came_late_is_not_lost_on_a_disk_that_refuses(path: Path) -> None:
    history = kept_in(path, recent(0.0), recent(600.0), now=NOW + 900)
    history.add(recent(10.0))
    history.add(recent(840.0))
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("begin immediate")
    with pytest.raises(sqlite3.OperationalError):
        history.save(NOW + 960)
    blocker.execute("rollback")
    history.save(NOW + 970)
    assert minutes_in(path)["replica", 0.0] == 200
    assert minutes_in(path)["replica", 840.0] == 100


def test_all_kinds_of_minutes_come_back_as_they_were(path: Path) -> None:
    before = History(7 * 86400, HistoryFile(path))
    for at in (0.0, 20.0, 70.0):
        before.observe([replace(working(0, 100.0 + at, 1.5), at=NOW + at)], None)
        before.add(recent(at, domain="sql", num_steps=7, num_captured=1, version=1 + int(at)))
    before.save()
    after = History(7 * 86400, HistoryFile(path))
    for by in ("class", "replica", "position"):
        assert after.series(NOW, 60.0, by) == before.series(NOW, 60.0, by)
    assert after.series(NOW, 60.0)["net_ratio"] == [1.5, 1.5]
    kept = {
        (kind, *key[1:]): value
        for kind, key, value in HistoryFile(path).minutes(NOW)
        if key[0] == NOW
    }
    assert kept["speculation", "replica-0"].seconds_per_part == {"draft": 5.0, "verify": 15.0}
    (later,) = (
        value for kind, key, value in HistoryFile(path).minutes(NOW + 60) if kind == "speculation"
    )
    assert later.seconds_per_part == {"draft": 12.5, "verify": 37.5}, "since the heartbeat before"
    expected = recent(0.0, num_steps=7, num_captured=1, seconds=0.25)
    assert kept["replica", "replica-0", 1, 2] == expected.counters
    assert HistoryFile(path).minutes(NOW + 61) == []
    assert [after.served(version) for version in (1, 21, 71, 2)] == [(180, 120)] * 3 + [(0, 0)]


def test_what_the_feed_tells_anew_takes_the_place_of_what_the_file_had(path: Path) -> None:
    told = [recent(10.0 * i, domain="sql") for i in range(60)]
    kept_in(path, *told)
    since_then = replace(poor(0.0, domain="sql"), at=NOW + 595)
    after, whole = History(7 * 86400, HistoryFile(path)), History(7 * 86400)
    for history, records in ((after, told[7:]), (whole, told)):
        for record in [*records, since_then]:
            history.add(record)
    assert after.series(NOW, 60.0, "class") == whole.series(NOW, 60.0, "class")


def test_a_shorter_history_takes_no_more_of_the_file_than_it_keeps(path: Path) -> None:
    kept_in(path, recent(0.0, version=1), recent(1800.0, version=2))
    after = History(2700.0, HistoryFile(path))
    assert [after.served(version) for version in (1, 2)] == [(0, 0), (180, 120)]
    assert after.series(0.0, 60.0)["version"] == [2]


def test_what_a_draft_served_is_counted_once_between_feed_and_file(path: Path) -> None:
    told = [recent(10.0 * i, version=1 + i // 12) for i in range(24)]
    before = kept_in(path, *told)
    after = History(7 * 86400, HistoryFile(path))
    for again in told[9:]:
        after.add(again)
    for history in (before, after):
        assert [history.served(version) for version in (1, 2)] == [(12 * 180, 12 * 120)] * 2


def test_what_a_replica_added_up_is_spread_over_the_time_it_took() -> None:
    """Whole numbers stay whole, and none is lost."""
    history = History()
    counts = msgspec.structs.replace(recent(0.0).counters, seconds=20.0, num_drafts=45)
    window = SpecWindow.of(counts, at=NOW + 100, replica="replica-0", version=1, k=2)
    history.add(window)
    slots = [history.window(since=NOW + i, until=NOW + i + 0.5) for i in range(70, 110)]
    found = [slot for slot in slots if slot is not None]
    assert [slot.seconds for slot in found] == [1.0] * 20
    assert sum(slot.num_drafts for slot in found) == 45
    assert {slot.num_drafts for slot in found} == {2, 3}
    whole = history.window()
    assert whole is not None
    assert msgspec.structs.replace(whole.counters, decode_seconds=1.0) == window.counters
    speeds = [speed for speed in history.series(NOW + 79, 1.0)["tokens_per_second"] if speed]
    assert len(speeds) == 20 and max(speeds) - min(speeds) <= 1


def test_sums_of_many_seconds_are_counted_once_between_feed_and_file(path: Path) -> None:
    """Also where one began before the feed did, or lies across the end of the file."""

    def told(at: float, replica: str) -> SpecWindow:
        counts = msgspec.structs.replace(recent(0.0).counters, seconds=20.0)
        return SpecWindow.of(counts, at=NOW + at, replica=replica, version=1, k=2)

    windows = [told(20.0 * i + j, f"replica-{j}") for i in range(1, 16) for j in range(3)]
    before = kept_in(path, *windows, now=NOW + 300)
    assert before.served(1) == (45 * 180, 45 * 120)
    after = History(7 * 86400, HistoryFile(path))
    for window in windows[12:]:
        after.add(window)
    assert after.served(1) == before.served(1)
    whole = after.window(version=1)
    assert whole is not None
    assert sum(whole.num_tested_per_pos) == 45 * 180


def test_a_window_without_end_is_one_part() -> None:
    history = History()
    counts = msgspec.structs.replace(recent(0.0).counters, seconds=math.inf)
    history.add(SpecWindow.of(counts, at=NOW, replica="replica-0", version=1, k=2))
    assert history.served(1) == (180, 120)


def test_a_minute_is_kept_once_it_is_over(path: Path) -> None:
    history = kept_in(path, recent(0.0), recent(59.0), recent(60.0), now=NOW + 60 + 50)
    assert [key[0] for kind, key, _ in HistoryFile(path).minutes(0.0) if kind == "replica"] == [NOW]
    history.add(recent(61.0))
    history.save(NOW + 200)
    minutes = {
        key[0]: value for kind, key, value in HistoryFile(path).minutes(0.0) if kind == "replica"
    }
    assert {start: value.num_drafts for start, value in minutes.items()} == {
        NOW: 200,
        NOW + 60: 200,
    }


def test_the_file_forgets_and_says_what_a_day_costs(path: Path) -> None:
    file = HistoryFile(path)
    values: list[Any] = [1.0, *[123_456] * 8, 61.25, [9999] * 5, [99999] * 5, *[123_456] * 4]
    day = [("replica", (NOW + 60 * i, "replica-0", 3, 5), Counters(*values)) for i in range(1440)]
    file.write(day, [], oldest=0.0)
    size = path.stat().st_size + path.with_name("history.db-wal").stat().st_size
    file.close()
    day_bytes = path.stat().st_size
    print(f"a day of one replica's minutes takes {day_bytes} bytes in the file")
    assert day_bytes < 400_000 and size < 2 * day_bytes + 100_000
    file = HistoryFile(path)
    events = [Event(at=START + i, kind="published", text=f"v{i}") for i in range(2100)]
    file.write([], events, oldest=NOW + 1000 * 60)
    assert len(file.minutes(0.0)) == 440
    assert [event.at - START for event in file.events()] == [float(i) for i in range(100, 2100)]


def test_nobody_else_reads_the_file(path: Path) -> None:
    kept_in(path, recent(0.0))
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}


def test_a_file_that_is_none_is_put_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database at all " * 400)
    kept_in(path, recent(0.0))
    assert "cannot be read" in caplog.text and len(caplog.records) == 1
    assert [key[0] for _, key, _ in HistoryFile(path).minutes(0.0)] == [NOW, NOW]
    aside = [file for file in path.parent.iterdir() if "unreadable" in file.name]
    assert len(aside) == 1 and aside[0].read_bytes().startswith(b"no database")


def test_a_file_of_another_kind_is_put_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as other:
        other.execute("create table minutes (at real, acceptance real)")
    kept_in(path, recent(0.0))
    assert "its table minutes has columns at, acceptance" in caplog.text
    assert len(HistoryFile(path).minutes(0.0)) == 2
    (aside,) = [file for file in path.parent.iterdir() if "unreadable" in file.name]
    with closing(sqlite3.connect(aside)) as kept:
        assert kept.execute("select at, acceptance from minutes").fetchall() == []


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 0x00), (18, 3), (19, 3), (47, 5), (47, 0x84)],
    ids=["name", "version to write", "version to read", "format", "a flipped bit"],
)
def test_a_file_with_a_damaged_header_is_put_aside_and_a_new_one_begun(
    at: int, value: int, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A header that says a newer version wrote the file lets it be read, and never written."""
    HistoryFile(path).close()
    damaged = bytearray(path.read_bytes())
    damaged[at] = value
    path.write_bytes(damaged)
    kept_in(path, recent(60.0))
    assert "cannot be read" in caplog.text and len(caplog.records) == 1
    assert {key[0] for _, key, _ in HistoryFile(path).minutes(0.0)} == {NOW + 60.0}
    (aside,) = [file for file in path.parent.iterdir() if "unreadable" in file.name]
    assert aside.read_bytes() == damaged


@pytest.mark.parametrize(
    "damage",
    [
        "update minutes set labels = cast(x'5bff' as text) where kind = 'class'",
        "update minutes set labels = '[\"r\"]' where kind = 'replica'",
        "update minutes set start = 'now' where kind = 'class'",
        "update minutes set kind = cast(x'ff' as text) where kind = 'class'",
        "update minutes set value = cast(x'22f022' as blob) where kind = 'class'",
        "update events set type = cast(x'ff' as text)",
        "update events set record = null",
    ],
)
def test_of_a_damaged_file_the_rest_is_read(path: Path, damage: str) -> None:
    kept_in(path, recent(0.0), Event(at=NOW, kind="note", text="hello"))
    with closing(sqlite3.connect(path)) as file:
        file.execute(damage)
        file.commit()
    after = History(7 * 86400, HistoryFile(path))
    num_minutes, num_events = len(HistoryFile(path).minutes(0.0)), len(after.events())
    assert (num_minutes, num_events) == ((2, 0) if "events" in damage else (1, 1))


def test_a_file_that_another_holds_is_not_put_aside(path: Path) -> None:
    """It is whole, and refuses only for now."""
    path.parent.mkdir()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("create table mine (x)")
    holder.execute("begin exclusive")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        HistoryFile(path)
    holder.execute("rollback")
    assert holder.execute("select count(*) from mine").fetchone() == (0,)
    assert not [file for file in path.parent.iterdir() if "unreadable" in file.name]
    holder.close()


def test_minutes_come_oldest_first_as_they_were_written_last(path: Path) -> None:
    file = HistoryFile(path)
    file.write(
        [
            ("replica", (NOW + 60, "r", 1, 2), Counters(1.0)),
            ("class", (NOW + 120, "sql"), Counters(2.0)),
        ],
        [],
        0.0,
    )
    file.write(
        [("replica", (NOW + 60, "r", 1, 2), Counters(3.0)), ("class", (NOW, "sql"), Counters(4.0))],
        [],
        0.0,
    )
    assert [(key[0] - NOW, value.seconds) for _, key, value in file.minutes(0.0)] == [
        (0, 4.0),
        (60, 3.0),
        (120, 2.0),
    ]


def test_rows_of_another_version_are_passed_over(path: Path) -> None:
    file = HistoryFile(path)
    file.write([("replica", (NOW, "replica-0", 1, 2), Counters(num_drafts=3))], [], oldest=0.0)
    with sqlite3.connect(path) as db:
        db.execute("insert into minutes values ('weather', ?, '[]', '{}')", (NOW,))
        db.execute("insert into minutes values ('class', ?, '[\"sql\"]', '[\"many\"]')", (NOW,))
        db.execute("insert into events values (1.0, 'Haiku', '{}')")
        db.execute("insert into events values (1.0, 'Event', 'nonsense')")
    assert [key for _, key, _ in file.minutes(0.0)] == [(NOW, "replica-0", 1, 2)]
    assert file.events() == []


def test_a_disk_that_refuses_loses_nothing(path: Path) -> None:
    history = kept_in(path, recent(0.0), now=NOW)
    history.add(Event(at=START, kind="published", text="v2"))
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("begin immediate")
    with pytest.raises(sqlite3.OperationalError):
        history.save()
    blocker.execute("rollback")
    history.save()
    file = HistoryFile(path)
    assert len(file.events()) == 1 and len(file.minutes(0.0)) == 2


def test_long_spans_are_drawn_from_long_slots_and_say_the_same(path: Path) -> None:
    history = History(7 * 86400, HistoryFile(path))
    began = NOW - 4 * 7200
    for i in range(0, 4 * 7200, 60):
        history.add(recent(began - NOW + i, domain="sql" if i % 120 else "chat", num_steps=10))
    fine, coarse = history.series(began, 60.0, "class"), history.series(began, 1200.0, "class")
    assert sum(coarse["requests"]) == sum(fine["requests"]) == 2 * 4 * 7200 / 60
    assert sum(coarse["tested"]) == sum(fine["tested"])
    assert set(coarse["k"]) == {20.0} and set(coarse["lines"]) == {"sql", "chat"}
    history.save(NOW + 7200)
    kept = History(7 * 86400, HistoryFile(path))
    assert kept.series(began, 1200.0)["tested"][:-1] == coarse["tested"][:-1]
    kept.add(recent(0.0))
    assert sum(kept.series(began, 1200.0)["tested"]) == pytest.approx(
        sum(kept.series(began, 60.0)["tested"])
    )


def test_a_feed_that_counts_down_stops_nothing() -> None:
    history = History()
    history.add(MetricPoint(at=START, name="osd_round_total", value=-1, labels={"outcome": "x"}))
    assert history.total("osd_round_total") == 0


def test_positions_of_unequal_number_are_shown_as_far_as_they_go() -> None:
    report = REPORT | {"tested_per_position": [88, 70], "accepted_per_position": [70]}
    figures = speculation_figures(status(speculation=report).speculation)
    assert figures is not None and figures.positions == [(88, 70)]
