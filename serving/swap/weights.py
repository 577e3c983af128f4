"""The weights of a live vLLM draft: put into the model, and read back through its layers.

Like `serving/vllm`, which says what was run, this holds private names of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from osd.errors import SwapError
from serving.swap import proof
from serving.swap.live_draft import LiveDraft, Owned

SERVED_METHOD = "draft_model"
"""vLLM's name for drafting with a model of its own; all else are heads, or need no weights."""


def check_method(worker: Any) -> None:
    """Raise `SwapError` unless the draft is a model of its own."""
    method = worker.vllm_config.speculative_config.method
    if method != SERVED_METHOD:
        raise SwapError(
            f"vLLM would draft by the method {method!r}, which is not served: only a draft model of its own is. vLLM "
            "goes by the name of the draft's directory too: it must not contain eagle3, eagle-, dflash or dspark"
        )


def live_draft(worker: Any) -> LiveDraft:
    """The draft of this worker, to build weights for and to put them in."""

    def pack(twin: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        method = getattr(twin, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            vars(twin).pop("_already_called_process_weights_after_loading", None)  # else some methods do nothing
            with set_current_vllm_config(worker.vllm_config):
                method.process_weights_after_loading(twin)

    return LiveDraft(worker.get_draft_model(), worker.model_runner.get_model(), unpacked, pack)


def load_draft_weights(worker: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load Hugging Face tensors into the live draft, between two engine steps."""
    draft = live_draft(worker)
    draft.put(draft.build(tensors))


def unpacked(layer: Any, twin: Any) -> dict[str, torch.Tensor]:
    """Parameters as vLLM made them before it packed them, for the twin of a layer: what a checkpoint fills. Raises
    `SwapError` for layers that derive weights of their own from those of others."""
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    if is_deferred_attention_layer(layer) and not isinstance(layer, Attention):
        raise SwapError(f"the draft's {type(layer).__name__} derives weights when it is loaded, which is not supported")
    info = get_layerwise_info(layer)
    with info.restore_device if _needs_device(layer) else torch.device("cpu"):
        metadata = info.restore_metadata[0]
        made: dict[str, Any] = {name: materialize_meta_tensor(meta).zero_() for name, meta in metadata.items()}
    for tensor in made.values():
        tensor.weight_loader = _get_original_loader(tensor)  # vLLM's own way of reloading leaves it wrapped, and deaf
    return {name: restore_layer_refs(tensor, twin) for name, tensor in made.items()}


def _needs_device(layer: Any) -> bool:
    """Whether weights of this layer are packed where it computes: those that are quantised."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(layer, "quant_method", None)
    return method is not None and not isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))


@torch.no_grad()
def read_back(worker: Any) -> Iterator[torch.Tensor]:
    """What `proof.of_release` compares, from the live draft. What it shares with the target is left out."""
    draft, target = worker.get_draft_model(), Owned(worker.model_runner.get_model())
    head = next((getattr(draft, name) for name in proof.HEADS if hasattr(draft, name)), None)
    for module in draft.modules():
        own = [p for p in module.parameters(recurse=False) if module not in target.modules and p not in target]
        if hasattr(module, "embedding_dim"):
            if own and not _is_head(module):
                yield module.weight[proof.rows(module.org_vocab_size)]
            if own and (_is_head(module) or module is head):
                yield _columns(module, module.embedding_dim)
        elif hasattr(module, "input_size") and hasattr(module, "quant_method"):
            yield _columns(module, module.input_size)
            if getattr(module, "bias", None) is not None:
                yield module.bias
        else:
            yield from own


@torch.no_grad()
def sample_of_target(worker: Any) -> Iterator[torch.Tensor]:
    """What of the target a swap of the draft could reach by mistake: vectors, and entries of what may be shared. Its
    matrices are its own, and to read them back costs tokens of the target."""
    for parameter in worker.model_runner.get_model().parameters():
        if not parameter.is_floating_point() or not parameter.numel() or parameter.element_size() < 2:
            continue  # nothing, or numbers of a byte, which no draft shares
        if parameter.dim() == 1:
            yield parameter
        elif parameter.dim() == 2:
            yield parameter[proof.rows(len(parameter))]


def _is_head(module: Any) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, ParallelLMHead)


def _columns(module: Any, num_features: int) -> torch.Tensor:
    """[<= NUM_COLUMNS, outputs]: the layer's answer to unit vectors, without its bias."""
    chosen = proof.columns(num_features)
    like = next(module.parameters(recurse=False))
    units = torch.zeros(len(chosen), num_features, dtype=like.dtype, device=like.device)
    units[torch.arange(len(chosen)), chosen] = 1
    answer: torch.Tensor = module.quant_method.apply(module, units)
    return answer


def draft_dtype(worker: Any) -> torch.dtype:
    """The dtype the live draft computes in."""
    dtype: torch.dtype = worker.vllm_config.speculative_config.draft_model_config.dtype
    return dtype


def target_checksum(worker: Any) -> float:
    """A number that changes when any weight of the target does (CPU linears may be packed: their buffers count)."""
    total = 0.0
    for tensor in [*worker.model_runner.get_model().parameters(), *worker.model_runner.get_model().buffers()]:
        if tensor.numel() and tensor.is_floating_point():
            flat = tensor.detach().double().flatten()
            total += float(flat.sum()) + float(flat.abs().sum()) * 3.0
    return total
