"""The bound against exhaustive search and hand-worked cases, and the order of its rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osd.evaluate.bound.costs import NOBODY, DraftCosts, StepCosts
from osd.evaluate.bound.foresight import earning, foreseeing, paying_to_see
from osd.evaluate.bound.rules import adaptive, fixed, longest, none, oracle
from osd.evaluate.bound.runs import ProposerRuns, RequestRuns
from osd.evaluate.bound.speeds import (
    ALL,
    NONE,
    best_fixed,
    fixed_name,
    rules_of,
    share_closed,
    speeds,
)

MOST = {"draft": 3, "memory": 5}
COSTS = StepCosts(
    batch=1,
    widths=(0, 4),
    verify_s=(1.0, 1.4),
    drafts={"draft": DraftCosts(per_step_s=0.3), "memory": DraftCosts()},
)
"""A step takes 1 s and 0.1 s a draft token; the draft model 0.3 s a step."""


def a_request(
    right: Mapping[str, Sequence[int]], num_prompt: int = 2, offered: int = 5
) -> RequestRuns:
    """Of an answer of one token more than there are positions."""
    runs = {
        name: ProposerRuns(right=np.array(values), offered=np.full(len(values), offered))
        for name, values in right.items()
    }
    (num,) = {len(values) for values in right.values()}
    return RequestRuns(num_prompt=num_prompt, num_output=num + 1, proposers=runs)


def exhaustively(request: RequestRuns, costs: StepCosts, proposers: Sequence[str]) -> float:
    """The least seconds of all courses, each written out and priced one step at a time. A proposer
    that is never used reads no prompt."""

    def courses(t: int) -> Iterator[tuple[tuple[str, int, int], ...]]:
        if t >= request.num_output:
            yield ()
            return
        for name in (NOBODY, *proposers):
            runs = request.proposers.get(name)
            for width in range(0 if runs is None else int(runs.offered[t - 1]) + 1):
                if width:
                    accepted = min(width, int(runs.right[t - 1]))  # type: ignore[union-attr]
                    for rest in courses(t + accepted + 1):
                        yield ((name, width, t), *rest)
            if name == NOBODY:
                for rest in courses(t + 1):
                    yield ((name, 0, t), *rest)

    def seconds(course: Sequence[tuple[str, int, int]]) -> float:
        used = {name for name, _, _ in course}
        total = costs.prefill(request.num_prompt)
        total += sum(costs.prefill(request.num_prompt, name) for name in used - {NOBODY})
        for name, width, t in course:
            line = costs.line(name, width)
            tokens = costs.batch * (request.num_prompt + t)
            total += line.base_W[width] + line.slope_W[width] * tokens
        return total

    return min(seconds(course) for course in courses(1))


@st.composite
def some_requests(draw: st.DrawFn, most: int = 5) -> RequestRuns:
    num = draw(st.integers(1, most))
    proposers = {}
    for name, longest_draft in MOST.items():
        offered = draw(st.lists(st.integers(0, longest_draft), min_size=num, max_size=num))
        right = [draw(st.integers(0, n)) for n in offered]
        proposers[name] = ProposerRuns(right=np.array(right), offered=np.array(offered))
    return RequestRuns(num_prompt=draw(st.integers(1, 9)), num_output=num + 1, proposers=proposers)


@st.composite
def some_costs(draw: st.DrawFn) -> StepCosts:
    def price(most: float) -> float:
        return draw(st.floats(0, most))

    rises = [price(0.5), price(0.5)]
    drafts = {
        name: DraftCosts(
            per_step_s=price(0.5),
            per_pass_s=price(0.2),
            per_context_s=price(0.01),
            share_of_verify=price(0.1),
            prefill_token_s=draw(st.sampled_from([0.0, 0.05])),
            is_charged_empty=draw(st.booleans()),
        )
        for name in MOST
    }
    return StepCosts(
        batch=draw(st.integers(1, 3)),
        widths=(0, 2, 4),
        verify_s=(1.0, 1.0 + rises[0], 1.0 + sum(rises)),
        per_context_s=price(0.01),
        overhead_s=price(0.1),
        prefill_s=1.0,
        prefill_token_s=price(0.1),
        drafts=drafts,
    )


@settings(max_examples=150, deadline=None)
@given(request=some_requests(4), costs=some_costs())
def test_the_oracle_is_the_best_of_all_courses(request: RequestRuns, costs: StepCosts) -> None:
    for proposers in (("draft",), ("memory",), ("draft", "memory")):
        found = oracle(proposers)(request, costs)
        assert found.seconds == pytest.approx(exhaustively(request, costs, proposers))


@settings(max_examples=150, deadline=None)
@given(request=some_requests(12), costs=some_costs())
def test_no_rule_is_faster_than_the_oracle(request: RequestRuns, costs: StepCosts) -> None:
    best = oracle(tuple(MOST))(request, costs).seconds
    for name, rule in rules_of(MOST).items():
        assert rule(request, costs).seconds >= best - 1e-9, name
    assert longest(tuple(MOST))(request, costs).seconds >= best - 1e-9
    for proposer, most in MOST.items():
        alone = oracle((proposer,))(request, costs).seconds
        others = [fixed(proposer, k) for k in range(1, most + 1)] + [adaptive(proposer, most), none]
        assert all(rule(request, costs).seconds >= alone - 1e-9 for rule in others)


def told(request: RequestRuns, odds: Mapping[str, Sequence[Sequence[float]]]) -> RequestRuns:
    """The same with odds, by position."""
    return replace(
        request,
        proposers={
            name: replace(runs, odds=np.array(odds[name]))
            for name, runs in request.proposers.items()
        },
    )


def certain(request: RequestRuns) -> RequestRuns:
    """Told what will be accepted."""
    return told(
        request,
        {
            name: [[float(i < right) for i in range(MOST[name])] for right in runs.right]
            for name, runs in request.proposers.items()
        },
    )


@settings(max_examples=100, deadline=None)
@given(request=some_requests(12), costs=some_costs(), data=st.data())
def test_who_knows_the_odds_is_no_faster_than_who_knows_the_outcome(
    request: RequestRuns, costs: StepCosts, data: st.DataObject
) -> None:
    best = oracle(tuple(MOST))(request, costs).seconds
    chance = st.floats(0, 1)
    odds = {
        name: [
            data.draw(st.lists(chance, min_size=MOST[name], max_size=MOST[name]))
            for _ in runs.right
        ]
        for name, runs in request.proposers.items()
    }
    for known in (told(request, odds), certain(request)):
        for rate in (0.0, 0.5, 2.0):
            assert foreseeing(tuple(MOST), rate)(known, costs).seconds >= best - 1e-9
            seeing = paying_to_see(("memory",), "draft", rate)
            assert seeing(known, costs).seconds >= best - 1e-9


def test_who_knows_the_odds_drafts_as_far_as_a_token_is_worth_its_seconds() -> None:
    # A step takes 1 s and 0.1 s a token: at 1.2 tokens/s a token pays from a chance of 0.12 on.
    request = a_request({"memory": [5, 0, 0, 0, 0, 0]})
    odds = [[0.9, 0.5, 0.3, 0.8, 0.5], *([[0.1] * 5] * 5)]
    known = told(request, {"memory": odds})
    found = foreseeing(("memory",), 1.2)(known, COSTS).steps
    assert found[0] == ("memory", 3, 3), "0.9, 0.45 and 0.135 pay, 0.108 and 0.054 do not"
    assert set(found[1:]) == {(NOBODY, 0, 0)}


def test_odds_that_are_certain_come_to_what_the_oracle_makes() -> None:
    # Where nothing that is accepted now is worth more later.
    request = certain(a_request({"memory": [2, 0, 0, 3, 0, 0, 0, 1, 0]}))
    known = earning([request], COSTS, lambda rate: foreseeing(("memory",), rate))
    best = speeds([request], COSTS, {ALL: oracle(("memory",))})[ALL]
    assert known.of_sums == pytest.approx(best.of_sums) and best.of_sums > 1.5


def test_a_second_is_worth_what_is_earned_in_it() -> None:
    # The draft costs 0.3 s a step. Where the memory does so well, it is not worth its chance.
    memory, draft = [4, 3, 2, 1, 0] * 4, [1, 0] * 10
    plain = a_request({"draft": draft})
    alone = told(plain, {"draft": [[0.5, 0, 0, 0, 0]] * 20})
    dear = told(
        a_request({"draft": draft, "memory": memory}),
        {
            "draft": [[0.5, 0, 0, 0, 0]] * 20,
            "memory": [[1.0] * r + [0.0] * (5 - r) for r in memory],
        },
    )
    used = earning([alone], COSTS, lambda rate: foreseeing(("draft",), rate))
    assert "draft" in {name for name, _, _ in used.courses[0].steps}
    both = earning([dear], COSTS, lambda rate: foreseeing(("draft", "memory"), rate))
    assert {name for name, _, _ in both.courses[0].steps} == {"memory"}


def test_who_pays_to_see_a_draft_pays_where_it_is_no_good_too() -> None:
    # A step takes 1 s and 0.1 s a token, and 0.3 s where the draft model is asked. The memory has
    # nothing; the draft is sure of its 3 tokens at every other position that is come to.
    right = [3, 0, 0, 0, 0] * 6
    request = told(
        a_request({"memory": [0] * 30, "draft": right}),
        {"memory": [[0.0] * 5] * 30, "draft": [[float(i < n) for i in range(5)] for n in right]},
    )
    knows = foreseeing(("memory", "draft"), 1.0)(request, COSTS)
    pays = paying_to_see(("memory",), "draft", 1.0)(request, COSTS)
    assert knows.steps == pays.steps, "both draft where it is sure, and nowhere else"
    drafts = [step for step in pays.steps if step[0] == "draft"]
    assert len(drafts) == 6 and set(drafts) == {("draft", 3, 3)}
    # In vain at the step after each, but the last, where no room is left for a draft token.
    assert pays.seconds == pytest.approx(knows.seconds + 5 * 0.3)


def test_who_pays_to_see_does_not_ask_where_it_never_pays() -> None:
    request = told(
        a_request({"memory": [2, 1, 0] * 4, "draft": [0] * 12}),
        {"memory": [[0.9, 0.8, 0.1, 0, 0]] * 12, "draft": [[0.05] * 5] * 12},
    )
    knows = foreseeing(("memory", "draft"), 1.0)(request, COSTS)
    pays = paying_to_see(("memory",), "draft", 1.0)(request, COSTS)
    assert pays.seconds == knows.seconds and {step[0] for step in pays.steps} == {"memory"}


@settings(max_examples=100, deadline=None)
@given(request=some_requests(12), costs=some_costs(), more=st.floats(0, 1))
def test_charging_a_proposer_never_makes_anybody_faster(
    request: RequestRuns, costs: StepCosts, more: float
) -> None:
    dearer = {
        name: replace(one, per_step_s=one.per_step_s + more) for name, one in costs.drafts.items()
    }
    charged = replace(costs, drafts=dearer)
    for name, rule in rules_of(MOST).items():
        assert rule(request, charged).seconds >= rule(request, costs).seconds - 1e-9, name


@settings(max_examples=100, deadline=None)
@given(request=some_requests(12), costs=some_costs())
def test_every_course_makes_the_whole_answer(request: RequestRuns, costs: StepCosts) -> None:
    for name, rule in rules_of(MOST).items():
        course = rule(request, costs)
        tokens = 1 + sum(accepted + 1 for _, _, accepted in course.steps)
        over = tokens - request.num_output
        last = course.steps[-1][2]
        assert 0 <= over <= last, name  # a last draft may reach beyond the end
        assert all(accepted <= width for _, width, accepted in course.steps)


def test_the_oracle_gives_up_a_token_for_a_better_place() -> None:
    # All 2 of the draft's tokens lead to position 4, with nobody right there; 1 leads to position
    # 3, from where the memory's 2 end the answer: 1.4 + 1.2 s. By the longest: 1.5 + 1 + 1.
    request = a_request({"draft": [2, 0, 0, 0, 0], "memory": [0, 0, 2, 0, 0]})
    found = oracle(("draft", "memory"))(request, COSTS)
    assert found.steps == (("draft", 1, 1), ("memory", 2, 2))
    assert found.seconds == pytest.approx(2.6)
    assert longest(("memory", "draft"))(request, COSTS).seconds == pytest.approx(3.5)


def test_the_oracle_does_not_draft_where_it_does_not_pay() -> None:
    request = a_request({"draft": [1, 0]})
    dear = replace(COSTS, drafts={"draft": DraftCosts(per_step_s=1.0)})
    assert oracle(("draft",))(request, COSTS).steps == (("draft", 1, 1),)
    assert oracle(("draft",))(request, dear).steps == (("", 0, 0), ("", 0, 0))
    assert oracle(("draft",))(request, dear).seconds == pytest.approx(2.0)


def test_a_draft_that_must_read_a_long_prompt_is_left_out() -> None:
    dear = replace(COSTS, drafts={"draft": DraftCosts(per_step_s=0.3, prefill_token_s=0.1)})
    for num_prompt, expected in ((2, 1.4 + 0.2), (9, 2.0)):
        request = a_request({"draft": [1, 0]}, num_prompt)
        assert oracle(("draft",))(request, dear).seconds == pytest.approx(expected)
    assert fixed("draft", 1)(a_request({"draft": [1, 0]}, 9), dear).seconds == pytest.approx(2.3)


def test_a_fixed_k_verifies_all_of_it_and_pays_for_what_is_rejected() -> None:
    # 1.3 + 0.3 a step of 3 tokens: 2 accepted, then none, then the answer ends within the draft.
    request = a_request({"draft": [2, 9, 9, 0, 1]}, offered=9)
    found = fixed("draft", 3)(request, COSTS)
    assert found.steps == (("draft", 3, 2), ("draft", 3, 0), ("draft", 3, 1))
    assert found.seconds == pytest.approx(3 * 1.6)
    assert none(request, COSTS).seconds == pytest.approx(5.0)


def test_the_simple_rule_follows_what_was_accepted() -> None:
    right, wrong = a_request({"draft": [9] * 60}, offered=9), a_request({"draft": [0] * 60})
    rises = [width for _, width, _ in adaptive("draft", 5)(right, COSTS).steps]
    falls = [width for _, width, _ in adaptive("draft", 5)(wrong, COSTS).steps]
    assert rises[0] == falls[0] == 3  # in the middle
    assert rises == sorted(rises) and max(rises) == 5
    assert falls == sorted(falls, reverse=True) and falls[-1] == 1


def test_the_simple_rule_learns_nothing_where_nothing_is_proposed() -> None:
    offered = np.array([0] * 10 + [5] * 3)
    runs = ProposerRuns(right=np.minimum(offered, 2), offered=offered)
    request = RequestRuns(num_prompt=2, num_output=14, proposers={"draft": runs})
    assert adaptive("draft", 5)(request, COSTS).steps[10:] == (("draft", 3, 2),)


def test_times_grow_between_the_widths_and_beyond() -> None:
    costs = StepCosts(
        batch=2,
        widths=(0, 2, 4),
        verify_s=(1.0, 1.2, 2.0),
        per_context_s=0.5,
        overhead_s=0.1,
        drafts={"draft": DraftCosts(per_step_s=0.1, per_pass_s=0.01, share_of_verify=0.5)},
    )
    plain = costs.line(NOBODY, 0)
    assert (plain.base_W.tolist(), plain.slope_W.tolist()) == ([1.1], [0.5])
    line = costs.line("draft", 5)
    verify = [1.0, 1.1, 1.2, 1.6, 2.0, 2.4]
    expected = [1.1, *(1.5 * v + 0.2 + 0.01 * w for w, v in enumerate(verify) if w)]
    assert line.base_W.tolist() == pytest.approx(expected)
    assert line.slope_W.tolist() == pytest.approx([0.5] + [0.75] * 5)
    assert costs.context(3, 4).tolist() == [8.0, 10.0, 12.0]


def test_costs_that_are_none_are_refused() -> None:
    for changes, message in (
        ({"verify_s": (1.0, 0.9)}, "never fall"),
        ({"widths": (1, 4)}, "begin with 0"),
        ({"widths": (0,), "verify_s": (1.0,)}, "two at least"),
        ({"batch": 0}, "batch"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(COSTS, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="per_pass_s"):
        DraftCosts(per_pass_s=-1.0)
    with pytest.raises(ValueError, match="2 positions, but an answer of 4 tokens has 3"):
        replace(a_request({"draft": [0, 0]}), num_output=4)
    with pytest.raises(ValueError, match="more draft tokens"):
        a_request({"draft": [6]})


def test_both_means_are_given_and_differ() -> None:
    quick, slow = a_request({"memory": [3, 0, 0, 0]}), a_request({"memory": [0] * 12})
    found = speeds([quick, slow], COSTS, {ALL: oracle(("memory",))})[ALL]
    assert found.mean == pytest.approx((4 / 1.3 + 12 / 12) / 2)
    assert found.of_sums == pytest.approx((4 + 12) / (1.3 + 12))
    one_token = RequestRuns(num_prompt=1, num_output=1, proposers={})
    assert speeds([quick, one_token], COSTS, {NONE: none})[NONE].mean == 1.0
    with pytest.raises(ValueError, match="nothing to bound"):
        speeds([one_token], COSTS, {NONE: none})


def test_the_best_fixed_choice_may_be_none_and_the_gap_is_shared_out() -> None:
    found = {NONE: 1.0, **{fixed_name("draft", k): 0.5 + k / 10 for k in (1, 2, 3)}, ALL: 2.0}
    assert best_fixed(found, {"draft": 3}) == NONE
    assert best_fixed(found | {fixed_name("draft", 2): 1.2}, {"draft": 3}) == "draft, k = 2"
    assert share_closed(1.5, 1.0, 2.0) == pytest.approx(0.5)
    assert share_closed(0.8, 1.0, 2.0) == pytest.approx(-0.2)
    assert share_closed(1.0, 1.0, 1.0) is None
