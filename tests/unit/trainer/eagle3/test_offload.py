"""A target of which the memory holds a part: the layers in its files compute what they would."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from osd.errors import OSDError
from osd.models.eagle3 import read_spec
from tests.support.deep_targets import TAPS, deep_llama
from tests.support.heads import write_head
from tests.support.tiny_drafts import TARGET_ID, chain_traces, release_of
from tests.support.tiny_rounds import GATE, buffer_with, config, same_weights
from trainer.batch import collate
from trainer.eagle3.features import TargetFeatures
from trainer.loop import Trainer
from trainer.sampling.teacher import Teacher

EMBEDDING_AND_SOME = 110_000
"""Bytes: the embedding, a few of the eight layers, and room for the one that is read."""
K = 3


@pytest.fixture(scope="module", params=["1GB", "40KB"], ids=["one file", "shards"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    deep_llama().save_pretrained(directory, max_shard_size=request.param)
    return directory


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), target, taps=TAPS)


def features(teacher: Teacher, head: Path) -> Tensor:
    batch = collate(chain_traces(5), 64, teacher.model.vocab_size, packed=True)
    return TargetFeatures(teacher, K).of(read_spec(head))(batch)


def num_in_files(teacher: Teacher) -> int:
    """Layers of which nothing is in memory."""
    layers = cast(torch.nn.ModuleList, teacher.model.hf.base_model.layers)
    return sum(all(p.is_meta for p in layer.parameters()) for layer in layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_and_rows_are_those_of_the_whole_target(
    target: Path, head: Path, dtype: str
) -> None:
    whole = Teacher(target, top_k=4, dtype=dtype)
    part = Teacher(target, top_k=4, dtype=dtype, memory=EMBEDDING_AND_SOME)
    expected = features(whole, head)
    for _ in range(2):  # what was read is let go of
        assert torch.equal(features(part, head), expected)
        assert 0 < num_in_files(part) < 8
    assert num_in_files(whole) == 0 and whole.model.hf.dtype == getattr(torch, dtype)
    both = zip(whole.label(chain_traces(3)), part.label(chain_traces(3)), strict=True)
    for one, other in both:
        assert (one.target_ids == other.target_ids).all()
        assert (one.target_logprobs == other.target_logprobs).all()
    assert torch.equal(TargetFeatures(whole, K).embedding(), TargetFeatures(part, K).embedding())


def test_a_head_learns_from_it_what_it_would(target: Path, head: Path, tmp_path: Path) -> None:
    def learnt(name: str, memory: int | None) -> str:
        teacher = Teacher(target, top_k=16, memory=memory)
        buffer = buffer_with(*chain_traces(16))
        directory = tmp_path / name
        trainer = Trainer(config(), GATE, K, buffer, directory, TARGET_ID, teacher=teacher)
        return trainer.run_round(release_of(head)).path

    assert same_weights(learnt("whole", None), learnt("part", EMBEDDING_AND_SOME))


def test_memory_that_holds_all_of_it_leaves_nothing_in_files(target: Path, head: Path) -> None:
    teacher = Teacher(target, top_k=4, memory=1 << 30)
    assert torch.equal(features(teacher, head), features(Teacher(target, top_k=4), head))
    assert num_in_files(teacher) == 0


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("vocab_size", [64, 2048], ids=["large layer", "large output layer"])
def test_the_embedding_and_the_largest_that_is_read_have_to_fit(
    tmp_path: Path, vocab_size: int, is_tied: bool
) -> None:
    model = deep_llama(vocab_size=vocab_size, tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path)
    embedding = model.get_input_embeddings().weight.nbytes
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    least = embedding + max(layer, 0 if is_tied else model.lm_head.weight.nbytes)
    assert num_in_files(Teacher(tmp_path, top_k=4, memory=least)) > 0
    too_little = f"^trainer.target_memory_bytes={least - 1}: does not hold .* an output layer that"
    with pytest.raises(OSDError, match=too_little):
        Teacher(tmp_path, top_k=4, memory=least - 1).model  # noqa: B018
