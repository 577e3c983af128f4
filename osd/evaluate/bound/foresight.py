"""How fast one could be by knowing the odds of each draft token, and not what will be drawn.

    knows the odds     of every draft there could be, before anybody is asked
    pays to see        of the free proposers' drafts; of a paid one's, once it has been asked

Each step takes what is worth most: tokens expected less `rate` x seconds, where `rate` is what a
second earns. That is found as Dinkelbach does: begin with any, and take what the rule comes to.

Legend: T output tokens, K draft tokens, W draft tokens verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from osd.evaluate.bound.costs import NOBODY, StepCosts
from osd.evaluate.bound.rules import Choice, Course, Rule, longest_draft, none, walk
from osd.evaluate.bound.runs import ProposerRuns, RequestRuns
from osd.evaluate.bound.speeds import NONE, Speeds, speeds

KNOWS, PAYS = "who knows the odds", "who pays to see a draft, and knows its odds"
CHANCES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1.0)
"""Of a free proposer's first token, below which a paid one is asked; 0 = never."""
CLOSE_ENOUGH, MOST_ROUNDS = 1e-3, 20
"""Of the search for the rate."""
Worth = tuple[float, Choice]


class _Odds:
    """What each length of each draft is worth, at each position of a request."""

    def __init__(
        self, request: RequestRuns, costs: StepCosts, proposers: Sequence[str], rate: float
    ) -> None:
        self._request, self._rate = request, rate
        self._context = costs.context(request.num_prompt, request.num_output)
        self._lines = {name: costs.line(name, longest_draft(request, name)) for name in proposers}
        self._nobody = costs.line(NOBODY, 1)
        self._expected = {name: _expected(request.proposers[name]) for name in proposers}

    def chance(self, t: int, names: Sequence[str]) -> float:
        """The likeliest first token of these."""
        return max((self._expected[n][t - 1, 0] for n in names if self._num(n, t)), default=0.0)

    def best(self, t: int, names: Sequence[str]) -> Worth:
        """The best choice among these, or nobody."""
        tokens = self._context[t - 1]
        found: Worth = (1 - self._rate * self._of_nobody(0, tokens), (NOBODY, 0))
        for name in names:
            if num := self._num(name, t):
                line = self._lines[name]
                seconds_W = line.base_W[1 : num + 1] + line.slope_W[1 : num + 1] * tokens
                worth_W = 1 + self._expected[name][t - 1, :num] - self._rate * seconds_W
                width = int(worth_W.argmax())
                found = max(found, (float(worth_W[width]), (name, width + 1)))
        return found

    def asking(self, t: int, name: str) -> float:
        """Seconds for a first token of a proposer beside verifying it; 0 where it has none."""
        if not self._num(name, t):
            return 0.0
        line, tokens = self._lines[name], self._context[t - 1]
        return float(line.base_W[1] + line.slope_W[1] * tokens) - self._of_nobody(1, tokens)

    def _num(self, name: str, t: int) -> int:
        """Tokens offered that there is room for."""
        offered = int(self._request.proposers[name].offered[t - 1])
        return max(0, min(self._request.num_output - 1 - t, offered))

    def _of_nobody(self, width: int, tokens: float) -> float:
        return float(self._nobody.base_W[width] + self._nobody.slope_W[width] * tokens)


def _expected(runs: ProposerRuns) -> np.ndarray:
    """float [T - 1, K]: draft tokens accepted in the mean, of so many."""
    assert runs.odds is not None, "who is to know the odds has to be told"
    return runs.odds.cumprod(1).cumsum(1)


def foreseeing(proposers: Sequence[str], rate: float) -> Rule:
    """Who knows the odds of every draft token."""

    def course(request: RequestRuns, costs: StepCosts) -> Course:
        odds = _Odds(request, costs, proposers, rate)
        return walk(request, costs, proposers, lambda t: odds.best(t, proposers)[1])

    return course


def paying_to_see(free: Sequence[str], paid: str, rate: float) -> Rule:
    """Who asks the paid proposer where the free ones' first token is less likely than one of
    `CHANCES`, the best for each request in hindsight, and then knows the odds of all. What was
    asked for is paid for, also where another draft is taken."""

    def course(request: RequestRuns, costs: StepCosts) -> Course:
        odds = _Odds(request, costs, (*free, paid), rate)
        courses = [below(chance, request, costs, odds) for chance in CHANCES]
        return min(courses, key=lambda one: one.seconds)

    def below(chance: float, request: RequestRuns, costs: StepCosts, odds: _Odds) -> Course:
        in_vain = 0.0

        def choose(t: int) -> Choice:
            nonlocal in_vain
            worth, choice = odds.best(t, free)
            if not odds.chance(t, free) < chance:
                return choice
            asked = odds.asking(t, paid)
            seen, drafted = odds.best(t, (paid,))
            if drafted[0] == paid and seen > worth - rate * asked:
                return drafted
            in_vain += asked
            return choice

        found = walk(request, costs, (*free, paid), choose)
        return replace(found, seconds=found.seconds + in_vain)

    return course


def earning(
    requests: Sequence[RequestRuns], costs: StepCosts, rule_at: Callable[[float], Rule]
) -> Speeds:
    """The fastest of a rule over all rates. `rule_at`: tokens per second of a request -> rule."""
    tokens = sum(one.num_output - 1 for one in requests if one.num_output > 1)
    best = speeds(requests, costs, {NONE: none})[NONE]
    rate = tokens / float(best.seconds_R.sum())
    for _ in range(MOST_ROUNDS):
        found = speeds(requests, costs, {KNOWS: rule_at(rate)})[KNOWS]
        best = max(best, found, key=lambda one: one.of_sums)
        rate, before = tokens / float(found.seconds_R.sum()), rate
        if abs(rate - before) <= CLOSE_ENOUGH * rate:
            break
    return best
