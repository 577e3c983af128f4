"""The memory in the closed loop, by hand: who proposes for each request, and what is learnt of the
one who does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from serving.speculation.control import STEPS_PER_DECISION, Settings, Speculation
from serving.speculation.goodput import OFF, Plan, expected
from serving.speculation.memory.lookups import NUM_LOOKUPS, NUM_UNUSED
from serving.speculation.memory.memory import Found
from serving.speculation.requests import Requests
from serving.speculation.step_seen import DraftWork, Stamp, StepSeen
from tests.support.simulated_engine import StepTime
from tests.unit.serving.speculation.test_control_steps import planned, rows, starts

MIXED = Plan("draft", 2, is_mixed=True)
HALF_RIGHT = Settings(k_max=2, predicted=0.5)
TOKENS = [*range(100, 108)]
"""What the memory says, as far as it knows any."""


class Knows:
    """A memory that finds for each request what it is told to: how likely its tokens are."""

    def __init__(self, k: int = 8, **survival: list[float]) -> None:
        self.k, self.survival = k, survival
        self.prompts: dict[str, list[int]] = {}
        self.served: dict[str, list[int]] = {}
        self.ended: list[str] = []
        self.num_lookups = 0
        self.looked_ahead: list[int] = []

    def begin(
        self, req_id: str, prompt: Sequence[int], *, scope: str = "", is_kept: bool = True
    ) -> None:
        self.prompts[req_id], self.served[req_id] = [*prompt], []

    def advance_all(
        self,
        served: Iterable[tuple[str, Sequence[int]]],
        k: int = 0,
        least: float = 0.0,
        num: int | None = None,
    ) -> None:
        self.looked_ahead.append(k)
        for req_id, tokens in served:
            self.served[req_id] += tokens

    def propose(
        self, req_id: str, k: int, least: float = 0.0, *, ahead: Sequence[int] = ()
    ) -> Found:
        self.num_lookups += 1
        survival_K = np.array(self.survival.get(req_id, [])[:k])
        survival_K = survival_K[survival_K >= least]
        return Found(TOKENS[: len(survival_K)], survival_K)

    def end(self, req_id: str) -> None:
        self.ended.append(req_id)

    def work(self) -> None: ...


def cheap(batch: int, tokens: int, passes: int) -> float:
    """Hardly anything but the target's weights is read."""
    return 0.02 + 0.00001 * tokens + 0.0005 * passes


def controlled(
    memory: Knows | None,
    settings: Settings = HALF_RIGHT,
    plan: Plan | None = MIXED,
    step_time: StepTime = cheap,
) -> Speculation:
    """Two requests, "a" and "b"; the draft is thought to get 0.75 of two tokens accepted."""
    control = Speculation(settings, memory=memory)
    control.times.load_rows(rows([1, 2, 4], step_time))
    control.force(plan)
    for req_id in ("a", "b"):
        control.begin(req_id, prompt=[1, 2, 3])
    control.plan(["a", "b"], 200)
    return control


# -- who proposes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "survival, num",
    [([0.9, 0.8], 2), ([0.76], 1), ([0.75], 0), ([0.5, 0.2], 0), ([], 0), ([0.9] + [0.2] * 7, 8)],
)
def test_the_memory_proposes_where_it_is_worth_more_than_the_draft(
    survival: list[float], num: int
) -> None:
    """Than 0.75 tokens."""
    control = controlled(Knows(a=survival))
    assert control.look_up("a") == TOKENS[:num]
    assert control.look_up("b") == [], "nothing is known of it"


def test_what_is_worth_less_than_its_price_is_no_part_of_it() -> None:
    """Two tokens of the draft are verified, which are worth 0.75 - 2 * 0.3."""
    memory = Knows(a=[0.9, 0.8, 0.3, 0.29], b=[0.4, 0.2])
    control = controlled(memory, plan=MIXED._replace(price=0.3))
    assert control.look_up("a") == TOKENS[:3], "what is just worth it, too"
    assert control.look_up("b") == [], "0.4 - 0.3 is less"
    memory.survival["b"] = [0.46, 0.2]
    assert control.look_up("b") == TOKENS[:1]


def test_where_the_draft_is_verified_whole_the_memory_is_cut_all_the_same() -> None:
    """A probe shows what the draft is worth; what the memory gets accepted is known without."""
    memory = Knows(a=[0.25, 0.2], b=[0.9, 0.25])
    hopeless, plan = Settings(k_max=2, predicted=0.05), MIXED._replace(price=0.3, is_whole=True)
    control = controlled(memory, hopeless, plan=plan)
    assert (control.look_up("a"), control.look_up("b")) == ([], TOKENS[:1])
    requests, cut = control.requests, plan._replace(is_whole=False)
    requests.set_caps(cut, ["a", "b"], requests.load(["a", "b"], 200))
    assert (requests.cap("a", cut), requests.cap("a", plan)) == (0, 2)
    assert not control.has_caps


def test_a_decided_plan_is_for_each_request_what_is_worth_most_there() -> None:
    """And the draft is cut as far as its tokens are worth it."""
    memory = Knows(a=[0.95, 0.9, 0.85, 0.8, 0.75])
    control = controlled(memory, Settings(k_max=2, predicted=0.8), None)
    for _ in range(4 * STEPS_PER_DECISION):
        stamp = control.plan(["a", "b"], 200)
        found = control.look_up("a"), control.look_up("b")
    assert (stamp.plan.name, stamp.plan.is_mixed) == ("draft 2", True)
    assert found == (TOKENS[:5], [])
    assert control.cap("b") == 2
    assert stamp.plan.width == pytest.approx(5 + 2)
    gain = 4.25 + (0.8 + 0.64)
    assert stamp.plan.goodput * stamp.plan.seconds == pytest.approx(2 + gain)


def test_what_is_found_less_often_than_not_is_thought_of_as_often() -> None:
    """The memory found 1.8 tokens for "a" in two look-ups of eight."""
    memory = Knows()
    control = controlled(memory)
    for i in range(NUM_LOOKUPS):
        memory.survival["a"] = [0.9, 0.9] if i in (2, 5) else []
        control.look_up("a")
        control.look_up("b")
    load = control.requests.load(["a", "b"], 200)
    assert load.memory_BRM is not None
    assert load.memory_BRM.sum(2).mean(1) == pytest.approx([1.8 / 4, 0])
    gain_P, width_P = expected(load, [MIXED, Plan("memory", 8)])
    assert gain_P == pytest.approx([1.8 / 4 + 0.75 * 3 / 4 + 0.75, 1.8 / 4])
    assert width_P == pytest.approx([4, 0.5])


@pytest.mark.parametrize(
    "settings, plan",
    [
        (Settings(mode="fixed", k_max=2), None),
        (Settings(mode="off", k_max=2), None),
        (Settings(k_max=2), Plan("draft", 2)),
        (Settings(k_max=2), OFF),
    ],
)
def test_what_is_fixed_or_forced_is_not_mixed(settings: Settings, plan: Plan | None) -> None:
    """What the memory would find is noted all the same."""
    memory = Knows(a=[0.99] * 8)
    control = controlled(memory, settings, plan)
    assert not control.present.is_mixed
    assert control.look_up("a") == []
    assert memory.num_lookups == 1
    found = control.requests.load(["a"], 100).memory_BRM
    assert found is not None and found[0, 0] == pytest.approx([0.99] * 8)


@pytest.mark.parametrize("mode, plan", [("auto", Plan("memory", 8)), ("fixed", None)])
def test_the_memory_alone_proposes_whatever_it_finds(mode: str, plan: Plan | None) -> None:
    settings = Settings(mode=mode, k_max=2, proposers=("memory", "draft"))
    control = controlled(Knows(a=[0.2, 0.06, 0.04]), settings, plan)
    assert control.present.name == "memory 8"
    assert control.look_up("a") == TOKENS[:2], "but for what is hardly ever right"


def test_the_memory_is_asked_as_far_as_plan_and_client_allow() -> None:
    memory = Knows(a=[0.9] * 8, capped=[0.9] * 8)
    control = controlled(memory, plan=Plan("memory", 3))
    control.begin("capped", client_cap=1)
    assert control.look_up("a") == TOKENS[:3]
    assert control.look_up("capped") == TOKENS[:1]


def test_a_client_gets_no_more_of_the_memory_than_it_allows() -> None:
    """As the draft, of which one token is thought to bring 0.5."""
    memory = Knows(capped=[0.9, 0.8, 0.7], weak=[0.4, 0.4, 0.4], none=[0.9])
    control = controlled(memory)
    control.begin("capped", client_cap=1)
    control.begin("weak", client_cap=1)
    control.begin("none", client_cap=0)
    assert control.look_up("capped") == TOKENS[:1]
    assert control.look_up("weak") == [], "0.4 is all it may have"
    num_lookups = memory.num_lookups
    assert control.look_up("none") == []
    assert memory.num_lookups == num_lookups, "it need not even be asked"
    for req_id in ("a", "b", "none"):
        control.end(req_id)
    load = control.requests.load(["capped", "weak"], 200)
    _, widths = expected(load, [Plan("memory", 8)])
    assert widths.sum() <= 2
    assert load.allowed_B.tolist() == [1, 1]


def test_a_request_without_drafts_says_nothing_of_the_memory() -> None:
    """That nothing was found for it was its own wish."""
    memory = Knows(a=[0.9])
    control = controlled(memory, plan=Plan("memory", 8))
    control.begin("none", client_cap=0)
    control.begin("uncounted", is_counted=False)
    for _ in range(NUM_LOOKUPS):
        for req_id in ("a", "none", "uncounted"):
            control.look_up(req_id)
    control.begin("new")
    load = control.requests.load(["new", "none", "uncounted"], 300)
    assert load.memory_BRM is not None
    assert load.memory_BRM[:, :, 0].mean(1) == pytest.approx([0.9, 0, 0])
    assert set(memory.prompts) == {"a", "b", "new"}


def test_a_new_request_is_thought_to_be_like_all_until_it_has_its_own_look_ups() -> None:
    memory = Knows(a=[0.9], b=[0.5])
    control = controlled(memory)
    for _ in range(20):
        control.look_up("a")
        control.look_up("b")
    control.begin("new")

    def found(req_id: str) -> list[float]:
        load = control.requests.load([req_id], 100)
        assert load.memory_BRM is not None
        return sorted(load.memory_BRM[0, :, 0].tolist())

    assert found("a") == [0.9] * NUM_LOOKUPS
    assert found("new") == [0.5] * 4 + [0.9] * 4
    for num in range(1, NUM_LOOKUPS + 1):
        control.look_up("new")
        assert found("new").count(0.0) >= num
    assert found("new") == [0.0] * NUM_LOOKUPS
    assert found("a") == [0.9] * NUM_LOOKUPS


def test_without_a_memory_nobody_asks_for_one() -> None:
    """Whatever the settings say."""
    control = controlled(None, plan=None)
    assert "memory" in control.settings.proposers
    load = control.requests.load(["a", "b"], 200)
    assert load.memory_BRM is load.ratio_BR is None
    assert control.look_up("a") == []
    assert {name.split()[0] for name in planned(control, ["a", "b"], 100)} == {"draft"}


def test_a_net_window_without_speculation_has_no_look_up() -> None:
    """It costs what an engine without speculation costs."""
    now = [0.0]
    settings = Settings(k_max=2, predicted=0.9, net_interval_seconds=5.0)
    memory = Knows(a=[0.9] * 8)
    control = Speculation(settings, clock=lambda: now[0], memory=memory)
    control.times.load_rows(rows([1], cheap))
    control.begin("a")
    num_without = 0
    for _ in range(200):
        now[0] += 0.125
        stamp = control.plan(["a"], 100)
        before = memory.num_lookups
        control.look_up("a")
        control.observe(
            StepSeen(["a"], [0], [0], stamp, stamp, DraftWork(), 100, False, 0.1, [100])
        )
        is_without = stamp.reason == "net window"
        assert memory.num_lookups == before + (not is_without)
        num_without += is_without
    assert num_without > 10


def test_a_memory_whose_step_is_never_seen_is_not_tried_for_ever() -> None:
    """It promises a tenth less than the draft, and then finds nothing."""
    memory = Knows(1, r0=[0.5])
    control = Speculation(Settings(k_max=1, predicted=0.7), memory=memory)
    known = [row for row in rows([1], cheap) if (row["tokens"], row["drafted"]) != (2, 0)]
    control.times.load_rows(known)
    control.begin("r0")
    control.look_up("r0")
    names = planned(control, ["r0"], 600)
    assert starts(names, "memory 1") == [24, 48]
    assert set(names) == {"draft 1", "memory 1"}


# -- what it is told ------------------------------------------------------------------------------


def test_the_memory_hears_every_token_of_a_request_once() -> None:
    memory = Knows()
    control = controlled(memory)
    served = control.requests.served
    served([("a", [1, 2, 3, 4]), ("b", [1, 2, 3, 8, 9])])
    served([("a", [1, 2, 3, 4])])
    served([("unknown", [1]), ("a", [1, 2, 3, 4, 5, 6])])
    assert memory.prompts == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert memory.served == {"a": [4, 5, 6], "b": [8, 9]}
    control.end("a")
    control.end("unknown")
    assert memory.ended == ["a"]


def test_the_memory_looks_up_all_at_once_while_it_is_asked() -> None:
    """Not in a net window, in which nobody asks it."""
    memory = Knows()
    control = controlled(memory)
    text = [1, 2, 3]
    for is_asked in (False, True, True, False, False, True):
        text = [*text, 4]
        control.requests.served([("a", text)])
        if is_asked:
            control.look_up("a")
    assert memory.looked_ahead == [0, 0, 8, 8, 0, 0]


def test_where_it_may_not_propose_few_are_looked_up_in_a_step_and_each_in_turn() -> None:
    memory = Knows(5)
    control = controlled(memory, plan=OFF)
    names = [f"r{b}" for b in range(3 * NUM_UNUSED)]
    for req_id in names:
        control.begin(req_id, prompt=[1])
        memory.survival[req_id] = [0.5]

    def step() -> int:
        control.plan(names, 200)
        before = memory.num_lookups
        control.requests.served([(r, [1, 2]) for r in names], control.may_memory_propose)
        for req_id in names:
            control.look_up(req_id)
        return memory.num_lookups - before

    assert [step() for _ in range(2)] == [NUM_UNUSED] * 2
    assert list(control.requests.found(names).values()).count(0.5) == 2 * NUM_UNUSED
    assert step() == NUM_UNUSED
    assert set(control.requests.found(names).values()) == {0.5}, "each once in three steps"
    control.force(Plan("memory", 5))
    assert step() == len(names), "all of which may be proposed"


# -- what is learnt of the draft ------------------------------------------------------------------


def believed(control: Speculation) -> float:
    survival_BG = control.requests.load(["a"], 100).draft_BG
    assert survival_BG is not None
    return float(survival_BG[0, 0])


def estimate(*, is_judged: bool) -> float:
    """What is thought of a draft that is right with 0.9 in an easy text and with 0.3 in another,
    where the memory proposes for all that is easy: half."""
    random = np.random.default_rng(0)
    memory = Knows()
    control = controlled(memory, Settings(k_max=1, predicted=0.7), Plan("draft", 1, is_mixed=True))
    text, found = [1, 2, 3], []
    for i in range(1600):
        is_easy = random.random() < 0.5
        memory.survival["a"] = [0.97, 0.97] if is_easy else []
        stamp = control.plan(["a"], 100)
        proposal = control.look_up("a")
        assert bool(proposal) == is_easy
        at, is_right = len(text), random.random() < (0.9 if is_easy else 0.3)
        if proposal:
            draft = [at if is_right else -1]
            control.requests.add_unverified("a", i, at, at - 3, draft)
            is_right = random.random() < 0.97
        text += [*range(at, at + 1 + is_right)]
        control.requests.served([("a", text)])
        judged, control.requests.judged = control.requests.judged, []
        one = [int(is_right)]
        seen = StepSeen(
            ["a"], [1], one, stamp, stamp, DraftWork(1), 100, False, 0.01, [at], [at - 3]
        )
        seen.from_memory, seen.judged = {"a"} if proposal else (), judged if is_judged else ()
        control.observe(seen)
        found.append(believed(control))
    return float(np.mean(found[600:]))


def test_a_draft_is_known_without_a_bias_though_others_propose_where_it_is_good() -> None:
    assert estimate(is_judged=True) == pytest.approx(0.6, abs=0.03)
    assert estimate(is_judged=False) == pytest.approx(0.3, abs=0.05), "what was verified alone"


def unverified(control: Speculation, draft: Sequence[int], served: Sequence[int]) -> None:
    """A step of "a" that verified nothing of the draft, while so much was served."""
    stamp = control.plan(["a"], 100)
    control.look_up("a")
    at = 3
    control.requests.add_unverified("a", 1, at, 0, draft)
    control.requests.served([("a", [1, 2, 3, *served])])
    judged, control.requests.judged = control.requests.judged, []
    seen = StepSeen(["a"], [0], [0], stamp, stamp, DraftWork(2), 100, False, 0.01, [at], [0])
    seen.from_memory, seen.judged = {"a"}, judged
    control.observe(seen)


def test_a_draft_that_is_never_verified_is_known_by_what_was_served() -> None:
    control = controlled(Knows(a=[0.9, 0.8, 0.7]))
    for _ in range(60):
        unverified(control, [4, 9], [4, 5])
    load = control.requests.load(["a"], 100)
    assert load.draft_BG is not None
    assert load.draft_BG[0, 0] > 0.9 and load.draft_BG[0, 1] < 0.1
    report = control.report()
    assert report.tested_per_position == (60, 60)
    assert report.accepted_per_position == (60, 0)
    assert report.sources["draft"] == (0, 0), "nothing of it was verified"


def test_the_draft_proposes_where_it_is_better_than_the_memory_beside_it() -> None:
    """It is twice as good there as in the mean."""
    memory = Knows(a=[0.9])
    control = controlled(memory)
    assert control.look_up("a") == TOKENS[:1]
    for _ in range(20):
        unverified(control, [4, 5], [4, 5])
    assert control.look_up("a") == []
    memory.survival["a"] = [0.99] * 3
    assert control.look_up("a") == TOKENS[:3], "beside such finds it is as it ever was"


def test_requests_that_are_not_counted_say_nothing_of_drafts_that_nobody_verified() -> None:
    control = controlled(Knows())
    control.begin("x", is_counted=False)
    control.requests.add_unverified("x", 1, 0, 0, [4, 5])
    control.requests.add_unverified("unknown", 1, 0, 0, [4, 5])
    control.requests.served([("x", [4, 5])])
    assert control.requests.judged == []


def test_another_draft_is_compared_with_nothing_of_the_one_before() -> None:
    """What the memory finds is no matter of the draft."""
    control = controlled(Knows(a=[0.9, 0.9]), Settings(k_max=2, predicted=0.9))
    for _ in range(30):
        unverified(control, [4, 9], [4, 5])
    before = control.requests.load(["a"], 100)
    assert before.ratio_BR is not None and before.ratio_BR[0, 0] < 0.75
    control.requests.add_unverified("a", 2, 3, 0, [4, 5])
    control.restart(0.2)
    after = control.requests.load(["a"], 100)
    assert after.memory_BRM is not None and before.memory_BRM is not None
    assert after.ratio_BR is not None and (after.ratio_BR == 1.0).all()
    assert np.array_equal(after.memory_BRM, before.memory_BRM)
    control.requests.served([("a", [1, 2, 3, 4, 5, 6])])
    assert control.requests.judged == [], "that one was the old draft's"
    stamp = control.plan(["a"], 100)
    for _ in range(5):  # verified, and right as often as is expected of the new one: 0.2 + 0.04
        control.observe(
            StepSeen(["a"], [2], [0], stamp, stamp, DraftWork(2), 100, False, 0.01, [10])
        )
    ratio_BR = control.requests.load(["a"], 100).ratio_BR
    assert ratio_BR is not None and ratio_BR.min() > 0.85, "not of the 1.7 tokens of the old one"


def test_a_probe_learns_from_what_was_served_in_its_place() -> None:
    """The memory proposes all the while: the draft has become good, and nobody verifies it."""
    memory = Knows(a=[0.9] * 8)
    control = controlled(memory, Settings(k_max=2, predicted=0.02), None)
    control.end("b")
    text = [1, 2, 3]
    for _ in range(600):
        stamp = control.plan(["a"], 100)
        if stamp.plan.passes:
            assert control.look_up("a"), "it is thought to be the better one"
            draft = [len(text), len(text) + 1][: stamp.plan.passes]
            control.requests.add_unverified("a", 1, len(text), len(text) - 3, draft)
        else:
            control.look_up("a")
        text += [*range(len(text), len(text) + 3)]
        control.requests.served([("a", text)])
        judged, control.requests.judged = control.requests.judged, []
        seen = StepSeen(
            ["a"], [8], [2], stamp, stamp, DraftWork(), 100, False, 0.01, [len(text) - 3], [5]
        )
        seen.from_memory, seen.judged = {"a"}, judged
        control.observe(seen)
        if believed(control) > 0.5:
            break
    assert (control.report().num_probes or 0) >= 1
    assert believed(control) > 0.5


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_drawn_draft_is_verified_now_and_then_where_the_memory_is_better(is_drawn: bool) -> None:
    """What was served does not say what it is worth there."""
    settings = Settings(k_max=2, predicted=0.5, is_drawn=is_drawn)
    control = controlled(Knows(a=[0.9] * 2, b=[0.9] * 2), settings, None)
    looked_up, plans = 0, []
    for _ in range(64 * STEPS_PER_DECISION):
        stamp = control.plan(["a", "b"], 200)
        looked_up += bool(control.look_up("a"))
        plans.append(stamp.plan)
        seen = StepSeen(
            ["a", "b"], [2, 2], [1, 1], stamp, stamp, DraftWork(), 200, False, 0.01, [9, 9]
        )
        seen.from_memory = {"a", "b"}
        control.observe(seen)
    alone = sum(plan.passes > 0 and not plan.is_mixed for plan in plans)
    assert (0 < alone < 0.2 * len(plans)) if is_drawn else alone == 0
    assert looked_up == len(plans) - alone


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_drawn_draft_that_runs_is_verified_alone_at_every_sixteenth_decision(
    is_drawn: bool,
) -> None:
    settings = Settings(k_max=2, predicted=0.95, is_drawn=is_drawn)
    control = controlled(Knows(a=[0.9] * 2), settings, None)
    plans = []
    for _ in range(64 * STEPS_PER_DECISION):
        stamp = control.plan(["a", "b"], 200)
        control.look_up("a")
        plans.append(stamp.plan)
        seen = StepSeen(
            ["a", "b"], [2, 2], [1, 2], stamp, stamp, DraftWork(), 200, False, 0.01, [9, 9]
        )
        seen.from_memory = {"a"}
        control.observe(seen)
    num_alone = sum(plan.passes > 0 and not plan.is_mixed for plan in plans)
    assert num_alone == (4 * STEPS_PER_DECISION if is_drawn else 0)


def test_a_draft_that_nobody_verified_is_judged_where_the_memory_found_nothing() -> None:
    """It is cut to nothing, and right all the same: so it is found out without verifying it."""
    costly = Settings(k_max=2, predicted=0.02)
    control = controlled(Knows(), costly, None, lambda b, t, p: 0.02 + 0.005 * t + 0.0005 * p)
    text = [1, 2, 3]
    while believed(control) < 0.5 and len(text) < 700:
        stamp = control.plan(["a"], 100)
        assert control.look_up("a") == []
        if stamp.plan.passes and stamp.reason == "probe":
            assert control.cap("a") == 0, "it is not worth verifying"
            control.requests.add_unverified("a", 1, len(text), len(text) - 3, [len(text)])
        text.append(len(text))
        control.requests.served([("a", text)])
        judged, control.requests.judged = control.requests.judged, []
        seen = StepSeen(["a"], [0], [0], stamp, stamp, DraftWork(), 100, False, 0.01, [len(text)])
        seen.judged = judged
        control.observe(seen)
    assert believed(control) > 0.5 and control.report().num_probes


@pytest.mark.parametrize("is_alike, most", [(True, 1.09), (False, 1.02)])
def test_the_draft_of_which_most_is_promised_holds_it(is_alike: bool, most: float) -> None:
    """Beside a memory: whoever looks best of those that differ by chance alone is not believed it.
    Where they do differ, the best is as good as it looks."""
    requests, random = Requests(4, ("draft", "memory"), 0.5, Knows()), np.random.default_rng(0)
    plan, stamp = Plan("draft", 4, is_mixed=True), Stamp(Plan("draft", 4, is_mixed=True), "")
    ids = [str(number) for number in range(8)]
    for req_id in ids:
        requests.begin(req_id, "", None, True)
    promised, kept = list[float](), list[int]()
    for number in range(8, 3000):
        load = requests.load(ids, 100)
        requests.set_caps(plan, ids, load)
        is_easy = [random.random() < 0.4 if is_alike else int(req_id) % 8 < 4 for req_id in ids]
        alpha_B1 = np.where(is_easy, 0.95, 0.1)[:, None]
        accepted = (random.random((8, 4)) < alpha_B1).cumprod(1).sum(1).tolist()
        assert load.draft_BG is not None
        best = int(load.draft_BG.sum(1).argmax())
        promised.append(float(load.draft_BG[best].sum()))
        kept.append(accepted[best])
        requests.learn(
            StepSeen(ids, [4] * 8, accepted, stamp, stamp, DraftWork(4), 100, True, 0.02, [100] * 8)
        )
        if number % 5 == 0:
            requests.end(ids[0])
            ids = [*ids[1:], str(number)]
            requests.begin(ids[-1], "", None, True)
    assert 0.95 * sum(kept) < sum(promised) < most * sum(kept)


def test_of_a_request_whose_client_allows_no_draft_tokens_none_is_judged() -> None:
    control = controlled(Knows())
    control.begin("capped", client_cap=0, prompt=[1, 2, 3])
    for req_id in ("a", "capped"):
        control.requests.add_unverified(req_id, 1, 3, 0, [4, 5])
        control.requests.served([(req_id, [1, 2, 3, 4, 5])])
    assert [one.req_id for one in control.requests.judged] == ["a"]
