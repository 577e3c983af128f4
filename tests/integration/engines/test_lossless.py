"""Answers are the target's, over all ways of running vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from serving.speculation.goodput import Plan
from serving.vllm.hooks import is_v2
from tests.integration.conftest import release_of
from tests.integration.serving.test_capture import keep_all, target
from tests.support.engines import Engine
from tests.support.fit import misfit_of
from tests.support.pairs import Pair
from tests.support.reference import Reference
from tests.support.ways import Way

__all__ = ["target"]

LONG = {"ignore_eos": True, "max_tokens": 48}


def plans_of(engine: Engine) -> list[tuple[Any, ...]]:
    memory = [("memory", engine.k), ("memory", 2), tuple(Plan("draft", 3, is_mixed=True))]
    return [("off", 0), *(("draft", k) for k in range(1, engine.k + 1)), *memory]


def test_the_engine_runs_this_way(engine: Engine, way: Way) -> None:
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    config = engine.llm.llm_engine.vllm_config
    draft = engine.worker.get_draft_model()
    compiled = [
        module
        for module in draft.modules()
        if isinstance(module, TorchCompileWithNoGuardsWrapper)
        and not getattr(module, "do_not_compile", True)
    ]
    assert is_v2(engine.worker.model_runner) == (way.runner == "V2")
    assert config.scheduler_config.async_scheduling == way.is_async
    assert bool(compiled) == way.is_compiled
    assert {parameter.dtype for parameter in draft.parameters()} == {getattr(torch, way.dtype)}


def test_tokens_are_the_targets_while_k_changes_every_step(
    engine: Engine, plain: Reference, prompts: list[list[int]]
) -> None:
    before = engine.command("report")["plans"]
    random, plans = np.random.default_rng(0), plans_of(engine)

    def change(step: int) -> None:
        engine.command("force", plans[random.integers(len(plans))])

    ids = [engine.add(prompt, **LONG) for prompt in prompts]
    done = engine.run(change)
    assert [done[i][0] for i in ids] == plain.generate(prompts, **LONG)
    after = engine.command("report")["plans"]
    assert len([name for name in after if after[name] != before.get(name)]) >= 4


def test_tokens_are_the_targets_while_20_drafts_are_swapped_in(
    engine: Engine, plain: Reference, pair: Pair, prompts: list[list[int]]
) -> None:
    answers = []

    def swap(step: int) -> None:
        if len(answers) < 20:
            path = (pair.stranger, pair.draft)[len(answers) % 2]
            answers.append(engine.swap(release_of(path, 2 + len(answers))))

    ids = [engine.add(prompt, **LONG) for prompt in prompts[:4]]
    done = engine.run(swap)
    assert [done[i][0] for i in ids] == plain.generate(prompts[:4], **LONG)
    assert [(answer["error"], answer["proved"]) for answer in answers] == [("", True)] * 20


@pytest.mark.parametrize("min_tokens", [0, 12])
def test_an_answer_ends_where_it_would_without_us(
    engine: Engine, plain: Reference, crowd: list[list[int]], min_tokens: int
) -> None:
    keep_all(engine)
    limits = ends(plain, crowd) | {"min_tokens": min_tokens}
    answers = engine.generate(crowd, **limits)
    assert answers == plain.generate(crowd, **limits)
    assert min(map(len, answers)) < 24
    served = sorted(trace.output_ids.tolist() for trace in engine.traces())
    assert served == sorted(answers)


def ends(plain: Reference, prompts: list[list[int]]) -> dict[str, Any]:
    """Limits under which some answers end early: the tokens that come often."""
    free = plain.generate(prompts, ignore_eos=True, max_tokens=24)
    often = np.bincount(np.concatenate(free)).argsort()[-3:].tolist()
    return {"stop_token_ids": often, "max_tokens": 24}


def test_what_is_aborted_leaves_the_others_their_tokens(
    engine: Engine, plain: Reference, prompts: list[list[int]]
) -> None:
    ids = [engine.add(prompt, **LONG) for prompt in prompts[:5]]
    at = {1: ids[0], 4: ids[2], 9: ids[3]}
    done = engine.run(lambda step: engine.abort(at[step]) if step in at else None)
    whole = plain.generate(prompts[:5], **LONG)
    assert {i: done[i][0] for i in (ids[1], ids[4])} == {ids[1]: whole[1], ids[4]: whole[4]}


def test_at_temperature_one_drafted_tokens_follow_the_target(
    engine: Engine, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    keep_all(engine)
    engine.generate(prompts, ignore_eos=True, max_tokens=80, temperature=1.0)
    traces = engine.traces()
    assert misfit_of(target, traces, 1.0) > 1e-4
    assert misfit_of(target, traces, 0.7) < 1e-6, "samples are too few to tell temperatures apart"
