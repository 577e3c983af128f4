"""Requests that come when they come, replayed and served, and what a rate sweep says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.drift.contenders import with_proposers
from benchmarks.drift.jobs import base_config
from benchmarks.papers import open_loop, rates, rates_engine
from benchmarks.papers.open_loop import OpenLoop, capacity, poisson, run_arm
from benchmarks.papers.rates import AUTO, FALLS, FIXED, HERE, MODELLED, OVER_BEST, OVER_NONE
from benchmarks.papers.rates_engine import STEPS_IN_A_ROW, LiveLoop, mean_k, side_by_side
from benchmarks.record import Options, Row
from benchmarks.replays import closed_loop
from benchmarks.replays.recording import Recorded
from benchmarks.replays.step_times import published, published_step_s
from osd.evaluate.bound import published as prices
from serving.speculation.goodput import OFF, Plan

P, T = 12, 41


def request(name: str = "r") -> Recorded:
    ids = np.arange(3, 3 + T, dtype=np.int32)
    return Recorded(
        name=name,
        prompt_ids=np.arange(P, dtype=np.int32),
        output_ids=ids,
        target_ids=ids[:, None],
        target_logprobs=np.zeros((T, 1), np.float16),
        tail_logprob=np.full(T, -np.inf, np.float32),
    )


def matches(alpha: float, num: int, seed: int = 0) -> list[np.ndarray]:
    """Of a draft that is right so often, wherever it is."""
    return list(np.random.default_rng(seed).random((num, 1, T - 1)) < alpha)


def served(
    plan: Plan, alpha: float, arrivals: list[float], *, batch: int = 4
) -> tuple[list[float], list[int]]:
    """Seconds from arrival to the last token, and steps, of each request."""
    config = with_proposers(base_config(), ["draft"])
    num = len(arrivals)
    requests = [request()] * num
    times = published(batch=batch)
    loop = OpenLoop(requests, matches(alpha, num), arrivals, config, times, seed=0)
    loop.speculation.force(plan)
    loop.speculation.plan((), 0)
    found = {one.index: (loop.clock, one.counts.steps) for one in loop.serve()}
    ended, steps = zip(*(found[i] for i in range(num)), strict=True)
    return [end - at for end, at in zip(ended, arrivals, strict=True)], list(steps)


def alone_s(num_steps: int = T - 1) -> float:
    """One request by itself, a token a step."""
    contexts = range(P + 1, P + 1 + num_steps)
    return P * prices.PER_TOKEN_S + sum(published_step_s(context, 1) for context in contexts)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_loop, "NOISE", 0.0)


# -- the replay -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("quiet")
def test_who_is_alone_waits_for_its_prompt_and_its_steps() -> None:
    seconds, steps = served(OFF, 0.0, [1.0, 5.0])
    assert steps == [T - 1, T - 1]
    assert seconds == pytest.approx([alone_s(), alone_s()])


@pytest.mark.usefixtures("quiet")
def test_who_comes_together_shares_steps_and_without_room_one_waits() -> None:
    shared, _ = served(OFF, 0.0, [0.0, 0.0])
    assert shared[0] == shared[1]
    assert alone_s() < shared[0] < 1.01 * alone_s()
    apart, _ = served(OFF, 0.0, [0.0, 0.0], batch=1)
    assert apart == pytest.approx([alone_s(), 2 * alone_s()])
    joined, _ = served(OFF, 0.0, [0.0, alone_s() / 2])  # within a step: it waits for its end
    step = published_step_s(0, 1)
    assert alone_s() < joined[1] < alone_s() + 1.1 * step


@pytest.mark.usefixtures("quiet")
def test_a_draft_that_is_right_saves_steps_and_one_that_is_wrong_costs() -> None:
    right, steps = served(Plan("draft", 4), 1.0, [0.0])
    assert steps == [(T - 1) // 5]
    wrong, _ = served(Plan("draft", 4), 0.0, [0.0])
    assert right[0] < 0.3 * alone_s()
    assert wrong[0] > 1.2 * alone_s()


@pytest.mark.usefixtures("quiet")
def test_the_wider_the_step_the_more_it_takes() -> None:
    """Draft tokens of many requests are no longer free."""
    ratio = {}
    for num in (1, 200):
        wide, narrow = (
            served(plan, 0.0, [0.0] * num, batch=num)[0][0] for plan in (Plan("draft", 4), OFF)
        )
        ratio[num] = wide / narrow
    assert ratio[200] > 1.3 * ratio[1]


def test_without_speculation_it_serves_what_its_capacity_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_loop, "MAX_SEQS", 16)
    num = 400
    found = run_arm(0, [request()] * num, matches(0.0, num), [0.0] * num, seed=0)
    assert found["k"] == 0
    # The last of `num` that came at once ends when all are served; in the mean, half of it.
    rate = num / (2 * found["latency_s"]) * (1 + open_loop.WARM_UP)
    assert rate == pytest.approx(capacity([request()], 16), rel=0.05)


@pytest.mark.parametrize("alpha", [0.05, 0.6, 0.9])
def test_the_control_is_nearly_as_fast_as_the_best_fixed_k(alpha: float) -> None:
    num = 240
    rate = 0.3 * capacity([request()], open_loop.MAX_SEQS)
    traffic = [request()] * num, matches(alpha, num), poisson(rate, num, 0)
    seconds = {k: run_arm(k, *traffic, seed=0)["latency_s"] for k in FIXED}
    auto = run_arm(AUTO, *traffic, seed=0)
    assert auto["latency_s"] < min(seconds.values()) / 0.95
    assert seconds[4] > 1.1 * seconds[0] if alpha < 0.1 else seconds[4] < 0.9 * seconds[0]


def test_arrivals_are_as_many_as_the_rate_says_and_the_same_again() -> None:
    coming = poisson(50.0, 2000, 3)
    assert coming == poisson(50.0, 2000, 3) != poisson(50.0, 2000, 4)
    assert coming == sorted(coming)
    assert coming[-1] == pytest.approx(40.0, rel=0.1)


# -- a real engine's open loop --------------------------------------------------------------------


class Engine:
    """A step takes a second of its clock, and brings each request so many tokens."""

    def __init__(self, per_step: int) -> None:
        self.now_of, self._per_step = [0.0], per_step
        """Its clock, which others may share."""
        self._running: list[str] = []
        self._left: dict[str, int] = {}

    @property
    def now(self) -> float:
        return self.now_of[0]

    def clock(self) -> float:
        return self.now

    def add(self, req_id: str, prompt: list[int], num_tokens: int) -> None:
        self._running.append(req_id)
        self._left[req_id] = num_tokens

    def step(self) -> dict[str, list[int]]:
        self.now_of[0] += 1.0
        brought = {req_id: [7] * self._per_step for req_id in self._running}
        for req_id in self._running:
            self._left[req_id] -= self._per_step
        self._running = [req_id for req_id in self._running if self._left[req_id] > 0]
        return brought


def live(engine: Engine, arrivals: list[float]) -> LiveLoop:
    prompts = [[1]] * len(arrivals)
    return LiveLoop(engine, prompts, arrivals, num_tokens=6, clock=engine.clock)


def test_time_passes_only_while_the_engine_works() -> None:
    engine = Engine(per_step=2)
    loop = live(engine, [0.5, 1.7, 100.25])
    side_by_side([loop])
    # The second comes within the second step, and takes part from the third on.
    assert loop.latencies == pytest.approx([3.0, 4.8 - 1.0, 3.0])
    assert engine.now < 12
    assert loop.is_over and loop.now == pytest.approx(103.25)


def test_engines_side_by_side_are_charged_their_own_time_and_stay_together() -> None:
    """On one clock, as in one process."""
    slow, quick = Engine(per_step=1), Engine(per_step=3)
    quick.now_of = slow.now_of = [0.0]
    arrivals = [10.0 * i for i in range(40)]
    loops = [live(slow, arrivals), live(quick, arrivals)]
    ahead = []
    for loop in loops:
        own = loop.step

        def step(own: Callable[[], None] = own) -> None:
            own()
            if not any(one.is_over for one in loops):
                ahead.append(abs(loops[0].now - loops[1].now))

        loop.step = step  # type: ignore[method-assign]
    side_by_side(loops)
    assert loops[0].latencies == [6.0] * 40
    assert loops[1].latencies == [2.0] * 40
    in_a_row = 10.0 * STEPS_IN_A_ROW / 2  # of the quick one, with its jumps
    assert 0 < max(ahead) <= in_a_row + 10


def test_no_arm_begins_cold() -> None:
    class Driven:
        def __init__(self) -> None:
            self.phases: list[Any] = []

        def drive(self, phases: Any, prompts: Any, first: int) -> None:
            self.phases.append(phases)

    arms = {arm: Driven() for arm in (*FIXED, AUTO)}
    rates_engine.warm_up(arms.values(), [[1]])
    assert [one.phases for one in arms.values()] == [[rates_engine.WARM_UP]] * len(arms)


def test_the_mean_k_counts_steps_without_a_draft() -> None:
    assert mean_k({"draft 4": 3, "draft 1": 1, "off": 6}) == pytest.approx(1.3)
    assert mean_k({}) == 0.0


# -- figures --------------------------------------------------------------------------------------


def rows(draws: list[dict[float, dict[int | str, float]]]) -> list[Row]:
    """Of a middling draft: per draw, load -> arm -> latency."""
    return [
        {"draft": "middling", "share": load, "draw": n, "arm": arm, "latency_s": s}
        for n, draw in enumerate(draws)
        for load, arms in draw.items()
        for arm, s in arms.items()
    ]


def cell(best: int, auto: float, fastest: float = 0.5) -> dict[int | str, float]:
    return {k: fastest if k == best else 1.0 for k in FIXED} | {AUTO: auto}


def verdicts(found: list[Row], tmp_path: Path, where: str = MODELLED) -> dict[tuple[str, str], Any]:
    plan = rates.protocol(Options(directory=tmp_path, quick=True), where)
    result = rates.summarise(plan, found)
    return {(figure.group, shape.figure): verdict for shape, figure, verdict in result.seen()}


def test_the_best_k_falls_where_it_does_in_every_draw(tmp_path: Path) -> None:
    falls = {0.1: cell(4, 0.5), 0.9: cell(1, 0.5)}
    level = {0.1: cell(2, 0.5), 0.9: cell(2, 0.5)}
    group = f"{MODELLED}, middling draft"
    assert verdicts(rows([falls] * 3), tmp_path)[group, FALLS] == "seen"
    assert verdicts(rows([level] * 3), tmp_path)[group, FALLS] == "not seen"
    assert verdicts(rows([falls, level, level]), tmp_path)[group, FALLS] == "inconclusive"


def test_auto_is_held_against_none_and_the_best_at_each_load(tmp_path: Path) -> None:
    draw = {0.1: cell(4, 0.5), 0.9: cell(1, 0.6)}
    found = verdicts(rows([draw] * 3), tmp_path, HERE)
    low, high = (f"{HERE}, middling draft, load {load}" for load in ("0.1", "0.9"))
    assert found[low, OVER_NONE] == found[high, OVER_NONE] == "seen"
    assert (found[low, OVER_BEST], found[high, OVER_BEST]) == ("seen", "not seen")


def test_the_best_is_not_picked_by_the_luck_of_the_draw_it_is_judged_by() -> None:
    lucky = rates.latencies(
        [
            {"draw": n, "arm": arm, "latency_s": s}
            for n, (best, fastest) in enumerate(((1, 0.5), (1, 0.5), (4, 0.01)))
            for arm, s in cell(best, 0.5, fastest).items()
        ]
    )
    assert rates.bests(lucky) == [1, 1, 4]
    assert rates.best_of_others(lucky)[2] == 1


def test_a_draw_that_was_cut_off_is_left_out() -> None:
    whole = [{"draw": 0, "arm": arm, "latency_s": s} for arm, s in cell(1, 0.5).items()]
    found = rates.latencies([*whole, {"draw": 1, "arm": 0, "latency_s": 1.0}])
    assert found[0] == [1.0] and found[AUTO] == [0.5]
