"""16 bits: tokens may differ from another engine's where the target is all but undecided, and
nowhere else. Everything that is not a matter of rounding holds as in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.integration.conftest import release_of
from tests.integration.engines.conftest import KEPT
from tests.integration.serving.test_capture import expected_logprobs, keep_all, target
from tests.integration.serving.test_swap import acceptance_and_outputs
from tests.support.engines import Engine
from tests.support.pairs import Pair
from tests.support.reference import Reference
from tests.support.ways import HALF, Way

__all__ = ["target"]

pytestmark = pytest.mark.parametrize("way", HALF, indirect=True, ids=lambda way: way.name)

LONG = {"ignore_eos": True, "max_tokens": 60}
LIKELY = -2.0
"""Log-probability of a token that may be the most likely one."""
ROUNDING = 0.2
"""Log-probabilities of likely tokens differ from those in float32 by less than this, and two tokens
nearer than this may change places. Largest seen: 0.15."""


@pytest.fixture(scope="module")
def unspeculating(pair: Pair, way: Way) -> Engine:
    engine = Engine(pair.target, None, way=way, disable_log_stats=True)
    KEPT.append(engine)
    return engine


def ties_between(
    target: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    ours: list[list[int]],
    theirs: list[list[int]],
) -> int:
    """How many answers differ; where they first do, the target must be undecided between both
    tokens."""
    num_ties = 0
    for prompt, mine, other in zip(prompts, ours, theirs, strict=True):
        assert len(mine) == len(other)
        first = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
        if first is None:
            continue
        with torch.no_grad():
            logits = target(torch.tensor([[*prompt, *mine[:first]]])).logits[0, -1]
        logprobs = logits.log_softmax(-1)
        assert abs(logprobs[mine[first]] - logprobs[other[first]]) < ROUNDING, (prompt, first)
        num_ties += 1
    return num_ties


@pytest.mark.parametrize("k", [0, 2, 4])
def test_answers_leave_those_without_speculation_at_near_ties_only(
    engine: Engine,
    unspeculating: Engine,
    target: torch.nn.Module,
    prompts: list[list[int]],
    k: int,
) -> None:
    engine.command("force", ("draft", k) if k else ("off", 0))
    answers = engine.generate(prompts, **LONG)
    assert ties_between(target, prompts, answers, unspeculating.generate(prompts, **LONG)) <= 2


def test_answers_leave_those_in_float32_at_near_ties_only(
    engine: Engine, plain: Reference, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    answers = engine.generate(prompts, **LONG)
    ties_between(target, prompts, answers, plain.generate(prompts, **LONG))


def test_captured_log_probabilities_are_those_in_float32_but_for_rounding(
    engine: Engine, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    keep_all(engine)
    engine.generate(prompts, **LONG)
    traces = engine.traces()
    assert len(traces) == len(prompts)
    largest = 0.0
    for trace in traces:
        assert len(trace.position) == 60, "a row for each token"
        rows = np.arange(trace.num_rows)[:, None]
        expected = expected_logprobs(target, trace)[rows, trace.target_ids]
        difference = np.abs(trace.target_logprobs.astype(np.float32) - expected)
        largest = max(largest, float(difference[expected > LIKELY].max()))
    print(f"largest difference {largest:.3f}")
    assert 0 < largest < ROUNDING


def test_there_and_back_is_exact_and_proved(
    engine: Engine, pair: Pair, prompts: list[list[int]]
) -> None:
    before = acceptance_and_outputs(engine, prompts)
    there = engine.swap(release_of(pair.stranger, 2))
    assert (there["error"], there["proved"]) == ("", True)
    assert acceptance_and_outputs(engine, prompts)[0] != before[0]
    back = engine.swap(release_of(pair.draft, 3))
    assert (back["error"], back["proved"]) == ("", True)
    assert acceptance_and_outputs(engine, prompts) == before


def test_answers_stay_near_while_drafts_are_swapped_in_and_k_changes(
    engine: Engine,
    unspeculating: Engine,
    pair: Pair,
    target: torch.nn.Module,
    prompts: list[list[int]],
) -> None:
    answers = []

    def change(step: int) -> None:
        engine.command("force", ("draft", step % 5) if step % 5 else ("off", 0))
        if len(answers) < 20:
            path = (pair.stranger, pair.draft)[len(answers) % 2]
            answers.append(engine.swap(release_of(path, 2 + len(answers))))

    ids = [engine.add(prompt, **LONG) for prompt in prompts]
    done = engine.run(change)
    ours, theirs = [done[i][0] for i in ids], unspeculating.generate(prompts, **LONG)
    assert ties_between(target, prompts, ours, theirs) <= 2
    assert [(answer["error"], answer["proved"]) for answer in answers] == [("", True)] * 20
