"""Which requests are not drafted for, and that they are refused unless all parts of the engine can
serve them. Their answers are compared in `tests/integration/serving/test_odd_requests.py`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.outputs import LogprobsTensors

from serving.vllm import undrafted
from serving.vllm.undrafted import (
    REASONS,
    REFUSED,
    Undrafted,
    permit,
    refuse_undrafted,
    why_undrafted,
)
from serving.vllm.undrafted_sampling import sample_undrafted, with_chosen

ODD: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {3: 1.0}},
    "min_p": {"min_p": 0.1},
    "logprob_token_ids": {"logprob_token_ids": [3]},
    "thinking_token_budget": {"thinking_token_budget": 0},
}
PLAIN: list[dict[str, Any]] = [
    {},
    {"logit_bias": {}},
    {"min_p": 0.1, "temperature": 0.0},
    {"logprobs": 3, "bad_words": ["x"], "allowed_token_ids": [1], "min_tokens": 2},
]


@pytest.mark.parametrize("reason", REASONS)
def test_what_keeps_a_request_from_being_drafted_for(reason: str) -> None:
    assert why_undrafted(SamplingParams(**ODD[reason])) == reason


@pytest.mark.parametrize("given", PLAIN)
def test_all_others_are_drafted_for(given: dict[str, Any]) -> None:
    assert why_undrafted(SamplingParams(**given)) == ""
    assert why_undrafted(None) == "", "a pooling request has none"


# -- scheduler ------------------------------------------------------------------------------------


class Plain:
    """Stands where vLLM's scheduler does, and notes the drafts it would verify."""

    use_v2_model_runner = False

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.requests: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.running = [*self.requests.values()]

    def schedule(self) -> dict[str, list[int]]:
        return {request.request_id: request.spec_token_ids for request in self.running}


class Scheduler(Undrafted, Plain):
    pass


def request(name: str, num_outputs: int = 0, **given: Any) -> Any:
    return SimpleNamespace(
        request_id=name,
        sampling_params=SamplingParams(**given),
        spec_token_ids=[-1] * 4,
        num_output_tokens=num_outputs,
    )


def test_no_draft_token_of_such_a_request_is_scheduled() -> None:
    scheduler = Scheduler()
    for reason in REASONS:
        scheduler.add_request(request(reason, **ODD[reason]))
    scheduler.add_request(request("plain"))
    shared = [5, 6, 7]
    for each in scheduler.running:
        each.spec_token_ids = shared
    nothing = {reason: list[int]() for reason in REASONS}
    assert scheduler.schedule() == {**nothing, "plain": [5, 6, 7]}
    assert shared == [5, 6, 7], "placeholders of asynchronous scheduling are one list for all"


def test_a_session_is_not_drafted_for() -> None:
    """Whose next turn begins behind what was computed: draft tokens that were accepted behind the
    end of the turn before are no part of it."""
    scheduler, session = Scheduler(), request("session")
    session.resumable = True
    for _ in range(2):  # it goes on
        scheduler.add_request(session)
    assert scheduler.schedule() == {"session": []}
    assert scheduler.osd_undrafted == {"session": 1}


def test_they_are_counted_once_by_reason() -> None:
    scheduler = Scheduler()
    for name, reason in (("a", "min_p"), ("a", "min_p"), ("b", "logit_bias"), ("c", "min_p")):
        scheduler.add_request(request(name, **ODD[reason]))
    scheduler.add_request(request("plain"))
    assert scheduler.osd_undrafted == {"min_p": 2, "logit_bias": 1}


@pytest.mark.parametrize(
    ("num_outputs", "num_drafts", "num_ahead"), [(0, 4, 0), (6, 3, 0), (9, 0, 0), (10, 4, 4)]
)
def test_no_draft_reaches_over_the_end_of_min_tokens(
    num_outputs: int, num_drafts: int, num_ahead: int
) -> None:
    late = {"min_tokens": 10, "stop_token_ids": [7]}
    for is_async, expected in ((False, num_drafts), (True, num_ahead)):
        scheduler = type("Scheduler", (Scheduler,), {"IS_ASYNC": is_async})()
        scheduler.add_request(request("late", num_outputs, **late))
        scheduler.add_request(request("nothing stops it", num_outputs, min_tokens=10))
        drafts = scheduler.schedule()
        assert len(drafts["late"]) == expected
        assert len(drafts["nothing stops it"]) == 4


def test_a_vllm_whose_requests_cannot_be_told_apart_schedules_as_it_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler as Vllms

    monkeypatch.delattr(Vllms, "schedule")
    scheduler = Scheduler()
    assert "Scheduler.schedule" in scheduler.osd_undrafted_problem
    scheduler.add_request(SimpleNamespace(request_id="a", spec_token_ids=[1]))
    assert scheduler.schedule() == {"a": [1]}


def test_a_vllm_whose_requests_have_no_drafts_to_take_away_schedules_as_it_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Plain, "schedule", lambda self: list(self.requests))
    scheduler = Scheduler()
    scheduler.osd_undrafted_problem = "vllm.v1.request:Request.__init__ says otherwise"
    scheduler.add_request(SimpleNamespace(request_id="a"))
    assert scheduler.schedule() == ["a"]


# -- worker ---------------------------------------------------------------------------------------


def test_a_worker_of_another_vllm_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    runner = SimpleNamespace(rejection_sampler=None)
    assert sample_undrafted(runner) == "", "a rank that does not sample"
    monkeypatch.delattr(RejectionSampler, "_get_logprobs_tensors")
    assert "_get_logprobs_tensors" in sample_undrafted(runner)


def test_a_worker_that_fails_says_so() -> None:
    runner = SimpleNamespace(rejection_sampler=object(), input_batch=SimpleNamespace(num_reqs=1))
    assert sample_undrafted(runner) == "RuntimeError: requests are running already"


def test_chosen_tokens_stand_beside_the_most_likely_ones_of_others() -> None:
    """Requests: logprobs of 2, chosen tokens [4, 0, 3], chosen token [1], in steps of 2 rows."""
    scores_BV = torch.log_softmax(torch.arange(15.0).reshape(3, 5) % 7, -1)
    top = LogprobsTensors(
        torch.arange(18, dtype=torch.int32).reshape(6, 3), torch.randn(6, 3), torch.arange(6)
    )
    found = with_chosen(top, {1: [4, 0, 3], 2: [1]}, scores_BV, slots=2)
    assert found.logprob_token_ids.tolist() == [
        [0, 1, 2, 0],
        [3, 4, 5, 0],
        [6, 4, 0, 3],
        [9, 10, 11, 0],
        [12, 1, 0, 0],
        [15, 16, 17, 0],
    ]
    assert found.logprobs[[0, 1, 3, 5], :3].equal(top.logprobs[[0, 1, 3, 5]])
    assert found.logprobs[:, 0].equal(top.logprobs[:, 0])
    assert found.logprobs[2, 1:].equal(scores_BV[1, [4, 0, 3]])
    assert found.logprobs[4, 1:].tolist() == [scores_BV[2, 1].item(), -torch.inf, -torch.inf]
    assert found.selected_token_ranks.equal(top.selected_token_ranks)


# -- front end ------------------------------------------------------------------------------------


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's check as it comes, and no engine permitted."""
    as_it_is = SamplingParams._validate_spec_decode
    monkeypatch.setattr(undrafted, "_PERMITTED", [])
    monkeypatch.setattr(SamplingParams, "_validate_spec_decode", refuses_what_vllm_does)
    refuse_undrafted()
    yield
    assert as_it_is is not None


def refuses_what_vllm_does(params: Any, speculative_config: Any) -> None:
    if speculative_config is not None and (params.min_p or params.logit_bias or params.seed):
        raise VLLMValidationError("not with speculative decoding")


def is_refused(config: Any, **given: Any) -> bool:
    try:
        SamplingParams(**given)._validate_spec_decode(config)
    except VLLMValidationError as error:
        assert "speculative decoding" in str(error)
        return True
    return False


@pytest.mark.parametrize("reason", REFUSED)
def test_an_engine_serves_them_once_it_was_permitted(own: None, reason: str) -> None:
    config, another = SimpleNamespace(), SimpleNamespace()
    assert is_refused(config, **ODD[reason])
    assert not is_refused(None, **ODD[reason])
    permit(config, ["", "", ""])
    assert not is_refused(config, **ODD[reason])
    assert is_refused(another, **ODD[reason])


def test_no_chosen_tokens_are_refused_too(own: None) -> None:
    """In an engine that was not permitted, an empty list ends it as well."""
    assert is_refused(SimpleNamespace(), logprob_token_ids=[])


def test_what_vllm_refuses_besides_it_refuses_still(own: None) -> None:
    config = SimpleNamespace()
    permit(config, [])
    assert is_refused(config, seed=3, min_p=0.2)
    asked = SamplingParams(min_p=0.2, logit_bias={1: 2.0})
    asked._validate_spec_decode(config)
    assert (asked.min_p, asked.logit_bias) == (0.2, {1: 2.0})


def test_the_check_is_made_stricter_once(own: None) -> None:
    stricter = SamplingParams._validate_spec_decode
    refuse_undrafted()
    assert SamplingParams._validate_spec_decode is stricter


class Engine:
    """As the front end sees it."""

    def __init__(self, workers: list[str], scheduler: str | None) -> None:
        self.workers, self.scheduler = workers, scheduler
        self.engine_core = self
        self.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace())

    async def collective_rpc(self, method: str) -> list[str]:
        assert method == "osd_undrafted"
        return self.workers

    async def call_utility_async(self, method: str) -> str:
        assert method == "osd_undrafted"
        if self.scheduler is None:
            raise Exception("'EngineCore' object has no attribute 'osd_undrafted'")
        return self.scheduler


@pytest.mark.parametrize(
    ("workers", "scheduler", "problem"),
    [
        (["", ""], "", ""),
        (["", "no sampler"], "", "no sampler"),
        ([""], "no schedule", "no schedule"),
        ([""], None, "has no attribute 'osd_undrafted'"),
    ],
)
async def test_scheduler_and_every_worker_are_asked(
    own: None,
    workers: list[str],
    scheduler: str | None,
    problem: str,
) -> None:
    engine = Engine(workers, scheduler)
    said = await undrafted.permit_undrafted(engine)
    assert problem in said and bool(said) is bool(problem)
    assert is_refused(engine.vllm_config.speculative_config, min_p=0.1) is bool(problem)
