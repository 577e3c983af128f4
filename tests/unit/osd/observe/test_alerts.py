"""Each alert fires at its cause alone, and at nothing like it; `promtool` runs the rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from osd.observe.history import History
from osd.observe.problems import problems_of
from osd.records import BufferStats, Health
from tests.support import promtool
from tests.support.paths import ROOT
from tests.support.promtool import OF_A_TARGET, OURS, PROMETHEUS, Named, named
from tests.unit.osd.observe.test_history import REPORT, START, status, swap, window
from tests.unit.osd.observe.test_status_text import replica
from tests.unit.osd.observe.test_status_text import status as page_status

DIRECTORY = ROOT / "configs" / "prometheus"
RULES = yaml.safe_load((DIRECTORY / "alerts.yaml").read_text())["groups"][0]["rules"]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDS = {rule["record"] for rule in RULES if "record" in rule}

TARGET = {"job": "osd", "instance": "host:8001"}
MINUTES, TROUBLE = 95, 40
"""Length of each case, scraped once a minute, and when something happens."""
Values = list[float | str]
GONE: Values = ["stale", *["_"] * (MINUTES - TROUBLE)]
"""What a series that ends with the trouble has from then on."""


def level(before: float, *later: tuple[int, float]) -> Values:
    """A gauge: `before` from the start, then others from a minute on."""
    steps = [(0, before), *later]
    return [
        [value for start, value in steps if start <= minute][-1] for minute in range(MINUTES + 1)
    ]


def counting(before: float, *later: tuple[int, float]) -> Values:
    """A counter that grows by so much per minute, then by others from a minute on."""
    total, values = 0.0, list[float | str]()
    for growth in level(before, *later):
        values.append(round(total, 3))
        total += float(growth)
    return values


DRAFT_INFO = 'osd_draft_info{draft="default",replica="replica-0",version="1"}'
DROPPED = 'osd_buffer_dropped_total{reason="redis"}'
LAGGING = 'osd_replica_lagging{replica="replica-0"}'
NET_HIGH = 'osd_speculation_net_ratio{bound="high",replica="replica-0"}'
SECONDS = 'osd_speculation_seconds_total{plan="draft 3",replica="replica-0"}'
SECONDS_OFF = 'osd_speculation_seconds_total{plan="off",replica="replica-0"}'
TESTED = 'osd_spec_position_tested_total{draft="default",position="0"}'
TESTED_1 = 'osd_spec_position_tested_total{draft="default",position="1"}'
ACCEPTED = 'osd_spec_position_accepted_total{draft="default",position="0"}'
ACCEPTED_1 = 'osd_spec_position_accepted_total{draft="default",position="1"}'

HEALTHY: dict[str, Values] = {
    "up": level(1),
    "osd_alarm": level(0),
    "osd_redis_up": level(1),
    "osd_trainer_up": level(1),
    "osd_trainer_failures_total": level(0),
    "osd_replicas": level(1),
    "osd_capture_traces_total": counting(30),
    DRAFT_INFO: level(1),
    DROPPED: level(0),
    LAGGING: level(0),
    NET_HIGH: level(1.41),
    SECONDS: counting(40),
    SECONDS_OFF: counting(2),
    TESTED: counting(600),
    ACCEPTED: counting(400),
    TESTED_1: counting(400),
    ACCEPTED_1: counting(200),
}
"""A service under load, as Prometheus would have scraped it; α is 0.6."""
BY_REPLICAS = (DRAFT_INFO, LAGGING, NET_HIGH, SECONDS, SECONDS_OFF)


def ending(*names: str) -> dict[str, Values]:
    """These series as they are in health, until they end with the trouble."""
    return {name: HEALTHY[name][:TROUBLE] + GONE for name in names}


@dataclass(frozen=True)
class Case:
    """What is otherwise than in health, and which alerts fire when."""

    name: str
    changes: Mapping[str, Values]
    fires: Mapping[int, set[str]]
    """Minute -> all alerts that fire then."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the alert, beside the target's."""
    value: str = ""
    """What its description says for `$value`."""


CAUSES = [
    Case(
        "the draft is accepted no longer",
        {
            ACCEPTED: counting(400, (TROUBLE, 0), (80, 400)),
            ACCEPTED_1: counting(200, (TROUBLE, 0), (80, 200)),
        },
        {TROUBLE: set(), 48: set(), 60: {"OsdDraftSilentlyDead"}, 95: set()},
        {"draft": "default"},
        "0%",
    ),
    Case(
        "the draft is accepted far less than it was",
        {
            ACCEPTED: counting(400, (TROUBLE, 100)),
            ACCEPTED_1: counting(200, (TROUBLE, 0)),
            TESTED_1: counting(400),
        },
        {TROUBLE: set(), 48: set(), 60: {"OsdDraftSilentlyDead"}},
        {"draft": "default"},
        "10%",
    ),
    Case(
        "the draft was never any good",
        {ACCEPTED: level(0), ACCEPTED_1: level(0), TESTED_1: level(0)},
        {3: set(), 15: {"OsdDraftSilentlyDead"}},
        {"draft": "default"},
        "0%",
    ),
    Case(
        "a replica does not come to the wanted draft",
        {LAGGING: level(0, (TROUBLE, 1), (70, 0))},
        {41: set(), 43: {"OsdReplicaLagging"}, 70: set()},
        {"draft": "default", "replica": "replica-0", "version": "1"},
    ),
    Case(
        "the buffer cannot take what comes",
        {DROPPED: counting(0, (TROUBLE, 3), (70, 0))},
        {49: set(), 55: {"OsdBufferDropping"}, 80: set()},
        {"reason": "redis"},
        "10%",
    ),
    Case(
        "the trainer is gone",
        {"osd_trainer_up": level(1, (TROUBLE, 0), (70, 1))},
        {54: set(), 56: {"OsdTrainerFailing"}, 70: set()},
    ),
    Case(
        "the trainer answers and fails each round",
        {"osd_trainer_failures_total": level(0, *((TROUBLE + 4 * n, n + 1) for n in range(10)))},
        {54: set(), 60: {"OsdTrainerFailing"}, 95: set()},
    ),
    Case(
        "speculation loses and goes on",
        {NET_HIGH: level(1.41, (TROUBLE, 0.93), (70, 1.02))},
        {49: set(), 51: {"OsdSpeculationSlowerThanNone"}, 70: set()},
        {"replica": "replica-0", "bound": "high"},
        "93%",
    ),
    Case(
        "an engine runs another draft than it says",
        {"osd_alarm": level(0, (TROUBLE, 1), (70, 0))},
        {44: set(), 46: {"OsdEngineNotAsReleased"}, 70: set()},
    ),
    Case(
        "Redis is away, and with it the trainer fails",
        {
            "osd_redis_up": level(1, (TROUBLE, 0), (90, 1)),
            "osd_trainer_up": level(1, (TROUBLE, 0), (90, 1)),
            "osd_trainer_failures_total": level(0, (TROUBLE, 1), (TROUBLE + 1, 2)),
        },
        {TROUBLE: set(), 42: {"OsdRedisAway"}, 80: {"OsdRedisAway"}, 90: set()},
    ),
    Case(
        "the only replica is gone",
        {"osd_replicas": level(1, (TROUBLE, 0), (70, 1))} | ending(*BY_REPLICAS),
        {41: set(), 43: {"OsdNoReplica"}, 70: set()},
    ),
    Case(
        "one of two replicas is missing",
        {"osd_replicas": level(2, (TROUBLE, 1), (70, 2)), "osd_replicas_wanted": level(2)},
        {49: set(), 51: {"OsdReplicasMissing"}, 70: set()},
    ),
    Case(
        "no replica ever comes up",
        {"osd_replicas": level(0), **{name: ["_"] * (MINUTES + 1) for name in BY_REPLICAS}},
        {30: set(), 35: {"OsdNoReplica"}},
    ),
    Case(
        "the control port is gone",
        {"up": level(1, (TROUBLE, 0))} | ending(*(name for name in HEALTHY if name != "up")),
        {41: set(), 43: {"OsdControlAway"}, 70: {"OsdControlAway"}},
    ),
]

QUIET = [5, 15, 25, *range(TROUBLE - 1, 75, 2)]
LOOK_ALIKES = {
    "health": {},
    "no traffic, with the last plan and its poor figures still shown": {
        name: level(float(HEALTHY[name][0]))
        for name in (TESTED, ACCEPTED, TESTED_1, ACCEPTED_1, SECONDS, SECONDS_OFF)
    }
    | {NET_HIGH: level(0.93), "osd_capture_traces_total": level(0)},
    "traffic ends": {
        TESTED: counting(600, (TROUBLE, 0)),
        ACCEPTED: counting(400, (TROUBLE, 0)),
        TESTED_1: counting(400, (TROUBLE, 0)),
        ACCEPTED_1: counting(200, (TROUBLE, 0)),
        SECONDS: counting(40, (TROUBLE, 0)),
        SECONDS_OFF: counting(2, (TROUBLE, 0)),
        NET_HIGH: level(1.41, (TROUBLE + 3, 0.93)),
    },
    "speculation lost and is off, but for probes": {
        NET_HIGH: level(1.41, (TROUBLE, 0.8)),
        SECONDS: counting(40, (TROUBLE, 0.5)),
        SECONDS_OFF: counting(2, (TROUBLE, 41)),
        TESTED: counting(600, (TROUBLE, 6)),
        ACCEPTED: counting(400, (TROUBLE, 4)),
        TESTED_1: counting(400, (TROUBLE, 4)),
        ACCEPTED_1: counting(200, (TROUBLE, 2)),
    },
    "probes whose few tokens are rejected": {
        SECONDS: counting(40, (TROUBLE, 0.5)),
        SECONDS_OFF: counting(2, (TROUBLE, 41)),
        TESTED: counting(0),
        ACCEPTED: counting(0),
        TESTED_1: counting(0, (TROUBLE, 9)),
        ACCEPTED_1: counting(0),
    },
    "another draft, less liked": ending(DRAFT_INFO)
    | {
        DRAFT_INFO.replace('"1"', '"2"'): [*["_"] * TROUBLE, *[1] * (MINUTES - TROUBLE + 1)],
        LAGGING: level(0, (TROUBLE, 1), (TROUBLE + 1, 0)),
        ACCEPTED: counting(400, (TROUBLE, 240)),
        TESTED_1: counting(400, (TROUBLE, 240)),
        ACCEPTED_1: counting(200, (TROUBLE, 60)),
    },
    "a bad draft that is taken back": {
        ACCEPTED: counting(400, (TROUBLE, 0), (TROUBLE + 4, 400)),
        TESTED_1: counting(400, (TROUBLE, 0), (TROUBLE + 4, 400)),
        ACCEPTED_1: counting(200, (TROUBLE, 0), (TROUBLE + 4, 200)),
    },
    "a service that takes 25 minutes to start": {
        "osd_replicas": level(0, (25, 1)),
        **{
            name: ["_"] * 25 + HEALTHY[name][: MINUTES - 24]
            for name in (*BY_REPLICAS, TESTED, ACCEPTED)
        },
        TESTED_1: ["_"] * (MINUTES + 1),
        ACCEPTED_1: ["_"] * (MINUTES + 1),
    },
    "a control port that starts again, and reads its feed": {
        **{
            name: [
                *HEALTHY[name][:TROUBLE],
                "stale",
                float(HEALTHY[name][20]),
                *HEALTHY[name][TROUBLE : MINUTES - 1],
            ]
            for name in (TESTED, ACCEPTED, TESTED_1, ACCEPTED_1, "osd_capture_traces_total")
        },
        "up": level(1, (TROUBLE, 0), (TROUBLE + 1, 1)),
        DROPPED: level(40, (TROUBLE, 0), (TROUBLE + 1, 45)),
        "osd_trainer_failures_total": level(5, (TROUBLE, 0), (TROUBLE + 1, 2), (TROUBLE + 2, 5)),
    },
    "problems_of that pass": {
        "osd_redis_up": level(1, (TROUBLE, 0), (TROUBLE + 1, 1)),
        DROPPED: level(0, (TROUBLE + 1, 200)),
        "osd_trainer_up": level(1, (TROUBLE, 0), (TROUBLE + 3, 1)),
        "osd_trainer_failures_total": level(0, (TROUBLE, 3), (TROUBLE + 2, 6)),
        "osd_replicas": level(1, (TROUBLE + 5, 0), (TROUBLE + 6, 1)),
        "osd_alarm": level(0, (TROUBLE, 1), (TROUBLE + 2, 0)),
    },
}
CASES = [
    *CAUSES,
    *(Case(name, changes, dict.fromkeys(QUIET, set())) for name, changes in LOOK_ALIKES.items()),
]


def full_history() -> History:
    """One in which each series has a sample."""
    history = History()
    for record in (window(0.0), swap(1, 2, 1), swap(3, 4, 3, ok=False)):
        history.add(record)
    counts = {
        "capture_rows": {"rejected": 9},
        "capture_skipped": {"budget": 1},
        "buffer_dropped": {"redis": 2},
    }
    stats = BufferStats(num_traces=9, num_holdout=2, num_bytes=80, num_put=11, oldest_at=START)
    history.observe([status(speculation=REPORT, num_traces=30, **counts)], stats)
    history.observe_health(
        Health(is_redis_up=True, is_trainer_up=True, is_alarmed=False, num_wanted=1)
    )
    return history


def test_promtool_finds_no_fault_with_the_metrics() -> None:
    for history in (History(), full_history()):
        checked = promtool.run("check", "metrics", text=history.prometheus())
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    faulty = promtool.run("check", "metrics", text="# TYPE osd_swap counter\nosd_swap 1\n")
    assert faulty.returncode != 0, "it does look"


def test_rules_and_the_example_configuration_are_valid() -> None:
    checked = promtool.run("check", "config", DIRECTORY / "prometheus.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(RULES)} rules found" in checked.stdout


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        (
            'sum by (job) (rate(osd_swap_total{ok="true"}[5m]))',
            Named({"osd_swap_total"}, {"ok", "job"}),
        ),
        (
            "a:b:c < 0.05 or x / ignoring (y) group_left () z offset 30m",
            Named({"a:b:c", "x", "z"}, {"y"}),
        ),
        (
            'sum(max_over_time(up[1d]) > bool 0) and on(k) (up{a="$b", c=~"d{2}"} == 1)',
            Named({"up"}, {"k", "a", "c"}),
        ),
    ],
)
def test_what_an_expression_names_is_found(expression: str, found: Named) -> None:
    assert named(expression) == found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_series_in_a_rule_is_one_of_ours(rule: dict[str, Any]) -> None:
    known = OURS | PROMETHEUS | dict.fromkeys(RECORDS, ("draft",))
    found = named(rule["expr"])
    assert found.series and found.series <= set(known)
    assert found.labels <= OF_A_TARGET.union(*(known[name] for name in found.series))


def test_every_alert_is_tried_and_documented() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    anchors = {
        heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", page, re.M)
    }
    assert set().union(*(alerts for case in CAUSES for alerts in case.fires.values())) == set(
        ALERTS
    )
    assert set(re.findall(r"^\| `(Osd\w+)` \|", page, re.M)) == set(ALERTS)
    for rule in ALERTS.values():
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (ROOT / file, anchor in anchors) == (ROOT / "docs" / "operations.md", True)
        assert rule["labels"]["severity"] in ("critical", "warning")


@pytest.mark.parametrize(
    ("alert", "wrong"),
    [
        ("OsdRedisAway", {"redis": "away"}),
        ("OsdNoReplica", {"replicas": []}),
        ("OsdTrainerFailing", {"trainer": "away"}),
        ("OsdReplicaLagging", {"replicas": [replica(lagging=True, version=3)]}),
        ("OsdEngineNotAsReleased", {"alarm": "it reaches 0.7"}),
        ("OsdBufferDropping", {"replicas": [replica(buffer_dropped={"redis": 40})]}),
        ("OsdBufferDropping", {"replicas": [replica(buffer_dropped={"memory": 40})]}),
        ("OsdBufferDropping", {"replicas": [replica(buffer_dropped={"schema": 40})]}),
    ],
)
def test_an_alert_names_the_remedy_that_the_status_page_names(
    alert: str, wrong: dict[str, Any]
) -> None:
    (line,) = problems_of(page_status(**wrong))
    remedy = line.rpartition(": ")[2] if alert != "OsdReplicaLagging" else line.rpartition("; ")[2]
    annotations = ALERTS[alert]["annotations"]
    assert remedy in annotations["description"].replace("{{ $labels.version }}", "3")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_alerts_fire_at_their_cause_and_at_nothing_that_looks_like_it(
    case: Case, tmp_path: Path
) -> None:
    series = HEALTHY | dict(case.changes)
    assert {re.sub(r'version="\d+"', 'version="1"', name) for name in series} - {
        "up"
    } <= exposed(), "a series of ours"
    tests = {
        "interval": "1m",
        "input_series": [
            {"series": at_target(name), "values": " ".join(map(str, v))}
            for name, v in series.items()
        ],
        "promql_expr_test": [expected(minute, alerts) for minute, alerts in case.fires.items()],
        "alert_rule_test": list(told(case)),
    }
    file = tmp_path / "tests.yaml"
    file.write_text(
        json.dumps(
            {
                "rule_files": [str(DIRECTORY / "alerts.yaml")],
                "evaluation_interval": "1m",
                "tests": [tests],
            }
        )
    )
    tested = promtool.run("test", "rules", file)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@lru_cache
def exposed() -> set[str]:
    """Every series of a history in which each has a sample, as `name{label="value"}`."""
    return {
        line.rpartition(" ")[0]
        for line in full_history().prometheus().splitlines()
        if line[0] != "#"
    }


def at_target(name: str) -> str:
    """The series as Prometheus stores it."""
    name, _, labels = name.partition("{")
    both = [f'{key}="{value}"' for key, value in TARGET.items()] + [
        part for part in [labels.rstrip("}")] if part
    ]
    return f"{name}{{{','.join(both)}}}"


def expected(minute: int, alerts: set[str]) -> dict[str, Any]:
    """That these alerts fire at that minute, and no others."""
    return {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": f"{minute}m",
        "exp_samples": [
            {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)
        ],
    }


def told(case: Case) -> Iterator[dict[str, Any]]:
    """What a person is told at the first minute at which alerts fire: all labels, all annotations
    filled in."""
    minute, alerts = next(((m, a) for m, a in case.fires.items() if a), (0, set()))
    for alert in alerts:
        labels = TARGET | case.labels
        texts = {
            key: fill(text, labels, case.value)
            for key, text in ALERTS[alert]["annotations"].items()
        }
        told = {"exp_labels": labels | ALERTS[alert]["labels"], "exp_annotations": texts}
        yield {"alertname": alert, "eval_time": f"{minute}m", "exp_alerts": [told]}


def fill(template: str, labels: Mapping[str, str], value: str) -> str:
    """The template with its labels and its value; a label the alert does not have is a
    `KeyError`."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], template)
    assert "$value" not in text or value, "the case must say which value"
    return re.sub(r"\{\{ \$value[^}]*\}\}", value, text)
