"""Goodput by hand: step times, acceptances, and the choice that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from serving.speculation.goodput import (
    LEAST_SURVIVAL,
    MARGIN,
    OFF,
    Load,
    Plan,
    candidates,
    choose,
    draft_of,
    expected,
    shape_of,
    unmeasured,
    whole,
)
from serving.speculation.step_times import Shape, StepTimes


class Table(StepTimes):
    """Step times as given: (verified tokens, draft passes) -> seconds, and so much more for each
    token of context; `known` shapes have been measured."""

    def __init__(
        self,
        seconds: dict[tuple[int, int], float],
        per_token: float = 0.0,
        per_context_token: float = 0.0,
    ) -> None:
        super().__init__()
        self.seconds, self.per_token, self.per_context_token = seconds, per_token, per_context_token
        self.known: dict[tuple[int, int], int] = {}

    def predict(self, shapes: Sequence[Shape], context: int = 0) -> np.ndarray:
        return np.array(
            [
                self.seconds[shape.tokens, shape.drafted]
                + (shape.context + context) * self.per_context_token
                for shape in shapes
            ]
        )

    def num_steps(self, shape: Shape) -> int:
        return self.known.get((shape.tokens, shape.drafted), 0)

    def seconds_per_token(self, shape: Shape) -> float:
        return self.per_token * shape.tokens / 8 * (1 + shape.context)


SURVIVAL_BG = np.array([[0.5, 0.25, 0.1], [0.9, 0.8, 0.7]])
"""Of two requests; the sums of its columns are 1.4, 1.05 and 0.8."""
ALL_B = np.array([3, 3])


def of_draft(survival_BG: np.ndarray, batch: int = 2, context: int = 200) -> Load:
    """Requests whose clients allow all, where there is no memory."""
    allowed_B = np.full(len(survival_BG), survival_BG.shape[1])
    return Load(batch, context, survival_BG, None, None, allowed_B)


DRAFT_ONLY = of_draft(SURVIVAL_BG)
MEMORY_BRM = np.array([[[0.2, 0.1, 0.0]], [[0.6, 0.5, 0.4]]])
"""What the memory found once for each: it would verify two and three tokens, of which 0.3 and 1.5
are accepted."""
BOTH = Load(2, 200, SURVIVAL_BG, MEMORY_BRM, np.ones((2, 1)), ALL_B)
MEMORY_ONLY = BOTH._replace(draft_BG=None)


def seconds(
    off: float, draft: Sequence[float], memory: float = 0.0, beside_one: float = 0.0
) -> dict[tuple[int, int], float]:
    """Of steps of two requests. `beside_one`: of a step with one pass of the draft, whose token is
    verified for the first request, and the memory's three for the second."""
    table = {(2, 0): off, (7, 0): memory, (6, 1): beside_one}
    table |= {(2 * (1 + k), k): took for k, took in enumerate(draft, start=1)}
    return table


def test_goodput_is_expected_tokens_by_time() -> None:
    plans = candidates(DRAFT_ONLY, Table(seconds(0.10, [0.16, 0.20, 0.25])))
    assert [plan.name for plan in plans] == ["off", "draft 1", "draft 2", "draft 3"]
    assert [plan.goodput for plan in plans] == pytest.approx(
        [2 / 0.10, 3.4 / 0.16, 4.45 / 0.20, 5.25 / 0.25]
    )
    assert [plan.seconds for plan in plans] == [0.10, 0.16, 0.20, 0.25]


def test_all_requests_get_a_token_and_context_takes_its_time() -> None:
    plans = candidates(
        DRAFT_ONLY, Table(seconds(0.10, [0.16, 0.20, 0.25]), per_context_token=0.001)
    )
    assert [plan.seconds for plan in plans] == pytest.approx([0.30, 0.36, 0.40, 0.45])
    assert [plan.goodput for plan in plans] == pytest.approx(
        [2 / 0.30, 3.4 / 0.36, 4.45 / 0.40, 5.25 / 0.45]
    )
    # The same batch, later: what is known of its choices holds no context.
    later = candidates(
        DRAFT_ONLY._replace(context=700), Table(seconds(0.10, [0.16, 0.20, 0.25]), 0.0, 0.001)
    )
    assert [plan.seconds for plan in later] == pytest.approx([0.80, 0.86, 0.90, 0.95])


def test_another_batch_or_other_proposers_are_other_steps() -> None:
    times = Table(
        seconds(0.10, [0.16, 0.20, 0.25], 0.11, 0.17) | {(1, 0): 0.08, (2, 1): 0.09, (7, 1): 0.18}
    )
    one = of_draft(np.array([[0.5]]), 1, 100)
    assert [plan.name for plan in candidates(BOTH, times)] == [
        "off",
        "memory 3",
        "draft 1",
        "draft 2",
        "draft 3",
    ]
    assert [plan.name for plan in candidates(MEMORY_ONLY, times)] == ["off", "memory 3"]
    assert candidates(MEMORY_ONLY, times)[1] == (
        "memory", 3, pytest.approx(3.8 / 0.11), 0.11, 0.0, 5.0, False, False
    )  # fmt: skip
    assert candidates(one, times) == [
        Plan("off", 0, 1 / 0.08, 0.08),
        Plan("draft", 1, 1.5 / 0.09, 0.09, width=1.0),
    ]
    nobody = Load(2, 200, None, None, None, ALL_B)
    assert candidates(nobody, times) == [Plan("off", 0, 2 / 0.10, 0.10)], "nobody may propose"


def test_no_proposal_makes_a_step_cheaper_than_none() -> None:
    """However little is known of its step."""
    plans = candidates(BOTH, Table(seconds(0.10, [0.09, 0.20, 0.25], 0.07, 0.08)))
    assert [plan.seconds for plan in plans] == [0.10, 0.10, 0.10, 0.20, 0.25]
    assert plans[1].goodput == pytest.approx(3.8 / 0.10)
    assert plans[2].goodput == pytest.approx((2 + 0.5 + 1.5) / 0.10)


@pytest.mark.parametrize(
    "table, best",
    [
        (seconds(0.10, [0.16, 0.20, 0.25]), "draft 2"),  # 20, 21.25, 22.25, 21
        (seconds(0.10, [0.14, 0.20, 0.25]), "draft 1"),  # 20, 24.3, 22.25, 21
        (seconds(0.10, [0.16, 0.20, 0.22]), "draft 3"),  # 20, 21.25, 22.25, 23.9
        (seconds(0.10, [0.18, 0.23, 0.28]), "off"),  # 20, 18.9, 19.3, 18.75
    ],
)
def test_the_choice_with_most_tokens_per_second_wins(
    table: dict[tuple[int, int], float], best: str
) -> None:
    assert choose(candidates(DRAFT_ONLY, Table(table)), Plan("memory", 9)).name == best


def test_the_memory_pays_no_passes_of_the_draft() -> None:
    # It expects 1.8 tokens, and only the wider verification costs them.
    times = Table(seconds(0.10, [0.16, 0.20, 0.25], 0.102, 0.17))
    plans = candidates(BOTH, times)
    assert choose(plans, OFF).name == "memory 3"
    assert max(plan.goodput for plan in plans) == pytest.approx(3.8 / 0.102)


def test_a_shape_holds_all_requests_and_only_the_drafts_passes() -> None:
    assert shape_of(BOTH, Plan("draft", 3, width=6.0)) == Shape(2, 8, 0, 3)
    assert shape_of(BOTH, Plan("draft", 3, width=4.6)) == Shape(2, 7, 0, 3)
    assert shape_of(BOTH, Plan("memory", 3, width=4.4)) == Shape(2, 6, 0, 0)
    assert shape_of(BOTH, OFF) == Shape(2, 2, 0, 0)


@pytest.mark.parametrize("k, tokens", [(1, 4), (2, 5), (3, 6)])
def test_what_no_client_allows_is_not_thought_to_be_verified(k: int, tokens: int) -> None:
    """All requests are drafted for all the same."""
    load = DRAFT_ONLY._replace(allowed_B=np.array([1, 3]))
    times = Table({(t, k): 0.1 for t in range(2, 9) for k in range(4)})
    plan = candidates(load, times)[k]
    assert shape_of(load, plan) == Shape(2, tokens, 0, k)


def test_the_present_choice_stays_until_another_is_clearly_better() -> None:
    """By 2 %."""
    present = Plan("draft", 2, 100.0)
    a_little = Plan("draft", 3, 101.9)
    clearly = Plan("draft", 3, 102.1)
    assert choose([OFF, present, a_little], Plan("draft", 2)) == present
    assert choose([OFF, present, a_little._replace(goodput=102.0)], Plan("draft", 2)) == present
    assert choose([OFF, present, clearly], Plan("draft", 2)) == clearly


def test_the_present_choice_is_judged_by_what_it_promises_now() -> None:
    now = Plan("draft", 2, 50.0)
    better = Plan("off", 0, 80.0)
    assert choose([better, now], Plan("draft", 2, 200.0)) == better
    assert choose([Plan("off", 0, 50.0), now], Plan("draft", 2, 10.0)) == now


def test_what_nobody_predicted_promises_nothing_and_cuts_nothing() -> None:
    assert OFF == ("off", 0, 0.0, 0.0, 0.0, 0.0, False, False)
    assert Plan("draft", 2) == ("draft", 2, 0.0, 0.0, 0.0, 0.0, False, False)


def test_the_memory_with_the_same_k_is_another_choice() -> None:
    plans = [Plan("draft", 2, 100.0), Plan("memory", 2, 101.0)]
    assert choose(plans, Plan("memory", 2)).proposer == "memory"
    assert choose(plans, Plan("draft", 2)).proposer == "draft"
    plans = [Plan("off", 0, 50.0), *plans]
    assert choose(plans, Plan("draft", 5)).proposer == "memory", (
        "what is no longer a choice is no reason to stay"
    )


def test_what_gains_next_to_nothing_is_left_out() -> None:
    """Less than 2 %."""
    plans = [Plan("off", 0, 100.0), Plan("memory", 2, 101.9)]
    assert choose(plans, Plan("draft", 1)).proposer == "off"
    assert choose([plans[0], Plan("memory", 2, 102.0)], Plan("draft", 1)).proposer == "off"
    assert choose([plans[0], Plan("memory", 2, 102.1)], Plan("draft", 1)).proposer == "memory"
    # Even where the present choice gains a little: it is left, as soon as it is worse than nothing.
    for goodput, proposer in ((100.0, "draft"), (99.9, "off")):
        choice = choose([plans[0], Plan("draft", 1, goodput), plans[1]], Plan("draft", 1))
        assert choice.proposer == proposer


def is_new(plan: Plan, num_known: int) -> bool:
    return num_known < 6


def test_a_promising_choice_is_tried_when_it_is_due() -> None:
    """Asked with the steps that are known of each."""
    times = Table(seconds(0.10, [0.16, 0.20, 0.25]))
    plans = candidates(DRAFT_ONLY, times)  # 20, 21.25, 22.25, 21: all are near the best
    times.known = {(2, 0): 99, (4, 1): 5, (6, 2): 6, (8, 3): 7}
    trial = unmeasured(plans, DRAFT_ONLY, times, is_new)
    assert trial is not None
    assert trial.name == "draft 1"
    times.known[4, 1] = 6
    assert unmeasured(plans, DRAFT_ONLY, times, is_new) is None
    again = unmeasured(
        plans, DRAFT_ONLY, times, lambda plan, num_known: plan.k == 3 and num_known == 7
    )
    assert again is not None
    assert again.name == "draft 3"


def test_the_most_promising_of_the_unmeasured_is_tried_first() -> None:
    times = Table(seconds(0.10, [0.16, 0.20, 0.25]))
    trial = unmeasured(candidates(DRAFT_ONLY, times), DRAFT_ONLY, times, is_new)
    assert trial is not None
    assert trial.name == "draft 2"


def test_what_is_far_from_the_best_is_never_tried() -> None:
    times = Table(seconds(0.10, [0.16, 0.20, 0.25]))
    """What promises less than 85 % of it."""
    plans = [Plan("off", 0, 84.9), Plan("draft", 1, 100.0, width=2.0)]
    times.known = {(4, 1): 99}
    assert unmeasured(plans, DRAFT_ONLY, times, is_new) is None
    for goodput in (85.0, 85.1):
        near = Plan("off", 0, goodput)
        assert unmeasured([near, plans[1]], DRAFT_ONLY, times, is_new) == near


class Linear(Table):
    """A step takes 50 ms and so much for each verified token, which `graphs` round up."""

    def __init__(self, per_token: float, graphs: Sequence[int] = ()) -> None:
        super().__init__({}, per_token)
        self.graphs = graphs

    def predict(self, shapes: Sequence[Shape], context: int = 0) -> np.ndarray:
        tokens = [
            min((size for size in self.graphs if size >= shape.tokens), default=shape.tokens)
            for shape in shapes
        ]
        return 0.05 + self.per_token * np.array(tokens)

    def seconds_per_token(self, shape: Shape) -> float:
        return self.per_token


def cut(survival_BG: np.ndarray, plan: Plan) -> list[int]:
    """Draft tokens of each request that are verified."""
    num_B, gain_B = draft_of(of_draft(survival_BG), plan)
    assert gain_B.tolist() == [
        pytest.approx(row[:num].sum()) for row, num in zip(survival_BG, num_B, strict=True)
    ]
    return [int(num) for num in num_B]


def test_a_draft_token_must_be_worth_the_time_of_its_verification() -> None:
    """0.6 of the tokens that would else come in that time: with all verified 5.25 in 130 ms."""
    times = Linear(0.01)
    plan = candidates(DRAFT_ONLY, times)[3]
    price = 5.25 / 0.13 * 0.01
    assert plan == (
        "draft",
        3,
        pytest.approx(5.15 / 0.12),
        pytest.approx(0.12),
        pytest.approx(price),
        5.0,
        False,
        False,
    )
    assert cut(SURVIVAL_BG, plan) == [2, 3], "0.242 is less than 0.25 and more than 0.1"
    assert whole(plan, DRAFT_ONLY, times) == (
        "draft", 3, pytest.approx(5.25 / 0.13), pytest.approx(0.13), pytest.approx(price), 6.0,
        False, True,
    )  # fmt: skip
    assert whole(OFF, DRAFT_ONLY, times) == OFF


@pytest.mark.parametrize("per_token, tried", [(0.01, False), (0.001, True)])
def test_what_promises_anything_only_unverified_is_never_tried(
    per_token: float, tried: bool
) -> None:
    """A trial verifies everything, so it would cost what that takes."""
    useless = of_draft(np.full((2, 3), 0.01))
    times = Linear(per_token)
    plans = candidates(useless, times)
    assert plans[3].price > 0 and plans[3].goodput == pytest.approx(plans[0].goodput)
    times.known = {(2, 0): 99}
    trial = unmeasured(plans, useless, times, is_new)
    assert (trial is not None) is tried
    if trial is not None:
        assert trial == whole(trial, useless, times) and trial.goodput < plans[3].goodput


def test_what_is_not_verified_costs_nothing_and_brings_nothing() -> None:
    """So k is chosen for what is left of its drafts: here four tokens of a good request beside a
    bad one."""
    survival_BG = np.array([[0.9, 0.81, 0.73, 0.66], [0.1, 0.01, 0.0, 0.0]])
    load = of_draft(survival_BG, 2, 0)
    times = Linear(0.026)
    plans = candidates(load, times)
    best = choose(plans, OFF)
    assert [plan.price > 0 for plan in plans] == [False, True, True, True, True]
    assert best.name == "draft 4"
    whole_goodput = [
        (2 + survival_BG[:, :k].sum()) / (0.05 + 0.026 * 2 * (1 + k)) for k in range(5)
    ]
    assert np.argmax(whole_goodput) == 0, "else none would be worth it"
    assert best.goodput == pytest.approx((2 + survival_BG[0].sum()) / (0.05 + 0.026 * 6))
    assert cut(survival_BG, best) == [4, 0]


@pytest.mark.parametrize("graphs, is_cut", [((), True), ((8, 16), False), ((2, 4, 6, 7, 8), True)])
def test_with_graphs_tokens_are_cut_where_a_smaller_graph_is_enough(
    graphs: Sequence[int], is_cut: bool
) -> None:
    plan = candidates(DRAFT_ONLY, Linear(0.01, graphs))[3]
    assert (plan.price > 0) == is_cut


def test_no_more_is_verified_than_the_plan_says() -> None:
    assert cut(SURVIVAL_BG, Plan("draft", 2, price=0.05 / MARGIN)) == [2, 2]
    assert cut(SURVIVAL_BG, Plan("draft", 2, price=0.3 / MARGIN)) == [1, 2]
    assert cut(SURVIVAL_BG, Plan("draft", 3, price=0.95 / MARGIN)) == [0, 0]
    assert cut(SURVIVAL_BG, Plan("draft", 3, price=0.25 / MARGIN)) == [2, 3], (
        "what is just worth it"
    )
    assert cut(SURVIVAL_BG, OFF) == [0, 0]


def test_where_tokens_cost_nothing_all_are_verified() -> None:
    plans = candidates(DRAFT_ONLY, Linear(0.0))
    assert [plan.price for plan in plans] == [0.0] * 4
    assert cut(np.array([[0.01, 0.0, 0.0]]), plans[3]) == [3]


def test_cutting_by_the_threshold_delivers_more_where_requests_differ() -> None:
    """What the threshold is for: of four requests, two good and two bad, the same k for all wastes
    verification."""
    good, bad = 0.9 ** np.arange(1, 5), 0.1 ** np.arange(1, 5)
    survival_BG = np.array([good, good, bad, bad])
    per_token = 0.004

    def goodput(tokens_B: Sequence[int]) -> float:
        gain = sum(survival_BG[i, :num].sum() for i, num in enumerate(tokens_B))
        return float((4 + gain) / (0.05 + per_token * (4 + sum(tokens_B))))

    same_for_all = max(goodput([k] * 4) for k in range(5))
    load = of_draft(survival_BG, 4, 0)
    plan = choose(candidates(load, Linear(per_token)), OFF)
    num_B = cut(survival_BG, plan)
    assert (plan.k, num_B) == (4, [4, 4, 0, 0])
    assert plan.goodput == pytest.approx(goodput(num_B))
    assert goodput(num_B) > 1.1 * same_for_all


# -- the memory, and who proposes -----------------------------------------------------------------

TWICE = Load(
    2,
    200,
    np.array([[0.5, 0.25], [0.9, 0.8]]),
    np.array(
        [[[0.9, 0.8, 0.7], [0.0, 0.0, 0.0]], [[0.6, 0.5, 0.4], [0.95, 0.9, 0.85]]],
    ),
    np.ones((2, 2)),
    ALL_B,
)
"""The memory found much for the first request once, and once nothing; for the second one what is
worth a little less than its draft, and a little more."""
MIXED = Plan("draft", 2, is_mixed=True)


def of(load: Load, *plans: Plan) -> list[tuple[Any, Any]]:
    """Tokens that are accepted, and that are verified, under each plan."""
    gains, widths = expected(load, plans)
    pairs = zip(gains.tolist(), widths.tolist(), strict=True)
    return [(pytest.approx(gain), pytest.approx(width)) for gain, width in pairs]


def test_who_proposes_is_told_for_each_request_and_each_of_its_look_ups() -> None:
    draft, memory, mixed = Plan("draft", 2), Plan("memory", 3), MIXED
    assert of(TWICE, draft, memory, mixed, OFF) == [
        (0.75 + 1.7, 4),
        ((2.4 + 0) / 2 + (1.5 + 2.7) / 2, (3 + 0) / 2 + 3),
        ((2.4 + 0.75) / 2 + (1.7 + 2.7) / 2, (3 + 2) / 2 + (2 + 3) / 2),
        (0, 0),
    ]


def test_who_proposes_is_who_is_worth_more_beyond_the_price() -> None:
    """Half a token for each that is verified. 0.3 of it is enough for one of the draft: the first
    one's second token is left out."""
    assert of(TWICE, MIXED._replace(price=0.5), Plan("memory", 3, price=0.5)) == [
        ((2.4 + 0.5) / 2 + (1.7 + 2.7) / 2, (3 + 1) / 2 + (2 + 3) / 2),
        ((2.4 + 0) / 2 + (1.1 + 2.7) / 2, (3 + 0) / 2 + (2 + 3) / 2),
    ]
    # 2.4 tokens for three are more than 1.7 for two, and worth less where each costs 0.75.
    close = TWICE._replace(memory_BRM=np.array([[[0.0] * 3] * 2, [[0.8, 0.8, 0.8]] * 2]))
    assert of(close, MIXED, MIXED._replace(price=0.75)) == [
        (0.75 + 2.4, 2 + 3),
        (0.5 + 1.7, 1 + 2),
    ]


def test_the_draft_is_judged_by_what_it_is_beside_such_look_ups() -> None:
    """Where the memory is at its best the draft is twice as good as in the mean."""
    load = TWICE._replace(ratio_BR=np.array([[1.0, 0.5], [1.0, 2.0]]))
    assert of(load, MIXED) == [((2.4 + 0.375) / 2 + (1.7 + 3.4) / 2, (3 + 2) / 2 + 2)]


def test_what_a_client_allows_holds_for_the_memory() -> None:
    load = TWICE._replace(allowed_B=np.array([1, 0]), draft_BG=np.array([[0.5, 0], [0, 0.0]]))
    assert of(load, MIXED, Plan("memory", 3)) == [((0.9 + 0.5) / 2, 1), (0.9 / 2, 0.5)]


def test_a_plan_that_cuts_nothing_weighs_what_verification_takes_all_the_same() -> None:
    """What the memory finds next may be long."""
    sure = of_draft(np.array([[0.95, 0.9, 0.86]]), 1, 100)._replace(
        memory_BRM=np.array([[[0.9, 0.0, 0.0]]]), ratio_BR=np.ones((1, 1))
    )
    plan = candidates(sure, Linear(0.01))[-1]
    assert plan.name == "draft 3" and plan.is_mixed
    assert draft_of(sure, plan)[0].tolist() == [3] and plan.price > 0


def test_a_plan_that_verifies_drafts_whole_cuts_what_the_memory_finds() -> None:
    found = np.array([[[0.9, 0.5, 0.06]]])
    poor = of_draft(np.array([[0.1, 0.05, 0.01]]), 1, 100)._replace(
        memory_BRM=np.concatenate([found, 0 * found], 1), ratio_BR=np.ones((1, 2))
    )
    plan = Plan("draft", 3, price=0.3, is_mixed=True)
    assert expected(poor, [plan])[1] == pytest.approx([1.0]), "two tokens or none"
    assert expected(poor, [whole(plan, poor, Linear(0.01))])[1] == pytest.approx([2.5]), "or three"


def test_a_token_of_the_memory_must_be_worth_its_whole_price() -> None:
    """Its survival is measured; and what is hardly ever right is left out however cheap it is."""
    load = MEMORY_ONLY._replace(memory_BRM=np.array([[[0.5, 0.4, 0.3]], [[0.06, 0.05, 0.04]]]))
    assert LEAST_SURVIVAL == 0.05
    priced = [Plan("memory", 3, price=price) for price in (0.0, 0.055, 0.4, 0.41)]
    assert [width for _, width in of(load, *priced)] == [3 + 2, 3 + 1, 2, 1]
    assert MARGIN < 1
    assert cut(SURVIVAL_BG, Plan("draft", 3, price=0.5)) == [1, 3], "0.3 is enough for a draft"


def test_drafts_are_mixed_with_the_memory_where_there_is_one() -> None:
    times = Linear(0.001)
    assert {plan.name: plan.is_mixed for plan in candidates(BOTH, times)} == {
        "off": False, "memory 3": False, "draft 1": True, "draft 2": True, "draft 3": True,
    }  # fmt: skip
    assert not any(plan.is_mixed for plan in candidates(DRAFT_ONLY, times))


def test_a_draft_that_is_verified_alone_gives_its_place_to_nobody() -> None:
    times = Linear(0.001)
    mixed = max((plan for plan in candidates(BOTH, times) if plan.is_mixed), key=lambda p: p.k)
    alone = whole(mixed, BOTH, times, is_alone=True)
    assert (alone.k, alone.is_mixed, alone.draft_price) == (3, False, 0.0)
    assert alone.goodput == pytest.approx(whole(mixed, DRAFT_ONLY, times).goodput)
    assert whole(OFF, BOTH, times, is_alone=True) is OFF
    free = mixed._replace(price=0.0)
    assert whole(free, BOTH, times) is free
    assert not whole(free, BOTH, times, is_alone=True).is_mixed


class Stepped(Linear):
    """Each token beyond 16 takes five times as long."""

    def predict(self, shapes: Sequence[Shape], context: int = 0) -> np.ndarray:
        tokens_P = np.array([shape.tokens for shape in shapes])
        return 0.014 + self.per_token * (tokens_P + 4 * np.maximum(tokens_P - 16, 0))

    def seconds_per_token(self, shape: Shape) -> float:
        return self.per_token * (5 if shape.tokens > 16 else 1)


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.9, 0.95])
@pytest.mark.parametrize("per_token", [0.0001, 0.0004, 0.001])
def test_as_much_of_the_memory_is_verified_as_delivers_most(
    batch: int, alpha: float, per_token: float
) -> None:
    """Where the whole is far too wide, a token costs far more than where it is just right."""
    survival_M = alpha ** np.arange(1, 9)
    memory_BRM = np.tile(survival_M, (batch, 2, 1))
    times = Stepped(per_token)
    load = Load(batch, 0, None, memory_BRM, np.ones((batch, 2)), np.full(batch, 8))
    plan = max(candidates(load, times), key=lambda plan: plan.goodput)
    best = max(
        (batch + batch * survival_M[:k].sum())
        / float(times.predict([Shape(batch, batch * (1 + k), 0, 0)])[0])
        for k in range(9)
    )
    assert plan.goodput >= 0.9 * best


@pytest.mark.parametrize("per_token", [0.0001, 0.001])
def test_beside_a_memory_that_finds_nothing_the_draft_is_planned_as_without_one(
    per_token: float,
) -> None:
    times = Stepped(per_token)
    beside = TWICE._replace(memory_BRM=np.zeros((2, 2, 3)))
    alone = TWICE._replace(memory_BRM=None, ratio_BR=None)
    plans = [
        plan._replace(is_mixed=False, is_whole=False, price=plan.draft_price)
        for plan in candidates(beside, times)
    ]
    assert [plan for plan in plans if plan.proposer != "memory"] == candidates(alone, times)
    assert of(beside, Plan("memory", 3), MIXED) == [(0, 0), *of(alone, MIXED)]


@pytest.mark.parametrize("found", [0.0, 0.6])
def test_what_the_memory_finds_has_its_price_where_the_draft_is_verified_whole(
    found: float,
) -> None:
    times = Linear(0.001)
    load = TWICE._replace(memory_BRM=np.full((2, 2, 3), found))
    for plan in candidates(load, times)[1:]:
        assert plan.price > 0.5 * plan.goodput * 0.001, "what its time would bring"
        shown = whole(plan, load, times)
        assert shown.price == plan.price and (not plan.passes or shown.draft_price == 0)


def test_a_memory_that_finds_nothing_is_not_tried() -> None:
    """It makes the same steps as nothing does."""
    times = Linear(0.001)
    load = MEMORY_ONLY._replace(memory_BRM=np.zeros((2, 1, 3)))
    plans = candidates(load, times)
    assert plans[1].goodput == plans[0].goodput

    def is_due(plan: Plan, num_known: int) -> bool:
        return plan.proposer == "memory"

    assert unmeasured(plans, load, times, is_due) is None
    finds = candidates(MEMORY_ONLY, times)
    trial = unmeasured(finds, MEMORY_ONLY, times, is_due)
    assert trial is not None and trial.name == "memory 3"
