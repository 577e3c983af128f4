"""Which configurations are those of draft heads.

They have the names that vLLM uses for them, or entries that only heads have.
"""

from __future__ import annotations

import pytest

from osd.models.heads import KEYS, draft_head


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
