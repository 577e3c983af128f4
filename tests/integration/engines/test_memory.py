"""The memory proposes, over all ways of running vLLM: what it was served, and nobody else's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from serving.speculation.goodput import Plan
from serving.speculation.memory.memory import Memory
from serving.speculation.proposals import scope
from tests.integration.serving.test_capture import keep_all, target
from tests.support.engines import Engine
from tests.support.fit import misfit_of
from tests.support.pairs import VOCABULARY
from tests.support.reference import Reference
from tests.support.remembered import proposed_by

__all__ = ["target"]

LONG = {"ignore_eos": True, "max_tokens": 40}
MIXED = list(Plan("draft", 3, is_mixed=True))
"""Request by request, the draft or the memory."""


@pytest.fixture
def memory(engine: Engine) -> Memory:
    """Empty."""
    engine.command("forget")
    memory: Memory = engine.scheduler.osd.memory
    return memory


def served(
    engine: Engine, plan: list[Any], prompts: Sequence[Sequence[int]], **sampling: Any
) -> Any:
    """(answers, log of the steps, (verified, accepted) by whose tokens they were)."""
    engine.command("force", plan)
    before = engine.command("report")["sources"]
    engine.command("log", True)
    answers = engine.generate(prompts, **{**LONG, **sampling})
    log = engine.command("log", False)
    after = engine.command("report")["sources"]
    counts = {
        name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in after
    }
    return answers, log, counts


def test_what_was_served_before_is_proposed_while_the_draft_sleeps(
    engine: Engine, plain: Reference, prompts: list[list[int]], memory: Memory
) -> None:
    some = prompts[:4]
    want = plain.generate(some, **LONG)
    for is_known in (False, True):
        answers, log, counts = served(engine, ["memory", engine.k], some)
        assert answers == want
        assert counts["draft"] == (0, 0)
        verified, accepted = counts["memory"]
        assert accepted > 0.9 * verified > 60 if is_known else accepted < 60
        assert {step["passes"] for step in log} == {0}
        assert max(step["from_memory"] for step in log) > 0
    windows = json.loads(engine.rpc("osd_report", "test", "default"))["windows"]
    assert sum(window["num_draft_tokens"] for window in windows) == 0
    assert sum(map(len, answers)) > 3 * len(log), "several tokens a step and request"


def test_tokens_of_the_memory_and_of_the_draft_in_one_step_are_counted_apart(
    engine: Engine, plain: Reference, prompts: list[list[int]], memory: Memory
) -> None:
    """Drafts that nobody verified count for the draft too, by what was served in their place."""
    some = prompts[:4]
    served(engine, ["off", 0], some[:2])  # of these everything is known afterwards
    engine.traces()
    engine.rpc("osd_report", "test", "default")
    before = engine.command("report")
    answers, log, counts = served(engine, MIXED, some)
    assert answers == plain.generate(some, **LONG)
    assert any(0 < step["from_memory"] < step["batch"] for step in log), "in one step"
    assert min(verified for verified, _ in counts.values()) > 20
    assert counts["memory"][1] > 0.4 * counts["memory"][0], "it knows half of the text"
    engine.generate(some[:1], ignore_eos=True, max_tokens=1)  # a step that tells the worker
    engine.traces()
    windows = json.loads(engine.rpc("osd_report", "test", "default"))["windows"]
    assert sum(window["num_draft_tokens"] for window in windows) == counts["draft"][0]
    after = engine.command("report")
    tested = sum(sum(window["num_tested_per_pos"]) for window in windows)
    by_control = sum(after["tested_per_position"]) - sum(before["tested_per_position"])
    assert tested == pytest.approx(by_control, abs=12), "both judge the same drafts"
    assert tested > 1.2 * sum(
        min(step["drafted"], step["accepted"] + 1) for step in log if not step["from_memory"]
    )


def test_penalties_count_tokens_of_the_memory(
    engine: Engine, plain: Reference, prompts: list[list[int]], memory: Memory
) -> None:
    some, penalties = prompts[:2], {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    want = plain.generate(some, **LONG, **penalties)
    for _ in range(2):
        answers, _, counts = served(engine, ["memory", engine.k], some, **penalties)
        assert answers == want
    assert counts["memory"][1] > 0.8 * counts["memory"][0] > 20


def test_at_temperature_one_tokens_of_the_memory_follow_the_target(
    engine: Engine, target: torch.nn.Module, prompts: list[list[int]], memory: Memory
) -> None:
    keep_all(engine)
    warm: dict[str, Any] = {"max_tokens": 80, "temperature": 1.0}
    verified = [served(engine, ["memory", engine.k], prompts, **warm)[2] for _ in range(2)]
    assert sum(counts["memory"][0] for counts in verified) > 300
    assert sum(counts["draft"][0] for counts in verified) == 0
    traces = engine.traces()
    assert misfit_of(target, traces, 1.0) > 1e-4
    assert misfit_of(target, traces, 0.7) < 1e-6, "samples are too few to tell temperatures apart"


def test_tokens_are_the_targets_while_draft_and_memory_take_turns(
    engine: Engine, plain: Reference, prompts: list[list[int]], memory: Memory
) -> None:
    """The memory knows more and more of them."""
    some, plans = prompts[:3], [["memory", engine.k], ["draft", 2], MIXED, ["off", 0], None]
    want = plain.generate(some, **LONG)
    for start in range(2):
        ids = [engine.add(prompt, **LONG) for prompt in some]
        done = engine.run(lambda n, start=start: engine.command("force", plans[(n + start) % 5]))
        assert [done[i][0] for i in ids] == want


@pytest.mark.parametrize("who", ["anybody", "opted out", "another salt", "purged"])
def test_another_request_is_proposed_what_it_may_be(
    engine: Engine, prompts: list[list[int]], memory: Memory, who: str
) -> None:
    prompt = prompts[0]
    extra = {"osd_capture": "off"} if who == "opted out" else {}
    engine.command("force", ["memory", engine.k])
    req_id = add(engine, prompt, "tenant" if who == "another salt" else None, extra)
    (answer,) = engine.run()[req_id]
    if who == "purged":
        engine.command("forget")
    asked = proposed(engine, prompt, answer[:6])
    assert (asked == answer[6:10]) == (who == "anybody")
    if who == "another salt":
        assert proposed(engine, prompt, answer[:6], salt="tenant") == answer[6:10]


def add(engine: Engine, prompt: list[int], salt: str | None, extra: dict[str, Any]) -> str:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        detokenize=False,
        extra_args=extra,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **LONG,
    )
    given: dict[str, Any] = {"prompt_token_ids": prompt}
    if salt is not None:
        given["cache_salt"] = salt
    engine.llm.llm_engine.add_request("first", given, params)
    return "first"


def proposed(
    engine: Engine, prompt: list[int], answer: list[int], salt: str | None = None
) -> list[int]:
    """What the memory proposes to a later request that has begun like this: its prompt is another
    one, of which it knows nothing."""
    given = [VOCABULARY - 1], answer, scope(salt or "")
    found = proposed_by(engine.scheduler.osd.memory, *given)
    if engine.scheduler.has_memory_elsewhere:
        assert engine.rpc("osd_proposed", *given) == found, "the ranks have one of their own"
    return found


def test_preempted_requests_keep_their_tokens_while_the_memory_proposes(
    tight: Engine, plain: Reference, crowd: list[list[int]]
) -> None:
    preempted: list[str] = []
    own = tight.scheduler._preempt_request

    def preempt(request: Any, *given: Any, **named: Any) -> Any:
        preempted.append(request.request_id)
        return own(request, *given, **named)

    tight.scheduler._preempt_request = preempt
    try:
        for _ in range(2):
            answers, _, counts = served(tight, ["memory", tight.k], crowd)
            assert answers == plain.generate(crowd, **LONG)
    finally:
        del tight.scheduler._preempt_request
        tight.command("force", ["draft", tight.k])
    assert preempted, "the cache is too small for all of them"
    verified, accepted = counts["memory"]
    assert accepted > 0.6 * verified > 50, "it knows the answers by then"
    assert tight.command("report")["problem"] == ""
    tight.traces()
