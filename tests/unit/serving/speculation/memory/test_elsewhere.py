"""Engines whose workers ask a memory of their own: what is asked of it, what room it gets, and what
is believed of its answers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from serving.speculation import scheduler
from serving.speculation.goodput import OFF, Plan
from serving.speculation.memory.choice import Terms
from serving.speculation.memory.elsewhere import most_waiting
from serving.speculation.memory.messages import Begun, Told
from serving.speculation.proposals import scope
from tests.unit.serving.speculation.test_scheduler import Bench

MEMORY, MIXED, DRAFT = Plan("memory", 4), Plan("draft", 2, is_mixed=True), Plan("draft", 2)
TEXT = list(range(61, 81))
NOTHING = Told({}, {})


class Elsewhere(Bench):
    """The scheduler is told what a step sampled when the next one has run, and knows `TEXT`."""

    def __init__(self, plan: Plan = MEMORY, *, is_heard: bool = True, **settings: Any) -> None:
        super().__init__(**{"is_async": True, "executor": "mp", "predicted": 0.5, **settings})
        self.osd.force(plan)
        self.osd.memory.remember([([], TEXT)] * 4, scope())  # type: ignore[union-attr]
        self.osd.memory.work()  # type: ignore[union-attr]
        self.in_flight: Any = None
        if is_heard:
            self.add("first", [1])
            self.run({"first": [91]})
            self.run({"first": [92]})
            self.scheduler.running.clear(), self.scheduler.requests.clear()
            self.in_flight = None

    def run(self, sampled: dict[str, list[int]], told: Told | None = NOTHING) -> Any:
        """A step; the scheduler is told of the one before it."""
        output = self.scheduler.schedule()
        if self.in_flight is not None:
            self.give(*self.in_flight[:2], **self.in_flight[2])
        self.in_flight = output, sampled, {} if told is None else {"osd_told": told}
        return output

    @property
    def problem(self) -> str:
        return str(self.command("report")["problem"])


def test_nothing_is_asked_before_the_first_rank_was_heard() -> None:
    bench = Elsewhere(is_heard=False)
    request = bench.add("a", [1, 2])
    for _ in range(3):
        output = bench.run({"a": [61]}, told=None)
        assert output.osd_ask is None and request.spec_token_ids == []
    bench.run({"a": [62]})
    bench.run({"a": [63]})
    assert bench.run({"a": [64]}).osd_ask is not None


@pytest.mark.parametrize("plan", [OFF, DRAFT])
def test_nothing_is_asked_where_the_memory_may_not_propose(plan: Plan) -> None:
    bench = Elsewhere(plan)
    bench.add("a", [1, 2])
    assert bench.run({"a": [61]}).osd_ask is None


def test_it_is_asked_with_what_each_request_allows() -> None:
    bench = Elsewhere(MIXED)
    bench.add("a", [1, 2])
    bench.add("b", [1, 2], extra={"osd_spec_k": 1})
    bench.add("none", [1, 2], extra={"osd_spec_k": 0})
    ask = bench.run({"a": [61], "b": [61], "none": [61]}).osd_ask
    assert ask.plan == MIXED and len(ask.ratios) == 7
    assert ask.terms.keys() == {"a", "b"}
    assert ask.terms["a"] == Terms(4, 2, pytest.approx(0.5 + 0.25))
    assert ask.terms["b"] == Terms(1, 1, pytest.approx(0.5))


def test_the_ranks_are_told_of_requests_that_begin_or_go_on() -> None:
    bench = Elsewhere()
    bench.add("a", [1, 2])
    bench.add("b", [1, 2], cache_salt="tenant", extra={"osd_capture": "off"})
    begun = bench.run({"a": [61], "b": [61]}).osd_begun
    assert begun == {"a": Begun(scope(), True), "b": Begun(scope("tenant"), False)}
    assert bench.run({"a": [62], "b": [62]}).osd_begun == {}
    bench.scheduler.resumed = ["b"]
    assert bench.run({"a": [63], "b": [63]}).osd_begun == {"b": Begun(scope("tenant"), False)}


def test_there_is_room_for_what_the_memory_is_likely_to_find() -> None:
    bench = Elsewhere()
    request = bench.add("a", [1, 2])
    bench.run({"a": [61]})
    assert request.spec_token_ids == [], "nothing was found for anybody yet"
    for token in TEXT[1:4]:
        bench.run({"a": [token]})
    assert request.spec_token_ids == [-1] * 4
    for token in range(100, 110):  # never seen
        bench.run({"a": [token]})
    assert request.spec_token_ids == []


def test_a_client_that_allows_less_gets_less_room() -> None:
    bench = Elsewhere()
    request = bench.add("a", [1, 2], extra={"osd_spec_k": 2})
    for token in TEXT[:4]:
        bench.run({"a": [token]})
    assert request.spec_token_ids == [-1] * 2


def test_beside_the_draft_the_memory_gets_no_more_room_than_it() -> None:
    bench = Elsewhere(MIXED)
    request = bench.add("a", [1, 2])
    for token in TEXT[:6]:
        bench.run({"a": [token]})
        assert request.spec_token_ids == [-1, -1]
    load = bench.osd.requests.load(["a"], 10)
    assert load.is_bounded


def test_a_request_that_still_reads_its_prompt_gets_no_room() -> None:
    bench = Elsewhere(MIXED)
    request = bench.add("a", list(range(8)), chunk=3)
    bench.run({})
    assert request.spec_token_ids == []


def test_whose_tokens_were_verified_is_known_from_the_ranks() -> None:
    bench = Elsewhere(MIXED)
    bench.add("a", [1, 2])
    bench.add("b", [1, 2])
    sampled = {"a": [5], "b": [5]}
    bench.run(sampled, Told({"a": 2}, {}))
    bench.run({"a": [6, 7], "b": [6]})
    assert bench.seen.from_memory == frozenset(), "of the step that verified nothing yet"
    bench.run(sampled)
    assert bench.seen.from_memory == {"a"}
    assert bench.command("report")["sources"] == {"draft": [2, 0], "memory": [2, 1]}


def test_without_a_pass_of_the_draft_all_room_was_the_memorys() -> None:
    bench = Elsewhere()
    bench.add("a", [1, 2])
    for token in TEXT[:6]:
        bench.run({"a": [token]})
    assert bench.seen.drafted == [4] and bench.seen.from_memory == {"a"}


def test_a_draft_that_nobody_verified_is_judged_by_what_was_served() -> None:
    bench = Elsewhere(MIXED)
    bench.add("a", [1, 2])
    bench.run({"a": [5]}, Told({"a": 2}, {}))
    proposed_in = bench.run({"a": [6, 9, 8]}, Told({}, {"a": [6, 7]})).osd_step - 1
    bench.run({"a": [3]})
    bench.run({"a": [3]})
    (judged,) = [one for seen in bench.osd.seen for one in seen.judged]
    assert (judged.req_id, judged.step) == ("a", proposed_in)
    assert (judged.num_tokens, judged.num_drafted, judged.num_accepted) == (3, 2, 1)


def test_a_memory_that_has_ended_ends_the_control() -> None:
    bench = Elsewhere()
    bench.add("a", [1, 2])
    bench.run({"a": [61]}, Told({}, {}, "ValueError: no room"))
    bench.run({"a": [62]})
    assert bench.problem == (
        "RuntimeError: the memory of the first rank has ended: ValueError: no room"
    )
    assert not hasattr(bench.run({"a": [63]}), "osd_ask")


def test_a_step_of_which_nothing_was_heard_was_the_drafts() -> None:
    bench = Elsewhere(MIXED)
    bench.add("a", [1, 2])
    for told in (Told({"a": 2}, {}), None, Told({}, {})):
        bench.run({"a": [5]}, told)
    bench.run({"a": [5]})
    assert bench.seen.from_memory == frozenset() and bench.problem == ""


def test_room_without_a_draft_is_the_memorys_though_nothing_was_heard_of_it() -> None:
    bench = Elsewhere()
    bench.add("a", [1, 2])
    for token in TEXT[:6]:
        bench.run({"a": [token]}, None)
    assert bench.seen.drafted == [4] and bench.seen.from_memory == {"a"}


def test_what_was_found_before_it_was_held_is_not_verified_after_it() -> None:
    bench = Elsewhere(MIXED)
    bench.add("a", [1, 2])
    bench.run({"a": [5]}, Told({"a": 2}, {}))
    bench.run({"a": [5]}, Told({"a": 2}, {}))
    bench.run({"a": [5]}, Told({"a": 2}, {}))
    bench.command("hold", True)
    bench.give(*bench.in_flight[:2], **bench.in_flight[2])
    bench.in_flight = None
    assert bench.seen.from_memory == {"a"}, "it was scheduled before"
    bench.command("hold", False)
    for _ in range(2):
        bench.run({"a": [5]})
    assert bench.seen.from_memory == frozenset()


def test_what_is_known_of_requests_goes_with_them() -> None:
    bench = Elsewhere()
    bench.add("a", [1, 2])
    bench.run({"a": [61]})
    bench.scheduler.ending = {"a"}
    bench.run({"a": [62]})
    assert "a" not in bench.scheduler.requests
    assert bench.scheduler._osd_proposals._begun.keys() <= bench.scheduler.requests.keys()


def test_where_the_next_step_waits_for_this_one_it_verifies_what_was_found() -> None:
    bench = Bench(is_async=False, is_v2=True, executor="mp", predicted=0.5)
    bench.osd.force(MIXED)
    a, b = bench.add("a", [1, 2]), bench.add("b", [1, 2])
    c = bench.add("c", [1, 2], extra={"osd_spec_k": 1})
    for _ in range(2):
        output = bench.scheduler.schedule()
        bench.give(output, osd_told=Told({"a": 3}, {}))
        bench.draft(4)  # what the worker says is as long as its longest row
    assert output.osd_ask.terms.keys() == {"a", "b", "c"}
    assert [len(each.spec_token_ids) for each in (a, b, c)] == [3, 2, 1]


@pytest.mark.parametrize(
    "answers, waiting",
    [(["{}", "0", "0"], 0), (["12", "40", "0"], 40), (["null", "0"], 0), (["{}"], {})],
)
def test_the_most_that_waits_in_any_memory_is_said(answers: list[str], waiting: Any) -> None:
    assert most_waiting(answers) == waiting


def test_what_one_memory_cannot_do_is_not_done() -> None:
    with pytest.raises(RuntimeError, match="^the memory of a rank: MemoryError: no room$"):
        most_waiting(["{}", json.dumps({"error": "MemoryError: no room"})])


@pytest.mark.parametrize("name, is_sent", [("forget", True), ("remember", True), ("keep", False)])
def test_all_memories_of_an_engine_are_told(name: str, is_sent: bool) -> None:
    bench, told = Elsewhere(), list[Any]()

    def rpc(method: str, args: tuple[str, ...]) -> list[str]:
        told.append((method, *args))
        return ["7", "0"]

    executor = SimpleNamespace(collective_rpc=rpc)
    core = SimpleNamespace(scheduler=bench.scheduler, model_executor=executor)
    argument = {"forget": "null", "remember": "[]", "keep": "0.5"}[name]
    answer = scheduler._command(core, name, argument)
    assert told == ([("osd_memory", name, argument)] if is_sent else [])
    assert not is_sent or answer == "7"
    here = Bench()
    core.scheduler = here.scheduler
    scheduler._command(core, name, argument)
    assert len(told) == is_sent, "where the scheduler has the only one"


def test_without_a_memory_no_worker_is_to_ask() -> None:
    bench = Bench(is_async=True, executor="mp", proposers=["draft"])
    assert not bench.scheduler.is_asked_by_worker
    assert not bench.scheduler.has_memory_elsewhere
