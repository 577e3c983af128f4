"""EAGLE-3 heads, over ways of running vLLM: they serve, sleep less, and are swapped as draft models
are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from serving.speculation.goodput import Plan
from serving.vllm import undrafted
from tests.integration.conftest import release_of
from tests.integration.engines.conftest import started
from tests.integration.engines.test_sleep import Passes, Proposals
from tests.integration.serving.test_capture import assert_rows_are_the_targets, keep_all
from tests.integration.serving.test_swap import acceptance_and_outputs, truncated
from tests.support.engines import Engine
from tests.support.fit import misfit_of
from tests.support.headed import TAPS, WEIGHTS, build_head, build_headed
from tests.support.pairs import Pair
from tests.support.reference import K, Reference
from tests.support.ways import COMPILED, V1_ASYNC, V1_SYNC, Way

LONG = {"ignore_eos": True, "max_tokens": 32}
PLANS = [("off", 0), *(("draft", k) for k in range(1, K + 1))]
MIXED = tuple(Plan("draft", 3, is_mixed=True))
FORMS: dict[Way, dict[str, Any]] = {
    V1_SYNC: {"form": "specforge", "has_embedding": True},
    V1_ASYNC: {"form": "specforge", "has_embedding": False},
    COMPILED: {"form": "specforge", "has_embedding": False},
}
"""Of the heads in one way; in all others they are as speculators saves them, with an embedding."""


@pytest.fixture(scope="session")
def headed(tmp_path_factory: pytest.TempPathFactory, way: Way) -> Pair:
    form = FORMS.get(way, {"form": "speculators"})
    return build_headed(tmp_path_factory.mktemp(f"headed-{way.name}"), **form)


@pytest.fixture(scope="session")
def alone(headed: Pair) -> Reference:
    """The same target without speculation."""
    return Reference(headed)


@pytest.fixture(scope="session")
def drafting(headed: Pair, way: Way) -> Engine:
    undrafted.refuse_undrafted()
    engine = started(
        headed, way, speculative={"method": "eagle3"}, max_num_batched_tokens=384, max_num_seqs=16
    )
    core = engine.llm.llm_engine.engine_core.engine_core
    problems = [engine.rpc("osd_undrafted"), core.osd_undrafted()]
    undrafted.permit(engine.llm.llm_engine.vllm_config.speculative_config, problems)
    return engine


@pytest.fixture
def head(drafting: Engine, headed: Pair) -> Iterator[Engine]:
    """An engine whose head proposes 4 tokens; at the end control and hooks must be whole."""
    drafting.command("force", ("draft", K))
    drafting.llm.reset_prefix_cache()
    if drafting.worker.osd_swapper.version != 1:
        assert drafting.swap(release_of(headed.draft, 1))["error"] == ""
    yield drafting
    drafting.traces()
    assert drafting.command("report")["problem"] == ""
    assert drafting.worker.osd_hook.is_listening
    assert drafting.worker.osd_off == {}


@pytest.fixture(scope="session")
def deep(headed: Pair) -> Any:
    return AutoModelForCausalLM.from_pretrained(headed.target, dtype=torch.float32).eval()


# ------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("plan", [("draft", 3), ("draft", 1), ("off", 0), "changing"], ids=str)
def test_with_a_head_tokens_are_the_targets(
    head: Engine, alone: Reference, prompts: list[list[int]], plan: Any
) -> None:
    random, plans = np.random.default_rng(0), [*PLANS, ("memory", 2), MIXED]

    def change(_step: int) -> None:
        chosen = plans[random.integers(len(plans))] if plan == "changing" else plan
        head.command("force", chosen)

    ids = [head.add(prompt, **LONG) for prompt in prompts[:4]]
    done = head.run(change)
    assert [done[i][0] for i in ids] == alone.generate(prompts[:4], **LONG)
    (window,) = windows_of(head)[-1:] or [{"num_accepted_tokens": 1}]
    assert window["num_accepted_tokens"] > 0 or plan == ("off", 0)


def test_with_a_head_tokens_are_the_targets_while_20_heads_are_swapped_in(
    head: Engine, alone: Reference, headed: Pair, prompts: list[list[int]]
) -> None:
    answers = []

    def swap(_step: int) -> None:
        if len(answers) < 20:
            path = (headed.stranger, headed.draft)[len(answers) % 2]
            answers.append(head.swap(release_of(path, 2 + len(answers))))

    before = head.worker.osd_target_checksum()
    ids = [head.add(prompt, **LONG) for prompt in prompts[:4]]
    done = head.run(swap)
    assert [done[i][0] for i in ids] == alone.generate(prompts[:4], **LONG)
    assert [(answer["error"], answer["proved"]) for answer in answers] == [("", True)] * 20
    assert head.worker.osd_target_checksum() == before


def test_at_temperature_one_tokens_drafted_by_a_head_follow_the_target(
    head: Engine, deep: Any, prompts: list[list[int]]
) -> None:
    keep_all(head)
    head.generate(prompts, ignore_eos=True, max_tokens=80, temperature=1.0)
    traces = head.traces()
    assert misfit_of(deep, traces, 1.0) > 1e-4
    assert misfit_of(deep, traces, 0.6) < 1e-6, "samples are too few to tell temperatures apart"


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


# ------------------------------------------------------------------------------------- bad releases


def with_tensor(name: str, change: Callable[[torch.Tensor], None]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        change(tensors[name])
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})

    return act


def foreign_embedding(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    own = tensors.get("embed_tokens.weight", torch.zeros(96, 64))
    tensors["embed_tokens.weight"] = own + 0.5
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def other_taps(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]
    (path / "config.json").write_text(json.dumps(config))


REFUSALS: dict[str, tuple[Callable[[Path], None], str]] = {
    "another embedding": (foreign_embedding, "another embedding than the target's"),
    "another d2t": (with_tensor("d2t", lambda t: t[3:].add_(1)), "d2t is another than the engine"),
    "NaN": (with_tensor("fc.weight", lambda t: t[0].fill_(torch.nan)), "fc.weight holds NaN"),
    "truncated": (truncated, "is damaged"),
    "other taps": (other_taps, "taps=(1, 3, 5), the engine runs (1, 3, 6)"),
}


@pytest.mark.parametrize("what", [*REFUSALS, "another hidden size"])
def test_a_bad_release_of_a_head_is_refused_and_nothing_changes(
    head: Engine, headed: Pair, prompts: list[list[int]], tmp_path: Path, way: Way, what: str
) -> None:
    before = acceptance_and_outputs(head, prompts[:2])
    change, line = REFUSALS.get(what, (lambda path: None, "the engine runs 64"))
    if what in REFUSALS:
        shutil.copytree(headed.stranger, tmp_path / "bad")
    else:
        build_wide(tmp_path / "bad", headed.target, way)
    change(tmp_path / "bad")
    if what == "another embedding" and not holds_embedding(headed.draft):
        line = "1 tensors are unknown, first embed_tokens.weight"
    answer = head.swap(release_of(tmp_path / "bad", 2))
    assert line in answer["error"]
    assert acceptance_and_outputs(head, prompts[:2]) == before
    assert head.worker.osd_swapper.prove() == ""


def holds_embedding(path: Path) -> bool:
    return "embed_tokens.weight" in load_file(path / WEIGHTS)


def build_wide(directory: Path, target: Path, way: Way) -> Path:
    """A head that is 128 wide."""
    form = FORMS.get(way, {"form": "speculators"})
    build_head(directory, target, 2, **form)
    config = json.loads((directory / "config.json").read_text())
    config.get("transformer_layer_config", config)["hidden_size"] = 128
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def windows_of(engine: Engine) -> list[dict[str, Any]]:
    engine.traces()
    windows: list[dict[str, Any]] = json.loads(engine.rpc("osd_report", "test", "default"))[
        "windows"
    ]
    return windows
