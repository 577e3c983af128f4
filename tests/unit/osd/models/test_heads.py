"""Which configurations are those of draft heads.

They have the names that vLLM uses for them, or entries that only heads have.
"""

from __future__ import annotations

import pytest

from osd.models.eagle3 import is_eagle3
from osd.models.heads import KEYS, PARALLEL, draft_head


@pytest.mark.parametrize(
    "name",
    [
        "EagleLlamaForCausalLM",
        "LlamaForCausalLMEagle3",
        "PeagleQwen3ForCausalLM",
        "MedusaModel",
        "DeepSeekMTPModel",
        "Qwen3NextMTP",
        "Qwen3DSparkModel",
        "DFlashDraftModel",
        "MLPSpeculatorPreTrainedModel",
        "LiLiCorrDraftModel",
    ],
)
def test_a_head_is_known_by_its_architecture_or_type(name: str) -> None:
    assert draft_head({"architectures": ["LlamaForCausalLM", name]}) == name
    config = {"architectures": ["LlamaForCausalLM"], "model_type": name.lower()}
    assert draft_head(config) == name.lower()


@pytest.mark.parametrize("key", KEYS)
def test_a_head_is_known_by_an_entry_of_its_own(key: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", key: None}
    assert draft_head(config) == key


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": None, "model_type": None},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"},
        {"architectures": ["Eagle2_5_VLForConditionalGeneration"], "model_type": "eagle2_5_vl"},
    ],
)
def test_a_model_of_its_own_is_no_head(config: dict[str, object]) -> None:
    assert draft_head(config) == ""


@pytest.mark.parametrize(
    ("config", "is_served"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, True),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, True),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, True),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, True),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "peagle"}, False),
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({"architectures": ["Qwen3ForCausalLM"], "draft_vocab_size": 32000}, False),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, False),
        ({"architectures": ["EagleLlamaForCausalLM"]}, False),
        ({}, False),
        *(({"architectures": ["LlamaForCausalLMEagle3"], key: 3}, False) for key in PARALLEL),
    ],
)
def test_which_heads_are_served(config: dict[str, object], is_served: bool) -> None:
    assert is_eagle3(config) is is_served
    assert not is_served or draft_head(config)
