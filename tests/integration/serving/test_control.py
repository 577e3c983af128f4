"""The closed loop in real vLLM: whatever k and proposers it chooses, the text is the target's."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from osd.config.schema import CaptureConfig, Config
from osd.records import BY_MEMORY, PLAIN, Counters, SpecWindow, decode
from serving.replica import Replica
from serving.speculation.goodput import Plan
from serving.speculation.sleep.runners import lazy_draft
from serving.speculation.sleep.v1 import LazyDraftV1
from serving.vllm import parts
from serving.vllm.name import resolve
from serving.vllm.undrafted import refuse_undrafted
from tests.integration.conftest import release_of
from tests.integration.serving.test_capture import assert_rows_are_the_targets
from tests.integration.serving.test_lossless import drafted_samples, misfit, target
from tests.support.engines import Engine
from tests.support.pairs import VOCABULARY, Pair

__all__ = ["target"]

K = 5
LONG = {"ignore_eos": True, "max_tokens": 80}
SHORT = {"ignore_eos": True, "max_tokens": 24}
MIXED = list(Plan("draft", 3, is_mixed=True))
"""Request by request, the draft or the memory."""
PLANS: list[Any] = [
    *(("draft", k) for k in range(1, K + 1)),
    ("off", 0),
    ("memory", 2),
    ("memory", K),
    MIXED,
    None,
]


KEPT: list[Engine] = []
"""vLLM takes down what all engines of a process share when one of them is collected, so these live
to the end."""


@pytest.fixture(scope="module")
def controlled_engine(pair: Pair, plain: Engine) -> Engine:
    engine = Engine(pair.target, release_of(pair.draft, 1), k=K, control={}, disable_log_stats=True)
    KEPT.append(engine)
    engine.start_hooks(CaptureConfig(top_k=16))
    return engine


@pytest.fixture
def controlled(controlled_engine: Engine) -> Iterator[Engine]:
    engine = controlled_engine
    engine.command("force", None)
    engine.llm.reset_prefix_cache()
    engine.traces()
    engine.rpc("osd_report", "test", "default")
    engine.scheduler.osd.memory.clear()  # the tests ask the same again and again
    yield engine
    assert engine.command("report")["problem"] == ""
    assert not engine.worker.osd_lazy_draft.is_off


@pytest.fixture(scope="module")
def probabilistic(pair: Pair, plain: Engine) -> Engine:
    """Its draft samples, and its own probabilities are verified against."""
    sampling = {"draft_sample_method": "probabilistic"}
    engine = Engine(
        pair.target,
        release_of(pair.draft, 1),
        k=K,
        control={},
        speculative=sampling,
        disable_log_stats=True,
    )
    KEPT.append(engine)
    engine.start_hooks(CaptureConfig(top_k=16))
    return engine


def in_turns(engine: Engine, plans: list[Any], every: int, seed: int = 0) -> Callable[[int], None]:
    """Force another plan every so many steps."""
    random = np.random.default_rng(seed)

    def change(step: int) -> None:
        if step % every == 0:
            engine.command("force", plans[random.integers(len(plans))])

    return change


@pytest.mark.parametrize("every", [1, 3, 10])
def test_text_is_that_of_no_speculation_whatever_is_proposed_from_step_to_step(
    controlled: Engine, plain: Engine, prompts: list[list[int]], every: int
) -> None:
    before = controlled.command("report")["plans"]
    slept, caught_up = controlled.worker.osd_lazy_draft.num_forwards_saved, caught_up_of(controlled)
    ids = [controlled.add(prompt, **LONG) for prompt in prompts]
    done = controlled.run(in_turns(controlled, PLANS, every))
    assert [done[i][0] for i in ids] == plain.generate(prompts, **LONG)
    ran = {
        name
        for name, plan in controlled.command("report")["plans"].items()
        if plan != before.get(name)
    }
    assert len(ran) >= 4
    assert controlled.worker.osd_lazy_draft.num_forwards_saved > slept
    assert caught_up_of(controlled) > caught_up


def test_text_is_that_of_no_speculation_while_the_loop_decides(
    controlled: Engine, plain: Engine, prompts: list[list[int]]
) -> None:
    for _ in range(3):
        assert controlled.generate(prompts, **LONG) == plain.generate(prompts, **LONG)
    report = controlled.command("report")
    assert report["num_cells"] > 3
    assert report["decision_us"] > 0


def caught_up_of(engine: Engine) -> int:
    return int(engine.worker.osd_lazy_draft.num_tokens_caught_up)


# ----------------------------------------------------------------------------------- a draft asleep


def drafts_after(
    engine: Engine, prompts: list[list[int]], num_asleep: int
) -> list[list[list[int]]]:
    """What is drafted, step by step, after `num_asleep` steps at k = 0."""
    seen: list[list[list[int]]] = []
    own = engine.scheduler.update_draft_token_ids

    def overhear(found: Any) -> None:
        if any(found.draft_token_ids):
            seen.append([list(tokens) for tokens in found.draft_token_ids])
        own(found)

    engine.scheduler.update_draft_token_ids = overhear
    engine.command("force", ("off", 0) if num_asleep else ("draft", 4))

    def wake(step: int) -> None:
        if step == num_asleep:
            engine.command("force", ("draft", 4))

    try:
        for prompt in prompts:
            engine.add(prompt, ignore_eos=True, max_tokens=num_asleep + 40)
        engine.run(wake)
    finally:
        del engine.scheduler.update_draft_token_ids
    return seen


@pytest.fixture
def awake(controlled: Engine) -> Iterator[None]:
    """vLLM's own way: the draft runs at k = 0 too."""
    runner = controlled.worker.model_runner
    for owner, name in (
        (runner.drafter, "propose"),
        (runner, "propose_draft_token_ids"),
        (runner.rejection_sampler, "forward"),
    ):
        del vars(owner)[name]
    yield
    controlled.worker.osd_lazy_draft = lazy_draft(runner)


def test_after_a_sleep_drafts_are_what_they_would_have_been(
    controlled: Engine, prompts: list[list[int]], request: pytest.FixtureRequest
) -> None:
    slept = drafts_after(controlled, prompts[:8], 25)
    assert caught_up_of(controlled) > 8 * 25
    controlled.llm.reset_prefix_cache()
    request.getfixturevalue("awake")
    assert slept == drafts_after(controlled, prompts[:8], 25)
    assert len(slept) > 5


def test_without_catching_up_drafts_are_others(
    controlled: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = drafts_after(controlled, prompts[:8], 25)
    controlled.llm.reset_prefix_cache()
    monkeypatch.setattr(LazyDraftV1, "_catch_up", lambda *_: None)
    assert drafts_after(controlled, prompts[:8], 25) != slept


def test_cached_prefixes_that_the_draft_slept_through_are_caught_up(controlled: Engine) -> None:
    prompt = np.random.default_rng(3).integers(2, VOCABULARY, 150).tolist()
    fresh = drafts_after(controlled, [prompt], 0)
    controlled.llm.reset_prefix_cache()
    controlled.command("force", ("off", 0))
    # Its blocks stay in the cache, but the draft never wrote them.
    controlled.generate([prompt], max_tokens=2)
    before = caught_up_of(controlled)
    assert drafts_after(controlled, [prompt], 0) == fresh
    assert caught_up_of(controlled) - before >= 128, (
        "the prefix was not taken from the cache, or not caught up"
    )
    before = caught_up_of(controlled)
    assert drafts_after(controlled, [prompt], 0) == fresh
    assert caught_up_of(controlled) == before, "what was caught up once need not be again"


# ------------------------------------------------------------------------------------ distributions


@pytest.fixture
def capped(request: pytest.FixtureRequest) -> Callable[[Engine], None]:
    """Verify fewer tokens than were drafted: another number for each request and step."""

    def cap(engine: Engine) -> None:
        random = np.random.default_rng(0)
        control = engine.scheduler.osd
        own = control.cap
        control.cap = lambda req_id: int(random.integers(0, K))
        type(control).has_caps, before = property(lambda self: True), type(control).has_caps

        def restore() -> None:
            control.cap = own
            type(control).has_caps = before

        request.addfinalizer(restore)

    return cap


@pytest.mark.parametrize("plan", [("draft", 3), ("memory", 3), MIXED])
def test_at_temperature_one_tokens_follow_the_target_with_partial_verification(
    controlled: Engine,
    target: torch.nn.Module,
    prompts: list[list[int]],
    capped: Callable[[Engine], None],
    plan: Any,
) -> None:
    controlled.command("force", plan)
    capped(controlled)
    assert misfit(target, drafted_samples(controlled, prompts, 1.0), 1.0) > 1e-4


@pytest.mark.parametrize("plans", [[("draft", 3)], [("draft", 2), ("draft", 3), ("off", 0)]])
def test_at_temperature_one_tokens_follow_the_target_with_sampled_drafts(
    probabilistic: Engine,
    target: torch.nn.Module,
    prompts: list[list[int]],
    capped: Callable[[Engine], None],
    plans: list[tuple[str, int]],
) -> None:
    probabilistic.command("force", plans[0])
    capped(probabilistic)
    own = probabilistic.run
    probabilistic.run = lambda: own(in_turns(probabilistic, plans, 1))  # type: ignore[method-assign]
    try:
        assert misfit(target, drafted_samples(probabilistic, prompts, 1.0), 1.0) > 1e-4
    finally:
        del probabilistic.run  # type: ignore[method-assign]
    assert probabilistic.command("report")["problem"] == ""


# ------------------------------------------------------------------------------- clients and counts


def test_a_client_may_cap_its_own_request(controlled: Engine, prompts: list[list[int]]) -> None:
    controlled.command("force", ("draft", controlled.k))
    drafted: dict[str, set[int]] = {}
    own = controlled.scheduler.update_from_output

    def overhear(output: Any, result: Any) -> Any:
        for req_id, tokens in output.scheduled_spec_decode_tokens.items():
            drafted.setdefault(req_id.split("-")[0], set()).add(len(tokens))
        return own(output, result)

    controlled.scheduler.update_from_output = overhear
    try:
        caps = {
            controlled.add(prompts[i], extra_args={"osd_spec_k": i}, **SHORT): i for i in (0, 1, 3)
        }
        controlled.run()
    finally:
        del controlled.scheduler.update_from_output
    found = {cap: max(drafted.get(req_id, {0})) for req_id, cap in caps.items()}
    assert found == {0: 0, 1: 1, 3: 3}


def test_without_speculation_rows_are_still_captured(
    controlled: Engine, prompts: list[list[int]]
) -> None:
    controlled.command("force", ("off", 0))
    controlled.set_capture(plain_fraction=1.0)
    controlled.generate(prompts[:4], ignore_eos=True, max_tokens=20)
    traces = controlled.traces()
    assert [trace.kind.tolist() for trace in traces] == [[PLAIN] * 20] * 4
    assert {trace.num_draft_tokens for trace in traces} == {0}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 3},
    ],
)
def test_without_drafts_sampling_is_that_of_an_engine_without_speculation(
    controlled: Engine, plain: Engine, prompts: list[list[int]], sampling: dict[str, Any]
) -> None:
    """Seeded requests draw from generators of their own, so that even sampled tokens are the same
    ones."""
    controlled.command("force", ("off", 0))
    options = {"ignore_eos": True, "max_tokens": 24} | sampling
    before = controlled.worker.osd_lazy_draft.num_steps_without_drafts
    assert controlled.generate(prompts[:4], **options) == plain.generate(prompts[:4], **options)
    is_short = controlled.worker.osd_lazy_draft.num_steps_without_drafts > before
    prepare = inspect.getsource(controlled.worker.model_runner._prepare_inputs)
    is_verified = "use_spec_decode = self.speculative_config is not None" in prepare
    assert is_short == (is_verified and "logprobs" not in sampling), (
        "vLLM's rejection sampler is what returns log-probabilities; before 0.32 such steps pass "
        "by it"
    )


def test_rows_captured_without_drafts_are_the_targets(
    controlled: Engine, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    """A temperature divides the logits in place: not those that capture reads."""
    controlled.command("force", ("off", 0))
    controlled.set_capture(plain_fraction=1.0)
    controlled.generate(prompts[:4], ignore_eos=True, max_tokens=20, temperature=0.8, seed=3)
    assert assert_rows_are_the_targets(target, controlled.traces()) == 80


def test_what_the_memory_gets_accepted_is_not_credited_to_the_draft(
    controlled: Engine, plain: Engine, prompts: list[list[int]]
) -> None:
    repeating = [(prompt * 20)[:120] for prompt in prompts[:4]]
    controlled.command("force", ("memory", K))
    before = controlled.command("report")
    controlled.command("log", True)
    assert controlled.generate(repeating, **LONG) == plain.generate(repeating, **LONG)
    log = controlled.command("log", False)
    assert {entry["plan"] for entry in log} == {f"memory {K}"}
    assert sum(entry["accepted"] for entry in log) > 10, "else there is nothing to credit"
    after = controlled.command("report")
    for count in ("tested_per_position", "accepted_per_position"):
        assert after[count] == before[count]
    traces = controlled.traces()
    assert len(traces) == 4
    for trace in traces:
        assert trace.num_drafts == trace.num_draft_tokens == trace.num_accepted_tokens == 0
        assert set(trace.draft_version[trace.kind != PLAIN].tolist()) == {BY_MEMORY}
    windows = json.loads(controlled.rpc("osd_report", "test", "default"))["windows"]
    counts = [window["num_draft_tokens"] + window["num_accepted_tokens"] for window in windows]
    assert sum(counts) == 0
    assert sum(window["num_accepted_memory_tokens"] for window in windows) == sum(
        entry["accepted"] for entry in log
    )


# ------------------------------------------------------------------------------------ when it fails


def test_an_error_in_the_control_ends_the_control_and_nothing_else(
    pair: Pair, plain: Engine, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(pair.target, release_of(pair.draft, 1), k=3, control={}, disable_log_stats=True)
    KEPT.append(engine)
    engine.scheduler.osd.plan = lambda *_: 1 / 0
    with caplog.at_level(logging.ERROR, logger="serving.speculation.scheduler"):
        assert engine.generate(prompts, **LONG) == plain.generate(prompts, **LONG)
    assert [record.message.count("serving is not affected") for record in caplog.records] == [1]
    assert "ZeroDivisionError" in engine.command("report")["problem"]
    drafts = drafts_per_step(engine, prompts)
    assert max(drafts) == 3


def drafts_per_step(engine: Engine, prompts: list[list[int]]) -> list[int]:
    found: list[int] = []
    own = engine.scheduler.update_draft_token_ids

    def overhear(drafts: Any) -> None:
        found.extend(len(tokens) for tokens in drafts.draft_token_ids)
        own(drafts)

    engine.scheduler.update_draft_token_ids = overhear
    engine.generate(prompts, **LONG)
    del engine.scheduler.update_draft_token_ids
    return found


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("vllm.v1.core.sched.scheduler:Scheduler", "update_draft_token_ids"),
        ("vllm.v1.core.sched.scheduler:Scheduler", "update_from_output"),
        ("vllm.v1.engine.core:EngineCore", "post_step"),
    ],
)
def test_a_vllm_without_the_hooks_gets_a_static_k_and_one_line(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    name: str,
) -> None:
    replica = Replica.__new__(Replica)
    replica._config = Config()
    replica._release, replica._off = release_of(pair.draft, 1), {}
    scheduler = "serving.speculation.scheduler.controlled_scheduler"
    assert replica._control_arguments()["scheduler_cls"] == scheduler
    monkeypatch.delattr(resolve(where), name)
    assert parts.problem_with("control") != ""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert replica._control_arguments() == {}
    assert len(caplog.records) == 1
    assert name in caplog.text
    assert "k stays at speculation.k_max" in replica._off["control"]


def test_a_vllm_that_checks_requests_elsewhere_is_served_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.sampling_params import SamplingParams

    monkeypatch.delattr(SamplingParams, "_validate_spec_decode")
    off: dict[str, str] = {}
    parts.start(off, "requests", refuse_undrafted)
    assert "there is no vllm.sampling_params:SamplingParams._validate_spec_decode" in caplog.text
    assert off["requests"].endswith(parts.CONSEQUENCES["requests"])


def test_tokens_of_the_memory_and_of_the_draft_are_verified_in_one_step(
    controlled: Engine, plain: Engine, prompts: list[list[int]]
) -> None:
    """And counted apart, by the control and by the worker; drafts that nobody verified count for
    those who proposed them, by what was served."""
    some = prompts[:6]
    controlled.generate(some[:3], **LONG)  # of these three everything is known afterwards
    controlled.traces()
    controlled.rpc("osd_report", "test", "default")
    before = controlled.command("report")
    controlled.command("force", MIXED)
    controlled.command("log", True)
    assert controlled.generate(some, **LONG) == plain.generate(some, **LONG)
    log = controlled.command("log", False)
    assert any(0 < entry["from_memory"] < entry["batch"] for entry in log), "in one step"
    after = controlled.command("report")
    verified, accepted = (
        {name: now[i] - before["sources"][name][i] for name, now in after["sources"].items()}
        for i in (0, 1)
    )
    assert min(verified.values()) > 20
    controlled.generate(some[:1], ignore_eos=True, max_tokens=1)  # a step that tells the worker
    controlled.traces()
    windows = json.loads(controlled.rpc("osd_report", "test", "default"))["windows"]
    after = controlled.command("report")
    of_draft = sum(window["num_draft_tokens"] for window in windows)
    assert of_draft == verified["draft"]
    total = Counters()
    for window in windows:
        total.add(decode(json.dumps(window), SpecWindow).counters)
    assert total.num_memory_tokens == verified["memory"]
    assert total.num_accepted_memory_tokens == accepted["memory"] > 0
    assert total.num_accepted_tokens == accepted["draft"]
    brought = total.by_source()
    assert sum(brought.values()) == total.num_output_tokens == 6 * LONG["max_tokens"] + 1
    assert 0 < brought["memory"] <= accepted["memory"] and brought["draft"] > 0
    tested = sum(sum(window["num_tested_per_pos"]) for window in windows)
    by_control = sum(after["tested_per_position"]) - sum(before["tested_per_position"])
    assert tested == pytest.approx(by_control, abs=12), "both judge the same drafts"
    assert tested > 1.5 * sum(
        min(entry["drafted"], entry["accepted"] + 1) for entry in log if not entry["from_memory"]
    )
