"""EAGLE-3 heads, over ways of running vLLM: they serve, sleep less, and are swapped as draft models
are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from serving.speculation.goodput import Plan
from tests.integration.conftest import release_of
from tests.integration.engines.test_sleep import Passes, Proposals
from tests.integration.serving.test_capture import assert_rows_are_the_targets, keep_all
from tests.support.engines import Engine
from tests.support.fit import misfit_of
from tests.support.headed import TAPS
from tests.support.pairs import Pair
from tests.support.reference import K, Reference
from trainer.draft import load_draft
from trainer.eagle3.features import TargetFeatures
from trainer.evaluate import replay
from trainer.sampling.teacher import Teacher

LONG = {"ignore_eos": True, "max_tokens": 32}
PLANS = [("off", 0), *(("draft", k) for k in range(1, K + 1))]
MIXED = tuple(Plan("draft", 3, is_mixed=True))

# ------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("plan", [("draft", 3), ("draft", 1), ("off", 0), "changing"], ids=str)
def test_with_a_head_tokens_are_the_targets(
    head: Engine, alone: Reference, prompts: list[list[int]], plan: Any
) -> None:
    windows_of(head)
    random, plans = np.random.default_rng(0), [*PLANS, ("memory", 2), MIXED]

    def change(_step: int) -> None:
        chosen = plans[random.integers(len(plans))] if plan == "changing" else plan
        head.command("force", chosen)

    ids = [head.add(prompt, **LONG) for prompt in prompts[:4]]
    done = head.run(change)
    assert [done[i][0] for i in ids] == alone.generate(prompts[:4], **LONG)
    accepted = sum(sum(window["num_accepted_tokens_per_pos"]) for window in windows_of(head))
    assert (accepted > 0) == (plan != ("off", 0))


def test_at_temperature_one_tokens_drafted_by_a_head_follow_the_target(
    head: Engine, deep: Any, prompts: list[list[int]]
) -> None:
    keep_all(head)
    head.generate(prompts, ignore_eos=True, max_tokens=80, temperature=1.0)
    traces = head.traces()
    assert misfit_of(deep, traces, 1.0) > 1e-4
    assert misfit_of(deep, traces, 0.6) < 1e-6, "samples are too few to tell temperatures apart"


def test_a_replay_counts_at_every_depth_what_the_engine_counted(
    head: Engine, headed: Pair, prompts: list[list[int]]
) -> None:
    """Of both heads, which differ in all their tensors."""
    teacher, counted = Teacher(headed.target, top_k=4), []
    for version, directory in enumerate((headed.draft, headed.stranger), 1):
        if head.worker.osd_swapper.version != version:
            assert head.swap(release_of(directory, version))["error"] == ""
        keep_all(head)
        windows_of(head)
        head.llm.reset_prefix_cache()
        head.generate(prompts, ignore_eos=True, max_tokens=100)
        traces = head.traces()
        model = load_draft(directory, TargetFeatures(teacher, K))
        replayed = replay(model, traces, K, max_length=512)
        windows = windows_of(head)
        tested_G, accepted_G = (per_position(windows, name) for name in COUNTED)
        assert tested_G.tolist() == replayed.tested_RG.sum(0).tolist()
        assert accepted_G.tolist() == replayed.accepted_RG.sum(0).tolist()
        assert (tested_G > 0).all(), "some depths were never reached"
        counted.append(accepted_G.tolist())
    assert counted[0] != counted[1]


COUNTED = ("num_tested_per_pos", "num_accepted_tokens_per_pos")


def per_position(windows: list[dict[str, Any]], name: str) -> np.ndarray:
    """int [G]"""
    return np.array([window[name] for window in windows]).sum(0)


def test_rows_captured_beside_a_head_are_the_targets(
    head: Engine, deep: Any, prompts: list[list[int]]
) -> None:
    keep_all(head)
    answers = head.generate(prompts[:4], **LONG)
    traces = head.traces()
    assert sorted(trace.output_ids.tolist() for trace in traces) == sorted(answers)
    assert assert_rows_are_the_targets(deep, traces) == sum(map(len, answers))
    assert sum(trace.num_accepted_tokens for trace in traces) > 0


def test_memory_and_head_propose_in_one_batch(
    head: Engine, alone: Reference, prompts: list[list[int]]
) -> None:
    head.command("forget")
    head.command("force", ("off", 0))
    head.generate(prompts[:2], **LONG)
    before = head.command("report")["sources"]
    head.command("force", MIXED)
    assert head.generate(prompts[:4], **LONG) == alone.generate(prompts[:4], **LONG)
    after = head.command("report")["sources"]
    new = {name: after[name][0] - before.get(name, [0])[0] for name in ("draft", "memory")}
    assert min(new.values()) > 10
    head.command("forget")


def test_what_is_not_drafted_for_is_answered_beside_requests_with_a_head(
    head: Engine, alone: Reference, prompts: list[list[int]]
) -> None:
    some, odd = prompts[:3], {"logit_bias": {7: 4.0}}
    ids = [head.add(prompt, **LONG, **(odd if i == 1 else {})) for i, prompt in enumerate(some)]
    done = head.run()
    expected = alone.generate(some, **LONG)
    expected[1:2] = alone.generate(some[1:2], **LONG, **odd)
    assert [done[i][0] for i in ids] == expected
    assert expected[1] != alone.generate(some[1:2], **LONG)[0], "the bias changes the answer"


# ------------------------------------------------------------------------------ what the head reads


@dataclass
class Given:
    """What the head was given in one step, T tokens of B requests."""

    states: torch.Tensor
    """[T, taps x H]"""
    tokens: list[int]
    positions: list[int]
    req_ids: list[str]
    num_tokens_B: list[int]

    def by_request(self) -> Iterator[tuple[str, list[int], list[int], torch.Tensor]]:
        """Request, its positions, tokens and hidden states."""
        start = 0
        for req_id, num in zip(self.req_ids, self.num_tokens_B, strict=True):
            at = slice(start, start + num)
            yield req_id.split("-")[0], self.positions[at], self.tokens[at], self.states[at]
            start += num


@contextmanager
def overheard(engine: Engine) -> Iterator[list[Given]]:
    """What the head is given meanwhile."""
    heard: list[Given] = []
    runner = engine.worker.model_runner
    is_v2 = engine.way.runner == "V2"
    owner, name = (runner.speculator, "propose") if is_v2 else (runner, "propose_draft_token_ids")
    own = getattr(owner, name)

    def note_v1(scheduled: Any, *given: Any, **named: Any) -> Any:
        num, req_ids = scheduled.total_num_scheduled_tokens, list(runner.input_batch.req_ids)
        states = torch.cat([states[:num] for states in given[4]], -1).clone()
        tokens, positions = runner.input_ids.gpu[:num], runner.positions[:num]
        lengths = [scheduled.num_scheduled_tokens[i] for i in req_ids]
        heard.append(Given(states, tokens.tolist(), positions.tolist(), req_ids, lengths))
        return own(scheduled, *given, **named)

    def note_v2(batch: Any, *given: Any, **named: Any) -> Any:
        if not named.get("dummy_run"):
            num = batch.num_tokens
            states = torch.cat([states[:num] for states in given[3]], -1).clone()
            tokens, positions = batch.input_ids[:num].tolist(), batch.positions[:num].tolist()
            lengths = batch.num_scheduled_tokens.tolist()
            heard.append(Given(states, tokens, positions, list(batch.req_ids), lengths))
        return own(batch, *given, **named)

    setattr(owner, name, note_v2 if is_v2 else note_v1)
    try:
        yield heard
    finally:
        setattr(owner, name, own)


def test_a_head_is_given_the_hidden_states_it_was_trained_on(
    head: Engine, deep: Any, prompts: list[list[int]]
) -> None:
    """In steps without drafts, too."""
    some = prompts[:3]
    with overheard(head) as heard:
        ids = [head.add(prompt, **LONG) for prompt in some]
        done = head.run(lambda step: head.command("force", PLANS[step // 4 % 2 * 3]))
    served = {i: prompt + done[i][0] for i, prompt in zip(ids, some, strict=True)}
    expected = {i: tapped(deep, tokens) for i, tokens in served.items()}
    seen: dict[str, set[int]] = {i: set() for i in ids}
    for given in heard:
        for req_id, positions, tokens, states in given.by_request():
            for position, token, state in zip(positions, tokens, states, strict=True):
                if served[req_id][position : position + 1] != [token]:
                    break  # a draft token that was rejected, and what followed it
                wanted = expected[req_id][position]
                assert (state - wanted).abs().max() < 5e-5 * wanted.abs().max()
                seen[req_id].add(position)
    for i, tokens in served.items():
        assert seen[i] >= set(range(len(tokens) - 1)), "every position, once it is the target's"


@torch.no_grad()
def tapped(model: Any, tokens: list[int]) -> torch.Tensor:
    """[T, taps x H]"""
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap][0] for tap in TAPS], -1)


# ----------------------------------------------------------------------------------- without drafts


def test_a_head_makes_k_passes_and_one_at_k_0(head: Engine, prompts: list[list[int]]) -> None:
    for k in (4, 2, 1, 0):
        head.command("force", ("draft", k) if k else ("off", 0))
        passes = Passes(head)
        try:
            head.add(prompts[0], ignore_eos=True, max_tokens=8 * (k + 1))
            head.run(passes.next_step)
        finally:
            passes.close()
        ran = [num for num in passes.per_step if num]
        assert set(ran) == {max(1, k)} and len(ran) >= 8
    assert "reads the target's hidden states" in head.worker.osd_awake


def test_after_steps_without_drafts_a_head_proposes_what_it_would_have(
    head: Engine, prompts: list[list[int]]
) -> None:
    always = proposed(head, prompts[:3], {0: ("draft", 2)})
    pausing = proposed(head, prompts[:3], {0: ("off", 0), 14: ("draft", 2)})
    for before, after in zip(always, pausing, strict=True):
        both = before.keys() & after.keys()
        assert len(both) > 6
        assert {at: after[at] for at in both} == {at: before[at] for at in both}


def proposed(
    engine: Engine, prompts: Sequence[list[int]], plans: dict[int, tuple[str, int]]
) -> list[dict[int, list[int]]]:
    """What is proposed for each prompt, by position, under a plan from a step on."""
    engine.llm.reset_prefix_cache()
    engine.command("force", plans[0])
    kept = Proposals(engine)
    try:
        ids = [engine.add(prompt, **LONG) for prompt in prompts]
        engine.run(lambda step: engine.command("force", plans[step]) if step in plans else None)
    finally:
        kept.close()
    return [{end: ids for (req, end), ids in kept.found.items() if req == i} for i in ids]


def windows_of(engine: Engine) -> list[dict[str, Any]]:
    """What was counted since the last call."""
    engine.traces()
    windows: list[dict[str, Any]] = json.loads(engine.rpc("osd_report", "test", "default"))[
        "windows"
    ]
    return windows
