"""Control of speculation, over all ways of running vLLM."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from tests.integration.engines.conftest import started
from tests.integration.engines.test_lossless import plans_of
from tests.integration.serving.test_capture import assert_rows_are_the_targets, keep_all, target
from tests.integration.serving.test_control import (
    test_a_client_may_cap_its_own_request,
    test_without_speculation_rows_are_still_captured,
)
from tests.support.engines import Engine
from tests.support.pairs import Pair
from tests.support.reference import Reference
from tests.support.ways import Way

__all__ = [
    "target",
    "test_a_client_may_cap_its_own_request",
    "test_without_speculation_rows_are_still_captured",
]

LONG = {"ignore_eos": True, "max_tokens": 40}
SHORT = {"ignore_eos": True, "max_tokens": 20}


@pytest.fixture
def controlled(engine: Engine) -> Engine:
    return engine


def test_tokens_are_the_targets_while_the_loop_decides(
    engine: Engine, plain: Reference, prompts: list[list[int]]
) -> None:
    engine.command("force", None)
    some = prompts[:4]
    assert engine.generate(some, **LONG) == plain.generate(some, **LONG)
    report = engine.command("report")
    assert report["num_cells"] > 3, "at first it measures what plans cost"
    assert report["is_async"] == engine.way.is_async


def test_tokens_and_rows_are_the_targets_while_it_is_held_and_let_go(
    engine: Engine, plain: Reference, prompts: list[list[int]], target: torch.nn.Module
) -> None:
    """The draft is asleep, or the memory has proposed, when the engine goes on by itself."""
    keep_all(engine)
    random, plans = np.random.default_rng(2), plans_of(engine)
    num_switched, is_held = 0, False

    def change(step: int) -> None:
        nonlocal num_switched, is_held
        engine.command("force", plans[random.integers(len(plans))])
        if random.random() < 0.4:
            is_held, num_switched = not is_held, num_switched + 1
            engine.command("hold", is_held)

    try:
        ids = [engine.add(prompt, **LONG) for prompt in prompts]
        done = engine.run(change)
    finally:
        engine.command("hold", False)
    answers = [done[i][0] for i in ids]
    assert answers == plain.generate(prompts, **LONG)
    assert num_switched > 4
    traces = engine.traces()
    assert sorted(trace.output_ids.tolist() for trace in traces) == sorted(answers)
    assert assert_rows_are_the_targets(target, traces) == sum(map(len, answers))


def test_the_tokens_it_counts_are_those_that_are_delivered(
    engine: Engine, plain: Reference, prompts: list[list[int]]
) -> None:
    """A step with drafts may reach beyond the end of an answer."""
    some = prompts[:4]
    (_, *stops), *_ = plain.generate(some[:1], **LONG)
    for plan in (["draft", 4], ["off", 0]):
        engine.command("force", plan)
        for given in (
            *({"ignore_eos": True, "max_tokens": n} for n in (1, 2, 3, 5, 8, 13)),
            {"max_tokens": 40, "stop_token_ids": [stops[6]]},
        ):
            engine.command("log", True)
            answers = engine.generate(some, **given)
            counted = sum(step["tokens"] for step in engine.command("log", False))
            assert counted == sum(map(len, answers)), (plan, given)
    engine.command("force", None)


def test_nobody_who_may_propose_is_left_out(engine: Engine) -> None:
    assert engine.scheduler.osd.settings.proposers == ("draft", "memory")
    assert [line for line in engine.said if "left out" in line] == []
    assert engine.command("report")["left_out"] == {}


def test_an_error_in_the_control_ends_the_control_and_nothing_else(
    pair: Pair,
    way: Way,
    engine: Engine,
    plain: Reference,
    prompts: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = started(pair, way, disable_log_stats=True)
    failing.scheduler.osd.plan = lambda *_: 1 / 0
    with caplog.at_level(logging.ERROR, logger="serving.speculation.scheduler"):
        answers = failing.generate(prompts[:2], **SHORT)
    assert answers == plain.generate(prompts[:2], **SHORT)
    failing.traces()
    own = [line for _, level, line in caplog.record_tuples if level == logging.ERROR]
    assert [line.count("serving is not affected") for line in own] == [1]
    assert "ZeroDivisionError" in failing.command("report")["problem"]
