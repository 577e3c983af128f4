"""Acceptance learnt from tested positions, compared with sums by hand and with limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from serving.speculation.estimates import Acceptance, Watch


def step(estimates: Acceptance, slot: int, drafted: int, accepted: int, times: int = 1) -> None:
    for _ in range(times):
        estimates.add(np.array([slot]), np.array([drafted]), np.array([accepted]))


def first(estimates: Acceptance, slot: int) -> float:
    """Probability that the next draft token of a request is accepted."""
    return float(estimates.survival(np.array([slot]))[0, 0])


def of_new(estimates: Acceptance, domain: str) -> float:
    """The same of a request that comes now, which leaves no trace."""
    slot = estimates.open(domain)
    found = first(estimates, slot)
    estimates.close(slot)
    return found


def finish(estimates: Acceptance, domain: str, accepted: Iterable[int]) -> float:
    """A request that is drafted one token per step."""
    slot = estimates.open(domain)
    for num in accepted:
        step(estimates, slot, 1, num)
    return estimates.close(slot)


def share(num: int, num_accepted: int) -> list[int]:
    """So many tests of which so many are accepted, evenly mixed."""
    return [(i + 1) * num_accepted // num - i * num_accepted // num for i in range(num)]


def alphas(estimates: Acceptance, slot: int) -> list[float]:
    """Conditional acceptance at each position."""
    survival_G = estimates.survival(np.array([slot]))[0]
    return (survival_G / np.array([1.0, *survival_G[:-1]])).tolist()


def believed(
    tested_G: Sequence[float],
    accepted_G: Sequence[float],
    prior_G: Sequence[float],
    weight: float = 4,
) -> list[float]:
    """What `alphas` must be of a request with such evidence, in a class that is accepted as
    `prior_G` says."""
    expected = sum(t * p for t, p in zip(tested_G, prior_G, strict=True)) + weight * prior_G[0]
    better = (sum(accepted_G) + weight * prior_G[0]) / expected
    of_its_own_G = [
        p * better if better < 1 else min(p * better, 1 - (1 - p) / better) for p in prior_G
    ]
    return [
        (a + weight * p) / (t + weight)
        for t, a, p in zip(tested_G, accepted_G, of_its_own_G, strict=True)
    ]


# -- what is tested -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafted, accepted, tested", [(4, 0, 1), (4, 1, 2), (4, 3, 4), (4, 4, 4), (1, 0, 1), (1, 1, 1)]
)
def test_only_tokens_up_to_the_first_rejection_are_tested(
    drafted: int, accepted: int, tested: int
) -> None:
    estimates = Acceptance(4)
    slot = estimates.open("")
    step(estimates, slot, drafted, accepted)
    assert estimates.close(slot) == accepted / tested


def test_acceptance_of_a_request_is_accepted_by_tested_of_all_its_steps() -> None:
    estimates = Acceptance(4)
    slot = estimates.open("")
    for drafted, accepted in [(4, 1), (4, 4), (0, 0), (2, 2)]:  # 2, 4, 0 and 2 were tested
        step(estimates, slot, drafted, accepted)
    assert estimates.close(slot) == 7 / 8


def test_a_request_that_was_never_tested_says_nothing() -> None:
    estimates = Acceptance(4, predicted=0.6)
    slot = estimates.open("sql")
    step(estimates, slot, 0, 0, times=50)
    assert np.isnan(estimates.close(slot))
    assert of_new(estimates, "sql") == pytest.approx(0.6)


def test_survival_by_hand() -> None:
    estimates = Acceptance(2, predicted=0.5)
    slot = estimates.open("")
    assert estimates.survival(np.array([slot])).tolist() == [[0.5, 0.25]]
    step(estimates, slot, 1, 1)
    # One token accepted where a half was expected, against the weight of four tests: 3 / 2.5 = 1.2
    # times better than its class, whose misses become 0.5 / 1.2; one accepted of one joins four
    # tests of that.
    prior = 1 - 0.5 / 1.2
    assert estimates.survival(np.array([slot]))[0].tolist() == pytest.approx([2 / 3, 2 / 3 * prior])
    assert believed([1, 0], [1, 0], [0.5, 0.5]) == pytest.approx([2 / 3, prior])


@pytest.mark.parametrize(
    "steps, tested, accepted",
    [
        ([(2, 2)], [1, 1], [1, 1]),
        ([(2, 0)], [1, 0], [0, 0]),
        # Behind a rejection the counts fade; at the first position they go on.
        ([(2, 1), (2, 0)], [1.98, 0.997], [0.98, 0]),
        ([(2, 0), (2, 2)], [1.98, 1], [1, 1]),
        ([(1, 1), (2, 1), (2, 1)], [2.9404, 1.98], [2.9404, 0]),  # 1 + 0.98 + 0.98^2
        ([(2, 2), (0, 0), (0, 0)], [0.994009, 0.994009], [0.994009, 0.994009]),  # 0.997^2
    ],
)
def test_older_evidence_fades_by_two_percent_a_test_and_a_third_of_a_percent_without(
    steps: list[tuple[int, int]], tested: list[float], accepted: list[float]
) -> None:
    alone, beside = Acceptance(2, predicted=0.6), Acceptance(2, predicted=0.6)
    slot, (it, other) = alone.open(""), (beside.open(""), beside.open(""))
    for drafted, num in steps:
        step(alone, slot, drafted, num)
        # One of the two is tested in every step.
        beside.add(np.array([other, it]), np.array([2, drafted]), np.array([1, num]))
    assert alphas(alone, slot) == pytest.approx(believed(tested, accepted, [0.6, 0.6]))
    assert alphas(beside, it) == pytest.approx(believed(tested, accepted, [0.6, 0.6]))


def test_a_draft_nobody_knows_is_worth_a_try() -> None:
    estimates = Acceptance(2)
    assert alphas(estimates, estimates.open("")) == pytest.approx([0.7, 0.7])


def test_what_was_predicted_to_be_useless_or_perfect_may_be_neither() -> None:
    useless, perfect = Acceptance(2, predicted=0.0), Acceptance(2, predicted=1.0)
    slots = useless.open(""), perfect.open("")
    assert useless.survival(np.array([slots[0]])).tolist() == [[0, 0]]
    assert perfect.survival(np.array([slots[1]])).tolist() == [[1, 1]]
    step(useless, slots[0], 1, 1)
    step(perfect, slots[1], 1, 0)
    assert alphas(useless, slots[0])[0] == pytest.approx(0.2), (
        "one of one, against four tests of none"
    )
    # Four of five tests are those expected.
    assert alphas(perfect, slots[1]) == pytest.approx([4 * 0.8 / 5, 0.8])


def test_positions_behind_a_rejection_keep_what_was_thought_of_them_among_themselves() -> None:
    """100 rejections at position 0 say that the request is bad; nothing tells 1 and 2 apart."""
    estimates = Acceptance(3, predicted=0.8)
    slot = estimates.open("")
    step(estimates, slot, 3, 0, times=100)
    position_0, position_1, position_2 = estimates.survival(np.array([slot]))[0]
    assert position_0 < 0.1
    assert position_2 / position_1 == pytest.approx(position_1 / position_0)


def test_each_position_is_learnt_for_itself() -> None:
    estimates = Acceptance(3, predicted=0.5)
    slot = estimates.open("")
    for i in range(400):
        step(estimates, slot, 3, [3, 1, 1, 1][i % 4])  # position 0 always, 1 a quarter, 2 always
    position_0, position_1, position_2 = estimates.survival(np.array([slot]))[0]
    assert position_0 > 0.95
    assert position_1 / position_0 == pytest.approx(0.25, abs=0.06)
    assert position_2 / position_1 > 0.9


def test_a_request_good_where_it_was_tested_is_thought_good_where_it_was_not() -> None:
    estimates = Acceptance(4, predicted=0.5)
    good, bad = estimates.open(""), estimates.open("")
    step(estimates, good, 1, 1, times=40)
    step(estimates, bad, 1, 0, times=40)
    survival_BG = estimates.survival(np.array([good, bad]))
    alpha_good, alpha_bad = (survival_BG[:, 1:] / survival_BG[:, :-1]).mean(1)
    assert alpha_good > 0.65
    assert alpha_bad < 0.35


def test_survival_is_a_probability_and_falls_along_the_draft() -> None:
    rng = np.random.default_rng(0)
    estimates = Acceptance(5)
    slot_B = np.array([estimates.open(f"d{i % 3}") for i in range(40)])
    for _ in range(60):
        drafted_B = rng.integers(0, 6, 40)
        estimates.add(slot_B, drafted_B, np.minimum(rng.integers(0, 6, 40), drafted_B))
        survival_BG = estimates.survival(slot_B)
        assert survival_BG.min() >= 0
        assert survival_BG.max() <= 1
        assert np.diff(survival_BG, axis=1).max() <= 0


def test_requests_of_a_step_do_not_touch_each_other() -> None:
    together, alone = Acceptance(3), Acceptance(3)
    slot_B = np.array([together.open("") for _ in range(3)])
    others = [alone.open("") for _ in range(3)]
    for drafted_B, accepted_B in [([3, 0, 2], [1, 0, 2]), ([1, 3, 3], [1, 0, 3])]:
        together.add(slot_B, np.array(drafted_B), np.array(accepted_B))
        for slot, drafted, accepted in zip(others, drafted_B, accepted_B, strict=True):
            step(alone, slot, drafted, accepted)
    assert together.survival(slot_B).tolist() == alone.survival(np.array(others)).tolist()


# -- classes --------------------------------------------------------------------------------------


def test_a_finished_request_counts_once_however_long_it_stayed() -> None:
    """Bad requests stay twenty times as long: by steps 27 % would be accepted, by requests 75 %."""
    estimates = Acceptance(1)
    for _ in range(10):
        for _ in range(3):
            finish(estimates, "", share(20, 19))
        finish(estimates, "", share(400, 60))
    assert of_new(estimates, "") == pytest.approx(0.75, abs=0.05)


def test_the_order_in_which_requests_end_matters_little() -> None:
    estimates = Acceptance(1)
    for _ in range(5):
        finish(estimates, "", share(20, 19))
    for _ in range(5):
        finish(estimates, "", share(400, 60))
    assert of_new(estimates, "") == pytest.approx(0.55, abs=0.1)


def test_a_request_is_believed_as_its_class_until_it_is_tested() -> None:
    estimates = Acceptance(1)
    for _ in range(12):
        finish(estimates, "code", share(20, 18))
        finish(estimates, "chat", share(20, 4))
    assert of_new(estimates, "code") == pytest.approx(0.9, abs=0.06)
    assert of_new(estimates, "chat") == pytest.approx(0.2, abs=0.06)
    assert of_new(estimates, "never seen") == pytest.approx(0.55, abs=0.05)
    slot = estimates.open("code")
    step(estimates, slot, 1, 0, times=60)
    assert first(estimates, slot) < 0.2


def test_a_class_with_little_evidence_lies_between_its_own_and_everything() -> None:
    estimates = Acceptance(1)
    for _ in range(12):
        finish(estimates, "chat", share(20, 4))
    before = of_new(estimates, "code")
    finish(estimates, "code", [1] * 20)
    once = of_new(estimates, "code")
    for _ in range(5):
        finish(estimates, "code", [1] * 20)
    assert before == pytest.approx(0.2, abs=0.05)
    assert 0.4 < once < 0.75
    assert of_new(estimates, "code") > 0.88


def test_a_position_never_tested_is_thought_like_the_one_before() -> None:
    estimates = Acceptance(3, predicted=0.5)
    for _ in range(30):
        finish(estimates, "", share(20, 18))  # drafts of one token
    slot = estimates.open("")
    assert estimates.survival(np.array([slot]))[0].tolist() == pytest.approx(
        [0.9, 0.81, 0.729], abs=0.02
    )


def test_a_class_forgets() -> None:
    estimates = Acceptance(1)
    for _ in range(60):
        finish(estimates, "", share(20, 2))
    for _ in range(60):
        finish(estimates, "", share(20, 18))
    assert of_new(estimates, "") > 0.8


def test_what_a_class_is_thought_to_be_by_hand() -> None:
    """Ten steps: 8 of 10 are accepted at the first position, 6 of 8 at the second."""
    estimates = Acceptance(2)
    slot = estimates.open("code")
    for accepted in [2] * 6 + [1] * 2 + [0] * 2:
        step(estimates, slot, 2, accepted)
    assert estimates.close(slot) == 14 / 18
    all_0 = (8 + 2 * 0.7) / (10 + 2)
    all_1 = (6 + 2 * all_0) / (8 + 2)
    assert alphas(estimates, estimates.open("chat")) == pytest.approx([all_0, all_1])
    own = [(8 + 20 * all_0) / (10 + 20), (6 + 20 * all_1) / (8 + 20)]
    slot = estimates.open("code")
    assert alphas(estimates, slot) == pytest.approx(own)
    step(estimates, slot, 2, 1)
    assert alphas(estimates, slot) == pytest.approx(believed([1, 1], [1, 0], own)), (
        "its own evidence, shrunk to that"
    )


def test_what_a_finished_request_adds_and_takes_away_by_hand() -> None:
    """At most 20 first tokens, and so much less of the rest; a class remembers 400."""
    estimates = Acceptance(2)
    slot = estimates.open("code")
    for accepted in [2] * 10 + [1] * 20 + [0] * 10:
        step(estimates, slot, 2, accepted)
    assert estimates.close(slot) == 40 / 70
    half = [(15 + 2 * 0.7) / (20 + 2), 0.0]
    half[1] = (5 + 2 * half[0]) / (15 + 2)
    assert alphas(estimates, estimates.open("chat")) == pytest.approx(half)
    finish(estimates, "sql", [1] * 10)
    keep = 1 - 10 / 400
    later = [(15 * keep + 10 + 2 * 0.7) / (20 * keep + 10 + 2), 0.0]
    later[1] = (5 * keep + 2 * later[0]) / (15 * keep + 2)
    assert alphas(estimates, estimates.open("chat")) == pytest.approx(later)
    code = [(15 + 20 * later[0]) / (20 + 20), (5 + 20 * later[1]) / (15 + 20)]
    assert alphas(estimates, estimates.open("code")) == pytest.approx(code), (
        "another class took nothing from it"
    )


def test_domains_beyond_the_bound_are_served_too() -> None:
    """64, the unlabelled included."""
    estimates = Acceptance(1, predicted=0.6)
    for i in range(84):
        assert of_new(estimates, f"d{i}") == pytest.approx(0.6)
    for _ in range(12):
        for domain in ("d0", "d62"):
            finish(estimates, domain, share(20, 18))
        finish(estimates, "d63", share(20, 2))
    assert of_new(estimates, "d0") > 0.8, (
        "domains of which nothing is kept share no class with those that have one"
    )
    assert of_new(estimates, "d62") > 0.8
    assert of_new(estimates, "another too many") < 0.3
    known = of_new(estimates, "")
    assert of_new(estimates, "d63") == of_new(estimates, "another too many") == known


@pytest.mark.parametrize(
    "finished, weight",
    [
        ([(20, 14), (20, 6), (20, 14)], 4),  # three say nothing
        # 9.1: the variance is 0.04, of which chance makes a third.
        ([(20, 14), (20, 6)] * 2, 0.25 / (0.04 - 0.25 / 20)),
        # The mean is 0.4, not 0.5; 1/15 is the mean of 1/10 and 1/30.
        ([(10, 7), (30, 9)] * 2, 0.24 / (0.05 - 0.24 / 15)),
        ([(20, 10)] * 4, 60),
        ([(20, 20), (20, 0)] * 2, 4),
        ([(100, 100), (100, 0)] + [(100, 50)] * 62, 0.25 / (0.5 / 64 - 0.25 / 100)),  # 47
        # One of the newest 64 differs: chance.
        ([(100, 100), (100, 0)] + [(100, 50)] * 63, 60),
    ],
)
def test_tests_that_a_request_must_show_to_be_believed_half(
    finished: list[tuple[int, int]], weight: float
) -> None:
    estimates = Acceptance(1)
    slots = [estimates.open("") for _ in finished]
    steps_of = [share(*request) for request in finished]
    for i in range(max(map(len, steps_of))):
        drafted_B = np.array([i < len(steps) for steps in steps_of], np.int64)
        estimates.add(
            np.array(slots),
            drafted_B,
            np.array([steps[i : i + 1] == [1] for steps in steps_of], np.int64),
        )
    for slot in slots:
        estimates.close(slot)
    slot = estimates.open("")
    prior = alphas(estimates, slot)
    step(estimates, slot, 1, 1)
    assert alphas(estimates, slot) == pytest.approx(believed([1], [1], prior, weight))


def test_a_request_is_believed_later_where_requests_are_alike() -> None:
    def shift(rates: tuple[float, float]) -> float:
        """What five rejections make of a request, where half of all requests are accepted at each
        rate."""
        rng = np.random.default_rng(0)
        estimates = Acceptance(1)
        for i in range(60):
            finish(estimates, "", (rng.random(8) < rates[i % 2]).astype(int).tolist())
        slot = estimates.open("")
        before = first(estimates, slot)
        assert before == pytest.approx(0.5, abs=0.08)
        step(estimates, slot, 1, 0, times=5)
        return before - first(estimates, slot)

    alike, unlike = shift((0.5, 0.5)), shift((0.95, 0.05))
    assert unlike > 0.25
    # By chance alone eight tests differ as if requests did: not told apart, that would halve the
    # effect of both.
    assert alike < 0.25 * unlike


# -- another draft --------------------------------------------------------------------------------


def test_a_restart_begins_with_what_was_predicted() -> None:
    estimates = Acceptance(2)
    running, other = estimates.open("code"), estimates.open("")
    for _ in range(10):
        finish(estimates, "code", [0] * 20)
    for slot in (running, other):
        step(estimates, slot, 2, 0, times=50)
        assert first(estimates, slot) < 0.1
    estimates.restart([other, running], 0.9)
    assert estimates.survival(np.array([running]))[0].tolist() == pytest.approx([0.9, 0.81])
    assert estimates.survival(np.array([other]))[0].tolist() == pytest.approx([0.9, 0.81])
    assert of_new(estimates, "code") == pytest.approx(0.9)
    step(estimates, running, 2, 1)
    assert estimates.close(running) == 0.5, "what it showed before belongs to the other draft"
    estimates.restart([other], 0.0)
    assert first(estimates, other) == 0, "known to be useless is not unknown"


def test_a_restart_with_nothing_predicted_begins_with_the_unknown() -> None:
    estimates = Acceptance(2, predicted=0.2)
    estimates.restart([], None)
    assert of_new(estimates, "") == pytest.approx(0.7)


def test_a_restart_believes_requests_as_soon_as_at_first() -> None:
    """How alike requests were under the other draft says nothing of this one."""
    estimates = Acceptance(1, predicted=0.5)
    for _ in range(40):
        finish(estimates, "", share(30, 15))
    estimates.restart([], 0.5)
    fresh = Acceptance(1, predicted=0.5)
    for num_finished in (0, 8):
        for i in range(num_finished):
            finish(estimates, "", share(30, 30 * (i % 2)))
            finish(fresh, "", share(30, 30 * (i % 2)))
        slots = estimates.open(""), fresh.open("")
        step(estimates, slots[0], 1, 0, times=5)
        step(fresh, slots[1], 1, 0, times=5)
        assert first(estimates, slots[0]) == first(fresh, slots[1])


# -- time -----------------------------------------------------------------------------------------


def test_evidence_fades_while_nothing_is_tested() -> None:
    estimates = Acceptance(2, predicted=0.8)
    slot = estimates.open("")
    step(estimates, slot, 2, 0, times=50)
    shown = first(estimates, slot)
    assert shown < 0.05
    step(estimates, slot, 0, 0, times=700)
    later = first(estimates, slot)
    assert 0.1 < later < 0.7
    step(estimates, slot, 0, 0, times=3000)
    assert first(estimates, slot) == pytest.approx(0.8, abs=0.02)


def test_the_newest_tests_count_most() -> None:
    estimates = Acceptance(1)
    slot = estimates.open("")
    step(estimates, slot, 1, 0, times=300)
    step(estimates, slot, 1, 1, times=100)
    assert first(estimates, slot) > 0.8


# -- slots ----------------------------------------------------------------------------------------


def test_a_slot_is_handed_on_clean() -> None:
    estimates = Acceptance(2)
    slot = estimates.open("bad")
    step(estimates, slot, 2, 0, times=80)
    estimates.close(slot)
    again, never_used = estimates.open("good"), estimates.open("good")
    assert again == slot != never_used
    found, fresh = (estimates.survival(np.array([slot])) for slot in (again, never_used))
    assert found.tolist() == fresh.tolist()
    step(estimates, again, 1, 1)
    assert estimates.close(again) == 1.0


def test_more_requests_than_slots_keep_their_evidence() -> None:
    estimates = Acceptance(1)
    good = estimates.open("")
    step(estimates, good, 1, 1, times=50)
    before = first(estimates, good)
    slots = [estimates.open("") for _ in range(50)]
    assert len({good, *slots}) == 51
    assert first(estimates, good) == before
    step(estimates, slots[-1], 1, 0, times=50)
    assert first(estimates, slots[-1]) < 0.2
    assert first(estimates, slots[-2]) == pytest.approx(0.7)
    for slot in slots:
        estimates.close(slot)
    again = [estimates.open("") for _ in range(50)]
    assert len({good, *again}) == 51
    assert max(again) < 2 * 51, "memory for at most twice as many as there were at once"


# -- surprises ------------------------------------------------------------------------------------


def surprises(expected: float, outcomes: Sequence[bool]) -> list[tuple[int, float]]:
    watch = Watch()
    found = [(at, watch.add(expected, each)) for at, each in enumerate(outcomes)]
    return [(at, rate) for at, rate in found if rate is not None]


@pytest.mark.parametrize("expected", [0.02, 0.5, 0.97])
def test_what_was_expected_is_no_surprise(expected: float) -> None:
    outcomes = np.random.default_rng(0).random(4000) < expected
    assert len(surprises(expected, outcomes.tolist())) <= 1


@pytest.mark.parametrize("expected, true", [(0.9, 0.1), (0.1, 0.9), (0.6, 0.1)])
def test_another_acceptance_is_noticed_soon_and_told(expected: float, true: float) -> None:
    outcomes = np.random.default_rng(1).random(400) < true
    (at, rate), *_ = surprises(expected, outcomes.tolist())
    assert at < 30
    assert rate == pytest.approx(true, abs=0.2)
