"""Requests that reach `max_model_len`, over all ways of running vLLM: their last steps have room
for fewer draft tokens than were proposed, while others go on beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from osd.records import PLAIN, REJECTED, Trace
from tests.integration.engines.test_lossless import plans_of
from tests.integration.engines.test_sleep import common, every_position, proposed_by, sleeper
from tests.integration.serving.test_capture import assert_rows_are_the_targets, keep_all, target
from tests.support.engines import Engine
from tests.support.pairs import VOCABULARY
from tests.support.reference import K, Reference

__all__ = ["proposed_by", "sleeper", "target"]

MAX_LENGTH = 256
ROOM = (1, 2, 4, 5, 9, 14)
"""Tokens that fit behind each prompt."""
ENDLESS = {"ignore_eos": True, "max_tokens": MAX_LENGTH}
BESIDE = {"ignore_eos": True, "max_tokens": 24}


@pytest.fixture(scope="module")
def long_prompts() -> list[list[int]]:
    random = np.random.default_rng(11)
    return [random.integers(2, VOCABULARY, MAX_LENGTH - room).tolist() for room in ROOM]


def answered(
    engine: Engine,
    long_prompts: list[list[int]],
    short: list[int],
    change: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Answers to all, in flight together."""
    ids = [engine.add(prompt, **ENDLESS) for prompt in long_prompts] + [engine.add(short, **BESIDE)]
    done = engine.run(change)
    return [done[i][0] for i in ids]


def test_tokens_up_to_the_longest_length_are_the_targets_and_counted(
    engine: Engine, plain: Reference, long_prompts: list[list[int]], prompts: list[list[int]]
) -> None:
    random, plans = np.random.default_rng(5), plans_of(engine)

    def change(step: int) -> None:
        engine.command("force", plans[random.integers(len(plans))])

    wanted = [*plain.generate(long_prompts, **ENDLESS), *plain.generate(prompts[:1], **BESIDE)]
    assert [len(answer) for answer in wanted] == [*ROOM, BESIDE["max_tokens"]]
    for each in (None, change):  # when plans change, the memory knows the answers
        engine.command("log", True)
        assert answered(engine, long_prompts, prompts[0], each) == wanted
        counted = sum(step["tokens"] for step in engine.command("log", False))
        assert counted == sum(map(len, wanted))


def test_rows_up_to_the_longest_length_are_the_targets(
    engine: Engine, target: torch.nn.Module, long_prompts: list[list[int]], prompts: list[list[int]]
) -> None:
    keep_all(engine)
    engine.traces()
    before = {m.name: m for m in engine.llm.get_metrics() if "spec_decode" in m.name}
    answers = answered(engine, long_prompts, prompts[0])
    after = {m.name: m for m in engine.llm.get_metrics() if "spec_decode" in m.name}
    traces = engine.traces()
    assert sorted(trace.output_ids.tolist() for trace in traces) == sorted(answers)
    for trace in traces:
        first = len(trace.prompt_ids)
        assert trace.position.tolist() == list(range(first, first + len(trace.output_ids)))
    rows = [proposed(trace, engine) for trace in traces]
    assert assert_rows_are_the_targets(target, rows) == sum(map(len, answers))
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        theirs = f"vllm:spec_decode_{name}"
        counted = sum(getattr(trace, name) for trace in traces)
        assert counted == after[theirs].value - before[theirs].value > 0


def proposed(trace: Trace, engine: Engine) -> Trace:
    """Where a step is scheduled ahead, the last ones of a full request may verify places for which
    there is no draft token: nothing was proposed there."""
    is_empty = (trace.kind == REJECTED) & (trace.draft_ids == -1)
    assert engine.way.is_async or not is_empty.any()
    assert is_empty.sum() <= engine.k
    return replace(trace, kind=np.where(is_empty, PLAIN, trace.kind))


def test_who_comes_beside_such_requests_is_then_drafted_for_as_ever(
    sleeper: Engine, long_prompts: list[list[int]], prompts: list[list[int]], proposed_by: Any
) -> None:
    """V1 drafts for nobody in a step in which one of them is too near the end."""
    awake = every_position(sleeper, proposed_by, prompts[:1])
    sleeper.llm.reset_prefix_cache()
    (*_, beside) = proposed_by([*long_prompts[:4], prompts[0]], {0: ("draft", K)}, 36)
    both = common([beside], awake)
    assert len(both) > 4
    assert [b for b, _ in both] == [a for _, a in both]
