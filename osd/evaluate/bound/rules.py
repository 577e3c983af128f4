"""Who proposes how much at each position of an answer, and what that takes.

    no speculation   every fixed k   a running mean   ──►  walked from the first token on
    the oracles: exactly what will be accepted        ──►  V[t] from the last token back

`V[t] = min over proposer and length of step(proposer, length) + V[t + length + 1]`: seconds from
position t on. Length 0 is nobody's, so the oracle speculates only where it is worth it. Each
proposer is charged what it costs.

Legend: T output tokens, W draft tokens verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np

from osd.evaluate.bound.costs import NOBODY, StepCosts
from osd.evaluate.bound.runs import ProposerRuns, RequestRuns

MEMORY_OF_MEAN = 0.85
"""Share of the running mean that a step leaves as it was (TurboSpec's, arXiv 2406.14066)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """The steps of one request under a rule."""

    seconds: float
    """From the start of prefill to the last token."""
    steps: tuple[tuple[str, int, int], ...]
    """(proposer, draft tokens verified, accepted) of each"""


Rule = Callable[[RequestRuns, StepCosts], Course]
Choice = tuple[str, int]
"""Proposer, and how many of its tokens are verified."""


def none(request: RequestRuns, costs: StepCosts) -> Course:
    """A token a step."""
    return walk(request, costs, (), lambda t: (NOBODY, 0))


def fixed(proposer: str, k: int) -> Rule:
    """k draft tokens of a proposer in every step, fewer where it has no more."""

    def course(request: RequestRuns, costs: StepCosts) -> Course:
        offered = request.proposers[proposer].offered
        return walk(request, costs, (proposer,), lambda t: (proposer, min(k, int(offered[t - 1]))))

    return course


def adaptive(proposer: str, most: int) -> Rule:
    """A simple rule: one token more than were accepted lately. k = round(m) + 1, at most `most`; m
    is the request's running mean of accepted tokens over its steps with a draft, which begins in
    the middle, at (most - 1) / 2."""

    def course(request: RequestRuns, costs: StepCosts) -> Course:
        offered, mean = request.proposers[proposer].offered, (most - 1) / 2

        def choose(t: int) -> Choice:
            return proposer, min(round(mean) + 1, most, int(offered[t - 1]))

        def learn(accepted: int) -> None:
            nonlocal mean
            mean = MEMORY_OF_MEAN * mean + (1 - MEMORY_OF_MEAN) * accepted

        return walk(request, costs, (proposer,), choose, learn)

    return course


def longest(proposers: Sequence[str]) -> Rule:
    """The public simulator's oracle: at each position the proposer of whom most will be accepted,
    and exactly that much; the first named where two have equally many. It looks at no price."""

    def course(request: RequestRuns, costs: StepCosts) -> Course:
        def choose(t: int) -> Choice:
            right = {name: int(request.proposers[name].right[t - 1]) for name in proposers}
            best = max(proposers, key=right.__getitem__)
            return best, right[best]

        return walk(request, costs, proposers, choose)

    return course


def oracle(proposers: Sequence[str]) -> Rule:
    """The fastest there is: the backward programme over all proposers and lengths. A proposer is
    worth its own prefill or is not used at all."""
    return partial(_oracle, tuple(proposers))


def _oracle(proposers: tuple[str, ...], request: RequestRuns, costs: StepCosts) -> Course:
    courses = [_backward(some, request, costs) for some in _subsets(proposers, request, costs)]
    return min(courses, key=lambda one: one.seconds)


def _subsets(
    proposers: tuple[str, ...], request: RequestRuns, costs: StepCosts
) -> Iterator[tuple[str, ...]]:
    """Whom to have in the engine: all who cost no prefill, with some of those who do."""
    paid = [name for name in proposers if costs.prefill(request.num_prompt, name)]
    free = [name for name in proposers if name not in paid]
    for num in range(len(paid) + 1):
        for some in combinations(paid, num):
            yield (*free, *some)


def _backward(proposers: tuple[str, ...], request: RequestRuns, costs: StepCosts) -> Course:
    num_output = request.num_output
    context = costs.context(request.num_prompt, num_output)
    useful = {name: _useful(request.proposers[name], num_output) for name in proposers}
    lines = {name: costs.line(name, int(n.max(initial=0))) for name, n in useful.items()}
    nobody = costs.line(NOBODY, 0)
    left_T = np.zeros(num_output + 1)  # seconds from position t on
    chosen: list[Choice] = [(NOBODY, 0)] * (num_output + 1)
    for t in range(num_output - 1, 0, -1):
        tokens = context[t - 1]
        left_T[t] = nobody.base_W[0] + nobody.slope_W[0] * tokens + left_T[t + 1]
        for name, line in lines.items():
            if not (num := int(useful[name][t - 1])):
                continue
            seconds_W = line.base_W[1 : num + 1] + line.slope_W[1 : num + 1] * tokens
            seconds_W += left_T[t + 2 : t + num + 2]
            best = int(seconds_W.argmin())
            if seconds_W[best] < left_T[t]:
                left_T[t], chosen[t] = seconds_W[best], (name, best + 1)
    return walk(request, costs, proposers, chosen.__getitem__)


def _useful(runs: ProposerRuns, num_output: int) -> np.ndarray:
    """int [T - 1]: tokens that will be accepted and leave room for the target's own."""
    return np.minimum(runs.right, np.arange(num_output - 2, -1, -1))


def walk(
    request: RequestRuns,
    costs: StepCosts,
    proposers: Sequence[str],
    choose: Callable[[int], Choice],
    learn: Callable[[int], None] = lambda accepted: None,
) -> Course:
    """From the first token to the last. `proposers`: who may be chosen, and reads the prompt.
    `choose` gets a position; `learn` hears how much of a draft was accepted. Tokens beyond the end
    of an answer are verified in vain."""
    context = costs.context(request.num_prompt, request.num_output)
    lines = {name: costs.line(name, longest_draft(request, name)) for name in (NOBODY, *proposers)}
    seconds = sum(costs.prefill(request.num_prompt, name) for name in (NOBODY, *proposers))
    steps, t = [], 1
    while t < request.num_output:
        name, width = choose(t)
        accepted = min(width, int(request.proposers[name].right[t - 1])) if width else 0
        line = lines[name]
        seconds += float(line.base_W[width] + line.slope_W[width] * context[t - 1])
        steps.append((name, width, accepted))
        if width:
            learn(accepted)
        t += accepted + 1
    return Course(seconds=seconds, steps=tuple(steps))


def longest_draft(request: RequestRuns, proposer: str) -> int:
    return 0 if proposer == NOBODY else int(request.proposers[proposer].offered.max(initial=0))
