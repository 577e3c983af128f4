"""vLLM's schedulers under control, with a hand-written one in place of vLLM's.

What is read, what is cut, and what is credited.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from osd.records import encode
from serving.speculation.control import Settings, Speculation, settings_of
from serving.speculation.goodput import OFF, Plan
from serving.speculation.memory.elsewhere import proposals_of
from serving.speculation.probes import MIN_STEPS_TO_PROBE, PROBE_STEPS
from serving.speculation.proposals import memory_of, scope
from serving.speculation.requests import whole_number
from serving.speculation.scheduler import (
    Controlled,
    ControlledAsync,
    controlled_class,
    controlled_scheduler,
)
from serving.speculation.step_seen import MAX_IDLE_SECONDS, DraftWork, Stamp, StepSeen
from serving.speculation.step_times import Shape, padded_sizes
from serving.speculation.sweep import SWEEP_STEPS
from serving.vllm.schedules import DRAWN_ELSEWHERE, OTHER_EXECUTOR

K = 4
STEP_S = 0.010
ROWS = [
    {
        "batch": b,
        "tokens": t,
        "context": 10,
        "drafted": k,
        "seconds": 0.01 + 0.001 * t + 0.002 * k,
        "steps": 8,
    }
    for b in (1, 2)
    for t in (b, 3 * b, 5 * b)
    for k in (0, 2)
]


@dataclass
class Request:
    """One of vLLM's, as far as the scheduler reads it; its prompt is computed in chunks of so many
    tokens."""

    request_id: str
    all_token_ids: list[int]
    sampling_params: Any = None
    chunk: int = 100
    num_output_tokens: int = 0
    num_computed: int = 0
    spec_token_ids: list[int] = field(default_factory=list)
    has_finished: bool = False
    max_tokens: int = 1000
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None
    resumable: bool = False

    def __post_init__(self) -> None:
        self.prompt_token_ids = list(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def is_prefill_chunk(self) -> bool:
        return self.num_computed < self.num_tokens

    def is_finished(self) -> bool:
        return self.has_finished


class PlainScheduler:
    """Stands where vLLM's does: it schedules all that run, and ends those in `ending` at their next
    output."""

    num_spec_tokens = K
    use_v2_model_runner = False
    max_model_len = 10_000

    def __init__(self, vllm_config: Any, *given: Any, **named: Any) -> None:
        self.vllm_config, self.given = vllm_config, (given, named)
        self.scheduler_config = vllm_config.scheduler_config
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.dynamic_sd_lookup: list[int] | None = None
        self.ending: set[str] = set()
        self.placeholders: list[int] = []
        self.resumed: list[str] = []

    def add_request(self, request: Request, *given: Any) -> Any:
        session = self.requests.get(request.request_id)
        if session is not None and session.resumable:
            session.all_token_ids += request.all_token_ids
            return ("added", *given)
        self.running.append(request)
        self.requests[request.request_id] = request
        return ("added", *given)

    def schedule(self, *given: Any) -> Any:
        assert self.dynamic_sd_lookup is not None
        decoding = [r for r in self.running if not r.is_prefill_chunk]
        verified = {r.request_id: r.spec_token_ids for r in decoding if r.spec_token_ids}
        num = {
            r.request_id: min(r.chunk, r.num_tokens - r.num_computed) or 1 + len(r.spec_token_ids)
            for r in self.running
        }
        new = [SimpleNamespace(req_id=r.request_id) for r in self.running if not r.num_computed]
        output = SimpleNamespace(
            given=given,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(self.resumed)),
            num_scheduled_tokens=num,
            scheduled_spec_decode_tokens=verified,
            num_invalid_spec_tokens=None,
            num_spec_tokens_to_schedule=self.dynamic_sd_lookup[len(num)],
        )
        for request in decoding:
            request.spec_token_ids = []
        for request in self.running:
            request.num_computed = min(
                request.num_tokens, request.num_computed + num[request.request_id]
            )
        self._update_after_schedule(output)
        return output

    def _update_after_schedule(self, output: Any) -> None:
        pass

    def update_from_output(self, output: Any, result: Any) -> Any:
        for req_id, at in result.req_id_to_index.items():
            request, emitted = self.requests[req_id], result.sampled_token_ids[at]
            request.all_token_ids += emitted
            request.num_computed += len(emitted)
            request.num_output_tokens += len(emitted)
            del emitted[1:]  # as vLLM does behind a stop
            if req_id in self.ending:
                self.running.remove(self.requests.pop(req_id))
        return {"outputs": sorted(result.req_id_to_index)}

    def update_draft_token_ids(self, drafts: Any) -> None:
        for req_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            if (request := self.requests.get(req_id)) is not None and not request.is_prefill_chunk:
                request.spec_token_ids = tokens


class AheadScheduler(PlainScheduler):
    """vLLM's asynchronous one: drafts stay in the worker, and all requests share one list of
    placeholders."""

    def _update_after_schedule(self, output: Any) -> None:
        self.placeholders = [-1] * output.num_spec_tokens_to_schedule
        for request in self.running:
            if not request.is_prefill_chunk:
                request.spec_token_ids = self.placeholders


class Overheard(Speculation):
    """Remembers what it was told, and plans what it is forced to."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, memory=memory_of(settings))
        self.begun: list[tuple[str, str, int | None, bool]] = []
        self.ended: list[str] = []
        self.asked: list[tuple[list[str], int]] = []
        self.seen: list[StepSeen] = []
        self.remembered: list[dict[str, Any]] = []
        """What the memory is told of each request."""

    def begin(
        self,
        req_id: str,
        *,
        domain: str = "",
        client_cap: int | None = None,
        is_counted: bool = True,
        **given: Any,
    ) -> None:
        self.begun.append((req_id, domain, client_cap, is_counted))
        self.remembered.append(given)
        super().begin(req_id, domain=domain, client_cap=client_cap, is_counted=is_counted, **given)

    def end(self, req_id: str) -> None:
        self.ended.append(req_id)
        super().end(req_id)

    def plan(self, req_ids: Sequence[str], context: int) -> Stamp:
        self.asked.append((list(req_ids), context))
        return super().plan(req_ids, context)

    def observe(self, step: StepSeen) -> None:
        self.seen.append(step)
        super().observe(step)


def vllm_config(
    *,
    padded: Sequence[int] = (),
    is_async: bool = False,
    device: str = "cuda",
    executor: str = "uni",
    is_drawn: bool = False,
    **settings: Any,
) -> Any:
    mode = SimpleNamespace(name="PIECEWISE" if padded else "NONE")
    return SimpleNamespace(
        additional_config={"osd": {"k_max": K, **settings}},
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode, cudagraph_capture_sizes=list(padded)
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, async_scheduling=is_async),
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(distributed_executor_backend=executor),
        speculative_config=SimpleNamespace(
            draft_sample_method="probabilistic" if is_drawn else "greedy"
        ),
    )


class Bench:
    """Scheduler, worker and clock: a step takes `STEP_S`, and the draft proposes 50, 51, … for
    every request."""

    def __init__(
        self,
        *,
        is_async: bool = False,
        is_v2: bool = False,
        device: str = "cuda",
        **settings: Any,
    ) -> None:
        self.now = 0.0
        mixin, base = (
            (ControlledAsync, AheadScheduler) if is_async else (Controlled, PlainScheduler)
        )
        named = {"osd_clock": staticmethod(lambda: self.now), "use_v2_model_runner": is_v2}
        config = vllm_config(is_async=is_async, device=device, **settings)
        self.scheduler: Any = type("Scheduler", (mixin, base), named)(config)
        settings = self.scheduler.osd.settings
        self.osd = self.scheduler.osd = Overheard(settings)
        self.scheduler._osd_proposals = proposals_of(self.osd, settings, config, is_v2=is_v2)

    def add(self, req_id: str, prompt: Sequence[int] = (7, 8, 9), **given: Any) -> Request:
        extra = given.pop("extra", None)
        params = SamplingParams(extra_args=extra, **given.pop("sampling", {}))
        request = Request(req_id, list(prompt), params, **given)
        assert self.scheduler.add_request(request) == ("added",)
        return request

    def step(self, emitted: dict[str, list[int]] | None = None, *, drafts: bool = True) -> Any:
        """One in which each request that is not in `emitted` gets one token once its prompt is
        computed."""
        output = self.scheduler.schedule()
        self.now += STEP_S
        self.give(output, emitted)
        if drafts:
            self.draft(output.num_spec_tokens_to_schedule)
        return output

    def give(self, output: Any, emitted: dict[str, list[int]] | None = None, **told: Any) -> Any:
        ids = [*output.num_scheduled_tokens]
        sampled = [
            list((emitted or {}).get(r, [] if self.scheduler.requests[r].is_prefill_chunk else [1]))
            for r in ids
        ]
        result = SimpleNamespace(
            sampled_token_ids=sampled, req_id_to_index={r: i for i, r in enumerate(ids)}, **told
        )
        return self.scheduler.update_from_output(output, result)

    def draft(self, k: int) -> list[list[int]]:
        """What the worker proposes; returns it as the scheduler left it."""
        ids = [r.request_id for r in self.scheduler.running]
        drafts = SimpleNamespace(
            req_ids=ids, draft_token_ids=[list(range(50, 50 + k)) for _ in ids]
        )
        self.scheduler.update_draft_token_ids(drafts)
        return drafts.draft_token_ids

    def command(self, name: str, argument: Any = None) -> Any:
        """As it comes from another process: a name equal to ours, but not the same string."""
        return json.loads(self.scheduler.osd_command(name.encode().decode(), json.dumps(argument)))

    @property
    def seen(self) -> StepSeen:
        return self.osd.seen[-1]

    @property
    def proposer(self) -> str:
        """Who proposed what the newest step verified."""
        return self.seen.proposed_by.plan.proposer


# -- what the control takes for itself ------------------------------------------------------------


@pytest.mark.parametrize(
    "is_async, device, is_told", [(False, "cuda", True), (True, "cpu", True), (True, "cuda", False)]
)
def test_a_step_tells_what_of_it_the_control_took(
    is_async: bool, device: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that schedules ahead of a device does not wait for its scheduler."""
    bench = Bench(is_async=is_async, device=device)
    bench.add("r")

    def slow(act: Any, seconds: float) -> Any:
        def taking_time(*given: Any) -> Any:
            bench.now += seconds
            return act(*given)

        return taking_time

    monkeypatch.setattr(bench.osd, "plan", slow(bench.osd.plan, 0.001))
    monkeypatch.setattr(bench.osd, "observe", slow(bench.osd.observe, 0.0015))
    for _ in range(4):
        bench.step()
    assert bench.seen.own_seconds == pytest.approx(0.0025 if is_told else 0.0)
    assert bench.seen.seconds == pytest.approx(STEP_S + 0.0025)


# -- what a client may say ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, number", [(3, 3), (3.0, 3), ("3", 3), (0, 0), ("0", 0), (0.0, 0), (10**6, 10**6)]
)
def test_a_client_says_a_whole_number(value: Any, number: int) -> None:
    assert whole_number(value) == number
    assert isinstance(whole_number(value), int)


@pytest.mark.parametrize(
    "value",
    [
        2.9,
        "2.9",
        "three",
        "",
        " 3",
        "3\n",
        "٣",
        "+3",
        True,
        False,
        -1,
        -1.0,
        -0.5,
        "-1",
        float("nan"),
        float("inf"),
    ]
    + [float("-inf"), None, [3], {}, 10**9, 1e300, "9" * 10, "9" * 5000, b"3"],
)
def test_what_is_no_whole_number_is_no_statement(value: Any) -> None:
    assert whole_number(value) is None
    bench = Bench(mode="fixed")
    bench.add("r", extra={"osd_spec_k": value})
    bench.step()
    assert bench.osd.begun == [("r", "", None, True)]
    assert len(bench.draft(K)[0]) == K
    assert bench.command("report")["problem"] == "", "what one client says never ends the control"


def test_a_request_begins_with_what_its_client_says() -> None:
    bench = Bench()
    bench.add("plain")
    bench.add("capped", extra={"osd_spec_k": "2", "osd_domain": "code/python 3"})
    bench.add("synthetic", extra={"osd_calibration": 1})
    bench.scheduler.add_request(Request("pooling", [1, 2]))
    assert bench.osd.begun == [
        ("plain", "", None, True),
        ("capped", "code_python_3", 2, True),
        ("synthetic", "", None, False),
        ("pooling", "", None, True),
    ]


def test_the_engines_own_answers_are_handed_on() -> None:
    bench = Bench(mode="off")
    assert bench.scheduler.add_request(Request("r", [1]), "kept") == ("added", "kept")
    output = bench.scheduler.schedule("given")
    assert output.given == ("given",)
    assert bench.give(output) == {"outputs": ["r"]}


# -- k of a step ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan, k",
    [
        (Plan("draft", 3), 3),
        (Plan("draft", 1), 1),
        (Plan("memory", 3), 0),
        (OFF, 0),
        (Plan("draft", K), K),
    ],
)
def test_the_k_of_the_plan_is_the_engines_for_any_number_of_requests(plan: Plan, k: int) -> None:
    bench = Bench()
    bench.osd.force(plan)
    for num in range(8):
        assert bench.scheduler.schedule().num_spec_tokens_to_schedule == k
        bench.add(f"r{num}")
    assert bench.scheduler.schedule().num_spec_tokens_to_schedule == k, (
        "of as many as may run at once"
    )
    assert bench.scheduler.dynamic_sd_lookup == [k] * 9


def test_a_table_of_k_is_made_once() -> None:
    bench = Bench()
    tables = []
    for plan in (Plan("draft", 2), OFF, Plan("draft", 2), OFF):
        bench.osd.force(plan)
        bench.step()
        tables.append(bench.scheduler.dynamic_sd_lookup)
    assert tables[0] is tables[2] is not tables[1] is tables[3]


def test_the_plan_is_for_the_requests_that_decode() -> None:
    bench = Bench()
    bench.add("a", range(5))
    bench.add("long", range(30), chunk=10)
    bench.step()
    bench.step()
    bench.step()
    bench.step()
    assert bench.osd.asked == [([], 0), (["a"], 6), (["a"], 7), (["a", "long"], 8 + 31)]


@pytest.mark.parametrize(
    "settings, k", [({"mode": "auto"}, K), ({"mode": "fixed"}, K), ({"mode": "off"}, 0)]
)
def test_the_first_error_ends_the_control_and_is_logged_once(
    settings: dict[str, Any], k: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on as it would without control: with all its draft tokens, or none where none
    were wanted."""
    bench = Bench(**settings)
    bench.add("a", extra={"osd_spec_k": 1})
    bench.osd.force(Plan("draft", 2))
    bench.step()
    bench.osd.requests._draft = None  # type: ignore[assignment]
    bench.step()
    assert caplog.messages == [
        f"control of speculation has ended, until the engine restarts: k stays at {k}; serving is "
        "not affected"
    ]
    assert caplog.records[0].levelno == logging.ERROR
    num_asked, num_seen = len(bench.osd.asked), len(bench.osd.seen)
    bench.add("b", extra={"osd_spec_k": 1})
    for _ in range(3):
        output = bench.step(drafts=False)
        assert output.num_spec_tokens_to_schedule == k
        assert output.osd_from_memory == ()
    assert bench.draft(K) == [[50, 51, 52, 53][:k]] * 2, "nor what is cut"
    assert (len(bench.osd.asked), len(bench.osd.seen)) == (num_asked, num_seen)
    assert len(caplog.records) == 1
    assert bench.command("report")["problem"].startswith("AttributeError: 'NoneType'")


def test_an_error_before_the_first_step_leaves_the_engine_at_its_largest_k() -> None:
    bench = Bench()
    bench.osd.plan = lambda *_: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    assert bench.step().num_spec_tokens_to_schedule == K
    assert bench.command("report")["problem"] == "ZeroDivisionError: division by zero"


# -- what a step has shown ------------------------------------------------------------------------


def test_what_was_accepted_is_what_was_emitted_but_one() -> None:
    bench = Bench(mode="fixed")
    bench.add("a", range(5))
    bench.add("b", range(6))
    bench.step()
    bench.step({"a": [50, 51, 1], "b": [1]})
    assert (bench.seen.req_ids, bench.seen.drafted, bench.seen.accepted) == (
        ["a", "b"],
        [K, K],
        [2, 0],
    )
    assert (bench.seen.num_tokens, bench.seen.num_outputs) == ([6, 7], [1, 1]), "before this step's"
    assert (bench.seen.context, bench.seen.draft.passes, bench.seen.is_pure) == (13, K, True)
    bench.step({"a": [50, 51, 52, 53, 1], "b": [50, 1]})
    assert (bench.seen.accepted, bench.seen.num_tokens, bench.seen.num_outputs) == (
        [4, 1],
        [9, 8],
        [4, 2],
    )


def test_a_request_that_stops_had_all_accepted_that_was_verified() -> None:
    """vLLM trims what lies behind a stop: that was accepted all the same."""
    bench = Bench(mode="fixed")
    bench.add("a")
    bench.step()
    bench.scheduler.ending = {"a"}
    bench.step({"a": [50, 51, 52, 1]})
    assert bench.seen.accepted == [3]


@pytest.mark.parametrize(
    ("given", "emitted", "delivered"),
    [
        ({}, [5, 6, 7], 3),
        ({"max_tokens": 4}, [5, 6, 7], 3),
        ({"max_tokens": 3}, [5, 6, 7], 2),
        ({"max_tokens": 2}, [5, 6, 7], 1),
        ({"sampling": {"stop_token_ids": [6]}}, [5, 6, 7], 2),
        ({"sampling": {"stop_token_ids": [6]}}, [6, 5, 6], 1),
        ({"sampling": {"stop_token_ids": [7]}}, [5, 6, 7], 3),
        ({"sampling": {"stop_token_ids": [7]}, "max_tokens": 3}, [5, 6, 7], 2),
        ({"sampling": {"stop_token_ids": [9]}, "max_tokens": 2}, [5], 1),
    ],
)
def test_what_lies_behind_the_end_of_an_answer_is_accepted_but_not_delivered(
    given: dict[str, Any], emitted: list[int], delivered: int
) -> None:
    """The draft was right, yet the client gets nothing of it: no speculation gains it."""
    bench = Bench(mode="fixed")
    bench.add("a", **given)
    bench.step({"a": [4]})
    bench.step({"a": emitted})
    assert bench.seen.accepted == [len(emitted) - 1]
    assert bench.seen.num_delivered == delivered


def test_the_end_of_the_text_is_an_end() -> None:
    bench = Bench(mode="fixed")
    request = bench.add("a")
    request.sampling_params._eos_token_id = 6
    bench.step({"a": [4]})
    bench.step({"a": [5, 6, 7]})
    assert bench.seen.num_delivered == 2
    bench.scheduler.max_model_len = request.num_tokens + 1
    bench.step({"a": [7, 8, 9]})
    assert bench.seen.num_delivered == 1, "nor does it grow beyond the context"


def test_draft_tokens_that_a_grammar_forbids_were_not_drafted() -> None:
    bench = Bench(mode="fixed")
    for req_id in ("a", "b"):
        bench.add(req_id)
    bench.step()
    output = bench.scheduler.schedule()
    output.num_invalid_spec_tokens = {"b": 3}
    bench.give(output)
    assert bench.seen.drafted == [K, K - 3]
    assert bench.seen.is_pure, "they were verified all the same"


def test_a_step_that_reads_prompts_is_not_pure() -> None:
    bench = Bench(mode="fixed")
    bench.add("a")
    bench.step()
    bench.step()
    assert bench.seen.is_pure
    bench.add("long", range(30), chunk=20)
    bench.step()
    assert (bench.seen.req_ids, bench.seen.is_pure) == (["a"], False), (
        "a part of a prompt brings no token"
    )
    bench.step()
    assert (bench.seen.req_ids, bench.seen.is_pure) == (["a", "long"], False)
    assert (bench.seen.drafted, bench.seen.accepted) == ([K, 0], [0, 0])
    bench.step()
    assert (bench.seen.req_ids, bench.seen.is_pure) == (["a", "long"], True)


def test_a_prompt_of_one_token_is_a_prompt() -> None:
    """It is scheduled like a decode: one token, no draft."""
    bench = Bench(mode="fixed")
    bench.add("a", [3])
    bench.step()
    assert (bench.seen.num_outputs, bench.seen.is_pure) == ([0], False)


def test_a_request_that_reads_its_text_again_makes_the_step_impure() -> None:
    """It lost its cache to others, and has an output already."""
    bench = Bench(mode="fixed")
    request = bench.add("a", range(5))
    bench.step()
    bench.step()
    request.num_computed, request.spec_token_ids = 0, []
    bench.step()
    assert (bench.seen.num_outputs, bench.seen.drafted, bench.seen.is_pure) == ([2], [0], False)


def test_a_request_aborted_under_way_shows_nothing_and_makes_the_step_impure() -> None:
    bench = Bench(mode="fixed")
    for req_id in ("a", "b"):
        bench.add(req_id)
    bench.step()
    output = bench.scheduler.schedule()
    bench.scheduler.running.remove(bench.scheduler.requests.pop("a"))
    result = SimpleNamespace(sampled_token_ids=[[1], [50, 1]], req_id_to_index={"b": 1, "a": 0})
    seen = bench.scheduler._osd_read(output, result)
    assert (seen.req_ids, seen.accepted, seen.is_pure) == (["b"], [1], False)


@pytest.mark.parametrize("emitted", [{"a": []}, None])
def test_a_step_without_a_token_shows_nothing(emitted: dict[str, list[int]] | None) -> None:
    bench = Bench(mode="fixed")
    bench.add("a", range(30), chunk=20)
    bench.step(emitted)
    output = bench.scheduler.schedule()
    bench.scheduler.update_from_output(
        output, SimpleNamespace(sampled_token_ids=[], req_id_to_index={})
    )
    assert [step.req_ids for step in bench.osd.seen] == [[], []], "but that it was taken"
    assert bench.osd.report().plans == {}
    bench.scheduler.running.clear()
    bench.give(bench.scheduler.schedule())
    assert len(bench.osd.seen) == 2, "nothing ran at all"
    assert bench.command("report")["problem"] == ""


def test_requests_that_ended_are_closed_after_their_last_step() -> None:
    bench = Bench(mode="fixed")
    for req_id in ("a", "b", "c"):
        bench.add(req_id)
    bench.step()
    bench.scheduler.ending = {"b"}
    bench.step({"b": [50, 51, 1]})
    assert bench.osd.ended == ["b"]
    assert bench.osd.report().spread["0.5"] == pytest.approx(2 / 3), "its last step counts for it"
    bench.step()
    assert bench.osd.ended == ["b"]
    bench.scheduler.running.remove(bench.scheduler.requests.pop("c"))  # its client hangs up
    bench.step()
    assert bench.osd.ended == ["b", "c"]


# -- how long a step took -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "idle, seconds",
    [
        (0.0, STEP_S),
        (0.9 * MAX_IDLE_SECONDS, STEP_S + 0.9 * MAX_IDLE_SECONDS),
        (1.1 * MAX_IDLE_SECONDS, STEP_S),
    ],
)
def test_a_step_begins_where_the_one_before_it_ended_or_when_it_is_scheduled(
    idle: float, seconds: float
) -> None:
    """What the engine does between two steps is part of their time; waiting for a request is
    not."""
    bench = Bench(mode="fixed")
    bench.add("a")
    bench.step()
    assert bench.seen.seconds == pytest.approx(STEP_S), "nothing was before the first"
    bench.now += idle
    bench.step()
    assert bench.seen.seconds == pytest.approx(seconds)


def test_a_step_scheduled_ahead_begins_when_the_one_before_it_ends() -> None:
    bench = Bench(is_async=True, mode="fixed")
    bench.add("a")
    first = bench.scheduler.schedule()
    bench.now += 0.004
    second = bench.scheduler.schedule()
    bench.now += 0.006
    bench.give(first)
    assert bench.seen.seconds == pytest.approx(0.010)
    bench.now += 0.020
    bench.give(second)
    assert bench.seen.seconds == pytest.approx(0.020)
    bench.now += 1.0
    bench.step()
    assert bench.seen.seconds == pytest.approx(STEP_S), "nothing was under way any more"


def test_a_step_that_its_submission_waits_for_has_ended_when_the_scheduler_is_called_next() -> None:
    """In the engine's own process on a CPU. Its result comes when the next step has ended too."""
    bench = Bench(is_async=True, device="cpu", mode="fixed")
    bench.add("a")
    first = bench.scheduler.schedule()
    bench.now += 0.010
    second = bench.scheduler.schedule()
    bench.now += 0.020
    bench.give(first)
    assert bench.seen.seconds == pytest.approx(0.010)
    bench.now += 0.001
    third = bench.scheduler.schedule()
    bench.now += 0.030
    bench.give(second)
    assert bench.seen.seconds == pytest.approx(0.020)
    bench.now += 0.500
    bench.give(third)
    assert bench.seen.seconds == pytest.approx(0.031)
    bench.now += 1.0
    bench.step()
    assert bench.seen.seconds == pytest.approx(STEP_S), "nothing was under way any more"


def test_a_step_without_a_token_is_still_the_one_before() -> None:
    bench = Bench(mode="fixed")
    bench.add("a", range(60), chunk=50)
    bench.step()
    bench.now += 0.001
    bench.step()
    assert bench.seen.seconds == pytest.approx(STEP_S + 0.001)


# -- who is credited ------------------------------------------------------------------------------


def test_a_step_verifies_what_was_proposed_at_the_end_of_the_one_before() -> None:
    bench = Bench()
    bench.add("a", [1, 1, 1, 1, 1, 1, 1])
    said, credited, plans = [], [], [("draft", 2), ("memory", 3), ("off", 0), ("memory", 1)]
    for plan in [*plans, ("draft", 1), ("off", 0)]:
        bench.osd.force(Plan(*plan))  # type: ignore[arg-type]
        said.append(bench.step().osd_from_memory)
        credited.append((bench.proposer, bench.seen.from_memory))
    by_draft, by_memory = ("draft", frozenset()), ("memory", frozenset("a"))
    assert credited == [by_draft, by_draft, by_memory, ("off", frozenset()), by_memory, by_draft]
    assert said == [(), (), ("a",), (), ("a",), ()], "the worker's counters must say the same"


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_keeps_the_plan_it_was_scheduled_with(ahead: int) -> None:
    """Also when the next one is planned before it ends."""
    bench = Bench(is_async=ahead > 0, proposers=["draft"])
    bench.add("a")
    plans = [Plan("draft", 2), OFF, Plan("draft", 1), Plan("draft", 3), OFF]
    open_steps = []
    for plan in plans:
        bench.osd.force(plan)
        open_steps.append(bench.scheduler.schedule())
        if len(open_steps) > ahead:
            bench.give(open_steps.pop(0))
    for step in open_steps:
        bench.give(step)
    assert [step.stamp.plan for step in bench.osd.seen] == plans
    assert [step.draft.passes for step in bench.osd.seen] == [plan.k for plan in plans]
    proposed_by = [step.proposed_by.plan for step in bench.osd.seen]
    assert proposed_by == [Plan("draft", K), *plans[:-1]]


@pytest.mark.parametrize(
    "device, is_v2, is_late", [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
@pytest.mark.parametrize("is_async", [True, False])
def test_the_drafts_work_is_in_the_time_of_the_step_whose_result_comes_after_it(
    device: str, is_v2: bool, is_late: bool, is_async: bool
) -> None:
    """The V2 model runner sends a result from a device before it drafts."""
    bench = Bench(is_async=is_async, is_v2=is_v2, device=device, proposers=["draft"])
    bench.add("a")
    for k in (2, 0, 0, 3, 1):
        bench.osd.force(Plan("draft", k))
        bench.step()
        if k == 3:  # a step in which nothing runs is none
            running, bench.scheduler.running = bench.scheduler.running, []
            bench.osd.force(OFF)
            bench.give(bench.scheduler.schedule())
            bench.scheduler.running = running
    work = [DraftWork(2), DraftWork(), DraftWork(), DraftWork(3, True), DraftWork(1)]
    if is_late:
        work = [DraftWork(K), *work[:-1]]
    assert [step.draft for step in bench.osd.seen] == work


def test_a_step_in_which_nothing_runs_proposes_nothing() -> None:
    """What the next one verifies was proposed before."""
    bench = Bench(mode="fixed")
    bench.osd.force(Plan("memory", 2))
    bench.add("a", [1, 1, 1, 1])
    bench.step()
    running, bench.scheduler.running = bench.scheduler.running, []
    bench.osd.force(OFF)
    bench.give(bench.scheduler.schedule())
    bench.scheduler.running = running
    assert bench.step().osd_from_memory == ("a",)


def test_what_the_memory_gets_accepted_is_none_of_the_drafts() -> None:
    bench = Bench()
    bench.osd.force(Plan("memory", 3))
    bench.add("a", [1, 2, 3, 4, 5, 6, 1, 2])
    bench.step({"a": [3]})
    bench.step({"a": [4, 5, 6]})
    assert (bench.proposer, bench.seen.drafted, bench.seen.accepted) == ("memory", [3], [2])
    assert sum(bench.osd.report().tested_per_position) == 0
    assert bench.osd.report().sources == {"draft": (0, 0), "memory": (3, 2)}
    bench.osd.force(Plan("draft", 2))
    bench.step()
    bench.step({"a": [50, 51, 1]})
    assert bench.osd.report().accepted_per_position == (1, 1, 0, 0)


# -- what is verified -----------------------------------------------------------------------------


def test_the_memory_takes_the_place_of_the_draft_request_by_request() -> None:
    bench = Bench()
    bench.osd.force(Plan("memory", 3))
    found = bench.add("found", [1, 2, 3, 4, 5, 6, 1, 2])
    capped = bench.add("capped", [1, 2, 3, 4, 5, 6, 1, 2], extra={"osd_spec_k": 1})
    new = bench.add("new", [1, 2, 3, 4])
    ended = bench.add("ended", [1, 2, 3, 4, 5, 6, 1, 2])
    bench.step({"found": [3], "capped": [3], "new": [9], "ended": [3]}, drafts=False)
    ended.has_finished = True
    drafts = SimpleNamespace(
        req_ids=["new", "found", "gone", "capped", "ended"],
        draft_token_ids=[[], [], [], [], []],
    )
    bench.scheduler.update_draft_token_ids(drafts)
    assert drafts.draft_token_ids == [[], [4, 5, 6], [], [4], []]
    assert [r.spec_token_ids for r in (found, capped, new)] == [[4, 5, 6], [4], []], (
        "before vLLM reads them"
    )
    assert bench.scheduler.schedule().num_scheduled_tokens == {
        "found": 4,
        "capped": 2,
        "new": 1,
        "ended": 1,
    }


MIXED = Plan("draft", 2, is_mixed=True)


def test_where_the_memory_is_worth_more_it_proposes_and_else_the_draft() -> None:
    bench = Bench(predicted=0.5)
    bench.osd.force(MIXED)
    bench.add("seen", [1, 2, 3, 4, 5, 6, 1, 2])
    bench.add("new", [1, 9])
    bench.step({"seen": [3], "new": [7]})
    seen, new = bench.scheduler.running
    assert (seen.spec_token_ids, new.spec_token_ids) == ([4, 5, 6, 1], [50, 51])
    output = bench.step({"seen": [4, 5, 9], "new": [50, 1]})
    assert output.osd_from_memory == ("seen",)
    assert (bench.seen.accepted, bench.seen.from_memory) == ([2, 1], frozenset({"seen"}))
    assert bench.osd.report().sources == {"draft": (2, 1), "memory": (4, 2)}


def test_a_draft_in_whose_place_the_memory_proposed_is_judged_by_what_was_served() -> None:
    """By both: the control, and the worker, which is told with a later step."""
    bench = Bench(predicted=0.5)
    bench.osd.force(MIXED)
    bench.add("a", [1, 2, 3, 50, 51, 52, 1, 2])
    proposed = bench.step({"a": [3]}).osd_step
    output = bench.step({"a": [50, 51, 7]})
    assert output.osd_judged == []
    (judged,) = bench.seen.judged
    assert (judged.req_id, judged.step, judged.num_drafted, judged.num_accepted) == (
        *("a", proposed),
        *(2, 2),
    )
    assert bench.osd.report().accepted_per_position == (1, 1, 0, 0)
    assert bench.step().osd_judged == [("a", proposed, 2, 2)]
    assert bench.step().osd_judged == [], "told once"


def test_a_draft_that_is_not_worth_verifying_is_judged_by_what_was_served() -> None:
    bench = Bench(predicted=0.5)
    bench.osd.force(MIXED._replace(price=0.9))
    bench.add("a", [1, 2])
    bench.osd.requests._requests["a"].cap = 0
    bench.step({"a": [3]})
    bench.osd.force(OFF)
    output = bench.step({"a": [50]})
    assert "a" not in output.scheduled_spec_decode_tokens and not bench.seen.judged
    bench.step({"a": [7]})
    assert [(j.num_drafted, j.num_accepted) for j in bench.seen.judged] == [(2, 1)]


def test_a_draft_is_judged_over_several_steps_and_by_the_end_of_its_request() -> None:
    bench = Bench(predicted=0.5)
    bench.osd.force(MIXED)
    bench.add("a", [1, 2, 3, 8, 9, 1, 2])
    bench.step({"a": [3]})
    bench.step({"a": [50]})
    assert not bench.seen.judged, "its second token is still to come"
    bench.scheduler.ending = {"a"}
    bench.osd.force(OFF)
    bench.add("b")
    bench.step({"a": [51, 4]})
    assert [(j.num_drafted, j.num_accepted) for j in bench.seen.judged] == [(2, 2)]


def test_what_may_be_remembered_of_a_request() -> None:
    """The same that may be captured, and by scope."""
    lora = SimpleNamespace(lora_name="one")
    labelled = {"extra": {"osd_domain": "law"}}
    for given, is_kept, who in (
        ({}, True, scope()),
        ({"extra": {"osd_capture": "off"}}, False, scope()),
        ({"cache_salt": "tenant"}, True, scope(salt="tenant")),
        ({"lora_request": lora}, False, scope(adapter="one")),
        ({"mm_features": ("image",)}, False, scope()),
        ({"prompt_embeds": "tensor"}, False, scope()),
        (labelled, True, scope()),
    ):
        bench = Bench()
        bench.add("a", [4, 5, 6], **given)  # type: ignore[arg-type]
        (told,) = bench.osd.remembered
        assert told == {"prompt": [4, 5, 6], "scope": who, "is_kept": is_kept}, given
    bench = Bench(memory_by_domain=True)
    bench.add("a", [4, 5, 6], **labelled)  # type: ignore[arg-type]
    assert bench.osd.remembered[0]["scope"] == scope(domain="law") != scope()


def test_another_request_of_the_same_name_has_nothing_of_the_first() -> None:
    """Its client was aborted, and nobody has told of it yet."""
    bench = Bench()
    bench.osd.force(Plan("memory", 3))
    first = bench.add("x", [1, 2])
    bench.scheduler.running.remove(first)
    del bench.scheduler.requests["x"]
    bench.add("x", [1, 2], cache_salt="tenant")
    assert bench.step({"x": [61, 62, 63, 64]}).osd_shared == ()
    bench.add("y", [1, 2])
    bench.step({"y": [61, 62]})
    assert bench.scheduler.requests["y"].spec_token_ids == [], "what the tenant was served"


def test_what_a_session_says_is_nobody_elses() -> None:
    bench = Bench()
    bench.osd.force(Plan("memory", 3))
    bench.add("x", [1, 2], resumable=True)
    assert bench.step({"x": [9]}).osd_shared == ()
    bench.add("x", [43, 44, 45, 46])
    bench.step({"x": [10]})
    assert [told["is_kept"] for told in bench.osd.remembered] == [False], "it is no other request"
    bench.add("y", [1, 2])
    bench.step({"y": [43, 44]})
    assert bench.scheduler.requests["y"].spec_token_ids == []


def test_drafts_within_a_prompt_are_judged_by_nothing() -> None:
    bench = Bench()
    bench.osd.force(Plan("draft", 2, is_mixed=True))
    bench.command("remember", [[[1, 2], [61, 62, 63], ""]] * 4)
    request = bench.add("a", [1, 2], chunk=1)
    drafts = [[7, 7]]
    request.num_computed = 1
    bench.scheduler._osd_proposals.redraft(["a"], drafts, bench.scheduler.requests)
    assert drafts == [[7, 7]] and not bench.osd.requests._unverified._open


def test_the_worker_is_told_once_of_new_requests_whose_answers_others_may_be_proposed() -> None:
    bench = Bench()
    told = []
    bench.add("a")
    bench.add("b", cache_salt="tenant")
    bench.add("c", lora_request=SimpleNamespace(lora_name="one"))
    for req_id in ("d", "e"):
        told.append(bench.step().osd_shared)
        bench.add(req_id)
    told.append(bench.step().osd_shared)
    assert told == [("a",), ("d",), ("e",)]
    bench.scheduler.ending = {"a", "b", "c", "d", "e"}
    bench.step()
    bench.add("a", cache_salt="tenant")
    assert bench.step().osd_shared == (), "another request of the same name"


def test_what_was_served_before_the_start_is_proposed_to_those_without_a_salt() -> None:
    bench = Bench()
    bench.osd.force(Plan("memory", 3))
    answers = [[[1, 2], [61, 62, 63], "law"], [[2], [*range(200, 300)], ""]]
    assert bench.command("remember", answers) == 39
    assert [bench.command("remember", []) for _ in range(2)] == [0, 0]
    bench.add("a", [1, 2])
    bench.add("b", [1, 2], cache_salt="tenant")
    bench.step({"a": [61], "b": [61]})
    assert [r.spec_token_ids for r in bench.scheduler.running] == [[62, 63], []]
    bench.scheduler.ending = {"a", "b"}
    bench.step()
    bench.command("forget")
    bench.add("c", [1, 2])
    bench.step({"c": [61]})
    assert bench.scheduler.running[0].spec_token_ids == []
    assert Bench(proposers=["draft"]).command("remember", []) is None, "there is none"


def test_what_was_served_before_the_start_is_proposed_by_domain_if_that_is_configured() -> None:
    bench = Bench(memory_by_domain=True)
    bench.osd.force(Plan("memory", 3))
    bench.command("remember", [[[1, 2], [61, 62, 63], "law"]] * 4)
    bench.add("a", [1, 2], extra={"osd_domain": "law"})
    bench.add("b", [1, 2], extra={"osd_domain": "code"})
    bench.add("c", [1, 2])
    bench.step({"a": [61], "b": [61], "c": [61]})
    assert [r.spec_token_ids for r in bench.scheduler.running] == [[62, 63], [], []]


def test_only_a_share_of_the_requests_is_remembered() -> None:
    bench = Bench(memory_fraction=0.5)
    for i in range(200):
        bench.add(f"r{i}")
    assert 60 < sum(told["is_kept"] for told in bench.osd.remembered) < 140


def test_a_later_request_is_proposed_what_an_earlier_one_was_served() -> None:
    bench = Bench()
    bench.osd.force(Plan("memory", 3))
    for name in ("first", "second"):
        bench.add(name, [1, 2])
        bench.scheduler.ending = set()
        bench.step({name: [61]})
        if name == "second":
            break
        for token in (62, 63, 64):
            bench.scheduler.ending = {name} if token == 64 else set()
            bench.step({name: [token]})
    assert bench.scheduler.running[0].spec_token_ids == [62, 63, 64]


def test_what_vllm_proposes_beyond_the_plan_is_not_verified() -> None:
    """Near the end of the draft's context it proposes k_max tokens for all requests, whatever k
    is."""
    bench = Bench(mode="off")
    request = bench.add("a")
    bench.step(drafts=False)
    assert bench.draft(K) == [[]] and request.spec_token_ids == []
    bench.osd.force(Plan("draft", 1))
    bench.step(drafts=False)
    assert bench.draft(K) == [[50]]


def test_a_step_that_runs_nothing_takes_nothing_of_a_probe_or_a_sweep() -> None:
    """One in which vLLM only tells the worker which requests have finished."""
    bench = Bench()
    bench.osd.sweep(0)
    left = bench.osd.num_sweep_steps_left
    bench.give(bench.scheduler.schedule())
    assert bench.osd.num_sweep_steps_left == left > 0
    bench.add("a")
    bench.step()
    assert bench.osd.num_sweep_steps_left == left - 1
    bench.osd.end_sweep()
    bench.osd.probes.begin(Plan("draft", 2), 0.5)
    bench.scheduler.running.clear()
    for _ in range(5):
        bench.give(bench.scheduler.schedule())
    bench.scheduler.running += bench.scheduler.requests.values()
    for _ in range(PROBE_STEPS):
        assert bench.osd.probes._probe is not None
        bench.step({"a": [1]})
    bench.step({"a": [50, 51, 1]})
    assert bench.osd.probes._probe is None, "all of it was tested"


def test_drafts_are_cut_to_what_a_client_allows() -> None:
    bench = Bench(mode="fixed")
    requests = [
        bench.add(name, extra={"osd_spec_k": cap})
        for name, cap in [("a", 0), ("b", 2), ("c", K), ("d", None)]
    ]
    bench.step()
    assert [r.spec_token_ids for r in requests] == [
        [],
        [50, 51],
        [50, 51, 52, 53],
        [50, 51, 52, 53],
    ]
    assert bench.draft(1) == [[], [50], [50], [50]], "a shorter draft is left as it is"


def test_the_draft_is_kept_where_no_request_is_capped() -> None:
    bench = Bench(mode="fixed")
    bench.add("a")
    bench.step()
    bench.osd.requests._requests["a"].cap = 1  # a cap of a decision that no longer counts
    assert bench.draft(3) == [[50, 51, 52]]


def test_scheduling_ahead_placeholders_are_cut_instead() -> None:
    bench = Bench(is_async=True, mode="fixed")
    capped = bench.add("capped", extra={"osd_spec_k": 1})
    free = bench.add("free", extra={"osd_spec_k": 99})
    reading = bench.add("reading", range(30), chunk=20, extra={"osd_spec_k": 1})
    reading.spec_token_ids = [8, 8]
    bench.scheduler.schedule()
    assert (capped.spec_token_ids, free.spec_token_ids) == ([-1], [-1] * K)
    assert bench.scheduler.placeholders == [-1] * K, "a list that all requests share"
    assert reading.spec_token_ids == [8, 8], (
        "what a request has that reads its prompt is vLLM's to deal with"
    )
    bench.osd.force(OFF)
    bench.scheduler.schedule()
    assert capped.spec_token_ids == free.spec_token_ids == []


def test_only_a_scheduler_that_runs_ahead_cuts_placeholders() -> None:
    bench = Bench(mode="fixed")
    request = bench.add("a", extra={"osd_spec_k": 1})
    request.num_computed, request.spec_token_ids = request.num_tokens, [4, 5, 6]
    bench.scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens={"a": 4}))
    assert request.spec_token_ids == [4, 5, 6]


# -- drafts that are drawn ------------------------------------------------------------------------


def drawn_bench() -> Bench:
    """Whose worker tells tokens of the memory from drawn ones."""
    bench = Bench(predicted=0.5, is_drawn=True)
    bench.scheduler.osd_begin_to_mix()
    bench.osd.force(MIXED)
    return bench


def test_beside_drawn_drafts_the_memory_waits_for_its_worker() -> None:
    bench = Bench(predicted=0.5, is_drawn=True)
    bench.osd.force(MIXED)
    request = bench.add("a", [1, 2, 3, 4, 5, 6, 1, 2])
    bench.step({"a": [3]})
    assert request.spec_token_ids == [50, 51]
    bench.scheduler.osd_begin_to_mix()
    bench.step({"a": [4]})
    assert request.spec_token_ids == [5, 6, 1, 2]
    assert bench.step({"a": [5, 6, 9]}).osd_from_memory == ("a",)
    assert bench.command("report")["left_out"] == {}


@pytest.mark.parametrize("temperature, num", [(0.0, 1), (0.7, 0)])
def test_what_was_served_says_nothing_of_a_drawn_draft(temperature: float, num: int) -> None:
    """At temperature 0 none is drawn."""
    bench = drawn_bench()
    bench.add("a", [1, 2, 3, 50, 51, 52, 1, 2], sampling={"temperature": temperature})
    bench.step({"a": [3]})
    bench.step({"a": [50, 51, 7]})
    assert len(bench.seen.judged) == num


def test_what_the_memory_proposed_before_an_error_is_not_taken_for_drawn() -> None:
    bench = drawn_bench()
    bench.add("a", [1, 2, 3, 4, 5, 6, 1, 2])
    bench.step({"a": [3]})
    bench.osd.plan = lambda *_: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    output = bench.scheduler.schedule()
    assert output.scheduled_spec_decode_tokens == {"a": [4, 5, 6, 1]}
    assert not hasattr(output, "osd_from_memory"), "not known, so that all are certain"
    bench.give(output)
    bench.draft(K)
    assert bench.scheduler.schedule().osd_from_memory == ("a",), "nor taken for drawn too early"
    bench.draft(K)
    assert bench.scheduler.schedule().osd_from_memory == ()


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "is_async, is_v2, executor, reason",
    [
        *(
            (is_async, is_v2, executor, "")
            for is_async in (True, False)
            for is_v2 in (True, False)
            for executor in ("uni", "mp")
        ),
        (True, False, "ray", OTHER_EXECUTOR),
        (True, True, "ray", OTHER_EXECUTOR),
        (False, True, "ray", OTHER_EXECUTOR),
        (False, False, "ray", ""),
    ],
)
@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("proposers", [("draft", "memory"), ("memory",), ("draft",)])
def test_the_memory_is_left_out_where_workers_keep_the_drafts_and_a_warning_says_so(
    is_async: bool,
    is_v2: bool,
    executor: str,
    reason: str,
    is_drawn: bool,
    proposers: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(
        is_async=is_async,
        is_v2=is_v2,
        executor=executor,
        is_drawn=is_drawn,
        proposers=list(proposers),
    )
    if is_drawn and not reason and executor != "uni":
        reason = DRAWN_ELSEWHERE
    kept = tuple(p for p in proposers if p != "memory" or not reason)
    known = Settings(k_max=K, memory_k_max=K, proposers=kept, is_drawn=is_drawn)
    assert bench.osd.settings == known
    is_left_out = f"the memory is left out of speculation.proposers: {reason}"
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("serving.")]
    assert messages == [is_left_out] * (kept != proposers)
    report = bench.command("report")
    assert report["is_async"] is is_async
    assert report["left_out"] == ({"memory": reason} if kept != proposers else {})


def test_the_settings_lie_under_a_key_of_vllms_additional_configuration() -> None:
    given = {
        "osd": {"mode": "fixed", "proposers": ["memory"], "predicted": 0.5},
        "another": {"mode": "off"},
    }
    assert settings_of(given) == Settings(mode="fixed", proposers=("memory",), predicted=0.5)
    for given in ({"another": 1}, None, SimpleNamespace()):
        assert settings_of(given) == Settings()
    with pytest.raises(TypeError, match="surprise"):
        settings_of({"osd": {"surprise": 1}})


@pytest.mark.parametrize(
    "mode, sizes, padded",
    [
        (SimpleNamespace(name="FULL_AND_PIECEWISE"), [8, 16], [8, 16]),
        (SimpleNamespace(name="NONE"), [8, 16], []),
        ("PIECEWISE", (8,), [8]),
        ("NONE", [8], []),
        (None, [8], []),
        (SimpleNamespace(name="FULL"), None, []),
    ],
)
def test_cuda_graphs_round_steps_up_where_there_are_any(
    mode: Any, sizes: Any, padded: list[int]
) -> None:
    compilation = SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
    assert padded_sizes(SimpleNamespace(compilation_config=compilation)) == padded


@pytest.mark.parametrize(
    "mode, speculative, is_measured",
    [
        ("FULL_AND_PIECEWISE", {"num_speculative_tokens_per_batch_size": None}, False),
        ("FULL_DECODE_ONLY", {}, False),
        ("FULL", {"num_speculative_tokens_per_batch_size": [(1, 1, 0)]}, True),
        ("PIECEWISE", {}, True),
        ("NONE", {}, True),
        ("FULL", None, True),
    ],
)
def test_where_steps_without_speculation_would_look_slow_the_gain_is_not_measured(
    mode: str, speculative: dict[str, Any] | None, is_measured: bool
) -> None:
    config = vllm_config(net_interval_seconds=30.0)
    config.compilation_config.cudagraph_mode = SimpleNamespace(name=mode)
    config.speculative_config = None if speculative is None else SimpleNamespace(**speculative)
    scheduler: Any = type("Scheduler", (Controlled, PlainScheduler), {})(config)
    left_out = json.loads(scheduler.osd_command("report", ""))["left_out"]
    assert (scheduler.osd.settings.net_interval_seconds == 30.0) is is_measured
    assert list(left_out) == ([] if is_measured else ["net"])


@pytest.mark.parametrize("padded", [[], [8, 16]])
def test_the_control_knows_the_sizes_of_the_graphs(padded: list[int]) -> None:
    scheduler: Any = type("Scheduler", (Controlled, PlainScheduler), {})(
        vllm_config(padded=padded), 1, log_stats=True
    )
    assert scheduler.given == ((1,), {"log_stats": True})
    scheduler.osd_command("load_rows", json.dumps(ROWS))
    narrow, wide = scheduler.osd.times.predict([Shape(1, 2, 10, 2), Shape(1, 4, 10, 2)])
    assert (narrow == wide) == bool(padded)


# -- from the replica -----------------------------------------------------------------------------


def test_a_report_is_the_controls_with_what_went_wrong() -> None:
    bench = Bench(mode="fixed")
    assert bench.command("report") == {
        **json.loads(encode(bench.osd.report())),
        "problem": "",
        "is_async": False,
    }


def test_plans_are_forced_and_released() -> None:
    bench = Bench(mode="fixed")
    assert bench.command("force", ["draft", 2]) == {}
    assert bench.scheduler.schedule().num_spec_tokens_to_schedule == 2
    assert bench.command("force", ["off", 0]) == {}
    assert bench.scheduler.schedule().num_spec_tokens_to_schedule == 0
    assert bench.command("force") == {}
    assert bench.scheduler.schedule().num_spec_tokens_to_schedule == K


def test_a_sweep_is_begun_watched_and_ended() -> None:
    bench = Bench()
    bench.add("a")
    bench.add("b")
    assert bench.command("sweep", 2) == {}
    total = bench.command("sweep_steps_left")
    assert total == 4 * SWEEP_STEPS
    bench.step()
    assert bench.command("sweep_steps_left") == total, "nothing decodes yet"
    bench.step()
    assert bench.command("sweep_steps_left") == total - 1
    assert bench.command("end_sweep") == {}
    assert bench.command("sweep_steps_left") == 0


def test_step_times_are_loaded_and_read_back() -> None:
    bench = Bench()
    assert bench.command("rows") == []
    assert bench.command("load_rows", ROWS) is True
    assert [row["seconds"] for row in bench.command("rows")] == [
        pytest.approx(row["seconds"]) for row in ROWS
    ]
    with pytest.raises(ValueError, match="no step takes such time"):
        bench.command("load_rows", [{**ROWS[0], "seconds": -1}])
    fresh = Bench()
    for _ in range(3):
        fresh.osd.times.add(Shape(1, 3, 10, 2), 0.02)
    assert [row["steps"] for row in fresh.command("rows")] == [3]
    assert fresh.osd.times.is_fitted, "whoever asks for them wants them fitted"


@pytest.mark.parametrize("predicted, plan", [(0.02, "off"), (0.98, f"draft {K}")])
def test_a_new_draft_is_announced_with_what_was_predicted(predicted: float, plan: str) -> None:
    bench = Bench(proposers=["draft"])
    bench.command("load_rows", ROWS)
    bench.add("a")
    bench.step()
    assert bench.command("restart", predicted) == {}
    bench.step()
    assert bench.command("report")["plan"] == plan


def test_a_log_is_kept_from_command_to_command() -> None:
    bench = Bench(mode="fixed")
    bench.add("a")
    assert bench.command("log", True) == []
    bench.step()
    bench.step({"a": [50, 1]})
    assert [(entry["drafted"], entry["accepted"]) for entry in bench.command("log", False)] == [
        (0, 0),
        (K, 1),
    ]
    bench.step()
    assert bench.command("log", True) == []


def test_an_unknown_command_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown command 'reprot'"):
        Bench().scheduler.osd_command("reprot", "")
    assert Bench().scheduler.osd_command("end_sweep", "") == "{}", "no argument need be given"


# -- within vLLM ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async, base", [(False, "Scheduler"), (True, "AsyncScheduler")])
def test_vllms_own_scheduler_is_what_is_controlled(is_async: bool, base: str) -> None:
    from vllm.v1.engine.core import EngineCore

    config = vllm_config(is_async=is_async)
    cls = controlled_class(config)
    assert next(c.__name__ for c in cls.__mro__ if c.__module__.startswith("vllm")) == base
    assert cls.IS_ASYNC is is_async
    bench = Bench(mode="fixed")
    core = SimpleNamespace(scheduler=bench.scheduler)
    assert json.loads(EngineCore.osd_speculation(core, "report"))["mode"] == "fixed"  # type: ignore[attr-defined]
    assert EngineCore.osd_speculation(core, "force", '["draft", 1]') == "{}"  # type: ignore[attr-defined]
    assert bench.scheduler.schedule().num_spec_tokens_to_schedule == 1
    with pytest.raises(TypeError, match="101 were given"):
        controlled_scheduler(config, *range(99))  # with self and the configuration
    with pytest.raises(TypeError, match="unexpected keyword argument 'surprise'"):
        controlled_scheduler(config, surprise=1)


# Held: vLLM's own way


@pytest.mark.parametrize("is_async", [False, True])
def test_held_every_step_has_the_largest_k_and_nothing_is_decided_or_learnt(
    is_async: bool,
) -> None:
    bench = Bench(is_async=is_async, is_held=True, net_interval_seconds=0.001)
    bench.command("load_rows", ROWS)
    bench.add("a", extra={"osd_spec_k": 1})
    for _ in range(40):
        output = bench.step({"a": [1, 2]})
        assert output.num_spec_tokens_to_schedule == K
        assert output.osd_from_memory == ()
    assert bench.osd.asked == bench.osd.seen == []
    assert bench.scheduler.placeholders == ([-1] * K if is_async else [])
    bench.scheduler.ending = {"a"}
    bench.step()
    assert bench.osd.ended == ["a"], "requests are known all the same, and forgotten"


@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_is_let_go_and_held_again_while_it_runs(is_async: bool) -> None:
    bench = Bench(is_async=is_async, is_held=True)
    bench.add("a")
    for _ in range(3):
        bench.step()
    ahead = bench.scheduler.schedule()
    bench.command("hold", False)
    bench.command("force", ["draft", 2])
    bench.now += STEP_S
    bench.give(ahead, None)
    assert bench.osd.seen == [], "a step that was scheduled before"
    bench.draft(K)
    assert bench.step().num_spec_tokens_to_schedule == 2
    assert (bench.seen.stamp.plan.k, bench.seen.proposed_by.plan.k) == (2, K)
    assert bench.step().num_spec_tokens_to_schedule == 2
    assert bench.seen.proposed_by.plan.k == 2
    assert bench.seen.seconds == pytest.approx(STEP_S)
    ahead = bench.scheduler.schedule()
    num_seen = len(bench.osd.seen)
    bench.command("hold", True)
    bench.give(ahead, None)
    assert len(bench.osd.seen) == num_seen + 1, "a step that was scheduled before"
    assert bench.step().num_spec_tokens_to_schedule == K
    assert len(bench.osd.seen) == num_seen + 1
    assert bench.command("report")["problem"] == ""


@pytest.mark.parametrize("num_drafting", [1, PROBE_STEPS])
def test_a_probe_under_way_does_not_keep_others_from_coming_when_it_was_held(
    num_drafting: int,
) -> None:
    """Its last steps are never seen, so it would never end."""
    bench = Bench()
    bench.add("a")
    bench.osd.probes.begin(Plan("draft", 1), expected=0.5)
    for _ in range(num_drafting):
        bench.step()
        assert bench.seen.stamp.reason == "probe"
    for is_held in (True, False):
        bench.command("hold", is_held)
        bench.step()
    assert bench.seen.stamp.reason != "probe"
    for _ in range(MIN_STEPS_TO_PROBE):
        bench.osd.probes.add_step(0, 0, None)
    assert bench.osd.probes.is_due(0.01, 0.01)


def test_what_came_before_it_was_held_is_not_held_against_what_comes_after() -> None:
    bench = Bench(net_interval_seconds=1e-9, net_window_seconds=STEP_S)
    bench.add("a")
    while not bench.osd.net.is_off():
        bench.step()
    for is_held in (True, False):
        bench.command("hold", is_held)
    assert bench.osd.net.newest is None


def of_a_text_that_repeats() -> Bench:
    """1, 2, 3 again and again: the memory proposes the next three."""
    bench = Bench()
    bench.add("a", prompt=[1, 2, 3] * 8)
    bench.command("force", ["memory", 3])
    for token in (1, 2, 3) * 4:
        bench.step({"a": [token]})
    return bench


def test_what_is_not_held_is_let_go_without_a_change() -> None:
    """The deployment says so again whenever anything else of its terms changes."""
    bench = of_a_text_that_repeats()
    bench.command("hold", False)
    bench.step({"a": [1]})
    assert bench.seen.from_memory == {"a"}


def test_the_memory_does_not_go_on_when_it_is_held() -> None:
    bench = Bench()
    bench.add("a", prompt=[1, 2, 3] * 8)
    bench.command("force", ["memory", 3])
    for _ in range(4):
        bench.step({"a": [1]})
    bench.command("hold", True)
    bench.step({"a": [1]}, drafts=False)  # what was proposed before
    assert bench.draft(K) == [[50, 51, 52, 53]]
    assert bench.scheduler.schedule().osd_from_memory == ()


@pytest.mark.parametrize("is_let_go", [False, True])
def test_what_the_memory_had_proposed_when_it_was_held_is_the_memorys(is_let_go: bool) -> None:
    bench = of_a_text_that_repeats()
    bench.command("hold", True)
    if is_let_go:
        bench.command("hold", False)
    output = bench.scheduler.schedule()
    assert output.scheduled_spec_decode_tokens == {"a": [1, 2, 3]}
    assert output.osd_from_memory == ("a",)
    bench.give(output, {"a": [1]})
    bench.draft(K)
    if not is_let_go:
        assert bench.scheduler.schedule().osd_from_memory == (), "the draft's again"


@pytest.mark.parametrize("is_held", [False, True])
def test_what_the_memory_proposed_is_the_memorys_until_it_is_verified(is_held: bool) -> None:
    """Not every request has room in every step."""
    bench = of_a_text_that_repeats()
    bench.command("hold", is_held)
    waiting = bench.scheduler.running.pop()
    bench.add("b")
    bench.step()
    bench.scheduler.running.append(waiting)
    output = bench.scheduler.schedule()
    assert output.scheduled_spec_decode_tokens["a"] == [1, 2, 3]
    assert "a" in output.osd_from_memory


def test_a_held_engine_holds_nothing_of_requests_that_have_gone() -> None:
    """While it is held, nothing is remembered of any, and nothing observed."""
    bench = Bench()
    bench.add("long", prompt=range(1000, 1090))
    bench.step()
    assert bench.osd.memory._left == 0, "it remembers a prompt, as engines in use do"
    bench.command("hold", True)
    bench.command("keep", 0.0)
    for n in range(20):
        bench.add(f"{n}", prompt=range(10_000, 10_100))
        bench.step()
        bench.scheduler.ending = {f"{n}"}
        bench.step()
    assert len(bench.osd.memory._leaving) <= 1, "the newest"


def test_the_memory_is_emptied_and_may_remember_less() -> None:
    bench = Bench()
    bench.osd.force(Plan("memory", 3))
    bench.add("a", [1, 2])
    for token in (61, 62, 63):
        bench.scheduler.ending = {"a"} if token == 63 else set()
        bench.step({"a": [token]})
    bench.command("forget")
    bench.add("b", [1, 2])
    bench.step({"b": [61]})
    assert bench.scheduler.running[0].spec_token_ids == []
    assert bench.osd.remembered[-1]["is_kept"]
    bench.command("keep", 0.0)
    bench.add("c")
    assert not bench.osd.remembered[-1]["is_kept"]
    assert Bench(proposers=["draft"]).command("forget") == {}, "there is none"
