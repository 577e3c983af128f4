"""Names of tensors: some architectures are stored under other names than transformers gives their parameters.

A GPT-NeoX checkpoint holds `embed_out.weight`, which transformers 5 loads into `lm_head.weight`. What the trainer
exports must bear the names of the checkpoint it came from: those are the ones vLLM knows.
"""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming


def names_in_model(hf: PreTrainedModel, stored: Collection[str], known: Collection[str]) -> dict[str, str]:
    """Name in the checkpoint -> name in the model, whose names are `known`. A name unknown to both stands for itself.

    Only plain renamings are followed: tensors that transformers splits or joins could not be exported as they were.
    """
    renamings = [step for step in get_model_conversion_mapping(hf) if isinstance(step, WeightRenaming)]

    def rename(name: str) -> str:
        renamed = name
        for step in renamings:
            renamed, _ = step.rename_source_key(renamed)
        return renamed if renamed in known else name

    return {name: name if name in known else rename(name) for name in stored}
