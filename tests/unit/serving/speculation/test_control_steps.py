"""The closed loop step by step, by hand.

From what it is asked and what a step showed to what it plans next.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from serving.speculation.control import STEPS_PER_DECISION, Settings, Speculation
from serving.speculation.estimates import Acceptance
from serving.speculation.goodput import OFF, Plan
from serving.speculation.probes import PROBE_STEPS
from serving.speculation.step_seen import DraftWork, Stamp, StepSeen
from serving.speculation.sweep import SWEEP_STEPS
from tests.support.simulated_engine import StepTime, cpu

K_MAX = 5
AUTO = Settings(k_max=K_MAX)


def scheduled(passes: int, **more: object) -> SimpleNamespace:
    """vLLM's output of its scheduler."""
    return SimpleNamespace(num_spec_tokens_to_schedule=passes, **more)


@pytest.mark.parametrize("passes", [0, 3])
def test_a_step_whose_drafts_nobody_can_use_is_one_without_passes(passes: int) -> None:
    """The draft sleeps through it, and reads what it missed in the one that follows."""
    skipped = DraftWork(3).after(scheduled(passes, skip_drafts=True))
    assert skipped == DraftWork(0, is_waking=False)
    assert skipped.after(scheduled(3, skip_drafts=False)) == DraftWork(3, is_waking=True)
    assert DraftWork(3).after(scheduled(3)) == DraftWork(3, is_waking=False), "vLLM before 0.33"


@pytest.mark.parametrize("client_cap, expected", [(None, 5), (0, 0), (2, 2), (99, 5), (-1, 0)])
def test_a_client_gets_no_more_draft_tokens_than_it_allows(
    client_cap: int | None, expected: int
) -> None:
    control = Speculation(Settings(mode="fixed", k_max=K_MAX))
    control.begin("capped", client_cap=client_cap)
    control.begin("other")
    for _ in range(10):
        next_plan(control, ["capped", "other"], 100)
    assert (control.cap("capped"), control.cap("other")) == (expected, K_MAX)
    assert control.has_caps == (expected < K_MAX)


@pytest.mark.parametrize(
    "client_cap, plan", [(None, "draft 5"), (3, "draft 3"), (1, "draft 1"), (0, "off")]
)
def test_what_clients_allow_is_all_that_a_choice_is_thought_to_bring(
    client_cap: int | None, plan: str
) -> None:
    control = profiled(Settings(k_max=K_MAX, predicted=0.95, proposers=("draft",)))
    control.begin("a", client_cap=client_cap)
    assert next_plan(control, ["a"], 100).name == plan


def next_plan(control: Speculation, req_ids: Sequence[str], context: int) -> Plan:
    return control.plan(req_ids, context).plan


def seen_by(
    control: Speculation,
    req_ids: list[str],
    drafted: list[int],
    accepted: list[int],
    proposer: str,
    passes: int,
    *rest: Any,
) -> StepSeen:
    """The step that was planned last. Its draft tokens are of this proposer."""
    proposed_by = Stamp(Plan(proposer, 1), "")  # type: ignore[arg-type]
    draft = DraftWork(proposed_by.plan.passes).next(passes)
    seen = StepSeen(req_ids, drafted, accepted, control._newest, proposed_by, draft, *rest)
    seen.from_memory = req_ids if proposer == "memory" else ()
    return seen


def of_draft(control: Speculation, *req_ids: str) -> np.ndarray:
    """float [B, G]: how likely the drafts of these requests are thought to be accepted."""
    survival_BG = control.requests.load(req_ids, 100 * len(req_ids)).draft_BG
    assert survival_BG is not None
    return survival_BG


def rows(batches: Sequence[int], step_time: StepTime) -> list[dict[str, Any]]:
    """A profile of an engine, with steps of every width and number of passes."""
    return [
        {
            "batch": b,
            "tokens": t,
            "context": 100 * b,
            "drafted": k,
            "seconds": step_time(b, t, k),
            "steps": 15,
        }
        for b in batches
        for t in range(b, b * (2 + K_MAX), b)
        for k in range(K_MAX + 1)
    ]


def profiled(
    settings: Settings = AUTO, step_time: StepTime = cpu, batches: Sequence[int] = (1, 2, 4, 8)
) -> Speculation:
    """Has its step times."""
    control = Speculation(settings)
    control.times.load_rows(rows(batches, step_time))
    return control


def step(
    control: Speculation, accepted: dict[str, tuple[int, int]], proposer: str = "draft"
) -> None:
    """One in which of so many tokens drafted for each request so many were accepted; its time
    teaches nothing."""
    drafted, num_accepted = zip(*accepted.values(), strict=True)
    num = len(accepted)
    seen = seen_by(
        control,
        [*accepted],
        [*drafted],
        [*num_accepted],
        proposer,
        0,
        100 * num,
        False,
        0.01,
        [100] * num,
    )
    control.observe(seen)


def followed(
    control: Speculation, req_ids: Sequence[str], num: int, newest: Stamp, ahead: int = 0
) -> list[Stamp]:
    """The step that was planned last is taken, then `num` more, and all that is drafted is
    accepted. So many steps are planned `ahead` of the one that ends. Returns all stamps."""
    stamps = [newest]
    for i in range(num + 1):
        while len(stamps) <= min(i + ahead, num):
            stamps.append(control.plan(req_ids, 100 * len(req_ids)))
        before = stamps[i - 1] if i else Stamp(OFF, "")
        all_B = [before.plan.k] * len(req_ids)
        taken = StepSeen(
            [*req_ids],
            all_B,
            all_B,
            stamps[i],
            before,
            DraftWork(stamps[i].plan.passes),
            100,
            False,
            0.01,
            [100] * len(req_ids),
        )
        control.observe(taken)
    return stamps


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_all_that_a_probe_drafts_is_tested_before_it_is_judged(ahead: int) -> None:
    """However many steps are planned ahead. The step after its last one is another's."""
    control = profiled(Settings(k_max=K_MAX, proposers=("draft",), predicted=0.02))
    control.begin("a")
    while (stamp := control.plan(["a"], 100)).probe is None:
        step(control, {"a": (0, 0)})
    probe = stamp.probe
    stamps = followed(control, ["a"], PROBE_STEPS - 1, stamp, ahead)
    assert [found.reason for found in stamps] == ["probe"] * PROBE_STEPS
    assert (probe.tested, probe.surprise) == (PROBE_STEPS - 1, pytest.approx(3 / 4))
    believed = of_draft(control, "a")[0, 0]
    assert believed < 0.7, "what it has found is not taken for known before it is over"
    last = control.plan(["a"], 100)
    assert (last.plan.name, last.probe) == ("off", None)
    control.observe(
        StepSeen(["a"], [2], [2], last, stamps[-1], DraftWork(), 100, False, 0.01, [100])
    )
    assert probe.tested == probe.accepted == PROBE_STEPS
    assert of_draft(control, "a")[0, 0] == pytest.approx(4 / 5), "(3 + 1) / (3 + 2)"
    assert control.plan(["a"], 100).plan.proposer == "draft", "decided for at once"


def test_a_probe_whose_requests_ended_ends_with_the_steps_of_others() -> None:
    """Else there would never be another one."""
    control = profiled(Settings(k_max=K_MAX, proposers=("draft",), predicted=0.02))
    control.begin("a")
    control.begin("b")
    while (stamp := control.plan(["a"], 100)).probe is None:
        step(control, {"a": (0, 0)})
    stamps = [stamp, *(control.plan(["a"], 100) for _ in range(PROBE_STEPS))]
    control.end("a")
    for before in stamps[:PROBE_STEPS]:
        control.observe(StepSeen([], [], [], stamps[-1], before, DraftWork(), 0, False, 0.01, []))
    names = planned(control, ["b"], 100)
    assert control.report().num_probes == 2, names


def test_a_step_is_booked_on_the_plan_it_was_scheduled_with() -> None:
    """In an asynchronous engine the next one is planned before it is over."""
    control = profiled(Settings(k_max=2, proposers=("draft",)), flat)
    control.begin("a")
    control.force(Plan("draft", 2))
    first = control.plan(["a"], 100)
    control.force(OFF)
    second = control.plan(["a"], 100)
    for stamp, before, passes in ((first, second, 2), (second, first, 0)):
        taken = StepSeen(["a"], [0], [0], stamp, before, DraftWork(passes), 100, True, 0.25, [100])
        control.observe(taken)
    plans = control.report().plans
    assert {name: (plan.steps, plan.seconds) for name, plan in plans.items()} == {
        "draft 2": (1, 0.25),
        "off": (1, 0.25),
    }


def test_a_profile_makes_the_sweep_needless() -> None:
    control = profiled(Settings(k_max=K_MAX, predicted=0.9))
    control.begin("a")
    assert next_plan(control, ["a"], 100).name == "draft 5"
    doubtful = profiled(Settings(k_max=K_MAX, predicted=0.02, proposers=("draft",)))
    doubtful.begin("a")
    assert next_plan(doubtful, ["a"], 100).name == "off"


def test_a_batch_that_changes_is_decided_for_at_once_and_others_every_few_steps() -> None:
    control = profiled(Settings(k_max=K_MAX, predicted=0.7, proposers=("draft",)))
    ids = [f"r{i}" for i in range(8)]
    for req_id in ids:
        control.begin(req_id)
    alone = next_plan(control, ids[:1], 100)
    together = next_plan(control, ids, 800)
    assert alone.k > together.k
    assert next_plan(control, ids[:1], 100).k > together.k
    for _ in range(40):
        step(control, {"r0": (2, 0)})
    plans = [next_plan(control, ids[:1], 100).proposer for _ in range(STEPS_PER_DECISION)]
    assert plans == ["draft"] * (STEPS_PER_DECISION - 1) + ["off"]


@pytest.mark.parametrize("num_running", [1, 2, 4])
def test_a_probe_that_surprises_makes_void_what_was_known_of_all(num_running: int) -> None:
    """Requests that come later, too: their class was learnt from a draft that is no more."""
    control = profiled(Settings(k_max=K_MAX, proposers=("draft",)))
    for i in range(30):
        control.begin(f"old{i}")
        for _ in range(20):
            step(control, {f"old{i}": (2, 0)})
        control.end(f"old{i}")
    running = ["a", "b", "c", "d"][:num_running]
    for req_id in running:
        control.begin(req_id)
    names = []
    while (stamp := control.plan(running, 400)).plan.proposer == "off":
        names.append(stamp.plan.name)
        step(control, dict.fromkeys(running, (0, 0)))
    assert (stamp.plan.name, control.report().num_probes) == ("draft 1", 1)
    assert len(names) > 50
    followed(control, running, PROBE_STEPS, stamp)
    for req_id in running:
        control.end(req_id)
    control.begin("new")
    assert next_plan(control, ["new"], 100).proposer == "draft"


@pytest.mark.parametrize("predicted, plan", [(None, "draft 3"), (0.9, "draft 5"), (0.05, "off")])
def test_a_release_is_judged_at_once_by_what_was_predicted(
    predicted: float | None, plan: str
) -> None:
    """Where nothing was, it is tried."""
    control = profiled(Settings(k_max=K_MAX, proposers=("draft",)))
    for req_id in ("a", "b"):
        control.begin(req_id)
    for _ in range(40):
        step(control, {"a": (2, 0), "b": (2, 0)})
    assert next_plan(control, ["a", "b"], 200).name == "off"
    control.restart(predicted)
    assert next_plan(control, ["a", "b"], 200).name == plan


def test_requests_that_are_not_counted_teach_nothing() -> None:
    def next_survival(is_counted: bool) -> float:
        control = profiled()
        for _ in range(5):
            control.begin("probe", domain="sql", is_counted=is_counted)
            for _ in range(30):
                step(control, {"probe": (K_MAX, 0)})
                step(control, {"probe": (K_MAX, 0)}, "memory")
            control.end("probe")
        control.begin("next", domain="sql")
        return float(of_draft(control, "next")[0].sum())

    fresh = profiled()
    fresh.begin("next", domain="sql")
    untouched = float(of_draft(fresh, "next")[0].sum())
    assert next_survival(is_counted=False) == untouched
    assert next_survival(is_counted=True) < 0.2 * untouched


def test_whose_tokens_were_verified_counts_those_of_the_traffic_alone() -> None:
    control = profiled()
    control.begin("calibration", is_counted=False)
    control.begin("asked")
    step(control, {"calibration": (K_MAX, 2)})
    step(control, {"calibration": (K_MAX, 1)}, "memory")
    assert control.report().sources == {"draft": (0, 0), "memory": (0, 0)}
    step(control, {"calibration": (K_MAX, 2), "asked": (K_MAX, 1)})
    assert control.report().sources == {"draft": (K_MAX, 1), "memory": (0, 0)}


def test_a_finished_request_teaches_its_domain() -> None:
    control = profiled(batches=(1,))
    for i in range(20):
        for domain, accepted in (("good", 5), ("bad", 0)):
            control.begin(f"{domain}{i}", domain=domain)
            for _ in range(20):
                step(control, {f"{domain}{i}": (5, accepted)})
            control.end(f"{domain}{i}")
    for domain, proposers in (("good", {"draft"}), ("bad", {"off"})):
        control.begin("new", domain=domain)
        plans = [next_plan(control, ["new"], 100) for _ in range(STEPS_PER_DECISION)]
        assert plans[-1].proposer in proposers
        control.end("new")


def test_steps_with_prefills_and_steps_that_catch_up_do_not_count_as_step_times() -> None:
    control = profiled(batches=(1,))
    control.begin("a")
    before = sum(row["steps"] for row in control.times.to_rows())

    def seen(passes: int, proposer: str, is_pure: bool = True) -> None:
        control.observe(
            seen_by(control, ["a"], [0], [0], proposer, passes, 100, is_pure, 5.0, [100])
        )

    for _ in range(3):
        seen(0, "draft", is_pure=False)
    assert sum(row["steps"] for row in control.times.to_rows()) == before
    seen(2, "off")  # the draft reads what it has missed
    assert sum(row["steps"] for row in control.times.to_rows()) == before
    seen(2, "draft")
    assert sum(row["steps"] for row in control.times.to_rows()) == before + 1


def test_requests_that_are_not_known_are_passed_over() -> None:
    control = profiled()
    control.begin("a")
    step(control, {"unknown": (2, 1), "a": (5, 2)})
    control.end("unknown")
    plan = next_plan(control, ["a"], 100)
    assert control.cap("unknown") == plan.k
    assert control.look_up("unknown") == []
    report = control.report()
    assert report.tested_per_position == (1, 1, 1, 0, 0)
    assert report.accepted_per_position == (1, 1, 0, 0, 0)
    assert report.by_context["<256"] == (3, 2)


def test_a_fresh_engine_has_a_report() -> None:
    said = msgspec.to_builtins(Speculation(AUTO).report())
    report = json.loads(json.dumps(said, allow_nan=False))
    assert (report["plan"], report["plans"], report["net"]["ratio"]) == ("draft 5", {}, None)


@pytest.mark.parametrize("given", [{"client_cap": 0}, {"is_counted": False}])
def test_where_a_probe_would_show_nothing_there_is_none(given: dict[str, Any]) -> None:
    control = profiled(Settings(k_max=K_MAX, proposers=("draft",), predicted=0.05))
    for req_id in ("a", "b"):
        control.begin(req_id, **given)
    for _ in range(400):
        assert next_plan(control, ["a", "b"], 200).proposer == "off"
        step(control, {"a": (0, 0), "b": (0, 0)})
    assert control.report().num_probes == 0


def test_the_study_of_acceptance_leaves_out_what_is_not_counted() -> None:
    control = profiled(Settings(k_max=K_MAX, proposers=("draft",)))
    control.begin("x", is_counted=False)
    control.begin("y")
    seen = seen_by(
        control,
        ["gone", "x", "y"],
        [5, 5, 5],
        [0, 0, 5],
        "draft",
        5,
        10,
        True,
        0.02,
        [10, 10, 5000],
        [1, 1, 2000],
    )
    control.observe(seen)
    report = control.report()
    assert report.tested_per_position == report.accepted_per_position == (1,) * 5
    assert {name: counts for name, counts in report.by_context.items() if counts[0]} == {
        ">=4096": (5, 5)
    }
    assert {name: counts for name, counts in report.by_output.items() if counts[0]} == {
        ">=1024": (5, 5)
    }


def test_a_request_that_is_announced_again_keeps_what_it_has_shown() -> None:
    """As a client's next turn in one and the same session."""
    control = profiled(Settings(k_max=K_MAX, proposers=("draft",)))
    control.begin("a", client_cap=2)
    before = control.requests._requests["a"]
    control.begin("a")
    assert control.requests._requests["a"] is before
    control.end("a")
    control.begin("b")
    assert control.requests._requests["b"].slot == before.slot


# -- when something is decided, tried and measured ------------------------------------------------


def flat(batch: int, tokens: int, passes: int) -> float:
    """Verifying costs nothing: with an acceptance of 0.7, one draft token is nearly as good as
    two."""
    return 0.010 + 0.003 * passes


def planned(control: Speculation, req_ids: Sequence[str], num: int) -> list[str]:
    """The next plans, while nothing is learnt from the steps."""
    names = []
    for _ in range(num):
        proposed_by = control._newest
        stamp = control.plan(req_ids, 100 * len(req_ids))
        names.append(stamp.plan.name)
        none_B = [0] * len(req_ids)
        taken = StepSeen(
            [*req_ids],
            none_B,
            none_B,
            stamp,
            proposed_by,
            DraftWork(),
            100,
            False,
            0.01,
            [100] * len(req_ids),
        )
        control.observe(taken)
    return names


def starts(names: list[str], name: str) -> list[int]:
    """Steps in which a plan begins to be followed."""
    return [
        i for i, found in enumerate(names) if found == name and (i == 0 or names[i - 1] != name)
    ]


def hardly_seen(
    settings: Settings,
    hardly: Sequence[tuple[int, int]],
    batches: Sequence[int] = (1, 2),
    num: int = 2,
) -> Speculation:
    """Knows its step times well but for those of `hardly`: (tokens of a request, passes), of which
    it saw `num`."""
    control = Speculation(settings)
    known = [
        {**row, "steps": num if (row["tokens"] // row["batch"], row["drafted"]) in hardly else 15}
        for row in rows(batches, flat)
        if row["drafted"] <= settings.k_max
    ]
    control.times.load_rows(known)
    for batch in batches:
        for i in range(batch):
            control.begin(f"r{i}")
    return control


DRAFT_OF_TWO = Settings(k_max=2, proposers=("draft",))


def test_a_plan_whose_step_was_hardly_seen_is_tried_twice_and_again_when_long_unused() -> None:
    control = hardly_seen(DRAFT_OF_TWO, [(2, 1)])
    names = planned(control, ["r0"], 460)
    assert starts(names, "draft 1") == [24, 48, 448], (
        "once in 24 steps; then 400 steps after it was last used"
    )
    assert names.count("draft 1") == 3 * STEPS_PER_DECISION
    assert names.count("draft 2") == 460 - 3 * STEPS_PER_DECISION
    assert {change.reason for change in control.report().changes} == {"trial", "goodput"}
    names = planned(control, ["r0", "r1"], 100)
    assert len(starts(names, "draft 1")) == 2, "another batch is another step"


def test_a_plan_whose_step_is_known_is_tried_when_it_was_long_not_used() -> None:
    control = hardly_seen(DRAFT_OF_TWO, [])
    assert starts(planned(control, ["r0"], 860), "draft 1") == [400, 800]


def test_of_plans_that_were_long_not_used_one_is_tried_in_400_steps() -> None:
    control = hardly_seen(Settings(k_max=3, proposers=("draft",)), [])
    names = planned(control, ["r0"], 1700)
    tried = sorted(starts(names, "draft 1") + starts(names, "draft 2"))
    assert len(tried) >= 3
    assert all(b - a >= 400 for a, b in itertools.pairwise(tried))


def test_two_trials_are_24_steps_apart_however_often_is_decided() -> None:
    control = hardly_seen(DRAFT_OF_TWO, [(2, 1)])
    names = []
    for _ in range(460):
        control.restart(None)
        names += planned(control, ["r0"], 1)
    assert starts(names, "draft 1") == [23, 47, 447]


@pytest.mark.parametrize("num, tried", [(5, [24, 48]), (6, [])])
def test_six_steps_make_a_plan_known(num: int, tried: list[int]) -> None:
    control = hardly_seen(DRAFT_OF_TWO, [(2, 1)], num=num)
    assert starts(planned(control, ["r0"], 100), "draft 1") == tried


def test_nothing_is_tried_while_the_number_of_requests_changes() -> None:
    control = hardly_seen(DRAFT_OF_TWO, [(2, 1)])
    names = [name for i in range(60) for name in planned(control, ["r0", "r1"][: 1 + i % 2], 1)]
    assert set(names) == {"draft 2"}
    assert starts(planned(control, ["r1"], 12), "draft 1") == [STEPS_PER_DECISION], (
        "at once when it no longer does"
    )


def test_a_choice_made_for_many_batches_is_forgotten_for_the_oldest() -> None:
    control = hardly_seen(DRAFT_OF_TWO, [])
    req_ids = [f"r{i}" for i in range(1026)]
    for batch in (*range(1, 1025), 1, 1025, 1026):
        next_plan(control, req_ids[:batch], 100)
    assert [batch for batch, _, _ in control._trials._used] == [*range(4, 1025), 1, 1025, 1026]


def test_nothing_is_decided_for_nobody() -> None:
    control = profiled(Settings(k_max=K_MAX, proposers=("draft",), predicted=0.02))
    assert next_plan(control, [], 0).name == "draft 5", "what was planned last"
    control.begin("a")
    assert next_plan(control, ["a"], 100).name == "off"
    assert control.report().decision_us > 0
    assert next_plan(control, [], 0).name == "off"
    assert control.report().batch == 1


def test_a_swap_is_decided_for_at_once_and_ends_a_probe_of_the_draft_before() -> None:
    control = profiled(Settings(k_max=K_MAX, proposers=("draft",), predicted=0.02))
    control.begin("a")
    while not control.report().num_probes:
        planned(control, ["a"], 1)
    assert planned(control, ["a"], 1) == ["draft 1"]
    control.restart(0.9)
    assert planned(control, ["a"], 1) == ["draft 5"]
    assert {change.reason for change in control.report().changes} == {"load", "probe", "goodput"}


def test_a_swap_leaves_what_is_known_of_step_times() -> None:
    control = profiled()
    control.begin("a")
    for _ in range(20):
        step(control, {"a": (2, 2)})
    times = control.times.to_rows()
    control.restart(0.4)
    assert of_draft(control, "a")[0] == pytest.approx(0.4 ** np.arange(1, K_MAX + 1))
    assert control.times.to_rows() == times


@pytest.mark.parametrize("k_max", [1, 2, K_MAX])
def test_a_probe_drafts_one_token(k_max: int) -> None:
    control = profiled(Settings(k_max=k_max, proposers=("draft",), predicted=0.02))
    control.begin("a")
    control.begin("uncounted", is_counted=False)
    names = planned(control, ["a", "uncounted"], 200)
    probes = starts(names, "draft 1")
    assert len(probes) > 1, "one request that can show something is enough"
    assert control.report().num_probes == len(probes)
    assert names.count("draft 1") == 3 * len(probes)
    assert names.count("off") == 200 - names.count("draft 1")


def test_where_there_is_no_draft_there_is_no_probe() -> None:
    control = profiled(Settings(k_max=K_MAX, proposers=("memory",)))
    control.begin("a")
    assert {name.split()[0] for name in planned(control, ["a"], 200)} <= {"memory", "off"}
    assert control.report().num_probes == 0


def test_a_probe_is_a_surprise_only_against_what_was_thought_of_all_its_requests() -> None:
    """Of two requests one is thought to get all accepted, the other nothing: three of six are
    none."""
    control = profiled(
        Settings(k_max=K_MAX, proposers=("draft",)), lambda b, t, p: 0.01 + 0.006 * p
    )
    for req_id, accepted in (("good", 2), ("bad", 0)):
        control.begin(req_id)
        for _ in range(30):
            step(control, {req_id: (2, accepted)})
    while not control.report().num_probes:
        planned(control, ["good", "bad"], 1)
    before = of_draft(control, "good", "bad")[:, 0]
    assert before[0] > 0.7 and before[1] < 0.2
    for _ in range(3):
        step(control, {"good": (2, 2), "bad": (2, 0)})
    after = of_draft(control, "good", "bad")[:, 0]
    assert after == pytest.approx(before, abs=0.1), "what was known is still believed"


def test_those_who_get_no_draft_are_not_thought_to_fail_in_a_probe() -> None:
    """Beside many of them, what was known of the others would be a surprise, and void."""
    control = profiled(
        Settings(k_max=K_MAX, proposers=("draft",)), lambda b, t, p: 0.01 + 0.001 * p
    )
    drafted = {"good": 2, "bad": 0, "worse": 0}
    for req_id, accepted in drafted.items():
        control.begin(req_id)
        for _ in range(30):
            step(control, {req_id: (2, accepted)})
    req_ids = [*drafted, *(f"none{i}" for i in range(17))]
    for req_id in req_ids[len(drafted) :]:
        control.begin(req_id, client_cap=0)
    while not control.report().num_probes:
        planned(control, req_ids, 1)
    before = of_draft(control, *drafted)[:, 0]
    assert before[0] > 0.7 and before[1:].max() < 0.2
    for _ in range(PROBE_STEPS):
        probe = control._newest
        control.plan(req_ids, 2000)
        some = [*drafted], [1] * 3, [1, 0, 0]
        seen = seen_by(control, *some, "draft", 0, 300, False, 0.01, [100] * 3)
        seen.proposed_by = probe
        control.observe(seen)
    after = of_draft(control, *drafted)[:, 0]
    assert after == pytest.approx(before, abs=0.1), "what was known is still believed"


def test_a_probe_that_is_never_right_leaves_what_was_known() -> None:
    control = profiled(Settings(k_max=K_MAX, proposers=("draft",), predicted=0.9))
    control.begin("a")
    for _ in range(40):
        step(control, {"a": (2, 0)})
    believed = of_draft(control, "a")[0, 0]
    while not control.report().num_probes:
        planned(control, ["a"], 1)
    planned(control, ["a"], PROBE_STEPS)
    assert of_draft(control, "a")[0, 0] == pytest.approx(believed, abs=0.02)


# -- forces, sweeps, net windows ------------------------------------------------------------------


class Clock:
    """Goes on in `planned_by` alone."""

    now = 0.0


def with_net_windows(mode: str = "auto", **given: Any) -> tuple[Speculation, Clock]:
    clock = Clock()
    settings = Settings(
        mode, 2, ("draft",), 0.9, net_interval_seconds=5.0, net_window_seconds=2.0, **given
    )
    control = Speculation(settings, clock=lambda: clock.now)
    control.times.load_rows(rows([1, 2], flat))
    control.begin("a")
    return control, clock


def planned_by(
    clock: Clock, control: Speculation, num: int, accepted: int = 2, own_seconds: float = 0.0
) -> list[str]:
    """As `planned`, in steps of an eighth of a second that bring one token, and `accepted` more of
    a draft."""
    names = []
    for _ in range(num):
        clock.now += 0.125
        plan = next_plan(control, ["a"], 100)
        names.append(plan.name)
        num_accepted = accepted if plan.k else 0
        seen = seen_by(
            control, ["a"], [plan.k], [num_accepted], "draft", 0, 100, False, 0.125, [100]
        )
        seen.own_seconds = own_seconds
        control.observe(seen)
    return names


def test_a_net_window_is_without_speculation_and_measures_what_it_gains() -> None:
    control, clock = with_net_windows()
    names = planned_by(clock, control, 400)
    windows = starts(names, "off")
    assert len(windows) >= 3
    assert names.count("off") == len(windows) * (3 + 16), (
        "steps that settle, and two seconds of others"
    )
    net = control.report().net
    assert net.ratio == pytest.approx(3.0)
    assert net.windows == len(windows) and not net.discarded
    assert [change.reason for change in control.report().changes] == [
        "net window",
        "goodput",
    ] * len(windows)
    assert names[windows[0] + 19] == "draft 2", "decided for at once"


def test_an_engine_without_speculation_would_have_no_control() -> None:
    """What the control takes is a cost of speculation: it counts where there is some."""
    control, clock = with_net_windows()
    planned_by(clock, control, 400, own_seconds=0.025)
    assert control.report().net.ratio == pytest.approx(3.0 * 0.8)


def test_a_probe_waits_until_a_net_window_is_over() -> None:
    control, clock = with_net_windows()
    while not control.net.is_off():
        planned_by(clock, control, 1)
    control.probes.begin(Plan("draft", 1), 0.9)
    assert planned_by(clock, control, 3 + 16) == ["off"] * 19
    assert planned_by(clock, control, 4) == ["draft 1"] * 3 + ["draft 2"]


def test_a_step_counts_in_the_net_window_that_it_was_planned_in() -> None:
    """A step that was planned before the window began, and one of a sweep, count for none."""
    control, clock = with_net_windows()
    while not control.net.is_off():
        before = control.plan(["a"], 100)
        seen = seen_by(control, ["a"], [2], [2], "draft", 0, 100, False, 0.125, [100])
        clock.now += 0.125
        control.observe(seen)
    window = control.net.newest
    assert window is not None and before.window is not window
    control.observe(seen)
    control.sweep(1)
    control.plan(["a"], 100)
    swept = seen_by(control, ["a"], [0], [0], "draft", 0, 100, False, 0.125, [100])
    control.observe(swept)
    assert window.steps == 0


@pytest.mark.parametrize("mode, plan", [("fixed", "draft 2"), ("off", "off")])
def test_there_are_no_net_windows_where_nothing_is_decided(mode: str, plan: str) -> None:
    control, clock = with_net_windows(mode)
    assert set(planned_by(clock, control, 200)) == {plan}
    assert control.report().net.windows == 0
    assert not control.net.is_off()


def test_net_windows_fall_at_other_times_with_another_seed() -> None:
    first = []
    for seed in (0, 1, 0):
        control, clock = with_net_windows(seed=seed)
        first.append(planned_by(clock, control, 300).index("off"))
    assert first[0] == first[2] != first[1]


def test_a_force_overrules_a_sweep_which_overrules_a_net_window() -> None:
    control, clock = with_net_windows()
    while not control.net.is_off():
        planned_by(clock, control, 1)
    assert next_plan(control, ["a"], 100).name == "off"
    assert control.plan(["a"], 100).window is not None
    control.sweep(1)
    stamp = control.plan(["a"], 100)
    assert (stamp.plan.name, stamp.window) == ("draft 2", None), "it counts for no window"
    control.force(Plan("draft", 1))
    assert next_plan(control, ["a"], 100).name == "draft 1"
    assert control.num_sweep_steps_left == 4 * SWEEP_STEPS - 1
    assert [change.reason for change in control.report().changes][-2:] == ["net window", "forced"]


@pytest.mark.parametrize(
    "proposers, expected",
    [
        (("draft", "memory"), [2] * 8 + [1] * 8 + [1, 2] * 4 + [0] * 8),
        (("draft",), [2] * 8 + [1] * 8 + [1, 2] * 4 + [0] * 8),
        (("memory",), [0] * 8),
    ],
)
def test_a_sweep_takes_steps_of_every_kind(proposers: tuple[str, ...], expected: list[int]) -> None:
    control = profiled(Settings(k_max=2, proposers=proposers))
    control.begin("a")
    control.sweep(1)
    assert control.num_sweep_steps_left == len(expected)
    assert [next_plan(control, ["a"], 100).k for _ in expected] == expected
    assert control.num_sweep_steps_left == 0


def test_a_sweep_that_is_ended_leaves_no_step() -> None:
    control = profiled(Settings(k_max=2, proposers=("draft",), predicted=0.02))
    control.begin("a")
    control.sweep(1)
    assert next_plan(control, ["a"], 100).name == "draft 2"
    control.end_sweep()
    assert control.num_sweep_steps_left == 0
    assert planned(control, ["a"], 3) == ["off"] * 3


def test_the_steps_of_a_sweep_teach_step_times_and_count_nowhere_else() -> None:
    control = Speculation(Settings(k_max=2, proposers=("draft",)))
    control.begin("a")
    next_plan(control, ["a"], 100)
    assert control.num_sweep_steps_left == 4 * SWEEP_STEPS, (
        "an engine nobody measured does it itself"
    )
    for i in range(4 * SWEEP_STEPS):
        plan = next_plan(control, ["a"], 100)
        pure_step(control, 3, 0, passes=plan.k, seconds=0.01)
        assert control.report().num_cells > 0 or i == 0
    assert control.report().plans == {}
    assert not control.times.is_fitted
    next_plan(control, ["a"], 100)
    assert control.times.is_fitted
    assert control.num_sweep_steps_left == 0, "once is enough"
    next_plan(control, ["a"], 100)
    pure_step(control, 0, 0)
    assert sum(plan.steps for plan in control.report().plans.values()) == 1


# -- clients and caps -----------------------------------------------------------------------------


def test_a_request_that_has_just_come_gets_what_its_client_allows() -> None:
    control = profiled()
    control.begin("a")
    control.begin("capped", client_cap=2)
    assert (control.cap("a"), control.cap("capped")) == (K_MAX, 2)


def test_caps_are_thought_of_wherever_drafts_may_be_cut() -> None:
    control = Speculation(Settings(mode="fixed", k_max=K_MAX))
    control.begin("a", client_cap=3)
    control.force(Plan("draft", 3))
    next_plan(control, ["a"], 100)
    assert not control.has_caps, "the plan says no more"
    control.force(Plan("draft", 4))
    next_plan(control, ["a"], 100)
    assert control.has_caps
    control.end("a")
    assert not control.has_caps
    control.force(Plan("draft", 4, price=0.1))
    next_plan(control, [], 0)
    assert control.has_caps


GOOD, BAD = ([f"{name}{i}" for i in range(4)] for name in ("good", "bad"))


def of_two_kinds(**client_caps: int) -> Speculation:
    """Eight requests, where verification is dear and drafting cheap: half are always right, half
    never."""
    control = profiled(AUTO, lambda batch, tokens, passes: 0.02 + 0.001 * tokens + 0.0005 * passes)
    for req_id in GOOD + BAD:
        control.begin(req_id, client_cap=client_caps.get(req_id))
    for _ in range(30):
        step(control, dict.fromkeys(GOOD, (2, 2)) | dict.fromkeys(BAD, (2, 0)))
    return control


def test_requests_in_one_batch_get_as_many_draft_tokens_as_are_worth_verifying() -> None:
    control = of_two_kinds(good0=1)
    plan = next_plan(control, GOOD + BAD, 800)
    assert plan.proposer == "draft"
    assert 0.6 < plan.price / (plan.goodput * 0.001) < 1, (
        "by what it would deliver if all was verified"
    )
    assert control.has_caps
    assert plan.k > 1
    assert [control.cap(r) for r in GOOD] == [1, plan.k, plan.k, plan.k], (
        "the first one's client allows one"
    )
    assert {control.cap(r) for r in BAD} == {0}


def test_a_request_thought_hopeless_is_verified_whole_at_every_16th_decision() -> None:
    """Else it could never show that it is not."""
    control = of_two_kinds()
    opened = []
    for i in range(4 * 33):
        plan = next_plan(control, GOOD + BAD, 800)
        assert plan.proposer == "draft" and plan.k > 1
        caps = [control.cap(r) for r in BAD]
        assert caps in ([0] * 4, [plan.k] * 4)
        opened += [i] * any(caps)
        step(control, dict.fromkeys(GOOD, (2, 2)) | dict.fromkeys(BAD, (2, 0)))
    assert opened == [*range(60, 64), *range(124, 128)]


def test_a_plan_that_is_not_decided_verifies_all() -> None:
    """Caps were worth their verification under the plan they were made for."""
    control = of_two_kinds(bad0=3)
    next_plan(control, GOOD + BAD, 800)
    assert {control.cap(r) for r in BAD} == {0}
    next_plan(control, GOOD + BAD, 800)
    assert {control.cap(r) for r in BAD} == {0}, "between two decisions nothing changes"
    control.force(Plan("draft", K_MAX))
    next_plan(control, GOOD + BAD, 800)
    assert [control.cap(r) for r in BAD] == [3, K_MAX, K_MAX, K_MAX]


def test_a_client_that_allows_few_tokens_is_thought_to_get_no_more() -> None:
    control = profiled(Settings(k_max=3, predicted=0.5))
    control.begin("free")
    control.begin("capped", client_cap=1)
    load = control.requests.load(["free", "gone", "capped"], 100)
    assert load.draft_BG == pytest.approx(np.array([[0.5, 0.25, 0.125], [0.5, 0, 0]]))
    assert load.allowed_B.tolist() == [3, 1]
    assert (load.batch, load.context) == (3, 100)


# -- what a step teaches --------------------------------------------------------------------------


def pure_step(
    control: Speculation,
    drafted: int,
    accepted: int,
    *,
    passes: int = 0,
    seconds: float = 0.02,
    proposer: str = "draft",
    **seen: Any,
) -> None:
    """Of the request "a", with nothing else in it."""
    given = {"is_pure": True, "context": 100, **seen}
    context, is_pure = given["context"], given["is_pure"]
    found = seen_by(
        control,
        ["a"],
        [drafted],
        [accepted],
        proposer,
        passes,
        context,
        is_pure,
        seconds,
        [context],
    )
    control.observe(found)


def test_a_step_is_remembered_by_its_requests_width_context_and_passes() -> None:
    control = Speculation(AUTO)
    for req_id in ("a", "b"):
        control.begin(req_id)
    seen = seen_by(control, ["a", "b"], [5, 2], [1, 0], "draft", 3, 700, True, 0.04, [300, 400])
    control.observe(seen)
    assert control.times.to_rows() == [
        {"batch": 2, "tokens": 9, "context": 700, "drafted": 3, "seconds": 0.04, "steps": 1}
    ]


def test_only_the_first_step_after_a_sleep_is_left_out() -> None:
    """There the draft reads what it has missed."""
    control = Speculation(AUTO)
    control.begin("a")
    for proposer, passes in (("draft", 1), ("draft", 0), ("off", 0), ("off", 1), ("draft", 1)):
        pure_step(control, 0, 0, passes=passes, proposer=proposer)
    assert {row["drafted"]: row["steps"] for row in control.times.to_rows()} == {1: 2, 0: 2}
    assert control.report().plans["draft 5"].steps == 5, "its time was spent all the same"


def test_what_plans_brought_is_counted_in_tokens_seconds_and_what_was_predicted() -> None:
    control = profiled(Settings(k_max=2, proposers=("draft",)), flat)
    for req_id in ("a", "b"):
        control.begin(req_id)
    plan = next_plan(control, ["a", "b"], 200)
    for is_pure in (True, True, False):
        seen = seen_by(
            control, ["a", "b"], [2, 2], [2, 1], "draft", 2, 200, is_pure, 0.5, [100, 100]
        )
        control.observe(seen)
    assert msgspec.to_builtins(control.report().plans) == {
        "draft 2": {
            "steps": 2,
            "seconds": 1.0,
            "tokens": 10,
            "predicted_seconds": pytest.approx(2 * plan.seconds),
        }
    }
    assert plan.seconds == pytest.approx(0.016, rel=0.05)


def test_what_reaches_nobody_is_in_no_speed() -> None:
    control = Speculation(AUTO)
    control.begin("a")
    next_plan(control, ["a"], 100)
    seen = seen_by(control, ["a"], [5], [5], "draft", 2, 100, True, 0.5, [100])
    seen.num_surplus = 4
    control.observe(seen)
    (totals,) = control.report().plans.values()
    assert totals.tokens == 2
    assert control.report().accepted_per_position[:5] == (1, 1, 1, 1, 1), "the draft was right"


def test_a_log_has_every_step_as_it_was() -> None:
    control = profiled(Settings(k_max=2, proposers=("draft",)), flat)
    for req_id in ("a", "b"):
        control.begin(req_id)
    control.accounts.keep_log(True)
    plan = next_plan(control, ["a", "b"], 200)
    seen = seen_by(control, ["a", "b"], [2, 1], [2, 0], "draft", 2, 230, False, 0.5, [100, 130])
    control.observe(seen)
    assert control.accounts.keep_log(False) == [
        {
            "plan": "draft 2",
            "reason": "load",
            "predicted_seconds": plan.seconds,
            "batch": 2,
            "drafted": 3,
            "accepted": 2,
            "from_memory": 0,
            "tokens": 4,
            "passes": 2,
            "context": 230,
            "is_pure": False,
            "seconds": 0.5,
        }
    ]


def believed(num_positions: int, predicted: float, steps: Sequence[tuple[int, int]]) -> np.ndarray:
    """What one request that showed these steps is thought to survive."""
    acceptance = Acceptance(num_positions, predicted)
    slot_B = np.array([acceptance.open("")])
    for drafted, accepted in steps:
        acceptance.add(slot_B, np.array([drafted]), np.array([accepted]))
    return acceptance.survival(slot_B)[0]


def test_what_the_memory_gets_accepted_is_credited_to_the_memory() -> None:
    control = profiled(Settings(k_max=K_MAX, predicted=0.6))
    control.begin("a")
    steps = [(3, 3), (0, 0), (3, 1), (2, 0)]
    for drafted, accepted in steps:
        step(control, {"a": (drafted, accepted)}, "memory")
    assert of_draft(control, "a")[0] == pytest.approx(0.6 ** np.arange(1, K_MAX + 1))
    report = control.report()
    assert report.tested_per_position == (0,) * K_MAX
    assert report.sources == {"draft": (0, 0), "memory": (8, 4)}
    step(control, {"a": (4, 3)})
    assert control.report().sources == {"draft": (4, 3), "memory": (8, 4)}


def test_what_the_draft_gets_accepted_fades_while_nothing_is_known_of_it() -> None:
    control = profiled(Settings(mode="fixed", k_max=K_MAX, predicted=0.6))
    control.begin("a")
    for _ in range(10):
        step(control, {"a": (3, 3)})
    for _ in range(20):
        step(control, {"a": (3, 3)}, "memory")
    assert of_draft(control, "a")[0] == pytest.approx(
        believed(K_MAX, 0.6, [(3, 3)] * 10 + [(0, 0)] * 20)
    )


# -- settings -------------------------------------------------------------------------------------


def test_what_is_not_said_is_what_the_documentation_says() -> None:
    expected = Settings(
        "auto",
        5,
        ("draft", "memory"),
        None,
        net_interval_seconds=0.0,
        net_window_seconds=2.0,
        seed=0,
        memory_k_max=8,
        memory_bytes=64 << 20,
        memory_fraction=1.0,
        is_held=False,
    )
    assert Settings() == expected


@pytest.mark.parametrize("predicted, alpha", [(None, 0.7), (0.0, 0.0), (0.25, 0.25)])
def test_an_engine_begins_with_what_its_draft_was_measured_with(
    predicted: float | None, alpha: float
) -> None:
    control = profiled(Settings(k_max=2, predicted=predicted))
    control.begin("a")
    assert of_draft(control, "a")[0] == pytest.approx([alpha, alpha**2])


@pytest.mark.parametrize(
    "settings, plan",
    [
        (Settings(mode="auto", k_max=3), "draft 3"),
        (Settings(mode="auto", k_max=3, proposers=("memory", "draft")), "draft 3"),
        (Settings(mode="auto", k_max=3, proposers=("memory",)), "off"),
        (Settings(mode="fixed", k_max=3, proposers=("memory",)), "memory 8"),
        (Settings(mode="off", k_max=3, proposers=("memory",)), "off"),
        (Settings(mode="auto", k_max=3, proposers=()), "off"),
    ],
)
def test_until_something_is_known_the_draft_is_tried(settings: Settings, plan: str) -> None:
    control = Speculation(settings)
    assert (control.present.name, control.report().plan) == (plan, plan)
    report, k = control.report(), int(plan.split()[-1]) if plan != "off" else 0
    assert (report.mode, report.k, report.batch) == (settings.mode, k, 0)
    assert control.report().proposer == plan.split()[0]
