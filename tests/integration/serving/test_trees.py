"""Token trees on the tiny pair, its draft made worse so that there is something to gain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.trees.runs import Bench
from osd.tiny.models import ensure
from osd.tiny.tokenizer import chat_prompt
from osd.tiny.traffic import DOMAINS, requests
from serving.trees import verify
from serving.trees.drafting import probabilities
from serving.trees.engine import Answer, TreeEngine
from serving.trees.expand import CHILDREN
from tests.support.greedy import greedy_answers
from tests.unit.serving.trees.test_verify import EXACT, error

SHAPES = [(1, 1, 1), (2, 1, 1), (3, 2, 2)]
NUM_TOKENS = 24
TEMPERATURE = 1.5
"""The tiny target is too sure of its tokens at 1 to tell distributions apart."""
SEED = 1001


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("trees"), {"good": 0.0, "middling": 0.5}, num_requests=16)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Six of each domain."""
    tokenizer: Any = AutoTokenizer.from_pretrained(ensure().target)
    return [chat_prompt(tokenizer, r.prompt) for d in DOMAINS for r in requests(d, 6, SEED)]


@pytest.mark.parametrize("widths", SHAPES, ids=str)
def test_greedy_answers_are_the_targets(
    bench: Bench, prompts: list[list[int]], widths: tuple[int, ...]
) -> None:
    target = AutoModelForCausalLM.from_pretrained(ensure().target).eval()
    alone = [example.answer_ids[:NUM_TOKENS] for example in greedy_answers(target, prompts)]
    engine = TreeEngine(bench.target, [bench.drafts["middling"]], widths)
    found = engine.generate(prompts, NUM_TOKENS, bench.eos)
    assert [list(answer.output_ids) for answer in found] == alone
    assert sum(step.num_accepted for answer in found for step in answer.steps) > 50


def sampled(bench: Bench, prompts: list[list[int]], children: str) -> list[Answer]:
    engine = TreeEngine(
        bench.target,
        [bench.drafts["middling"]],
        (4, 2),
        temperature=TEMPERATURE,
        children=children,
    )
    return engine.generate(prompts * 4, NUM_TOKENS, bench.eos)


@torch.no_grad()
def pvalue(bench: Bench, prompts: list[list[int]], answers: list[Answer]) -> float:
    """Of the answers under the target: each token's place in the target's distribution, ordered by
    how much more the draft would have said it, is uniform."""
    rng, places = np.random.default_rng(0), list[float]()
    for prompt, answer in zip(prompts * 4, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer.output_ids]])
        p_NV, q_NV = (
            probabilities(model(ids).logits[0, len(prompt) - 1 : -1], TEMPERATURE)
            for model in (bench.target, bench.drafts["middling"])
        )
        for p_V, q_V, token in zip(p_NV, q_NV, answer.output_ids, strict=True):
            is_before_V = q_V / p_V > q_V[token] / p_V[token]
            places.append(float(p_V[is_before_V].sum() + rng.random() * p_V[token]))
    return float(kstest(places, "uniform").pvalue)


@pytest.mark.parametrize("children", CHILDREN)
def test_sampled_answers_follow_the_target(
    bench: Bench, prompts: list[list[int]], children: str
) -> None:
    assert pvalue(bench, prompts, sampled(bench, prompts, children)) > 1e-4


def test_a_rejection_that_leaves_p_as_it_was_shows_in_the_answers(
    bench: Bench, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "residual", lambda p_V, q_V: p_V)
    assert pvalue(bench, prompts, sampled(bench, prompts, "sampled")) < 1e-6


def test_the_largest_tree_is_exact() -> None:
    """21 nodes, every outcome gone through."""
    assert error((2, 1, (3, 2, 2)), "sampled") < EXACT


def test_wider_trees_bring_more_tokens(bench: Bench, tmp_path: Path) -> None:
    for temperature in (0.0, 1.0):
        brought = [
            np.mean(
                bench.steps(
                    "middling",
                    NUM_TOKENS,
                    batch=16,
                    widths=(width, 1, 1),
                    temperature=temperature,
                    children="distinct",
                )["tokens_per_step"]
            )
            for width in (1, 5)
        ]
        assert brought[1] > brought[0] + 0.1


def test_success_rises_with_the_children_where_the_target_is_not_sure(bench: Bench) -> None:
    """Greedy success flattens, as in table 1 of arXiv 2305.09781; stochastic success goes on."""
    found = {
        (temperature, row["rule"], row["k"]): float(np.mean(row["success"]))
        for temperature in (0.0, 3.0)
        for row in bench.successes("good", temperature, NUM_TOKENS, (1, 2, 5))
    }
    greedy, drawn = (
        [found[temperature, rule, k] for k in (1, 2, 5)]
        for temperature, rule in ((0.0, "greedy"), (3.0, "multi-step, drawn"))
    )
    assert greedy[1] - greedy[0] > (greedy[2] - greedy[1]) / 3
    assert drawn[2] - drawn[0] > 3 * (greedy[2] - greedy[0])
    for k in (1, 2, 5):
        assert found[3.0, "multi-step, drawn", k] > found[3.0, "naive, drawn", k]
