"""The drift benchmark's figures from known curves.

Also n-gram lookup, and counts of replayed drafts by hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.drift import names
from benchmarks.drift.contest import mean_with_interval
from benchmarks.drift.modelled import BEST_RATIO, FROZEN_ALIKE, FROZEN_RATIO, GOALS
from benchmarks.drift.report import WINDOW, requests_to_reach, summarise
from benchmarks.record import Protocol, Row
from benchmarks.replays.curve import Curve, StepCounts
from benchmarks.replays.lookup import ngram, prompt_lookup, walk
from benchmarks.replays.recording import Recorded
from benchmarks.replays.step_times import DRAFT, ModelledStepTimes
from benchmarks.result import Figure


def a_request(prompt: list[int], output: list[int]) -> Recorded:
    num = len(output)
    return Recorded(
        name="r",
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.array(output, np.int32),
        target_ids=np.array(output, np.int32)[:, None],
        target_logprobs=np.zeros((num, 1), np.float16),
        tail_logprob=np.full(num, -np.inf, np.float32),
    )


# -- walking an output ----------------------------------------------------------------------------


def test_a_step_without_a_draft_makes_one_token() -> None:
    assert walk(np.array([7, 8, 9]), lambda at: []) == StepCounts(
        tokens=2, steps=2, drafts=0, drafted=0, tested=0, accepted=0
    )


def test_a_wrong_token_ends_the_test_of_a_draft() -> None:
    # [1 2 3] right of four, then the target's own token, then nothing is left.
    served = np.array([0, 1, 2, 3, 9])
    assert walk(served, lambda at: [1, 2, 3, 4]) == StepCounts(
        tokens=4, steps=1, drafts=1, drafted=4, tested=4, accepted=3
    )


def test_what_is_drafted_beyond_the_end_is_drafted_but_not_tested() -> None:
    assert walk(np.array([0, 1]), lambda at: [1, 5, 5, 5]) == StepCounts(
        tokens=1, steps=1, drafts=1, drafted=4, tested=1, accepted=1
    )


def test_after_a_full_draft_one_token_is_free() -> None:
    assert walk(np.arange(7), lambda at: [at, at + 1]) == StepCounts(
        tokens=6, steps=2, drafts=2, drafted=4, tested=4, accepted=4
    )


def test_replayed_counts_agree_with_the_trainers_own(tmp_path: Any) -> None:
    from benchmarks.replays.served import counts_of

    rng = np.random.default_rng(0)
    for _ in range(50):
        served, guess = rng.integers(0, 2, 30), rng.integers(0, 2, 30)
        mine = walk(served, lambda at, guess=guess: guess[at : at + 4].tolist())
        theirs = counts_of(served[1:] == guess[1:], 4)
        assert (mine.steps, mine.tested, mine.accepted) == (
            theirs.steps,
            theirs.tested,
            theirs.accepted,
        )


# -- n-gram ---------------------------------------------------------------------------------------


def test_the_earliest_of_the_longest_matches_is_followed() -> None:
    tokens = np.array([1, 2, 9, 5, 1, 2, 8, 1, 2])
    assert prompt_lookup(tokens, 4, 1, 3) == [9, 5, 1, 2]
    # Three tokens beat two.
    assert prompt_lookup(np.array([5, 1, 2, 7, 6, 1, 2, 3, 6, 1, 2]), 2, 1, 3) == [3, 6]
    assert prompt_lookup(tokens, 4, 3, 5) == []


def test_a_repeating_answer_is_accepted_and_a_fresh_one_has_no_draft() -> None:
    curve = ngram([a_request([9], [1, 2, 3, 4, 5] * 6), a_request([9], list(range(10, 40)))], k=4)
    assert curve.rate(0, 1) > 0.9
    assert curve.tokens_per_step(0, 1) > 2
    assert curve.total("drafts", 1, 2) == 0
    assert (curve.rate(1, 2), curve.length(1, 2), curve.tokens_per_step(1, 2)) == (0.0, 1.0, 1.0)


# -- curves ---------------------------------------------------------------------------------------


def a_curve(shares: list[int], *, cpu_s: list[float] | None = None, **fields: Any) -> Curve:
    """A request for each: of 10 tested tokens so many accepted."""
    counts = [
        StepCounts(
            tokens=20, steps=10 - accepted // 2, drafts=5, drafted=20, tested=10, accepted=accepted
        )
        for accepted in shares
    ]
    return Curve.of(counts, cpu_s, **fields)


def test_figures_of_a_window() -> None:
    curve = a_curve([0, 10, 5])
    assert curve.alpha(1, 3) == 0.75
    assert curve.rate() == 15 / 60
    assert curve.length(1, 2) == 1 + 10 / 5
    assert curve.tokens_per_step(1, 2) == 4
    # Request 1 took 10 steps, 5 of them without a draft: each counts as a rejection.
    assert curve.alpha_of_steps(0, 1) == 0.0
    assert curve.alpha_of_steps(2, 3) == 5 / (10 + 8 - 5)


def test_a_curve_survives_its_row() -> None:
    import json

    curve = a_curve([1, 2, 3], cpu_s=[0.0, 0.5, 0.5], num_rounds=1)
    again = Curve.from_row(json.loads(json.dumps(curve.as_row())))
    assert again.as_row() == curve.as_row()
    assert again.moving_alpha(2).tolist() == curve.moving_alpha(2).tolist()


def test_requests_to_reach_the_ceiling_are_counted_from_the_shift() -> None:
    top = a_curve([8] * 200)
    late = a_curve([0] * 100 + [0] * 20 + [8] * 80)
    found = requests_to_reach(late, top, 100, 200)
    assert found is not None
    assert 20 - WINDOW // 8 <= found <= 20  # nine tenths of the window may be enough
    assert requests_to_reach(top, top, 100, 200) == 0
    assert requests_to_reach(a_curve([4] * 200), top, 100, 200) is None


def test_the_interval_is_students() -> None:
    found = mean_with_interval("g", "n", [1.0, 2.0, 3.0])
    assert found.value == 2
    assert found.high == pytest.approx(2 + 4.303 / 3**0.5)
    assert mean_with_interval("g", "n", [1.0]).low is None


# -- the report -----------------------------------------------------------------------------------

OSD_8, OSD_1 = names.OSD_PUBLISHED
PHASES = [
    {"name": "home", "requests": 100, "mix": {"arithmetic": 1}},
    {"name": "sql", "requests": 200, "mix": {"sql": 1}},
    {"name": "home again", "requests": 100, "mix": {"arithmetic": 1}},
]
SHAPES = {
    names.FROZEN: [8] * 100 + [0] * 200 + [8] * 100,
    names.CEILING: [8] * 400,
    OSD_8: [8] * 100 + [2] * 200 + [6] * 100,
    OSD_1: [8] * 100 + [3] * 200 + [6] * 100,
    names.OURS: [8] * 100 + [0] * 50 + [8] * 150 + [4] * 100,
}


def report(*timed: Row) -> dict[tuple[str, str], Figure]:
    plan = Protocol(
        bench="drift",
        question="?",
        arms=tuple(SHAPES),
        order="",
        sizes={"schedules": {"some": {"family": "tiny", "phases": PHASES}}},
    )
    rows: list[Row] = [*timed]
    for name, shape in SHAPES.items():
        for seed in (0, 1):
            learns = name not in (names.FROZEN, names.CEILING)
            cpu_s = [0.1 * i for i in range(400)] if learns else None
            curve = a_curve(
                [max(0, one - seed) for one in shape],
                cpu_s=cpu_s,
                num_rounds=9 * learns,
                num_published=4,
            )
            rows.append({"schedule": "some", "seed": seed, "contender": name, **curve.as_row()})
    result = summarise(plan, rows[::-1])  # in whatever order they ended
    assert len(result.drawings) == 1
    return {(f.group, f.name): f for f in result.figures}


def test_of_osds_published_pairs_the_better_is_shown() -> None:
    shown = {name for group, name in report() if group == "some: α, whoever proposed, all requests"}
    assert shown == {names.FROZEN, names.CEILING, "OSD (1e-5 every 1)", names.OURS}


def test_losses_are_shown_like_wins() -> None:
    figures = report()
    group = "some: α of the steps, whoever proposed, all requests: ours minus"
    assert figures[group, names.FROZEN].value > 0
    assert figures[group, names.CEILING].value < 0


def test_recovery_is_censored_in_the_open() -> None:
    figures = report()
    group = "some: requests to 90% of the ceiling after the shift to sql"
    assert 40 <= figures[group, names.OURS].value <= 50
    never = f"{names.FROZEN} (never in 2 of 2: counted as the phase)"
    assert figures[group, never].value == 200
    seconds = figures["some: trainer's CPU by then, since the shift to sql", names.OURS]
    assert seconds.value == pytest.approx(0.1 * figures[group, names.OURS].value)


def test_what_is_kept_is_measured_at_once() -> None:
    figures = report()
    kept = f"first {WINDOW} of home again over its last {WINDOW}"
    group = f"some: α kept of home, whoever proposed: {kept}"
    assert figures[group, names.FROZEN].value == pytest.approx(1.0)
    assert figures[group, names.OURS].value < 0.6


def test_training_is_counted() -> None:
    figures = report()
    group = f"some: training, {names.OURS}"
    assert (figures[group, "rounds"].value, figures[group, "refused"].value) == (9, 5)
    assert figures[group, "CPU"].value == pytest.approx(39.9)
    assert not any(group == f"some: training, {names.FROZEN}" for group, _ in figures)


# -- speed ----------------------------------------------------------------------------------------

TIMED = [
    {"arm": arm, "step_s": ms / 1e3} for arm, ms in (("0", 40), ("4", 60), ("24", 160), (DRAFT, 70))
]


def test_a_step_costs_what_it_verifies_and_drafts() -> None:
    times = ModelledStepTimes.of([*TIMED, *TIMED])
    assert times.verify_s == (0.04, 0.06, 0.16)
    assert times.draft_s == pytest.approx(0.01)
    assert times.tokens_per_second_without() == pytest.approx(100)
    counts = [
        StepCounts(tokens=12, steps=10, drafts=0, drafted=0, tested=0, accepted=2),
        StepCounts(tokens=12, steps=10, drafts=10, drafted=40, tested=10, accepted=2),
        StepCounts(tokens=12, steps=10, drafts=5, drafted=5 * 14, tested=10, accepted=2),
    ]
    # Four requests share a step.
    expected = [10 * 0.01, 10 * 0.015, 5 * 0.01 + 5 * (0.06 + 0.16) / 2 / 4]
    assert times.seconds(Curve.of(counts), has_draft_model=False) == pytest.approx(expected)
    with_model = times.seconds(Curve.of(counts), has_draft_model=True)
    assert with_model - expected == pytest.approx([0, 10 * 0.0025, 5 * 0.0025])


def test_speed_is_over_no_speculation_and_who_never_learns() -> None:
    figures = report(*TIMED)
    frozen, ours = (
        figures["some: modelled speed over no speculation, all requests", n]
        for n in (names.FROZEN, names.OURS)
    )
    # Requests of `a_curve`: 20 tokens, 5 steps with a draft, 5 - accepted / 2 without, seeds 0 and
    # 1.
    seconds = [5 * 0.07 / 4 + (5 - accepted / 2) * 0.01 for accepted in [8] * 200 + [0] * 200]
    first_seed = 400 * 20 / sum(seconds) / 100
    assert frozen.low is not None and frozen.high is not None
    assert frozen.low < first_seed < frozen.high
    assert figures["some: modelled speed", f"ours {FROZEN_RATIO}"].value == pytest.approx(
        ours.value / frozen.value, rel=0.01
    )
    assert figures["some: modelled speed", f"ours {BEST_RATIO}"].value == pytest.approx(
        ours.value / max(1.0, frozen.value), rel=0.01
    )
    title = (
        "some: modelled speed over no speculation, all requests, the trainer's CPU seconds added"
    )
    assert figures[title, names.OURS].value < 0.7 * ours.value
    assert figures[title, names.FROZEN].value == frozen.value
    assert not any("modelled" in group for group, _ in report())


def test_a_slow_draft_is_measured_against_no_speculation() -> None:
    slow = [row | {"step_s": 9.0} if row["arm"] == DRAFT else row for row in TIMED]
    figures = report(*slow)
    ours = figures["some: modelled speed over no speculation, all requests", names.OURS]
    modelled = figures["some: modelled speed", f"ours {BEST_RATIO}"]
    assert modelled.value == pytest.approx(ours.value) and ours.value < 0.1


def test_waits_are_over_those_without_speculation() -> None:
    figures = report(*TIMED)
    # The slowest of the frozen draft's requests: 5 steps with a draft and 5 without, of 70 and 40
    # ms, for 20 tokens.
    slowest = (5 * 0.07 + 5 * 0.04) / 20 / 0.04
    for title in ("TPOT", "decode latency of a request"):
        figure = figures[
            f"some: modelled {title} over no speculation, p99 of the requests", names.FROZEN
        ]
        assert figure.value == pytest.approx(slowest)
        assert figures[figure.group.replace("p99", "p50"), names.CEILING].value < slowest
    reached = figures[
        "some: modelled seconds of decoding by then, since the shift to sql", names.OURS
    ]
    num = figures["some: requests to 90% of the ceiling after the shift to sql", names.OURS].value
    assert reached.value == pytest.approx(num * 20 * slowest * 0.04 / 4, rel=0.02)


def test_who_keeps_time_is_believed() -> None:
    curve = a_curve([8] * 10, seconds=np.full(10, 0.5))
    assert ModelledStepTimes.of(TIMED).seconds(curve, has_draft_model=True).tolist() == [0.5] * 10
    again = Curve.from_row(curve.as_row())
    assert again.seconds is not None and again.seconds.tolist() == [0.5] * 10
    assert Curve.from_row(a_curve([8]).as_row()).seconds is None


def test_each_is_held_to_the_frozen_draft_that_is_served_as_it_is() -> None:
    assert FROZEN_ALIKE == {names.OURS: names.FROZEN, names.SERVED: names.FROZEN_LOOP}
    assert set(FROZEN_ALIKE) == set(names.HELD)
    assert {f"{who} {ratio}" for who in names.HELD for ratio in (BEST_RATIO, FROZEN_RATIO)} == set(
        GOALS
    )
