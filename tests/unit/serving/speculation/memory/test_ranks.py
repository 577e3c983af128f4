"""A memory in the first rank's process, and ranks that are told what it found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serving.speculation.goodput import Plan
from serving.speculation.memory.choice import Terms
from serving.speculation.memory.in_worker import DraftsV1, Sampled
from serving.speculation.memory.memory import Memory
from serving.speculation.memory.messages import Ask, Begun, Told
from serving.speculation.memory.ranks import RankMemory
from serving.speculation.proposals import scope
from serving.vllm import parts
from serving.worker import WorkerExtension
from tests.support.remembered import proposed_by

K = 4
TEXT = [11, 12, 13, 14, 15, 16, 17, 18]
MEMORY, MIXED = Plan("memory", K), Plan("draft", 2, is_mixed=True)
RATIOS = (1.0,) * 7
KEPT = Begun("all", True)
POOR, SURE = Terms(K, 2, 0.0), Terms(K, 2, 3.0)
"""Of requests whose draft is never accepted, and of those for which the memory is no better."""


class Worker:
    """vLLM's, which gives its output as it is, or as one that is on its way."""

    def __init__(self, wrapped: str = "") -> None:
        self.wrapped = wrapped
        self.executed: list[Any] = []

    def execute_model(self, scheduler_output: Any) -> None:
        self.executed.append(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.output = SimpleNamespace(req_ids=["a"])
        return SimpleNamespace(**{self.wrapped: self.output}) if self.wrapped else self.output


class Ranks:
    """Some ranks of an engine with one request more or fewer, which run step after step."""

    def __init__(self, num: int = 2, wrapped: str = "") -> None:
        self.workers = [Worker(wrapped) for _ in range(num)]
        self.memory = Memory(1 << 20, K)
        self.num_broadcasts = [0] * num
        self.sent: torch.Tensor | None = None
        self.ranks = [
            RankMemory(
                worker,
                None if rank else self.memory,
                K,
                lambda tensor, rank=rank: self.broadcast(rank, tensor),  # type: ignore[misc]
            )
            for rank, worker in enumerate(self.workers)
        ]
        self.first = self.ranks[0]
        for rank in self.ranks:
            rank.begin()

    def broadcast(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self.num_broadcasts[rank] += 1
        if rank == 0:
            self.sent = tensor.clone()
        assert self.sent is not None
        return tensor.copy_(self.sent)

    def step(
        self,
        sampled: dict[str, list[int]],
        ask: Ask | None = None,
        *,
        drafts: Sequence[Sequence[int]] = (),
        verified: Sequence[str] = (),
        **more: Any,
    ) -> tuple[list[torch.Tensor], Told]:
        """The draft tokens of each rank, and what the scheduler is told."""
        found = []
        for worker, rank in zip(self.workers, self.ranks, strict=True):
            output = step_of(sampled, ask, verified, **more)
            worker.execute_model(output)
            if sampled:
                changed = DraftsV1(torch.tensor(list(drafts) or [[]] * len(sampled)).long())
                rank.osd_propose(sampled_of(sampled), changed)
                found.append(changed.tokens)
            worker.sample_tokens(None)
        return found, self.workers[0].output.osd_told

    def serve(self, req_id: str, answer: Sequence[int], **begun: Any) -> None:
        """A request from its beginning to its end, with nothing asked."""
        self.step({req_id: [answer[0]]}, new={req_id: [1, 2]}, **begun)
        for token in answer[1:]:
            self.step({req_id: [token]})
        self.step({}, finished={req_id})


def step_of(
    sampled: dict[str, list[int]],
    ask: Ask | None,
    verified: Sequence[str],
    *,
    new: dict[str, list[int]] | None = None,
    resumed: dict[str, list[int]] | None = None,
    finished: set[str] | None = None,
    begun: Begun = KEPT,
) -> Any:
    names = [*(new or {}), *(resumed or {})]
    return SimpleNamespace(
        osd_ask=ask,
        osd_begun=dict.fromkeys(names, begun),
        num_scheduled_tokens=dict.fromkeys(sampled, 1),
        scheduled_spec_decode_tokens={req_id: [-1] for req_id in verified},
        finished_req_ids=finished or set(),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=tokens, prefill_token_ids=None)
            for name, tokens in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            resumed_req_ids=set(resumed or {}), all_token_ids=resumed or {}
        ),
    )


def sampled_of(tokens: dict[str, list[int]]) -> Sampled:
    width = max(map(len, tokens.values()), default=1)
    rows = [row + [-1] * (width - len(row)) for row in tokens.values()]
    return Sampled(list(tokens), torch.tensor(rows).reshape(len(tokens), width))


def asking(plan: Plan = MEMORY, **terms: Terms) -> Ask:
    return Ask(plan, RATIOS, terms or {"b": POOR})


def test_all_ranks_are_told_what_the_first_one_found() -> None:
    ranks = Ranks(3)
    ranks.serve("a", TEXT)
    begin = {"b": TEXT[:3]}
    drafts, told = ranks.step(begin, asking(), new={"b": [1, 2]})
    assert [each[0].tolist() for each in drafts] == [TEXT[3:7]] * 3
    assert told.found == {"b": K}
    assert told.problem == "" and told.unverified == {}
    assert ranks.num_broadcasts == [1, 1, 1]


def test_nobody_waits_in_a_step_that_does_not_ask_and_what_it_sampled_is_known_later() -> None:
    ranks = Ranks()
    ranks.serve("a", TEXT)
    assert ranks.num_broadcasts == [0, 0]
    drafts, told = ranks.step({"b": TEXT[:3]}, new={"b": [1, 2]}, drafts=[[5, 6]])
    assert drafts[0].tolist() == [[5, 6]] and told.found == {}
    drafts, _ = ranks.step({"b": TEXT[3:4]}, asking())
    assert drafts[0][0].tolist() == TEXT[4:8]


def test_the_newest_tokens_are_not_read_before_they_have_come() -> None:
    """Where nothing is asked, the host is a step ahead of the device."""
    ranks = Ranks(1)
    read: list[str] = []

    class Late(Sampled):
        def tokens(self) -> Any:
            read.append("read")
            return super().tokens()

    worker, rank = ranks.workers[0], ranks.first
    for token in TEXT[:3]:
        before = len(read)
        worker.execute_model(step_of({"a": [token]}, None, ()))
        rank.osd_propose(Late(["a"], torch.tensor([[token]])), DraftsV1(torch.zeros(1, 0)))
        assert len(read) - before <= 1 and len(rank._unread) <= 2
    assert len(read) == 1


def test_the_draft_is_worth_what_it_was_beside_such_look_ups() -> None:
    """The last kind of look-ups that find as much as here is the fifth."""
    ranks = Ranks()
    ranks.serve("a", TEXT)
    terms = {name: Terms(K, 2, 1.9) for name in "bc"}
    for name, ratio, is_found in (("b", 0.1, True), ("c", 9.0, False)):
        ask = Ask(MIXED, (1.0, 1.0, 1.0, ratio, ratio, 1.0, 1.0), terms)
        _, told = ranks.step({name: TEXT[:3]}, ask, new={name: [1, 2]}, drafts=[[5, 6]])
        assert bool(told.found) is is_found


def test_what_waits_to_be_remembered_is_remembered_step_by_step() -> None:
    ranks = Ranks(1)
    answers = json.dumps([([1, 2], list(range(10, 10 + 400)), "")])
    waiting = int(worker_with(ranks, 0).osd_memory("remember", answers))
    assert waiting == ranks.memory.num_waiting > 0
    ranks.step({"b": [5]}, asking(), new={"b": [1, 2]})
    assert ranks.memory.num_waiting < waiting


def test_a_draft_that_is_worth_more_is_left() -> None:
    ranks = Ranks()
    ranks.serve("a", TEXT)
    ask = asking(MIXED._replace(price=0.1), b=SURE, c=POOR)
    new = {"b": [1, 2], "c": [1, 2]}
    drafts, told = ranks.step({"b": TEXT[:3], "c": TEXT[:3]}, ask, new=new, drafts=[[5, 6], [7, 8]])
    assert told.found.keys() == {"c"}
    for rank in drafts:
        assert rank[0, :2].tolist() == [5, 6]
        assert rank[1].tolist() == TEXT[3:7]


def test_what_nobody_verifies_is_told_with_the_next_step() -> None:
    ranks = Ranks()
    ranks.serve("a", TEXT)
    _, told = ranks.step({"b": TEXT[:3]}, asking(MIXED, b=POOR), new={"b": [1, 2]}, drafts=[[5, 6]])
    assert told.found and told.unverified == {}
    _, told = ranks.step({"b": TEXT[3:7]}, verified=["b"])
    assert told.unverified == {"b": [5, 6]} and told.found == {}


def test_a_draft_of_which_nothing_is_verified_is_told_too() -> None:
    ranks = Ranks()
    none = asking(MIXED, b=Terms(K, 0, 0.0), c=Terms(K, 2, 0.0))
    new = {"b": [1, 2], "c": [1, 2]}
    ranks.step({"b": [71], "c": [72]}, none, new=new, drafts=[[5, 6], [7, 8]])
    _, told = ranks.step({"b": [73], "c": [74]})
    assert told.unverified == {"b": [5, 6]}


def test_capture_is_told_whose_tokens_a_step_verifies() -> None:
    ranks = Ranks()
    ranks.serve("a", TEXT)
    new = {"b": [1, 2], "c": [1, 2]}
    given = {"b": TEXT[:3], "c": [71, 72, 73]}
    for plan, names in ((MIXED, {"b"}), (MEMORY, {"b", "c"})):
        ranks.step(given, asking(plan, b=POOR, c=POOR), new=new, drafts=[[5, 6], [7, 8]])
        ranks.step(given, verified=["b", "c"])
        assert set(ranks.workers[0].executed[-1].osd_from_memory) == names, plan
    ranks.step(given, verified=["b", "c"])
    assert set(ranks.workers[0].executed[-1].osd_from_memory) == set(), "nothing was asked"


@pytest.mark.parametrize("wrapped", ["", "_model_runner_output", "model_runner_output"])
def test_what_was_found_travels_with_the_output(wrapped: str) -> None:
    ranks = Ranks(wrapped=wrapped)
    _, told = ranks.step({"a": [5]}, new={"a": [1]})
    assert told == Told({}, {})
    assert not hasattr(ranks.workers[1].output, "osd_told"), "one rank speaks for all"


def test_a_step_that_sampled_nothing_tells_nothing() -> None:
    worker: Any = Worker()
    worker.sample_tokens = lambda _: None
    RankMemory(worker, Memory(1 << 20, K), K, lambda tensor: tensor).begin()
    assert worker.sample_tokens(None) is None


def test_before_all_ranks_are_ready_the_scheduler_is_told_nothing() -> None:
    worker = Worker()
    rank = RankMemory(worker, Memory(1 << 20, K), K, lambda tensor: tensor)
    worker.sample_tokens(None)
    assert not hasattr(worker.output, "osd_told")
    rank.begin()
    worker.sample_tokens(None)
    assert worker.output.osd_told == Told({}, {})


def test_after_an_error_the_first_rank_still_meets_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks()
    ranks.serve("a", TEXT)
    ranks.memory.propose = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
    given = {"b": TEXT[:3]}
    for _ in range(2):
        drafts, told = ranks.step(given, asking(), new={"b": [1, 2]}, drafts=[[5, 6]])
        assert [each[0, :2].tolist() for each in drafts] == [[5, 6]] * 2
        assert "ZeroDivisionError" in told.problem and told.found == {}
    assert ranks.num_broadcasts == [2, 2]
    assert caplog.text.count("serving is not affected") == 1


def test_of_a_look_up_that_failed_half_way_nothing_is_put() -> None:
    ranks = Ranks()
    ranks.serve("a", TEXT)
    found, asked = ranks.memory.propose, list[str]()

    def fails(req_id: str, *given: Any, **named: Any) -> Any:
        asked.append(req_id)
        return found(req_id, *given, **named) if len(asked) == 1 else 1 / 0

    ranks.memory.propose = fails  # type: ignore[method-assign]
    given, new = {"b": TEXT[:3], "c": TEXT[:3]}, {"b": [1, 2], "c": [1, 2]}
    drafts, told = ranks.step(given, asking(b=POOR, c=POOR), new=new, drafts=[[5, 6], [7, 8]])
    assert asked == ["b", "c"] and told.found == {} and told.problem
    assert [each[:, :2].tolist() for each in drafts] == [[[5, 6], [7, 8]]] * 2


def test_what_could_not_be_read_does_not_keep_the_memory_from_being_emptied() -> None:
    ranks = Ranks(1)
    ranks.serve("a", TEXT)
    ranks.step({"b": [11]}, new={"b": [1, 2]})
    ranks.memory.advance_all = lambda *_, **__: 1 / 0  # type: ignore[method-assign, assignment]
    _, told = ranks.step({"b": [12]}, asking())
    assert "ZeroDivisionError" in told.problem
    assert worker_with(ranks, 0).osd_memory("forget", "null") == "0"
    del ranks.memory.advance_all
    assert proposed_by(ranks.memory, [99], TEXT[:3], "all") == []


def test_where_what_was_sampled_could_not_be_copied_the_ranks_still_meet() -> None:
    ranks = Ranks()
    for worker, rank in zip(ranks.workers, ranks.ranks, strict=True):
        worker.execute_model(step_of({"a": [5]}, asking(), ()))
        drafts = DraftsV1(torch.tensor([[5, 6]]))
        rank.osd_propose(None, drafts)
        assert drafts.tokens[0, :2].tolist() == [5, 6]
    assert ranks.num_broadcasts == [1, 1]


def test_a_request_that_goes_on_after_it_was_preempted_has_the_tokens_it_is_said_to_have() -> None:
    ranks = Ranks()
    ranks.serve("a", TEXT)
    ranks.step({"b": [71]}, new={"b": [1, 2]})
    ranks.step({"b": [72]})  # on its way when it was preempted: it was never served
    drafts, _ = ranks.step({"b": TEXT[2:3]}, asking(), resumed={"b": [1, 2, *TEXT[:2]]})
    assert drafts[0][0].tolist() == TEXT[3:7]
    assert proposed_by(ranks.memory, [1], [71], "all") == []


def test_where_nothing_is_said_of_its_tokens_a_request_goes_on_as_it_was() -> None:
    """vLLM leaves them out where the step before had the request too."""
    ranks = Ranks()
    ranks.serve("a", TEXT)
    ranks.step({"b": TEXT[:2]}, new={"b": [1, 2]})
    output = step_of({"b": TEXT[2:3]}, asking(), (), resumed={"b": []})
    output.scheduled_cached_reqs.all_token_ids = {}
    ranks.workers[0].execute_model(output)
    assert ranks.first.problem == ""


@pytest.mark.parametrize(
    "prefilled, prompt", [([1, 2, *TEXT[:2]], [1, 2]), (None, [1, 2, *TEXT[:2]]), (None, None)]
)
def test_a_request_begins_with_all_tokens_that_vllm_sends(
    prefilled: list[int] | None, prompt: list[int] | None
) -> None:
    """The V2 runner is sent those of a request that goes on; of embeddings there are none."""
    ranks = Ranks(1)
    output = step_of({"b": TEXT[2:3]}, None, (), new={"b": []})
    output.scheduled_new_reqs[0].prefill_token_ids = prefilled
    output.scheduled_new_reqs[0].prompt_token_ids = prompt
    ranks.workers[0].execute_model(output)
    ranks.first.osd_propose(sampled_of({"b": TEXT[2:3]}), DraftsV1(torch.zeros(1, 0)))
    for token in TEXT[3:]:
        ranks.step({"b": [token]})
    ranks.step({}, finished={"b"})
    assert ranks.first.problem == ""
    known = TEXT[2:6] if prefilled or prompt else []
    assert proposed_by(ranks.memory, [99], TEXT[:2], "all") == known


def test_what_is_not_kept_leaves_nothing_and_scopes_are_apart() -> None:
    ranks = Ranks()
    ranks.serve("a", TEXT, begun=Begun("all", False))
    assert proposed_by(ranks.memory, [99], TEXT[:3], "all") == []
    ranks.serve("b", TEXT, begun=Begun("tenant", True))
    assert proposed_by(ranks.memory, [99], TEXT[:3], "all") == []
    assert proposed_by(ranks.memory, [99], TEXT[:3], "tenant") == TEXT[3:7]


def test_what_is_not_kept_is_gone_when_the_engine_has_nothing_else_to_do() -> None:
    ranks = Ranks(1)
    ranks.step({"a": [5]}, new={"a": list(range(100, 700))}, begun=Begun("all", False))
    for _ in range(12):
        ranks.step({"a": [6]})
    assert (ranks.memory._own.key_E >= 0).any()
    ranks.step({}, finished={"a"})
    assert not (ranks.memory._own.key_E >= 0).any()


def test_what_is_on_its_way_when_another_request_of_the_name_begins_is_not_its() -> None:
    ranks = Ranks()
    ranks.step({"a": [71]}, new={"a": [1, 2]}, begun=Begun("tenant", True))
    ranks.step({"a": [72]})
    ranks.step({"a": TEXT[:1]}, new={"a": [1, 2]}, finished={"a"})
    for token in TEXT[1:]:
        ranks.step({"a": [token]})
    ranks.step({}, finished={"a"})
    assert proposed_by(ranks.memory, [99], [72], "all") == []
    assert proposed_by(ranks.memory, [1], [2], "all") == TEXT[:4]


def own_step(ranks: Ranks, verified: Sequence[str] = ()) -> Any:
    """A step of the first rank that carries nothing of ours."""
    worker, rank = ranks.workers[0], ranks.first
    output = SimpleNamespace(
        num_scheduled_tokens={"b": 1},
        scheduled_spec_decode_tokens={req_id: [-1] for req_id in verified},
    )
    worker.execute_model(output)
    rank.osd_propose(sampled_of({"b": [5]}), DraftsV1(torch.tensor([[5, 6]])))
    worker.sample_tokens(None)
    return output


@pytest.mark.parametrize("plan", [MEMORY, MIXED])
def test_where_it_is_led_again_nothing_of_before_is_told(plan: Plan) -> None:
    ranks = Ranks(1)
    ranks.serve("a", TEXT)
    ranks.step({"b": TEXT[:3]}, asking(plan, b=POOR), new={"b": [1, 2]}, drafts=[[5, 6]])
    assert own_step(ranks, ["b"]).osd_from_memory == ("b",), "they were proposed when it was led"
    assert own_step(ranks, ["b"]).osd_from_memory == ()
    _, told = ranks.step({"b": [5]}, verified=["b"])
    assert told == Told({}, {})
    assert ranks.workers[0].executed[-1].osd_from_memory == ()


def test_while_the_engine_goes_on_by_itself_nothing_is_kept() -> None:
    """As one that is held does: its steps carry nothing of ours."""
    ranks = Ranks(1)
    ranks.step({"a": [11]}, new={"a": [1, 2]})
    rank = ranks.first
    for _ in range(50):
        own_step(ranks)
    assert rank._unread == [] and ranks.memory._requests == {} and rank.problem == ""
    ranks.serve("b", TEXT)
    drafts, _ = ranks.step({"c": TEXT[:3]}, asking(c=POOR), new={"c": [1, 2]})
    assert drafts[0][0].tolist() == TEXT[3:7], "when it is led again, it goes on"


def test_requests_that_end_are_not_kept() -> None:
    ranks = Ranks(1)
    for name in "abcdef":
        ranks.serve(name, TEXT[:2])
    assert ranks.memory._requests == {} and ranks.first._unread == []


def worker_with(ranks: Ranks, rank: int) -> Any:
    worker: Any = WorkerExtension.__new__(WorkerExtension)
    worker.osd_ask = ranks.ranks[rank]
    return worker


def test_it_remembers_what_was_served_before_and_forgets_when_it_is_told() -> None:
    ranks = Ranks()
    nobody = "('', '', '')"
    answers = json.dumps([([1, 2], TEXT, "label")])
    assert worker_with(ranks, 0).osd_memory("remember", answers) == "0"
    assert worker_with(ranks, 1).osd_memory("remember", answers) == "0"
    assert proposed_by(ranks.memory, [99], TEXT[:3], nobody) == TEXT[3:7]
    for rank in range(2):
        assert worker_with(ranks, rank).osd_memory("forget", "null") == "0"
    assert proposed_by(ranks.memory, [99], TEXT[:3], nobody) == []


def test_what_has_ended_and_is_not_known_yet_is_forgotten_too() -> None:
    ranks = Ranks(1)
    ranks.step({"a": TEXT[:3], "b": [5]}, new={"a": [1, 2], "b": [1]})
    ranks.step({"a": TEXT[3:], "b": [6]})
    ranks.workers[0].execute_model(step_of({"b": [7]}, None, (), finished={"a"}))
    worker_with(ranks, 0).osd_memory("forget", "null")
    ranks.step({"b": [8]})
    ranks.step({}, finished={"b"})
    assert proposed_by(ranks.memory, [99], TEXT[3:5], "all") == []


def test_a_rank_that_cannot_forget_says_so() -> None:
    ranks = Ranks()
    ranks.memory.clear = lambda: 1 / 0  # type: ignore[method-assign]
    assert (
        "ZeroDivisionError" in json.loads(worker_with(ranks, 0).osd_memory("forget", ""))["error"]
    )


def test_a_worker_without_a_memory_answers_all_the_same() -> None:
    worker: Any = WorkerExtension.__new__(WorkerExtension)
    worker.osd_ask = None
    worker.osd_begin_to_ask()
    assert worker.osd_memory("forget", "null") == "0"


def test_ranks_say_that_they_are_ready_when_they_are_told() -> None:
    ranks = Ranks(1)
    ranks.first.is_begun = False
    worker_with(ranks, 0).osd_begin_to_ask()
    assert ranks.first.is_begun


# -- who asks -------------------------------------------------------------------------------------


def ready(
    monkeypatch: pytest.MonkeyPatch,
    rank: int = 0,
    *,
    executor: str = "mp",
    is_async: bool = True,
    **settings: Any,
) -> Any:
    """A worker of vLLM's that was let ask, where it may."""
    monkeypatch.setattr(parts, "problem_with", lambda part: "")
    group = SimpleNamespace(broadcast=lambda tensor: tensor)
    monkeypatch.setattr("vllm.distributed.parallel_state._TP", group)
    worker: Any = type("Both", (WorkerExtension, Worker), {})()
    worker.rank, worker.osd_off = rank, {}
    worker.vllm_config = SimpleNamespace(
        additional_config={"osd": {"k_max": 3, "memory_k_max": 6, "is_alone": False, **settings}},
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        parallel_config=SimpleNamespace(distributed_executor_backend=executor),
        speculative_config=SimpleNamespace(num_speculative_tokens=5),
        compilation_config=SimpleNamespace(cudagraph_mode="NONE"),
    )
    worker.model_runner = SimpleNamespace(propose_draft_token_ids=lambda *_: None)
    worker.osd_let_ask()
    assert worker.osd_off == {}
    return worker


def test_the_first_rank_has_a_memory_of_as_many_tokens_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (ready(monkeypatch, rank).osd_ask for rank in range(2))
    assert first._memory.k == first._k == second._k == 5
    assert second._memory is None


@pytest.mark.parametrize(
    "given",
    [{"executor": "uni"}, {"is_async": False}, {"proposers": ["draft"]}, {"mode": "off"}],
)
def test_ranks_meet_nowhere_else(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    assert ready(monkeypatch, **given).osd_ask is None


@pytest.mark.parametrize("is_by_domain", [False, True])
def test_answers_of_before_are_for_whoever_asks_or_their_class(
    monkeypatch: pytest.MonkeyPatch, is_by_domain: bool
) -> None:
    worker = ready(monkeypatch, memory_by_domain=is_by_domain)
    worker.osd_memory("remember", json.dumps([([1, 2], TEXT, "label")]))
    memory = worker.osd_ask._memory
    assert bool(proposed_by(memory, [99], TEXT[:3], scope())) is not is_by_domain
    assert bool(proposed_by(memory, [99], TEXT[:3], scope(domain="label"))) is is_by_domain
