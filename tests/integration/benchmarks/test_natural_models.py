"""The natural-text models, built by a recipe that takes seconds from an empty cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.natural.models import ensure_natural, ensure_natural_cost_shaped, requests
from benchmarks.natural.recipe import Recipe, natural_hash
from benchmarks.natural.sampling import sampled_answers
from benchmarks.natural.text import PACKAGES
from osd.tiny.recipe import Shape
from osd.tiny.tokenizer import chat_prompt

SMALL = Recipe(
    vocab_size=512,
    target=Shape(hidden_size=64, intermediate_size=128, num_layers=1),
    target_steps=30,
    target_batch=4,
    draft=Shape(hidden_size=32, intermediate_size=64, num_layers=1),
    draft_answers=8,
    draft_steps=5,
    draft_batch=4,
)


@pytest.fixture(scope="module")
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OSD_CACHE_DIR", str(directory))
        yield directory


def test_built_once_and_found_again_under_its_hash(cache_directory: Path) -> None:
    first = ensure_natural(progress=False, recipe=SMALL)
    weights = first.target / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert first.target == cache_directory / f"natural-{natural_hash(SMALL)}" / "target"
    assert ensure_natural(progress=False, recipe=SMALL) == first
    assert weights.stat().st_mtime_ns == written
    assert (first.draft / "model.safetensors").stat().st_size < weights.stat().st_size


def test_cost_shaped_target_gives_the_same_answers(cache_directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = ensure_natural(progress=False, recipe=SMALL)
    path = ensure_natural_cost_shaped(128, 2, 256, progress=False, recipe=SMALL)
    assert path.parent == cache_directory
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    target, wide = (AutoModelForCausalLM.from_pretrained(p).eval() for p in (models.target, path))
    assert wide.num_parameters() > 3 * target.num_parameters()
    prompts = [
        chat_prompt(tokenizer, requests(package, 1, seed=1)[0].prompt) for package in PACKAGES
    ]
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            difference = target(input_ids=ids).logits - wide(input_ids=ids).logits
            assert difference.abs().max().item() < 1e-4
    expected = sampled_answers(target, prompts, 0.7, seed=1)
    assert sampled_answers(wide, prompts, 0.7, seed=1) == expected
