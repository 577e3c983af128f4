"""The closed loop against a simulated engine, whose best choice follows from a formula.

`test_control_steps.py` follows the loop step by step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from serving.speculation.control import Settings
from serving.speculation.goodput import OFF, Plan
from serving.speculation.probes import FRESH_TESTS, PROBE_SHARE, PROBE_STEPS
from serving.speculation.step_times import Shape
from tests.support.simulated_engine import SimulatedEngine, best_fixed, cpu

K_MAX = 5
AUTO = Settings(k_max=K_MAX)
STEPS_TO_KNOW = 1500
"""Of one request, by which a draft that is never right has been probed often enough to be probed
rarely."""


def gpu(batch: int, tokens: int, passes: int) -> float:
    """Waits for memory up to 128 tokens: the opposite of `cpu`, where a batch of 16 has no room for
    drafts."""
    draft = 0.0005 + 0.0006 * passes if passes else 0.0
    return 0.012 + 0.000002 * tokens + 0.00015 * max(tokens - 128, 0) + draft


def of_best(engine: SimulatedEngine, num_steps: int, batch: int) -> float:
    """Tokens per second of the next steps, as a part of what the best fixed k would deliver."""
    return engine.run(num_steps, batch) / best_fixed(engine, batch, range(K_MAX + 1))[1]


def expected_rate(engine: SimulatedEngine, num_steps: int, batch: int) -> float:
    """Tokens per second of the next steps, without the luck of what was accepted."""
    tokens, began = engine.num_expected, engine.now
    engine.run(num_steps, batch)
    return (engine.num_expected - tokens) / (engine.now - began)


def rate_off(engine: SimulatedEngine, batch: int) -> float:
    return batch / engine.step_time(batch, batch, 0)


def shares(engine: SimulatedEngine, num_steps: int) -> dict[str, float]:
    """Of the newest steps: what part was planned by whom."""
    names = Counter(name.split()[0] for name in engine.plans[-num_steps:])
    return {proposer: names[proposer] / num_steps for proposer in ("draft", "memory", "off")}


# -- the best choice, where nothing changes -------------------------------------------------------


@pytest.mark.parametrize(
    "alpha, batch",
    [(0.05, 1), (0.5, 1), (0.9, 1), (0.3, 4), (0.7, 4), (0.9, 4), (0.9, 8), (0.9, 16)],
)
def test_the_best_fixed_choice_is_found(alpha: float, batch: int) -> None:
    engine = SimulatedEngine(AUTO, alpha=alpha)
    engine.run(200, batch)
    rate = engine.run(400, batch)
    assert rate >= 0.95 * best_fixed(engine, batch, range(K_MAX + 1))[1]
    assert rate >= 0.97 * rate_off(engine, batch)


def test_the_best_choices_that_are_found_differ() -> None:
    """Else the test above would say little."""
    engine = SimulatedEngine(AUTO)
    best = set()
    for engine.alpha, batch in [(0.05, 1), (0.5, 1), (0.9, 1), (0.9, 4), (0.9, 8)]:
        best.add(best_fixed(engine, batch, range(K_MAX + 1))[0])
    assert best == {"off", "draft 2", "draft 5", "draft 3", "draft 1"}


@pytest.mark.parametrize("batch", [1, 16])
def test_an_engine_of_another_shape_gets_another_choice(batch: int) -> None:
    engine = SimulatedEngine(AUTO, gpu, alpha=0.85)
    assert best_fixed(engine, batch, range(K_MAX + 1))[0] == "draft 5"
    engine.run(200, batch)
    assert of_best(engine, 300, batch) >= 0.95
    assert shares(engine, 300)["draft"] > 0.95


# -- a useless draft ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
def test_a_useless_draft_is_not_used_and_trying_it_costs_little(batch: int) -> None:
    """What probes and trials lose is measured against an engine that never drafts; at most 1.5 % of
    the time."""
    engine = SimulatedEngine(AUTO, alpha=0.0, noise=0.0)
    engine.run(STEPS_TO_KNOW, batch)
    num_probes = engine.control.report().num_probes
    lost = 1 - engine.run(800, batch) / rate_off(engine, batch)
    assert engine.control.report().num_probes - num_probes >= 2
    assert 0 < lost <= 0.015
    assert shares(engine, 800)["draft"] <= 0.03


@pytest.mark.parametrize("alpha", [0.4, 0.5])
def test_a_memory_that_finds_nothing_is_hardly_ever_followed(alpha: float) -> None:
    """It makes steps without a draft, as nothing does: there is nothing to try."""
    engine = SimulatedEngine(AUTO, alpha=alpha, found=0.0)
    engine.run(1200, 1)
    assert engine.memory is not None and engine.memory.num_lookups > 1000
    assert shares(engine, 800)["memory"] < 0.04


def test_a_costlier_draft_is_probed_less_often() -> None:
    def probes(passes_s: float) -> int:
        settings = Settings(k_max=K_MAX, proposers=("draft",))
        engine = SimulatedEngine(
            settings, lambda b, t, p: 0.015 + passes_s * p, alpha=0.0, noise=0.0
        )
        engine.run(STEPS_TO_KNOW, 1)
        before = engine.control.report().num_probes
        engine.run(1200, 1)
        return int(engine.control.report().num_probes - before)

    # A pass of a draft that takes a fifth as long as the target: 4 * 0.2 / 0.01 = 80 steps; as long
    # as the target: 400.
    assert probes(0.003) >= 4 * probes(0.015) >= 4


def test_the_draft_of_an_engine_that_starts_is_probed_like_a_new_one() -> None:
    engine = SimulatedEngine(Settings(k_max=K_MAX, proposers=("draft",)), alpha=0.0, noise=0.0)
    engine.run(600, 1)
    early = engine.control.report().num_probes
    engine.run(STEPS_TO_KNOW, 1)
    known = engine.control.report().num_probes
    engine.run(600, 1)
    assert early > 1.4 * (engine.control.report().num_probes - known) > 0


@pytest.mark.parametrize("alpha, batch", [(0.6, 4), (0.9, 1), (0.9, 4), (0.9, 16)])
def test_a_machine_that_is_slower_now_and_then_does_not_mislead(alpha: float, batch: int) -> None:
    """Every step takes up to half as long again or a third less, in waves of some 150 steps. What
    was chosen is judged by the formula: a plan that was measured in a bad moment must not seem
    bad."""
    found = []
    for seed in range(3):
        random, pace = np.random.default_rng(seed), [0.0]

        def paced(*step: int, random: Any = random, pace: list[float] = pace) -> float:
            pace[0] += float(random.normal(0, 0.035)) - pace[0] / 150
            return cpu(*step) * float(np.exp(pace[0]))

        engine = SimulatedEngine(AUTO, step_time=paced, alpha=alpha, noise=0.05, seed=seed)
        engine.run(1000, batch)
        found.append(quality(engine.plans[200:], alpha, batch))
    assert np.mean(found) >= 0.96 and min(found) >= 0.92, found


def test_a_plan_that_became_cheaper_while_it_was_not_used_is_found() -> None:
    """Nothing but another try can show it."""
    dearer = [1.15]

    def step_time(batch: int, tokens: int, passes: int) -> float:
        return cpu(batch, tokens, passes) * (dearer[0] if passes >= 3 else 1.0)

    settings = Settings(k_max=K_MAX, proposers=("draft",))
    engine = SimulatedEngine(settings, step_time=step_time, alpha=0.7, noise=0.0)
    engine.run(500, 1)
    assert engine.plans[-100:].count("draft 2") > 80
    dearer[0] = 0.7
    engine.run(900, 1)
    is_good = [name in ("draft 3", "draft 4", "draft 5") for name in engine.plans[-200:]]
    assert np.mean(is_good) > 0.85


def quality(plans: Sequence[str], alpha: float, batch: int) -> float:
    """Tokens per second of these plans, by the formulas, over those of the best one."""
    tokens = {"off": 1.0} | {
        f"draft {k}": sum(alpha**j for j in range(k + 1)) for k in range(1, K_MAX + 1)
    }
    seconds = {"off": cpu(batch, batch, 0)}
    seconds |= {f"draft {k}": cpu(batch, batch * (1 + k), k) for k in range(1, K_MAX + 1)}
    steps = Counter(name if name.startswith("draft") else "off" for name in plans)
    rate = sum(num * tokens[name] for name, num in steps.items()) / sum(
        num * seconds[name] for name, num in steps.items()
    )
    return rate / max(tokens[name] / seconds[name] for name in tokens)


# -- what changes without notice ------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("batch, steps", [(1, 200), (4, 300)])
def test_a_draft_that_becomes_good_is_found_by_probes(batch: int, steps: int, seed: int) -> None:
    """Bad to good, without notice: the mean over the 400 steps that follow the first `steps` after
    the change. With four requests a probe is due only every 245 steps, or it would cost more than
    its hundredth of the time."""
    engine = SimulatedEngine(AUTO, alpha=0.05, seed=seed)
    engine.run(250, batch)
    assert shares(engine, 100)["draft"] < 0.2
    engine.alpha = 0.9
    engine.run(steps, batch)
    assert of_best(engine, 400, batch) >= 0.95


@pytest.mark.parametrize("batch", [1, 4])
def test_a_draft_that_becomes_bad_is_dropped(batch: int) -> None:
    """Good to bad, without notice: the mean over the steps 200 to 600 after the change."""
    engine = SimulatedEngine(AUTO, alpha=0.9)
    engine.run(250, batch)
    assert shares(engine, 100)["draft"] > 0.9
    engine.alpha = 0.05
    engine.run(200, batch)
    assert of_best(engine, 400, batch) >= 0.95


# -- releases -------------------------------------------------------------------------------------


def test_a_release_that_is_predicted_good_is_used_at_once() -> None:
    """Mean over the steps 20 to 120 after the release, long before a probe would have been due."""
    engine = SimulatedEngine(AUTO, alpha=0.05)
    engine.run(250, 4)
    assert shares(engine, 100)["draft"] < 0.1
    engine.alpha = 0.9
    engine.control.restart(predicted=0.9)
    engine.run(20, 4)
    assert of_best(engine, 100, 4) >= 0.95
    assert shares(engine, 120)["draft"] > 0.95


def test_a_release_that_is_worse_than_predicted_is_dropped() -> None:
    """Mean over the steps 200 to 600 after the release."""
    engine = SimulatedEngine(AUTO, alpha=0.9)
    engine.run(250, 4)
    engine.alpha = 0.05
    engine.control.restart(predicted=0.9)
    engine.run(200, 4)
    assert of_best(engine, 400, 4) >= 0.95


def test_a_release_that_disappoints_is_soon_known_well_enough_to_be_taken_back() -> None:
    """A costly draft would be probed every 400 steps; until enough of a new one was tested, every
    50."""

    def first_tokens_tested() -> int:
        return int(engine.control.report().tested_per_position[0])

    engine = SimulatedEngine(
        Settings(k_max=K_MAX, proposers=("draft",)), lambda b, t, p: 0.015 + 0.0075 * p
    )
    engine.alpha = 0.0
    engine.run(250, 4)
    engine.control.restart(predicted=0.95)
    before = first_tokens_tested()
    engine.run(400, 4)
    assert first_tokens_tested() - before >= FRESH_TESTS
    before = first_tokens_tested()
    engine.run(400, 4)
    assert first_tokens_tested() - before < FRESH_TESTS


# -- load -----------------------------------------------------------------------------------------


def test_load_comes_and_goes() -> None:
    """1, 16, 1 requests: a batch never seen is known after the next fit of step times, a known one
    at once. Means over the steps 120 to 320 and 20 to 220 after each change."""
    engine = SimulatedEngine(AUTO, alpha=0.7)
    engine.run(250, 1)
    engine.run(120, 16)
    assert of_best(engine, 200, 16) >= 0.95
    assert shares(engine, 200)["draft"] < 0.1
    engine.run(20, 1)
    assert of_best(engine, 200, 1) >= 0.95
    assert shares(engine, 200)["draft"] > 0.9
    changes = engine.control.report().changes
    assert any(change.reason == "load" for change in changes), "the report says why"


# -- the memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
def test_a_good_memory_takes_the_place_of_a_useless_draft(batch: int) -> None:
    engine = SimulatedEngine(AUTO, alpha=0.05, found=0.9, copied=0.9)
    engine.run(250, batch)
    assert engine.run(300, batch) > 2 * rate_off(engine, batch)
    assert shares(engine, 300)["memory"] > 0.9


def test_a_memory_that_finds_nothing_does_not_displace_a_good_draft() -> None:
    engine = SimulatedEngine(AUTO, alpha=0.9)
    engine.run(250, 4)
    assert of_best(engine, 300, 4) >= 0.95
    assert shares(engine, 300)["draft"] > 0.95


def test_a_memory_is_found_worth_using_by_what_it_finds_while_the_draft_serves() -> None:
    """The texts begin to repeat while the draft is in use."""
    engine = SimulatedEngine(AUTO, alpha=0.7)
    engine.run(200, 1)
    assert shares(engine, 100)["draft"] > 0.9
    assert not engine.num_verified["memory"]
    engine.found, engine.copied = 0.9, 0.95
    engine.run(20, 1)
    engine.num_verified.clear()
    engine.run(230, 1)
    assert engine.num_verified["memory"] > 0.9 * engine.num_verified.total()
    assert shares(engine, 100)["memory"] > 0.9


def memory_alone(engine: SimulatedEngine, batch: int, num_found: int) -> float:
    """Tokens per second of the best the memory can do by itself, where it finds as much as it may
    for so many requests."""
    return max(
        (batch + num_found * gain(engine.copied, m))
        / engine.step_time(batch, batch + num_found * m, 0)
        for m in range(engine.settings.memory_k_max + 1)
    )


def draft_alone(engine: SimulatedEngine, alpha: float, batch: int, num_good: int) -> float:
    """The same of the draft, where it is verified for so many requests."""
    return max(
        (batch + num_good * gain(alpha, k)) / engine.step_time(batch, batch + num_good * k, k)
        for k in range(K_MAX + 1)
    )


def gain(alpha: float, k: int) -> float:
    return float(sum(alpha**j for j in range(1, k + 1)))


@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("alpha", [0.8, 0.9])
def test_draft_and_memory_together_beat_either_where_each_is_good_for_half(
    batch: int, alpha: float
) -> None:
    """Half of the requests are copies, which the draft never gets right; the memory knows nothing
    of the others."""
    kinds = [(alpha, 0.0), (0.05, 1.0)]
    engine = SimulatedEngine(AUTO, gpu, copied=alpha, kinds=kinds)
    half = batch // 2
    draft, memory = draft_alone(engine, alpha, batch, half), memory_alone(engine, batch, half)
    both = max(
        (batch + half * (gain(alpha, k) + gain(alpha, m))) / gpu(batch, batch + half * (k + m), k)
        for k in range(K_MAX + 1)
        for m in range(9)
    )
    assert both > 1.15 * max(draft, memory), "else there would be nothing to gain"
    engine.run(300, batch)
    rate = engine.run(500, batch)
    assert rate > 1.06 * max(draft, memory)
    assert rate > 0.92 * both
    assert min(engine.num_verified.values()) > 0.2 * engine.num_verified.total()


@pytest.mark.parametrize("found, copied", [(0.0, 0.0), (1.0, 0.1)])
@pytest.mark.parametrize("alpha, batch", [(0.7, 1), (0.9, 4)])
def test_a_useless_memory_costs_a_good_draft_nothing(
    alpha: float, batch: int, found: float, copied: float
) -> None:
    """Against an engine whose draft is alone; the mean of two."""
    ratios = []
    for seed in range(2):
        rates = []
        for proposers in (("draft", "memory"), ("draft",)):
            settings = Settings(k_max=K_MAX, proposers=proposers)
            engine = SimulatedEngine(settings, alpha=alpha, found=found, copied=copied, seed=seed)
            engine.run(250, batch)
            rates.append(expected_rate(engine, 600, batch))
        ratios.append(rates[0] / rates[1])
    assert np.mean(ratios) >= 0.97, ratios


@pytest.mark.parametrize("copied, batch", [(0.9, 1), (0.7, 4)])
def test_a_useless_draft_costs_a_good_memory_nothing(copied: float, batch: int) -> None:
    """Against an engine whose memory is alone; the mean of two. That is nearly the best there
    is."""
    ratios, of_the_best = [], []
    for seed in range(2):
        rates = []
        for proposers in (("draft", "memory"), ("memory",)):
            settings = Settings(k_max=K_MAX, proposers=proposers)
            engine = SimulatedEngine(settings, gpu, alpha=0.02, found=1.0, copied=copied, seed=seed)
            engine.run(700, batch)
            rates.append(expected_rate(engine, 600, batch))
        ratios.append(rates[0] / rates[1])
        of_the_best.append(rates[0] / memory_alone(engine, batch, batch))
    assert np.mean(ratios) >= 0.97, ratios
    assert np.mean(of_the_best) >= 0.94, of_the_best


@pytest.mark.parametrize("copied, batch", [(0.7, 4), (0.9, 4), (0.7, 8), (0.9, 8)])
def test_as_much_of_the_memory_is_verified_as_an_engine_has_room_for(
    copied: float, batch: int
) -> None:
    """On a processor whose steps grow dear beyond 16 tokens."""
    engine = SimulatedEngine(AUTO, alpha=0.05, found=1.0, copied=copied)
    engine.run(300, batch)
    assert engine.run(600, batch) > 0.88 * memory_alone(engine, batch, batch)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_draft_that_becomes_good_is_found_while_the_memory_proposes(batch: int) -> None:
    """For half of all steps."""
    engine = SimulatedEngine(AUTO, gpu, alpha=0.02, found=0.5, copied=0.6)
    engine.run(STEPS_TO_KNOW, batch)
    assert shares(engine, 300)["draft"] < 0.2
    engine.alpha = 0.9
    engine.run(400, batch)
    assert shares(engine, 100)["draft"] > 0.9
    assert engine.run(400, batch) >= 0.94 * draft_alone(engine, 0.9, batch, batch)


# -- modes, forces, clients -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, plan",
    [
        (Settings(mode="off", k_max=3), "off"),
        (Settings(mode="fixed", k_max=3), "draft 3"),
        (Settings(mode="fixed", k_max=3, proposers=("memory", "draft")), "memory 8"),
        (Settings(mode="fixed", k_max=3, proposers=()), "off"),
    ],
)
@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_other_modes_decide_nothing(settings: Settings, plan: str, alpha: float) -> None:
    engine = SimulatedEngine(settings, alpha=alpha)
    engine.run(150, 2)
    assert set(engine.plans) == {plan}
    assert engine.control.report().predicted_tokens_per_second == 0.0, "nothing is promised of it"


@pytest.mark.parametrize("proposers, absent", [(("draft",), "memory"), (("memory",), "draft")])
def test_only_the_proposers_of_the_settings_are_used(
    proposers: tuple[str, ...], absent: str
) -> None:
    engine = SimulatedEngine(
        Settings(k_max=3, proposers=proposers), alpha=0.9, found=0.9, copied=0.9
    )
    engine.run(300, 2)
    assert shares(engine, 300)[absent] == 0
    assert shares(engine, 100)[proposers[0]] > 0.9


def test_a_forced_plan_stays_until_it_is_lifted() -> None:
    engine = SimulatedEngine(AUTO, alpha=0.9)
    engine.run(200, 1)
    engine.control.force(Plan("draft", 1))
    engine.run(50, 1)
    assert set(engine.plans[-50:]) == {"draft 1"}
    engine.control.force(OFF)
    engine.run(50, 4)
    assert set(engine.plans[-50:]) == {"off"}
    engine.control.force(None)
    engine.run(50, 1)
    assert set(engine.plans[-20:]) <= {"draft 3", "draft 4", "draft 5"}


def test_a_forced_plan_ends_a_probe() -> None:
    engine = SimulatedEngine(AUTO, alpha=0.0)
    while not engine.control.report().num_probes:
        engine.run(1, 1)
    engine.control.force(Plan("draft", 4))
    engine.run(1, 1)
    assert engine.plans[-1] == "draft 4"
    engine.control.force(None)
    engine.run(1, 1)
    assert not engine.plans[-1].startswith("draft"), "decided anew: the probe is not gone on with"


def test_the_caps_of_clients_hold_whatever_is_decided() -> None:
    engine = SimulatedEngine(AUTO, alpha=0.95)
    engine.run(200, 1)
    engine.control.begin("capped", client_cap=1)
    for _ in range(40):
        engine.run(1, 1)
        assert engine.control.cap("capped") <= 1
        assert engine.control.has_caps
    assert shares(engine, 40)["draft"] == 1
    assert max(engine.control.cap(req_id) for req_id in engine._left) > 1


# -- sweeps ---------------------------------------------------------------------------------------


def test_without_a_profile_the_first_steps_are_a_sweep() -> None:
    engine = SimulatedEngine(AUTO, alpha=0.05)
    engine.run(33, 1)
    assert Counter(engine.plans) == {"draft 5": 13, "draft 1": 12, "off": 8}
    assert not engine.control.times.is_fitted
    engine.run(1, 1)
    assert engine.control.times.is_fitted
    report = engine.control.report()
    assert sum(plan.steps for plan in report.plans.values()) == 2, (
        "the steps before and after it: a sweep is no step of the service"
    )
    assert report.changes == ()


def test_a_sweep_tells_drafting_from_verifying() -> None:
    engine = SimulatedEngine(AUTO, alpha=0.7, noise=0.0)
    engine.run(40, 4)
    seen = [
        Shape(4, tokens, 400, passes)
        for tokens, passes in [(24, 5), (8, 1), (24, 1), (8, 5), (4, 0)]
    ]
    expected = [cpu(shape.batch, shape.tokens, shape.drafted) for shape in seen]
    assert engine.control.times.predict(seen) == pytest.approx(expected, rel=0.05)


def test_a_sweep_waits_for_its_batch() -> None:
    engine = SimulatedEngine(AUTO, alpha=0.0)
    engine.run(150, 1)
    engine.control.sweep(4)
    left = engine.control.num_sweep_steps_left
    engine.run(10, 3)
    assert engine.control.num_sweep_steps_left == left == 32
    engine.run(10, 4)
    assert engine.control.num_sweep_steps_left == left - 10
    engine.run(10, 1)
    assert engine.control.num_sweep_steps_left == left - 10
    engine.run(22, 4)
    assert engine.control.num_sweep_steps_left == 0
    assert Counter(engine.plans[-22:])["off"] == 8
    assert {name.split()[0] for name in engine.plans[-22:]} == {"draft", "off"}


# -- what it says of itself -----------------------------------------------------------------------


def test_a_report_is_json_and_adds_up() -> None:
    engine = SimulatedEngine(AUTO, alpha=0.6, found=0.3, copied=0.5)
    engine.run(40, 4)
    swept, began = engine.control.report().plans, engine.now
    engine.run(260, 4)
    said = msgspec.to_builtins(engine.control.report())
    report = json.loads(json.dumps(said, allow_nan=False))
    assert report["plan"] == engine.control.present.name == engine.plans[-1]
    assert (report["mode"], report["batch"]) == ("auto", 4)
    steps, seconds = (
        {name: plan[key] for name, plan in report["plans"].items()} for key in ("steps", "seconds")
    )
    assert Counter(steps) - Counter({name: plan.steps for name, plan in swept.items()}) == Counter(
        engine.plans[40:]
    )
    assert sum(seconds.values()) - sum(plan.seconds for plan in swept.values()) == pytest.approx(
        engine.now - began
    )
    used = report["plans"][Counter(engine.plans[100:]).most_common(1)[0][0]]
    assert used["predicted_seconds"] == pytest.approx(used["seconds"], rel=0.3)
    assert report["predicted_tokens_per_second"] == pytest.approx(engine.run(200, 4), rel=0.15)
    assert report["tested_per_position"] == sorted(report["tested_per_position"], reverse=True)
    assert [
        a <= t
        for a, t in zip(report["accepted_per_position"], report["tested_per_position"], strict=True)
    ] == [True] * 5
    assert report["accepted_per_position"][0] / report["tested_per_position"][0] == pytest.approx(
        0.6, abs=0.05
    )
    assert report["by_context"]["<256"] == [
        sum(report["tested_per_position"]),
        sum(report["accepted_per_position"]),
    ]
    assert report["spread"]["0.5"] == pytest.approx(0.6, abs=0.1)
    assert engine.control.report().num_cells == engine.control.times.num_cells > 3
    assert 0 < report["decision_us"] < 100_000


def test_the_changes_of_plan_form_a_chain() -> None:
    engine = SimulatedEngine(AUTO, alpha=0.2)
    engine.run(600, 4)
    changes = engine.control.report().changes
    reasons = {change.reason for change in changes}
    assert {"goodput"} < reasons <= {"goodput", "trial", "probe", "load"}
    assert len(changes) > 3
    assert all(before.new == after.old for before, after in pairwise(changes))
    assert changes[-1].new == engine.plans[-1]


def test_a_report_changes_nothing() -> None:
    engine = SimulatedEngine(AUTO, alpha=0.2)
    engine.run(150, 4)
    assert engine.control.report() == engine.control.report()


def test_requests_without_drafts_are_no_part_of_the_spread() -> None:
    engine = SimulatedEngine(Settings(mode="off"))
    engine.run(200, 2)
    assert engine._next > 2
    assert engine.control.report().spread == {}


def test_a_log_is_kept_where_asked() -> None:
    engine = SimulatedEngine(AUTO)
    engine.run(5, 2)
    assert engine.control.accounts.keep_log(True) == []
    engine.run(5, 2)
    log = json.loads(json.dumps(engine.control.accounts.keep_log(False)))
    assert [entry["plan"] for entry in log] == engine.plans[5:]
    assert engine.control.accounts.keep_log(True) == [], "the log has ended"
    engine.run(1, 2)
    assert len(engine.control.accounts.keep_log(True)) == 1
    assert engine.control.accounts.keep_log(False) == [], "it was begun anew"
    assert {entry["batch"] for entry in log} == {2}


def test_net_windows_measure_what_speculation_gains() -> None:
    settings = Settings(k_max=K_MAX, net_interval_seconds=4.0, net_window_seconds=1.0)
    engine = SimulatedEngine(settings, alpha=0.8)
    engine.run(200, 1)
    best = best_fixed(engine, 1, range(K_MAX + 1))[1]
    while engine.control.report().net.windows < 3:
        engine.run(20, 1)
    net = engine.control.report().net
    assert net.ratio == pytest.approx(best / rate_off(engine, 1), rel=0.1)
    assert net.low < net.ratio < net.high
    assert "off" in engine.plans[200:]


def test_a_probe_is_as_short_as_it_says() -> None:
    engine = SimulatedEngine(Settings(k_max=K_MAX, proposers=("draft",)), alpha=0.0, noise=0.0)
    engine.run(STEPS_TO_KNOW + 400, 1)
    runs, length = [], 0
    for name in engine.plans[STEPS_TO_KNOW:]:
        if name == "off" and length:
            runs.append(length)
        length = 0 if name == "off" else length + 1
    assert runs == [PROBE_STEPS] * len(runs) != []
    assert np.mean([name != "off" for name in engine.plans[STEPS_TO_KNOW:]]) < 4 * PROBE_SHARE
