"""`osd bench fleet` on rows by hand, and whether its simulated replicas write what real ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fleet
from benchmarks.fleet import records, report
from benchmarks.record import Options
from osd.records import SpeculationReport, WorkerReport, decode, encode

PLAN = fleet.protocol(Options(directory=Path("unused")))
WINDOWS_PER_SECOND = 0.9
CPU_PER_TRACE, MAIN_CPU_PER_TRACE, BYTES_PER_TRACE = 200e-6, 150e-6, 35_000


def rows(num: int, controller_later: float = 0.2) -> list[dict[str, Any]]:
    """Of a fleet whose costs grow with its replicas, in two spans each."""
    found: list[dict[str, Any]] = []
    seconds, num_traces = 10.0, 2000
    for i in range(2):
        usual = {"group": report.title(num), "num_replicas": num, "span": i, "seconds": seconds}
        usual |= {
            "controller_cpu_s": 0.001 * num * seconds,
            "look_seconds": [0.01, 0.02, 0.03],
            "num_polls": 4 * num * seconds,
            "num_heartbeats": num * seconds,
            "num_records": WINDOWS_PER_SECOND * num * seconds,
            "num_traces": 0,
            "stored": {
                "feed_bytes": 500 * 1000,
                "feed_records": 1000,
                "traces_bytes": 36_000 * 64,
                "traces_stored": 64,
            },
        }
        for arm, traces in ((report.QUIET, 0), (report.REST, 0), (report.TRACES, num_traces)):
            share = 0.002 * num if arm == report.QUIET else 0.01
            spent = {
                "redis_cpu_s": share * seconds + traces * CPU_PER_TRACE,
                "redis_main_cpu_s": share * seconds + traces * MAIN_CPU_PER_TRACE,
                "bytes_in": 1e5 * seconds + traces * BYTES_PER_TRACE,
            }
            found.append(usual | spent | {"arm": arm, "num_traces": traces})
        later = {"controller_cpu_s": controller_later * seconds, "history_bytes": 3e8}
        found.append(usual | later | {"arm": report.HISTORY, "look_seconds": []})
        last = {"arm": report.FAN_OUT, "seconds": [0.1, 0.2, 0.3 + i]}
        found.append({"group": report.title(num), "num_replicas": num, "span": i} | last)
    return found


def test_each_fleet_has_its_figures() -> None:
    result = fleet.summarise(PLAN, [*rows(16), *rows(256)])
    found = {(figure.group, figure.name): figure.value for figure in result.figures}
    json.dumps(result.as_dict(), allow_nan=False)
    small, large, more = "16 replicas", "256 replicas", "10,000 requests/s"
    assert found[small, report.REDIS] == pytest.approx(0.032)
    assert found[large, report.REDIS] == pytest.approx(0.512)
    assert found[large, report.CONTROLLER] == pytest.approx(0.256)
    assert found[large, f"{report.LOOK}, median"] == pytest.approx(20)
    assert found[large, f"{report.LOOK}, p95"] == pytest.approx(30)
    assert found[large, report.CONTROLLER_LATER] == pytest.approx(0.2)
    assert found[large, report.HISTORY_MEMORY] == pytest.approx(300)
    assert found[small, report.POLLS] == pytest.approx(4)
    assert found[small, report.HEARTBEATS] == pytest.approx(1)
    assert found[large, report.MEDIAN] == pytest.approx(0.2)
    assert found[large, report.LAST] == pytest.approx(1.3)
    assert found[small, report.HOLDS] == pytest.approx(50_000 / (16 * 0.9))
    assert found[large, report.HOLDS] == pytest.approx(50_000 / (256 * 0.9))
    assert found[large, report.FEED_MEMORY] == pytest.approx(25)
    for group in (small, large):
        assert found[group, report.TRACE_CPU] == pytest.approx(200)
        assert found[group, report.TRACE_MAIN_CPU] == pytest.approx(150)
        assert found[group, report.TRACE_WIRE] == pytest.approx(35_000)
        assert found[group, report.TRACE_MEMORY] == pytest.approx(36_000)
    assert found[more, report.MORE_CORES] == pytest.approx(2.0)
    assert found[more, report.MORE_MAIN] == pytest.approx(1.5)
    assert found[more, report.MORE_BYTES] == pytest.approx(350)
    assert found[more, report.MORE_HELD] == pytest.approx((512 << 20) / 36_000 / 10_000)
    assert found[more, report.HALF_A_CORE] == pytest.approx(0.5 / 150e-6)
    assert found[more, report.FRACTION] == pytest.approx(1 / 3)


def test_a_span_without_an_end_of_a_look_is_one_long_look() -> None:
    found = {f.name: f.value for f in fleet.summarise(PLAN, rows(16)).figures}
    assert found[f"{report.LOOK_LATER}, median"] == pytest.approx(10_000)


def test_the_goals_are_those_of_a_large_fleet() -> None:
    verdicts = {
        (figure.group, figure.name): is_met
        for _, figure, is_met in fleet.summarise(PLAN, [*rows(16), *rows(256, 0.6)]).verdicts()
    }
    assert verdicts == {
        ("16 replicas", report.REDIS): True,
        ("16 replicas", report.CONTROLLER): True,
        ("16 replicas", report.CONTROLLER_LATER): True,
        ("16 replicas", report.LAST): False,
        ("16 replicas", report.HOLDS): False,
        ("256 replicas", report.REDIS): False,
        ("256 replicas", report.CONTROLLER): True,
        ("256 replicas", report.CONTROLLER_LATER): False,
        ("256 replicas", report.LAST): False,
        ("256 replicas", report.HOLDS): False,
    }


def test_what_is_simulated_can_be_read_as_what_it_stands_for() -> None:
    worker = decode(encode(records.worker_report("replica-0", 3, 7)), WorkerReport)
    (window,) = worker.windows
    assert window.num_tested_per_pos[1:] == window.num_accepted_tokens_per_pos[:-1]
    assert window.num_output_tokens == window.num_drafts + window.num_accepted_tokens
    said = decode(encode(records.speculation(7)), SpeculationReport)
    assert len(said.changes) == records.NUM_CHANGES and said.plan in said.plans
    found = records.outcome(2).eval
    assert found is not None and window.alpha == pytest.approx(found.alpha_candidate, abs=0.01)
