"""Served tokens follow the target: the same at temperature 0, the same distribution above it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from transformers import AutoModelForCausalLM

from serving.vllm import names, parts, server, source
from tests.integration.conftest import release_of
from tests.support import older_vllm
from tests.support.engines import Engine
from tests.support.pairs import Pair

NUM_PROMPTS = 10
SAMPLES_PER_PROMPT = 600

Samples = dict[tuple[int, ...], list[list[int]]]
"""prompt -> sampled continuations"""


def test_identical_to_no_speculation_across_swaps_in_flight(
    engine: Engine, plain: Engine, pair: Pair, prompts: list[list[int]]
) -> None:
    drafts = [pair.draft, pair.stranger]
    swaps = []

    def swap(step: int) -> None:
        if step % 3 == 0:
            version = 2 + len(swaps)
            swaps.append(engine.swap(release_of(drafts[len(swaps) % 2], version))["error"])

    ids = [engine.add(prompt, ignore_eos=True, max_tokens=80) for prompt in prompts]
    done = engine.run(swap)
    assert [done[i][0] for i in ids] == plain.generate(prompts, ignore_eos=True, max_tokens=80)
    assert len(swaps) >= 8
    assert set(swaps) == {""}


@pytest.fixture(scope="module")
def target(pair: Pair) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()


def drafted_samples(engine: Engine, prompts: list[list[int]], temperature: float) -> Samples:
    """Three tokens after each prompt, many times over. The first is never drafted, the others
    are."""
    samples: Samples = {}
    for prompt in prompts[:NUM_PROMPTS]:
        engine.add(
            prompt, n=SAMPLES_PER_PROMPT, temperature=temperature, max_tokens=3, ignore_eos=True
        )
        samples[tuple(prompt)] = next(iter(engine.run().values()))
        engine.traces()
    return samples


def misfit(target: torch.nn.Module, samples: Samples, temperature: float) -> float:
    """p-value that tokens at the drafted positions (second, third) follow the target, by a pooled
    chi-square test.

    For each context with enough samples, counts of the next token against the target's exact
    probabilities; cells expected fewer than five times are put together.
    """
    statistic, freedom = 0.0, 0
    for context, following in contexts_of(samples).items():
        total = len(following)
        if total < 100:
            continue
        with torch.no_grad():
            logits = target(torch.tensor([context])).logits[0, -1]
        expected = (logits / temperature).double().softmax(-1).numpy() * total
        observed = np.bincount(following, minlength=len(expected))
        common = expected >= 5
        cells = [(observed[common], expected[common])]
        if expected[~common].sum() >= 5:
            cells.append(
                (observed[~common].sum(keepdims=True), expected[~common].sum(keepdims=True))
            )
        statistic += sum(float(((o - e) ** 2 / e).sum()) for o, e in cells)
        freedom += sum(len(o) for o, _ in cells) - 1
    assert freedom >= 40, f"only {freedom} degrees of freedom: too few samples to say anything"
    return float(chi2.sf(statistic, freedom))


def contexts_of(samples: Samples) -> dict[tuple[int, ...], list[int]]:
    """context (prompt and one or two sampled tokens) -> tokens sampled next, all at drafted
    positions"""
    found: dict[tuple[int, ...], list[int]] = {}
    for prompt, continuations in samples.items():
        for tokens in continuations:
            for length in (1, 2):
                found.setdefault((*prompt, *tokens[:length]), []).append(tokens[length])
    return found


def as_written(module: ModuleType, name: str) -> FunctionType:
    """A function of a module as its file defines it, whatever has taken its place since."""
    assert module.__spec__ is not None and module.__spec__.loader is not None
    copy = importlib.util.module_from_spec(module.__spec__)
    module.__spec__.loader.exec_module(copy)
    written = getattr(copy, name)
    return FunctionType(written.__code__, vars(module), name, written.__defaults__)


@pytest.fixture
def without_fix() -> Iterator[None]:
    """vLLM's CPU sampling as it comes, without our repair."""
    from vllm.v1.sample import rejection_sampler

    repaired = rejection_sampler.expand_batch_to_tokens
    original = as_written(rejection_sampler, "expand_batch_to_tokens")
    rejection_sampler.expand_batch_to_tokens = original
    yield
    rejection_sampler.expand_batch_to_tokens = repaired


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_drafted_tokens_follow_the_targets_distribution(
    engine: Engine, target: torch.nn.Module, prompts: list[list[int]], temperature: float
) -> None:
    p_value = misfit(target, drafted_samples(engine, prompts, temperature), temperature)
    print(f"temperature {temperature}: p = {p_value:.3f}")
    assert p_value > 1e-4


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_the_test_of_distribution_fails_without_the_repair(
    engine: Engine,
    target: torch.nn.Module,
    prompts: list[list[int]],
    without_fix: None,
    temperature: float,
) -> None:
    assert misfit(target, drafted_samples(engine, prompts, temperature), temperature) < 1e-8


@pytest.mark.parametrize("look", [None, source.installed()], ids=["imported", "source"])
@pytest.mark.parametrize("part", names.NAMES)
def test_every_part_finds_its_names_in_the_installed_vllm(
    part: names.Part, look: parts.Look | None
) -> None:
    is_off = part in names.TESTED_VERSIONS[older_vllm.VERSION]
    assert bool(parts.problem_with(part, look)) == is_off


def test_the_benchmarks_find_their_names_in_the_installed_vllm() -> None:
    assert parts.missing(names.BENCH_NAMES) == ""


def test_the_installed_engine_is_one_the_project_was_run_on() -> None:
    assert older_vllm.VERSION in names.TESTED_VERSIONS


@pytest.mark.parametrize("k_max", [1, 5])
def test_the_v2_runner_is_asked_for_graphs_of_every_k(k_max: int) -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    assert server.graphs_for_every_k(k_max, {}) == {}, "V1 would give up its full graphs"
    assert server.graphs_for_every_k(k_max, {"VLLM_USE_V2_MODEL_RUNNER": "0"}) == {}
    asked = server.graphs_for_every_k(k_max, {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    (table,) = asked.values()
    lookup = build_dynamic_sd_schedule_lookup(table, 64, k_max)[1:]
    assert set(lookup) == set(range(1 + k_max))
    assert lookup.count(k_max) == 64 - k_max, "most sizes are for the largest"
    few = [build_dynamic_sd_schedule_lookup(table, n, k_max)[1:] for n in (1, 2, 1 + k_max)]
    assert few[:2] == [[k_max], [k_max, 0]], "what vLLM would run without us, then none"
    assert set(few[2]) == set(range(1 + k_max))


@pytest.mark.parametrize("given", ["secret", ["secret"]])
def test_a_key_given_as_text_is_one_key(given: object) -> None:
    """vLLM takes a list, and would take each letter of a text for a key."""
    args = server.engine_arguments("model", {"api-key": given, "max_model_len": 256})
    assert (args.api_key, args.max_model_len) == (["secret"], 256)
