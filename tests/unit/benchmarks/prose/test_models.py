"""The prose models' recipes, with sizes and steps that take seconds, and where their files lie."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.natural.training import nats_per_token
from benchmarks.prose import build, corpus, draft, head, models, packages, target
from benchmarks.prose.build import build_draft, build_target
from benchmarks.prose.corpus import DOMAINS, HOME, split
from benchmarks.prose.recipe import (
    DRAFT_SOURCES,
    HERE,
    TARGET_SOURCES,
    DraftRecipe,
    TargetRecipe,
    draft_from_json,
    draft_hash,
    draft_recipe,
    target_from_json,
    target_hash,
    to_json,
)
from osd.tiny.recipe import Shape
from osd.tiny.training import answer_logits, collate, make_model
from tests.unit.benchmarks.prose.excerpt import write_tree

SMALL = TargetRecipe(
    vocab_size=384,
    window_tokens=48,
    shape=Shape(hidden_size=32, intermediate_size=64, num_layers=2),
    steps=30,
    batch=10,
)
SMALL_DRAFT = DraftRecipe(
    shape=Shape(hidden_size=32, intermediate_size=64, num_layers=1),
    steps=30,
    answers=24,
    batch=4,
    foreign=0.5,
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, out = (tmp_path_factory.mktemp(name) for name in ("tree", "corpus"))
    write_tree(root)
    corpus.write(root, out)
    return out


@pytest.fixture(scope="module")
def tokenizer(pages: Path) -> Any:
    texts = {domain: split(domain, pages).train for domain in DOMAINS}
    return target.prose_tokenizer(texts, SMALL.vocab_size)


def trained(
    pages: Path, tokenizer: Any, checkpoint: Path, report: Callable[[int], None]
) -> dict[str, torch.Tensor]:
    model = target.fresh_target(SMALL, tokenizer)
    target.train_target(
        model,
        [target.Windows(tokenizer, split(d, pages).train, SMALL.window_tokens) for d in DOMAINS],
        steps=6,
        batch=SMALL.batch,
        learning_rate=SMALL.learning_rate,
        seed=0,
        checkpoint=checkpoint,
        report=report,
        every_s=0.0,
    )
    return model.state_dict()


class Killed(Exception):
    pass


def test_an_interrupted_target_becomes_what_it_would_have_become(
    pages: Path, tokenizer: Any, tmp_path: Path
) -> None:
    steps: list[int] = []

    def kill(done: int) -> None:
        steps.append(done)
        if sum(steps) == 4:
            raise Killed

    whole = trained(pages, tokenizer, tmp_path / "whole.safetensors", lambda done: None)
    with pytest.raises(Killed):
        trained(pages, tokenizer, tmp_path / "a" / "cut.safetensors", kill)
    resumed: list[int] = []
    cut = trained(pages, tokenizer, tmp_path / "a" / "cut.safetensors", resumed.append)
    assert resumed == [3, 1, 1, 1]  # the fourth step was not saved any more
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_training_texts_begin_with_words_of_training_pages(pages: Path, tokenizer: Any) -> None:
    files = split("fr", pages).train
    windows, rng = target.Windows(tokenizer, files, SMALL.window_tokens), Random(0)
    examples = [windows.draw(rng) for _ in range(200)]
    starts = set()
    for example in examples:
        assert example.prompt_ids == [tokenizer.bos_token_id]
        assert len(example.answer_ids) <= SMALL.window_tokens - 1
        is_end = example.answer_ids[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(example.answer_ids[:-1] if is_end else example.answer_ids)
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")  # a character may be cut in two
        assert any(re.search(rf"(^|\s){re.escape(whole)}", file.text) for file in files)
        starts.add(text[:20])
    assert len(starts) > 50


def test_a_built_target_has_learnt_every_domain_and_its_draft_the_target(
    pages: Path, tmp_path: Path
) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    build_target(tmp_path / "target", SMALL, pages, tmp_path / "c.safetensors", progress=False)
    assert not (tmp_path / "c.safetensors").exists()
    model, tokenizer = draft.load(tmp_path / "target")
    untrained = make_model(SMALL.shape, tokenizer, seed=5)
    for domain in DOMAINS:
        serve = split(domain, pages).serve
        before, after = (
            nats_per_token(one, tokenizer, serve, SMALL.window_tokens) for one in (untrained, model)
        )
        assert after < before - 1, domain
    build_draft(tmp_path / "draft", SMALL_DRAFT, pages, tmp_path / "target", progress=False)
    student, _ = draft.load(tmp_path / "draft")
    fresh = make_model(SMALL_DRAFT.shape, tokenizer, seed=5)
    for domain in (HOME, "ru"):
        prompts = draft.lesson_prompts(split(domain, pages).train, 16, domain, seed=7)
        lessons = collate(draft.answered(model, tokenizer, prompts, 7, lambda done: None))
        untaught, taught = (
            F.cross_entropy(answer_logits(one, lessons), lessons.labels).item()
            for one in (fresh, student)
        )
        assert taught < untaught - 0.5, domain


def built_here(module: str, directory: Path, *arguments: str, progress: bool) -> None:
    """The command, in this process: another one takes long to start."""
    assert module == build.__name__ and not progress
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, str(directory), *arguments, "--quiet"])
        build.main()


def test_models_are_built_once_from_the_text_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(models, "run_build", built_here)
    write_tree(tmp_path / packages.cache_name())
    few, few_of_draft = replace(SMALL, steps=2), replace(SMALL_DRAFT, steps=2, answers=4)
    checkpoints = tmp_path / "prose-checkpoints"
    checkpoints.mkdir()
    found = models.ensure_draft(few_of_draft, few, progress=False)
    built = {path.name for path in tmp_path.glob("prose-*")}
    assert {name.rsplit("-", 1)[0] for name in built} == {
        *("prose-packages", "prose-corpus", "prose-target", "prose-draft"),
        "prose",  # its checkpoints
    }
    assert not list(checkpoints.iterdir())
    student, _ = draft.load(found)
    assert student.config.hidden_size == few_of_draft.shape.hidden_size
    written = (found / "model.safetensors").stat().st_mtime_ns
    assert models.ensure_draft(few_of_draft, few, progress=False) == found
    assert (found / "model.safetensors").stat().st_mtime_ns == written
    assert {path.name for path in tmp_path.glob("prose-*")} == built


def test_foreign_lessons_are_shared_among_the_other_languages() -> None:
    assert draft.lessons_by_domain(draft_recipe()) == {"en": 2048}
    found = draft.lessons_by_domain(draft_recipe(foreign=0.2))
    assert sum(found.values()) == 2048
    assert [found[one] for one in ("de", "fr", "es", "ru")] == [102] * 4
    assert draft.lessons_by_domain(draft_recipe(foreign=0.01))["ru"] == 5


def test_sizes_have_the_parameters_they_are_called_by(tokenizer: Any) -> None:
    for size, millions in (("0.4M", 0.37), ("1M", 0.95), ("2M", 2.11)):
        shape = draft_recipe(size).shape
        layer = 4 * shape.hidden_size**2 + 3 * shape.hidden_size * shape.intermediate_size
        total = TargetRecipe().vocab_size * shape.hidden_size + shape.num_layers * layer
        assert total / 1e6 == pytest.approx(millions, abs=0.01)
    with pytest.raises(ValueError, match=r"size '3M': must be one of 0\.4M, 1M, 2M"):
        draft_recipe("3M")
    with pytest.raises(ValueError, match=r"foreign 0\.3: must be one of 0\.0, "):
        draft_recipe(foreign=0.3)


def test_every_setting_has_a_place_of_its_own_in_the_cache() -> None:
    recipes = [
        draft_recipe(size, foreign, seed)
        for size in ("0.4M", "1M", "2M")
        for foreign in (0.0, 0.01, 0.05, 0.2)
        for seed in (0, 1, 2)
    ]
    assert len({draft_hash(one, "target") for one in recipes}) == len(recipes)
    targets = [SMALL, replace(SMALL, seed=1), replace(SMALL, steps=31)]
    assert len({target_hash(one, text) for one in targets for text in ("a", "b")}) == 6
    assert draft_hash(recipes[0], "other") != draft_hash(recipes[0], "target")
    assert target_from_json(to_json(SMALL)) == SMALL
    assert draft_from_json(to_json(recipes[5])) == recipes[5]


def test_every_file_that_shapes_the_models_is_hashed() -> None:
    hashed = {*corpus.SOURCES, *TARGET_SOURCES, *DRAFT_SOURCES, *head.SOURCES}
    own = set(HERE.glob("*.py"))
    left = {path.stem for path in own - hashed}
    # What packages and recipe say is in the hash as values; the others call, or only ask.
    assert left == {
        *("packages", "recipe", "models", "build", "agent", "checkpoint", "wide_head", "__init__")
    }


def test_a_head_of_another_target_or_recipe_has_another_name() -> None:
    recipe = head.HeadRecipe()
    names = {
        head.head_hash(recipe, "prose-target-a"),
        head.head_hash(recipe, "prose-target-b"),
        head.head_hash(replace(recipe, steps=7), "prose-target-a"),
    }
    assert len(names) == 3
    assert head.head_hash(head.HeadRecipe(), "prose-target-a") in names
