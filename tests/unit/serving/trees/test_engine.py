"""The engine on random models: its passes, its answers, and what it refuses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from osd.errors import ConfigError
from serving.trees import fitting, passes
from serving.trees.dice import RandomDice
from serving.trees.drafting import Drafting, feed_prompts, probabilities
from serving.trees.engine import TreeEngine
from serving.trees.passes import Passes
from serving.trees.reading import Reading, sequence_based, tree_attention
from serving.trees.tree import Tree
from tests.support.heads import write_head
from tests.support.pairs import build_pair
from tests.support.served_targets import served_target
from tests.support.tiny_drafts import tiny_llama
from tests.unit.serving.trees.test_tree import EIGHT, tree_of

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8], [60, 3]]
SHAPES = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (3, 2, 2), (4,)]
NUM_TOKENS = 14
READINGS = [tree_attention, sequence_based]


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_llama(0, scale=0.4)


@pytest.fixture(scope="module")
def drafts(target: Any) -> list[Any]:
    """Two copies of the target with noise: often right, each in its own way."""
    return [noisy(target, seed) for seed in (1, 2)]


def noisy(model: Any, seed: int, noise: float = 0.15) -> Any:
    copy = tiny_llama(vocab_size=model.config.vocab_size)
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in copy.parameters():
            random = torch.randn(weights.shape, generator=generator)
            weights.add_(noise * random * weights.std())
    return copy


@torch.no_grad()
def plain(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits of the token after `ids`, by a pass of its own."""
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits


def random_tree(root: int, seed: int) -> Tree:
    rng, tree = np.random.default_rng(seed), Tree(root)
    for _ in range(9):
        tree.add(int(rng.integers(len(tree))), int(rng.integers(64)))
    return tree


def largest_error(model: Any, reading: Reading) -> float:
    """Of any logit, over two steps of a batch of trees between which paths are kept."""
    contexts = [list(prompt) for prompt in PROMPTS]
    running = Passes(model, len(contexts), 100)
    feed_prompts(running, contexts)
    found = []
    for step in range(2):
        trees = [random_tree(ids[-1], 10 * step + i) for i, ids in enumerate(contexts)]
        logits, places = reading(running, trees)
        for ids, tree, rows in zip(contexts, trees, logits, strict=True):
            for node in range(len(tree)):
                text = ids + [tree.tokens[n] for n in tree.path(node)[1:]]
                found.append(float((rows[node] - plain(model, text)).abs().max()))
        paths = [max(tree.branches(), key=len)[: 2 + i] for i, tree in enumerate(trees)]
        kept = zip(places, paths, strict=True)
        running.keep([[of[node] for node in path] for of, path in kept])
        for ids, tree, path in zip(contexts, trees, paths, strict=True):
            ids += [*(tree.tokens[node] for node in path[1:]), 11]
    return max(found)


def answers(engine: TreeEngine, **options: Any) -> list[tuple[int, ...]]:
    found = engine.generate(PROMPTS, NUM_TOKENS, **options)
    return [answer.output_ids for answer in found]


@pytest.mark.parametrize("reading", READINGS)
def test_a_tree_is_read_as_its_branches_would_be(target: Any, reading: Reading) -> None:
    assert largest_error(target, reading) < 1e-5


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_one_off_is_noticed(
    target: Any, drafts: list[Any], monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    unspeculated = answers(TreeEngine(target))
    right = passes.ancestry
    monkeypatch.setattr(passes, "ancestry", lambda parents: np.roll(right(parents), shift, axis=1))
    assert largest_error(target, tree_attention) > 0.01
    assert answers(TreeEngine(target, drafts, (2, 2, 1))) != unspeculated


def test_eight_tokens_take_one_pass_of_8_slots_or_three_of_13(target: Any) -> None:
    """Figure 4 of arXiv 2305.09781."""
    spent = []
    for reading in READINGS:
        running = Passes(target, 1, 20)
        reading(running, [tree_of(EIGHT)])
        spent.append((running.num_passes, running.num_fed))
    assert spent == [(1, 8), (3, 13)]


def test_padding_is_no_node(target: Any) -> None:
    running = Passes(target, 2, 20)
    running.feed([[1, 2, 3], [4]], [[-1, 0, 1], [-1]])
    assert (running.num_passes, running.num_fed) == (1, 4)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize("widths", SHAPES, ids=str)
def test_greedy_answers_are_those_without_speculation(
    target: Any, drafts: list[Any], widths: tuple[int, ...], num_drafts: int, reading: Reading
) -> None:
    unspeculated = answers(TreeEngine(target))
    engine = TreeEngine(target, drafts[:num_drafts], widths, reading=reading)
    found = engine.generate(PROMPTS, NUM_TOKENS)
    assert [answer.output_ids for answer in found] == unspeculated
    assert sum(step.num_accepted for answer in found for step in answer.steps) > 10
    assert all(step.num_passes == 1 for step in engine.steps) or reading is sequence_based


def test_no_speculation_is_a_greedy_walk(target: Any) -> None:
    for prompt, output in zip(PROMPTS, answers(TreeEngine(target)), strict=True):
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            ids.append(int(plain(target, ids).argmax()))
        assert output == tuple(ids[len(prompt) :])


def test_answers_end_where_they_should_each_on_its_own(target: Any, drafts: list[Any]) -> None:
    whole = answers(TreeEngine(target))
    eos = {whole[0][4], whole[2][9]}
    wanted = [ids[: min([i + 1 for i, t in enumerate(ids) if t in eos] or [99])] for ids in whole]
    assert len({len(ids) for ids in wanted}) > 1
    assert answers(TreeEngine(target, drafts, (3, 2, 2)), eos=eos) == wanted


def test_a_draft_remembers_what_was_accepted_and_forgets_the_rest(target: Any) -> None:
    """Over steps that follow its trees for 0 to 3 tokens, whole paths among them."""
    draft = Drafting(target, (2, 1, 2), "top", 1.0, RandomDice())
    contexts = [list(prompt) for prompt in PROMPTS]
    draft.begin(contexts, 80)
    for step in range(6):
        trees, new = draft.propose(), list[list[int]]()
        for i, (ids, tree) in enumerate(zip(contexts, trees, strict=True)):
            assert tree.tokens[0] == ids[-1]
            for node in range(len(tree)):
                path = [tree.tokens[n] for n in tree.path(node)[1:]]
                if (depth := tree.depths[node]) < 3:
                    wanted = plain(target, ids + path).topk((2, 1, 2)[depth]).indices.tolist()
                    assert [tree.tokens[trial.child] for trial in tree.trials[node]] == wanted
            followed = tree.path(len(tree) - 1)[1:][: (step + i) % 4]
            new.append([*(tree.tokens[node] for node in followed), 50 + step])
            ids += new[-1]
        draft.accept(new)


def test_a_draft_that_is_the_target_is_always_right(target: Any, drafts: list[Any]) -> None:
    for pool in ([target], [drafts[0], target]):
        found = TreeEngine(target, pool, (1, 1, 1)).generate(PROMPTS, 20)
        assert [answer.tokens_per_step for answer in found] == [4.0] * len(PROMPTS)


def test_a_draft_samples_at_the_temperature_of_the_target(target: Any) -> None:
    engine = TreeEngine(target, [target], (1, 1, 1), temperature=0.3)
    found = engine.generate(PROMPTS, 20)
    assert [answer.tokens_per_step for answer in found] == [4.0] * len(PROMPTS)


def test_the_time_of_a_slow_target_is_the_targets(target: Any, drafts: list[Any]) -> None:
    def slowly(running: Passes, trees: Any) -> Any:
        time.sleep(0.2)
        return tree_attention(running, trees)

    engine = TreeEngine(target, drafts[:1], (1,), reading=slowly)
    engine.generate([[1, 2]], 1)
    (step,) = engine.steps
    assert 0.2 <= step.target_s < step.seconds


def test_answers_by_chance_are_those_of_the_seed(target: Any, drafts: list[Any]) -> None:
    one, again, other = (
        answers(TreeEngine(target, drafts[:1], (2, 1), temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    )
    assert one == again != other


def test_a_step_counts_what_it_brought(target: Any, drafts: list[Any]) -> None:
    engine = TreeEngine(target, drafts[:1], (2, 1, 1))
    found = engine.generate(PROMPTS, NUM_TOKENS)
    for answer in found:
        assert [step.num_drafted for step in answer.steps] == [6] * len(answer.steps)
        assert sum(step.num_tokens for step in answer.steps) == NUM_TOKENS
        for step in answer.steps[:-1]:
            assert step.num_tokens == step.num_accepted + 1
        assert answer.tokens_per_step == NUM_TOKENS / len(answer.steps) > 1
    assert engine.steps[0].num_nodes == len(PROMPTS) * 7
    assert sum(step.num_requests for step in engine.steps) == sum(len(a.steps) for a in found)


def test_a_wider_or_a_second_draft_takes_fewer_steps(target: Any, drafts: list[Any]) -> None:
    def num_steps(num_drafts: int, widths: tuple[int, ...]) -> int:
        found = TreeEngine(target, drafts[:num_drafts], widths).generate(PROMPTS, 30)
        return sum(len(answer.steps) for answer in found)

    assert num_steps(0, (1,)) == 30 * len(PROMPTS)
    assert num_steps(1, (3, 1, 1)) < num_steps(1, (1, 1, 1)) < 30 * len(PROMPTS)
    assert num_steps(2, (1, 1, 1)) < num_steps(1, (1, 1, 1))


@pytest.mark.parametrize(
    ("children", "rule"),
    [
        ("sampled", "multi-step"),
        ("distinct", "multi-step"),
        ("top", "multi-step"),
        ("top", "naive"),
    ],
)
def test_sampled_answers_follow_the_target(children: str, rule: str) -> None:
    """Three tokens of a vocabulary of six, two drafts, 1000 requests in one batch."""
    target = tiny_llama(5, scale=0.5, vocab_size=6)
    drafts = [noisy(target, seed, 0.8) for seed in (1, 2)]
    options = {"temperature": 0.7, "children": children, "rule": rule}
    engine = TreeEngine(target, drafts, (2, 1), **options)
    outputs = [answer.output_ids for answer in engine.generate([[1, 2, 3]] * 1000, 3)]
    law = np.ones(())
    for _ in range(3):
        after = [plain(target, [1, 2, 3, *text]) for text in np.ndindex(law.shape)]
        given = np.stack([probabilities(logits_V, 0.7) for logits_V in after])
        law = law[..., None] * given.reshape((*law.shape, 6))
    observed = np.zeros(law.shape)
    np.add.at(observed, tuple(np.array(outputs).T), 1)
    assert pvalue(observed.ravel(), law.ravel()) > 1e-4


def pvalue(observed: np.ndarray, law: np.ndarray) -> float:
    """Chi-square, outcomes that are rare taken together."""
    expected = law * observed.sum()
    is_common = expected >= 8
    counts = [*observed[is_common], observed[~is_common].sum()]
    wanted = [*expected[is_common], expected[~is_common].sum()]
    return float(chisquare(counts, np.array(wanted) * sum(counts) / sum(wanted)).pvalue)


def test_a_tree_beyond_the_context_is_refused_in_one_line(target: Any, drafts: list[Any]) -> None:
    engine = TreeEngine(target, drafts, (2, 1, 1))
    engine.generate([[1] * 243], 10)
    with pytest.raises(ConfigError, match="3 deep need a context of 257, it has 256") as caught:
        engine.generate([[1] * 244], 10)
    assert "\n" not in str(caught.value)
    (alone,) = TreeEngine(target, (), (2, 1, 1)).generate([[1] * 246], 10)
    assert len(alone.output_ids) == 10  # no tree needs room


def test_a_width_of_zero_and_an_empty_prompt_are_refused(target: Any, drafts: list[Any]) -> None:
    with pytest.raises(ConfigError, match="⟨2, 0⟩"):
        TreeEngine(target, drafts, (2, 0))
    with pytest.raises(ConfigError, match="at least one token"):
        TreeEngine(target).generate([[1], []], 4)


def test_drafts_of_two_vocabularies_are_refused(target: Any, drafts: list[Any]) -> None:
    other = tiny_llama(vocab_size=65)
    with pytest.raises(ConfigError, match="draft 2: 65 tokens, the target has 64"):
        TreeEngine(target, [drafts[0], other])


def test_a_draft_of_another_tokenizer_is_not_loaded(tmp_path: Path) -> None:
    pair = build_pair(tmp_path)
    file = pair.stranger / "tokenizer.json"
    file.write_text(file.read_text().replace('"t40"', '"other"'))
    assert len(fitting.load(pair.target, [pair.draft])[1]) == 1
    with pytest.raises(ConfigError, match="another tokenizer than the target's") as caught:
        fitting.load(pair.target, [pair.draft, pair.stranger])
    assert "\n" not in str(caught.value)


def test_a_head_is_no_draft_of_trees(tmp_path: Path) -> None:
    target = served_target(tmp_path / "target")
    head = write_head(tmp_path / "head", target)
    with pytest.raises(ConfigError, match="trees need a draft model, this is an EAGLE-3 head"):
        fitting.load(target, [head])


@pytest.mark.parametrize("key", [{"layer_types": ["sliding_attention"]}, {"sliding_window": 8}])
def test_layers_that_read_no_tree_are_refused(key: dict[str, Any]) -> None:
    windowed = tiny_llama()
    for name, value in key.items():
        setattr(windowed.config, name, value)
    with pytest.raises(ConfigError, match="target: layers of sliding_attention"):
        TreeEngine(windowed)
