"""All rules over the same requests: speed over no speculation, and how much of a gap is closed.

Legend: R requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from osd.evaluate.bound.costs import StepCosts
from osd.evaluate.bound.rules import Course, Rule, adaptive, fixed, none, oracle
from osd.evaluate.bound.runs import RequestRuns

NONE, ALL = "no speculation", "oracle of all proposers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """One rule over the requests, each alike `batch` times in a step."""

    plain_R: np.ndarray
    """float: seconds without speculation"""
    seconds_R: np.ndarray
    """float: seconds with the rule"""
    courses: tuple[Course, ...]
    """The steps of each request."""

    @property
    def mean(self) -> float:
        """Mean over requests of the speed of each: every request counts alike."""
        return float(np.mean(self.plain_R / self.seconds_R))

    @property
    def of_sums(self) -> float:
        """All seconds over all seconds: what a service that serves them all would see."""
        return float(self.plain_R.sum() / self.seconds_R.sum())


def fixed_name(proposer: str, k: int) -> str:
    """`draft, k = 3`."""
    return f"{proposer}, k = {k}"


def adaptive_name(proposer: str) -> str:
    """`draft, adaptive`."""
    return f"{proposer}, adaptive"


def oracle_name(proposer: str) -> str:
    """`draft, oracle length`."""
    return f"{proposer}, oracle length"


def rules_of(most: Mapping[str, int]) -> dict[str, Rule]:
    """Name -> rule: no speculation, every fixed k, the simple adaptive rule and the oracle length
    of each proposer, and the oracle of all. `most`: proposer -> its longest draft."""
    return {NONE: none, **dict(_rules(most)), ALL: oracle(tuple(most))}


def _rules(most: Mapping[str, int]) -> Iterator[tuple[str, Rule]]:
    for name, longest in most.items():
        for k in range(1, longest + 1):
            yield fixed_name(name, k), fixed(name, k)
        yield adaptive_name(name), adaptive(name, longest)
        yield oracle_name(name), oracle((name,))


def speeds(
    requests: Sequence[RequestRuns], costs: StepCosts, rules: Mapping[str, Rule]
) -> dict[str, Speeds]:
    """Each rule over all requests. One token long answers take no step and are left out; raises
    `ValueError` where nothing is left."""
    longer = [request for request in requests if request.num_output > 1]
    if not longer:
        raise ValueError("requests: none has an answer of more than one token; nothing to bound")
    plain_R = np.array([none(request, costs).seconds for request in longer])
    found = {}
    for name, rule in rules.items():
        courses = tuple(rule(request, costs) for request in longer)
        seconds_R = np.array([course.seconds for course in courses])
        found[name] = Speeds(plain_R=plain_R, seconds_R=seconds_R, courses=courses)
    return found


def best_fixed(found: Mapping[str, float], most: Mapping[str, int]) -> str:
    """The name of the fastest fixed choice, no speculation among them. `found`: name of a rule ->
    its speed."""
    names = [NONE, *(fixed_name(name, k) for name, n in most.items() for k in range(1, n + 1))]
    return max(names, key=found.__getitem__)


def share_closed(control: float, fixed_speed: float, oracle_speed: float) -> float | None:
    """How much of the way from the best fixed choice to the oracle a control has gone, in speed
    over no speculation: 1 = all of it, below 0 = slower than the fixed choice. None where there is
    no way to go."""
    gap = oracle_speed - fixed_speed
    return (control - fixed_speed) / gap if gap > 1e-9 else None
