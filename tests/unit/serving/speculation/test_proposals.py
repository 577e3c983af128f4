"""The memory asked within the worker's step, one step ahead of what the scheduler is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from serving.speculation.goodput import OFF, Plan
from serving.speculation.proposals import scope
from tests.unit.serving.speculation.test_scheduler import Bench, Request

MEMORY, MIXED, DRAFT = Plan("memory", 3), Plan("draft", 2, is_mixed=True), Plan("draft", 2)


class Step:
    """What a step of the worker sampled, and what its draft proposed: 50, 51, … for all."""

    def __init__(self, sampled: dict[str, list[int]], k: int) -> None:
        self.req_ids, self._sampled, self._k = list(sampled), sampled, k
        self.rows: dict[int, list[int]] = {}
        self.num_waits = 0

    def tokens(self) -> Mapping[str, Sequence[int]]:
        self.num_waits += 1
        return self._sampled

    def row(self, b: int) -> Sequence[int]:
        return list(range(50, 50 + self._k))

    def replace(self, rows: Mapping[int, Sequence[int]]) -> None:
        self.rows = {b: list(tokens) for b, tokens in rows.items()}


class Ahead(Bench):
    """The scheduler is told what a step sampled when the next one has run."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(is_async=True, **settings)
        self.scheduler.osd_begin_to_ask()
        self.scheduler._osd_proposals._in_flight.clear()  # nothing has run
        self.in_flight: Any = None

    def run(self, sampled: dict[str, list[int]]) -> tuple[Any, Step]:
        """A step, and what the scheduler is told of the one before it."""
        output = self.scheduler.schedule()
        step = Step(sampled, output.num_spec_tokens_to_schedule)
        self.scheduler.osd_propose(step, step)
        if self.in_flight is not None:
            self.give(*self.in_flight)
        self.in_flight = output, {r: list(tokens) for r, tokens in sampled.items()}
        return output, step


@pytest.fixture
def bench() -> Ahead:
    """Where 61, 62, … 69 was served before."""
    bench = Ahead(predicted=0.5)
    bench.osd.force(MEMORY)
    bench.osd.memory.remember([([], list(range(61, 70)))] * 4, scope())  # type: ignore[union-attr]
    bench.osd.memory.work()  # type: ignore[union-attr]
    return bench


def test_what_is_in_flight_is_looked_up(bench: Ahead) -> None:
    request = bench.add("a", [1, 2])
    _, step = bench.run({"a": [61]})
    assert step.rows == {0: [62, 63, 64]}
    assert request.spec_token_ids == [-1, -1, -1]
    output, step = bench.run({"a": [62, 63]})
    assert output.osd_from_memory == ("a",) and output.num_spec_tokens_to_schedule == 0
    assert len(output.scheduled_spec_decode_tokens["a"]) == 3
    assert step.rows == {0: [64, 65, 66]}, "nobody has told the scheduler of 62 and 63"
    bench.run({"a": [64, 65, 66, 67]})
    assert request.all_token_ids == [1, 2, 61, 62, 63]
    assert bench.seen.from_memory == {"a"} and bench.seen.accepted == [1]


def test_what_is_in_flight_is_not_remembered_before_it_is_served(bench: Ahead) -> None:
    bench.add("a", [1, 2])
    bench.run({"a": [61]})
    bench.run({"a": [31, 32, 33]})
    bench.scheduler.requests.pop("a"), bench.scheduler.running.clear()
    bench.in_flight = None  # its client has gone, and nobody was served these
    bench.add("b", [1, 2])
    _, step = bench.run({"b": [31, 32]})
    assert step.rows == {}


def test_where_it_finds_nothing_nothing_is_verified(bench: Ahead) -> None:
    request = bench.add("a", [1, 2])
    _, step = bench.run({"a": [3]})
    assert step.rows == {} and request.spec_token_ids == []
    output, _ = bench.run({"a": [4]})
    assert output.osd_from_memory == ()


def test_a_client_may_limit_what_is_verified_of_the_draft(bench: Ahead) -> None:
    bench.osd.force(DRAFT)
    request = bench.add("a", [1, 2], extra={"osd_spec_k": 1})
    other = bench.add("b", [1, 2])
    bench.run({"a": [5], "b": [5]})
    assert [len(r.spec_token_ids) for r in (request, other)] == [1, 2]


def test_request_by_request_the_memory_or_the_draft(bench: Ahead) -> None:
    bench.osd.force(MIXED)
    a, b = bench.add("a", [1, 2]), bench.add("b", [3, 4])
    output, step = bench.run({"a": [61], "b": [5]})
    assert list(step.rows) == [0]
    assert [len(r.spec_token_ids) for r in (a, b)] == [len(step.rows[0]), 2]
    proposed = output.osd_step
    bench.run({"a": [50, 7], "b": [50, 51, 6]})
    bench.run({"a": [8], "b": [9]})
    assert bench.seen.from_memory == {"a"} and bench.seen.drafted[1] == 2
    (judged,) = bench.seen.judged
    assert (judged.req_id, judged.step) == ("a", proposed)
    assert (judged.num_drafted, judged.num_accepted) == (2, 1), "by what was served in its place"
    assert judged.num_tokens == 3, "two of the prompt, and one in flight when it was proposed"


def test_a_draft_that_is_not_worth_verifying_is_judged_by_what_was_served(bench: Ahead) -> None:
    bench.osd.force(MIXED._replace(price=0.9))
    request = bench.add("a", [1, 2])
    bench.osd.requests._requests["a"].cap = 0
    bench.run({"a": [5]})
    assert request.spec_token_ids == []
    bench.osd.force(MEMORY)
    for tokens in ([50], [7], [8]):
        bench.run({"a": tokens})
    (judged,) = bench.seen.judged
    assert (judged.num_drafted, judged.num_accepted, judged.num_tokens) == (2, 1, 3)


@pytest.mark.parametrize("plan", [OFF, DRAFT])
def test_where_the_memory_may_not_propose_nobody_waits_and_it_is_still_known_what_it_would(
    bench: Ahead, plan: Plan
) -> None:
    bench.osd.force(plan)
    request = bench.add("a", [1, 2])
    steps = [bench.run({"a": [token]})[1] for token in (61, 62, 63)]
    assert [step.num_waits for step in steps] == [0, 0, 0]
    assert len(request.spec_token_ids) == plan.passes
    found = bench.osd.requests._requests["a"].lookups
    assert found is not None and (found.newest(8).sum(1) > 0).sum() == 2, "of those told of"
    bench.osd.force(MEMORY)
    _, step = bench.run({"a": [64]})
    assert step.rows == {0: [65, 66, 67]}, "and nothing in flight was lost"


def test_a_client_may_cap_what_is_proposed(bench: Ahead) -> None:
    a = bench.add("a", [1, 2], extra={"osd_spec_k": 1})
    b = bench.add("b", [1, 2], extra={"osd_spec_k": 0})
    _, step = bench.run({"a": [61], "b": [61]})
    assert step.rows == {0: [62]}
    assert [r.spec_token_ids for r in (a, b)] == [[-1], []]


def test_where_it_is_not_known_what_was_sampled_nothing_is_looked_up(bench: Ahead) -> None:
    """A step near the end of the draft's context, of which nobody is told within the worker."""
    bench.add("a", [1, 2])
    unheard = bench.scheduler.schedule()
    _, step = bench.run({"a": [62]})
    assert step.rows == {}
    bench.give(unheard, {"a": [61]})
    _, step = bench.run({"a": [63]})
    assert step.rows == {0: [64, 65, 66]}


def test_while_it_is_held_it_is_not_asked(bench: Ahead) -> None:
    bench.add("a", [1, 2])
    bench.command("hold", True)
    _, step = bench.run({"a": [61]})
    assert step.num_waits == 0 and step.rows == {}
    bench.command("hold", False)
    _, step = bench.run({"a": [62]})
    assert step.rows == {}, "what was sampled meanwhile is not known"
    _, step = bench.run({"a": [63]})
    _, step = bench.run({"a": [64]})
    assert step.rows == {0: [65, 66, 67]}


@pytest.mark.parametrize("where", ["look_up", "replace"])
def test_an_error_ends_the_control_and_leaves_as_many_tokens_as_were_drafted(
    bench: Ahead, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> Any:
        raise ZeroDivisionError

    bench.osd.force(MIXED)
    request: Request = bench.add("a", [1, 2])
    monkeypatch.setattr(*((bench.osd, where) if where == "look_up" else (Step, where)), fail)
    output, step = bench.run({"a": [61]})
    assert "ZeroDivisionError" in bench.command("report")["problem"]
    assert request.spec_token_ids == [-1, -1]
    output, _ = bench.run({"a": [62]})
    told = where == "replace"
    assert output.osd_from_memory == (("a",) if told else ()), "it may have put them there"


def test_the_v2_runners_scheduler_verifies_as_many_as_the_worker_says() -> None:
    """It is handed placeholders after each step."""
    bench = Bench(is_v2=True, predicted=0.5)
    bench.scheduler.osd_begin_to_ask()
    bench.scheduler._osd_proposals._in_flight.clear()
    bench.osd.force(MEMORY)
    bench.osd.memory.remember([([], [61, 62, 63])] * 4, scope())  # type: ignore[union-attr]
    bench.osd.memory.work()  # type: ignore[union-attr]
    a, b = bench.add("a", [1, 2]), bench.add("b", [3])
    output = bench.scheduler.schedule()
    step = Step({"a": [61], "b": [4]}, 0)
    bench.scheduler.osd_propose(step, step)
    bench.give(output, {"a": [61], "b": [4]})
    bench.draft(2)
    assert step.rows == {0: [62, 63]}
    assert [len(r.spec_token_ids) for r in (a, b)] == [2, 0]


@pytest.mark.parametrize("is_held", [False, True])
def test_nobody_gets_more_tokens_than_were_drafted_when_the_control_has_just_ended(
    is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The V2 runner hands out as many placeholders for all as the memory found for one."""
    bench = Bench(is_v2=True, predicted=0.5)
    bench.scheduler.osd_begin_to_ask()
    bench.osd.force(MIXED)
    found, other = bench.add("a", [1, 2]), bench.add("b", [3, 4])
    output = bench.scheduler.schedule()
    if is_held:
        bench.command("hold", True)
    else:
        monkeypatch.setattr(bench.osd, "observe", lambda seen: 1 / 0)
    bench.give(output)
    assert bench.draft(4) == [[50, 51]] * 2, "the draft made two passes"
    assert found.spec_token_ids == other.spec_token_ids == [50, 51]
