"""The head that `osd distil --new-head` begins with: for the target's tokens, and refused where
there can be none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from osd.errors import ConfigError
from osd.models.eagle3 import read_spec
from osd.models.fit import check_fit
from osd.offline.new_head import STAND_IN_SIZE, size_for, write_for, write_stand_in
from osd.records import Trace
from tests.support.pairs import VOCABULARY
from tests.support.served_targets import served_target

SAID = [5, 90, 90, 7, 90, 41]
"""One token often, three once."""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return served_target(tmp_path / "target")


def text(*output_ids: int) -> Trace:
    return Trace.of_text(np.array([95, 95, 95]), np.array(output_ids))


def ids_of(head: Path) -> list[int]:
    tensors = load_file(head / "model.safetensors")
    offsets = tensors["d2t"]
    ids = (torch.arange(len(offsets)) + offsets).tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == ids
    return [int(i) for i in ids]


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}], ids=["own", "tied"])
def test_it_may_propose_what_the_target_said_most(tmp_path: Path, options: dict[str, bool]) -> None:
    target = served_target(tmp_path / "target", **options)
    texts = [text(*SAID), text(90, 41, 3)]
    head = write_for(tmp_path / "head", target, texts, size=2, seed=0)
    assert ids_of(head) == [41, 90], "the prompts' 95 does not count"
    assert check_fit(target, head) == VOCABULARY
    ours, theirs = (load_file(p / "model.safetensors") for p in (head, target))
    name = "model.embed_tokens.weight" if options else "lm_head.weight"
    assert torch.equal(ours["lm_head.weight"], theirs[name][[41, 90]])
    assert read_spec(head).taps == (2, 4, 5), "vLLM's choice, written down"


def test_tokens_that_nobody_said_fill_it_up(target: Path, tmp_path: Path) -> None:
    head = write_for(tmp_path / "head", target, [text(*SAID)], size=6, seed=0)
    assert ids_of(head) == [0, 1, 5, 7, 41, 90]


def test_one_for_all_tokens_has_no_maps(target: Path, tmp_path: Path) -> None:
    head = write_for(tmp_path / "head", target, [text(*SAID)], size=VOCABULARY, seed=0)
    assert "d2t" not in load_file(head / "model.safetensors")
    assert check_fit(target, head) == VOCABULARY


def test_it_depends_on_the_seed_and_the_answers_alone(target: Path, tmp_path: Path) -> None:
    texts = [text(*SAID), text(1, 2)]
    heads = [
        load_file(
            write_for(tmp_path / name, target, texts, size=9, seed=seed) / "model.safetensors"
        )
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    same = [[torch.equal(heads[0][name], other[name]) for name in heads[0]] for other in heads[1:]]
    assert all(same[0]) and not all(same[1])


def test_norms_begin_as_one(target: Path, tmp_path: Path) -> None:
    head = write_for(tmp_path / "head", target, [text(*SAID)], size=9, seed=0)
    tensors = load_file(head / "model.safetensors")
    norms = {name: tensor for name, tensor in tensors.items() if "norm" in name}
    assert {"fc_norm.0.weight", "fc_norm.2.weight", "norm.weight"} < set(norms)
    assert all((tensor == 1).all() for tensor in norms.values())
    assert all(tensors[f"{name}.weight"].std() > 0.01 for name in ("fc", "midlayer.mlp.up_proj"))


def test_a_target_whose_layers_are_no_llamas_gets_a_llama_layer(tmp_path: Path) -> None:
    target = served_target(tmp_path / "target", hidden_act="gelu")
    head = write_for(tmp_path / "head", target, [text(*SAID)], size=9, seed=0)
    assert check_fit(target, head) == VOCABULARY


def test_the_stand_in_fits_and_is_small(target: Path, tmp_path: Path) -> None:
    head = write_stand_in(tmp_path / "head", target)
    assert check_fit(target, head) == VOCABULARY
    assert read_spec(head).draft_vocab_size == STAND_IN_SIZE < VOCABULARY


@pytest.mark.parametrize("asked, size", [(None, VOCABULARY), (7, 7), (VOCABULARY, VOCABULARY)])
def test_its_size(target: Path, asked: int | None, size: int) -> None:
    assert size_for(target, asked) == size


@pytest.mark.parametrize("asked", [0, -1, VOCABULARY + 1])
def test_impossible_sizes_are_refused(target: Path, asked: int) -> None:
    with pytest.raises(ConfigError, match=f"^--draft-vocab={asked}: must be between 1 and the 96"):
        size_for(target, asked)


def test_a_flat_target_is_refused(tmp_path: Path) -> None:
    target = served_target(tmp_path / "target", num_hidden_layers=4)
    with pytest.raises(ConfigError, match="^--new-head: .* has 4 layers, and a head reads before"):
        size_for(target, None)


def test_a_target_without_an_output_layer_is_refused(target: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="^--new-head: .* holds no lm_head.weight of 96 rows"):
        size_for(target, None)
    config = json.loads((target / "config.json").read_text())
    del config["tie_word_embeddings"]
    (target / "config.json").write_text(json.dumps(config))
    assert size_for(target, None) == VOCABULARY, "it is the embedding then"


@pytest.mark.parametrize("key", [{"model_type": "unheard_of"}, {"num_attention_heads": "many"}])
def test_a_target_that_transformers_does_not_know_is_refused(
    key: dict[str, str], target: Path
) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | key))
    with pytest.raises(ConfigError, match="^--new-head: .*: its config.json is none that") as error:
        size_for(target, None)
    assert "\n" not in str(error.value)
