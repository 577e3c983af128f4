"""Which EAGLE-3 heads fit a target. Each misfit is one line: what, where, remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from osd.errors import ConfigError
from osd.models import eagle3
from osd.models.compatibility import context_length, read_config, vocab_size
from osd.models.fit import check_fit, is_head
from osd.models.head_fit import check_head, check_parts
from tests.support.heads import write_head
from tests.support.pairs import VOCABULARY, tokenizer
from tests.support.served_targets import served_target

FORMS: tuple[eagle3.Form, ...] = ("specforge", "speculators")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_target(tmp_path_factory.mktemp("models") / "target")


def set_keys(head: Path, **keys: Any) -> Path:
    """Put keys on top of the head's configuration; None takes one out."""
    file = head / "config.json"
    config = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return head


def set_tensors(head: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, head / "model.safetensors")
    return head


def refused(target: Path, head: Path, max_model_len: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_fit(target, head, max_model_len)
    line = str(caught.value)
    assert str(head) in line and "\n" not in line and ("; " in line)
    return line.removeprefix(f"serving.draft={head}: ")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_draft", [VOCABULARY, 40])
@pytest.mark.parametrize("has_embedding", [False, True])
def test_heads_of_both_forms_fit(
    target: Path, tmp_path: Path, form: eagle3.Form, num_draft: int, has_embedding: bool
) -> None:
    head = write_head(
        tmp_path, target, form=form, draft_vocab_size=num_draft, has_embedding=has_embedding
    )
    assert is_head(head) and not is_head(target)
    assert check_fit(target, head) == VOCABULARY
    config = read_config(head)
    assert vocab_size(config, head) == VOCABULARY and context_length(config) == 64


def test_a_head_as_eagle_itself_names_it_fits(target: Path, tmp_path: Path) -> None:
    keys = {"architectures": ["LlamaForCausalLM"], eagle3.TAPS: None}
    head = set_keys(write_head(tmp_path, target, draft_vocab_size=40), **keys)
    assert check_fit(target, head) == VOCABULARY


def test_all_norms_that_are_named_are_asked_for(target: Path, tmp_path: Path) -> None:
    flags = {"norm_before_fc": True, "fc_norm": True, "norm_output": True}
    assert check_fit(target, write_head(tmp_path / "all", target, **flags)) == VOCABULARY
    head = write_head(tmp_path / "less", target)
    for key, first in (
        ("norm_before_fc", "input_norm.weight"),
        ("fc_norm", "fc_norm.0.weight"),
    ):
        assert f"tensors are missing, first {first}" in refused(
            target, set_keys(head, **{key: True})
        )
        set_keys(head, **{key: None})


def test_the_context_is_at_least_the_served_one(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, target, max_position_embeddings=48)
    assert refused(target, head).endswith(
        "has a context of 48 tokens, the target serves 64, and one longer request would stop "
        "speculation for all; set serving.vllm.max_model_len=48, or raise max_position_embeddings "
        "in its config.json (of a hub name, in a copy): its layer computes at any position"
    )
    assert check_head(target, head, 48) == check_parts(target, head) == VOCABULARY


def test_a_context_of_a_speculators_head_stands_in_its_layer(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, target, form="speculators")
    layer = json.loads((head / "config.json").read_text())[eagle3.LAYER]
    set_keys(head, **{eagle3.LAYER: layer | {"max_position_embeddings": 48}})
    assert "has a context of 48 tokens" in refused(target, head)


def test_a_tokenizer_of_its_own_is_compared(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, target)
    tokenizer().save_pretrained(head)
    assert check_fit(target, head) == VOCABULARY
    file = head / "tokenizer.json"
    file.write_text(file.read_text().replace('"t5":5', '"t5":6').replace('"t6":6', '"t6":5'))
    file.write_text(file.read_text().replace('"t5": 5', '"t5": 6').replace('"t6": 6', '"t6": 5'))
    assert "another tokenizer than the target's (they disagree on 't5'" in refused(target, head)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"target_hidden_size": 48}, "reads hidden states of 48 numbers, the target's have 32"),
        ({"vocab_size": 90}, "is for a vocabulary of 90 tokens, the target has 96"),
        ({"draft_vocab_size": 97}, "has draft_vocab_size=97, the target has 96 tokens"),
        ({eagle3.TAPS: [2, 4, 8]}, "[2, 4, 8]: the target has 8 layers, and no layer 8"),
        ({eagle3.TAPS: [-1, 2, 4]}, "[-1, 2, 4]: the target has 8 layers, and no layer -1"),
        ({eagle3.TAPS: [2, 2, 4]}, "[2, 2, 4]: one layer is there twice"),
        ({eagle3.TAPS: [2, 4]}, "[2, 4]: they are 2, and vLLM gives 3 to the head; set num_aux"),
        ({eagle3.TAPS: "2"}, "eagle_aux_hidden_state_layer_ids is '2', and must be a list"),
        ({"norm_output": "yes"}, "norm_output is 'yes', and must be true or false"),
        ({"num_hidden_layers": 2}, "is an EAGLE-3 head of 2 llama layer(s)"),
        ({"hidden_act": "gelu"}, "config.json has hidden_act='gelu', and only heads without"),
        ({"mlp_bias": True}, "config.json has mlp_bias=True"),
        ({"logit_scale": 0.5}, "config.json has logit_scale=0.5"),
        ({"quantization_config": {"bits": 8}}, "config.json has quantization_config="),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "has use_aux_hidden_state=false"),
        ({"intermediate_size": 64}, "layers.0.mlp.down_proj.weight has shape [32, 48], not [32, 6"),
        ({"mask_token_id": 3}, "is a P-EAGLE head (LlamaForCausalLMEagle3), and of heads only"),
        ({"draft_vocab_size": 30}, "lm_head.weight has shape [40, 32], not [30, 32]"),
        ({"intermediate_size": None}, "has no intermediate_size"),
        ({"num_attention_heads": None}, "has no num_attention_heads"),
        ({"num_attention_heads": 0}, "has no num_attention_heads"),
        ({"eagle_config": "true"}, "config.json: eagle_config is no mapping"),
        ({"eagle_config": {eagle3.TAPS: 3}}, "eagle_aux_hidden_state_layer_ids is 3, and must"),
        ({"draft_vocab_size": "40"}, "draft_vocab_size is '40', and must be a whole number above"),
        ({"target_hidden_size": "32"}, "target_hidden_size is '32', and must be a whole number"),
        ({"head_dim": "wide"}, "head_dim is 'wide', and must be a whole number above 0; correct"),
        ({"head_dim": -8}, "head_dim is -8, and must be a whole number above 0"),
        ({"num_key_value_heads": [2]}, "num_key_value_heads is [2], and must be a whole number"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4', and must be a whole number"),
        ({"num_aux_hidden_states": "three"}, "num_aux_hidden_states is 'three', and must be"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings is '64', and must be a"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', and must be a number above 0"),
        ({"rope_theta": "10000"}, "rope_theta is '10000', and must be a number above 0"),
        ({"rope_scaling": "linear"}, "config.json: rope_scaling is no mapping"),
        ({"rope_parameters": {"factor": "2"}}, "rope_parameters has factor='2', which is no"),
        ({"attention_bias": "false"}, "attention_bias is 'false', and must be true or false"),
    ],
)
def test_a_configuration_that_does_not_fit(
    target: Path, tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    head = write_head(tmp_path, target, draft_vocab_size=40)
    assert says in refused(target, set_keys(head, **keys))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"model_type": "eagle3"},
            "config.json has model_type=eagle3, by which vLLM does not know",
        ),
        ({"speculators_config": None}, "config.json has no speculators_config, by which vLLM"),
        ({"model_type": "speculators"}, ""),
    ],
)
def test_a_speculators_head_is_known_as_one(
    target: Path, tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    head = set_keys(write_head(tmp_path, target, form="speculators"), **keys)
    if says:
        assert says in refused(target, head)
    else:
        assert check_fit(target, head) == VOCABULARY


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


def shift(tensors: Tensors) -> None:
    """Two draft tokens are one of the target."""
    tensors["d2t"][3] -= 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop("fc.weight"), "1 of its tensors are missing, first fc.weight"),
        (drop("d2t"), "holds no d2t, which says which 40 of 96 tokens it proposes"),
        (put("layers.1.x.weight", torch.ones(2)), "are unknown, first layers.1.x.weight"),
        (put("fc.weight", torch.ones(32, 64)), "fc.weight has shape [32, 64], not [32, 96]"),
        (put("fc.weight", torch.ones(32, 96).to(torch.int8)), "fc.weight is I8, and heads in"),
        (put("embed_tokens.weight", torch.ones(95, 32)), "embed_tokens.weight has shape [95, 32]"),
        (put("d2t", torch.ones(40)), "d2t is F32 [40], not I64 [40]"),
        (put("d2t", torch.ones(39, dtype=torch.int64)), "d2t is I64 [39], not I64 [40]"),
        (put("d2t", torch.full((40,), 57)), "d2t maps to token 96, the target has 96"),
        (put("d2t", torch.full((40,), -1)), "d2t maps to token -1, the target has 96"),
        (shift, "d2t maps its 40 tokens to 39 of the target's"),
        (put("d2t", torch.full((40,), 3)), "d2t and t2d name different tokens of the target"),
        (put("t2d", torch.ones(96, dtype=torch.bool)), "d2t and t2d name different tokens"),
        (put("t2d", torch.ones(95, dtype=torch.bool)), "t2d is BOOL [95], not BOOL [96]"),
    ],
)
def test_tensors_that_do_not_fit(
    target: Path, tmp_path: Path, change: Callable[[Tensors], object], says: str
) -> None:
    head = write_head(tmp_path, target, draft_vocab_size=40)
    assert says in refused(target, set_tensors(head, change))


def test_what_nobody_reads_may_lie_in_it(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, target, draft_vocab_size=40)
    set_tensors(head, put("midlayer.self_attn.rotary_emb.inv_freq", torch.ones(8)))
    set_tensors(head, drop("t2d"))
    assert check_fit(target, head) == VOCABULARY


def test_a_map_between_equal_vocabularies_is_not_loaded(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, target)
    set_tensors(head, put("d2t", torch.zeros(VOCABULARY, dtype=torch.int64)))
    assert "holds d2t, which vLLM does not load where" in refused(target, head)


def test_another_width_needs_an_embedding_of_its_own(target: Path, tmp_path: Path) -> None:
    keys = {"hidden_size": 16, "target_hidden_size": 32, "head_dim": 16}
    head = write_head(tmp_path, target, **keys)
    assert "has a hidden size of 16, the target 32, and no embedding" in refused(target, head)
    set_tensors(head, put("embed_tokens.weight", torch.ones(VOCABULARY, 16)))
    assert check_fit(target, head) == VOCABULARY


def test_taps_that_vllm_counts_may_be_more(target: Path, tmp_path: Path) -> None:
    taps = (1, 2, 4, 6)
    counted = write_head(tmp_path / "counted", target, taps=taps, num_aux_hidden_states=4)
    assert check_fit(target, counted) == VOCABULARY
    within = write_head(tmp_path / "within", target, taps=taps)
    set_keys(within, **{eagle3.TAPS: None, "eagle_config": {eagle3.TAPS: list(taps)}})
    assert check_fit(target, within) == VOCABULARY


def test_layers_that_vllm_chooses_exist_in_the_target(tmp_path: Path) -> None:
    shallow = served_target(tmp_path / "target", num_hidden_layers=4)
    head = set_keys(write_head(tmp_path / "head", shallow), **{eagle3.TAPS: None})
    line = refused(shallow, head)
    assert line.startswith("names no layers of the target, and vLLM's own choice [2, 2, 1]: one")


def test_damaged_and_missing_files(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, target)
    file = head / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    assert "shorter than its header says" in refused(target, head)
    file.rename(head / "model-00001-of-00002.safetensors")
    index = {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert "model-00002-of-00002.safetensors is missing" in refused(target, head)
    (head / "model.safetensors.index.json").unlink()
    (head / "model-00001-of-00002.safetensors").unlink()
    assert "no model.safetensors there" in refused(target, head)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["EagleLlamaForCausalLM"]}, "an EAGLE-1 or EAGLE-2 head"),
        ({"architectures": ["DeepSeekMTPModel"]}, "an MTP head"),
        ({"architectures": ["MedusaModel"]}, "a Medusa head"),
        ({"speculators_model_type": "peagle", "speculators_config": {}}, "a P-EAGLE head"),
        ({"architectures": ["DFlashDraftModel"]}, "a DFlash head"),
        ({"architectures": ["Qwen3DSparkModel"]}, "a DSpark head"),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "an EAGLE-3 head of another layer than"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "a draft head (MLPSpeculator"),
    ],
)
def test_other_heads_are_refused_by_their_kind(
    target: Path, tmp_path: Path, config: dict[str, Any], kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": VOCABULARY}))
    line = refused(target, tmp_path)
    assert line.startswith(f"is {kind}")
    assert "and of heads only EAGLE-3 heads of one Llama layer are served; use such a" in line


def test_a_speculators_head_of_qwen3_layers_is_refused(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, target, form="speculators")
    layer = json.loads((head / "config.json").read_text())[eagle3.LAYER]
    set_keys(head, **{eagle3.LAYER: layer | {"model_type": "qwen3"}})
    assert "is an EAGLE-3 head of 1 qwen3 layer(s)" in refused(target, head)


def test_an_older_head_that_says_nothing_is_known_by_its_weights(
    target: Path, tmp_path: Path
) -> None:
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.ones(32, 64)}, tmp_path / "model.safetensors")
    assert "is an EAGLE-1 or EAGLE-2 head (it holds fc.weight)" in refused(target, tmp_path)
