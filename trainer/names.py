"""Names of tensors: the checkpoints of some architectures use other names than transformers.

A GPT-NeoX checkpoint holds `embed_out.weight`, which transformers 5 loads into `lm_head.weight`.
The trainer exports under the names of the checkpoint it loaded, because vLLM knows those.
"""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming


def names_in_model(
    hf: PreTrainedModel, stored: Collection[str], known: Collection[str]
) -> dict[str, str]:
    """Name in the checkpoint -> name in the model. `known` holds the names in the model; a name
    without a counterpart is mapped to itself.

    Only plain renamings are followed. Tensors that transformers splits or joins cannot be exported
    in their stored form.
    """
    renamings = [
        step for step in get_model_conversion_mapping(hf) if isinstance(step, WeightRenaming)
    ]

    def rename(name: str) -> str:
        renamed = name
        for step in renamings:
            renamed, _ = step.rename_source_key(renamed)
        return renamed if renamed in known else name

    return {name: name if name in known else rename(name) for name in stored}
