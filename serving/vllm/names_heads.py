"""As `names.py`, for EAGLE-3 heads, on both model runners."""

from __future__ import annotations

from serving.vllm.name import Name

_MODELS = "vllm.model_executor.models"

HEADS: tuple[Name, ...] = (
    Name(
        f"{_MODELS}.interfaces:EagleModelMixin._set_aux_hidden_state_layers",
        takes=("self", "layers"),
        says=("self.aux_hidden_state_layers = tuple(sorted(set(layers)))",),
    ),
    Name("vllm.config.model:ModelConfig.get_total_num_hidden_layers", takes=("self",)),
    Name(
        f"{_MODELS}.llama_eagle3:Eagle3LlamaForCausalLM.load_weights",
        takes=("self", "weights"),
        says=("t2d", "draft_id_to_target_id"),
    ),
    # At k = 0 the head makes one pass over the step's tokens, so that its cache stays whole.
    Name(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.propose",
        takes=("self", "num_speculative_tokens", "target_hidden_states"),
        says=("self.model.combine_hidden_states(", "if self.num_speculative_tokens == 0:"),
    ),
    Name(
        "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
        ":TargetDependentARSpeculator.propose",
        takes=("self", "aux_hidden_states", "num_speculative_tokens"),
        says=("self.model.combine_hidden_states(", "if num_speculative_tokens <= 1:"),
    ),
)
