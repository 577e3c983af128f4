"""What a swap needs of vLLM's layers: how they are packed, and how they were before that."""

from __future__ import annotations

from typing import Any

import torch

from osd.errors import SwapError


def pack(layer: Any, vllm_config: Any) -> None:
    """Bring the weights of a layer into the form in which they serve."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        # Some methods do nothing when this is set.
        vars(layer).pop("_already_called_process_weights_after_loading", None)
        with set_current_vllm_config(vllm_config):
            method.process_weights_after_loading(layer)


def unpacked(layer: Any, twin: Any) -> dict[str, torch.Tensor]:
    """Parameters for the twin of a layer as vLLM made them before it packed them, to be filled by a
    checkpoint. Raises `SwapError` for layers that derive weights from others."""
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import (
        _get_original_loader,
        get_layerwise_info,
    )
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    if is_deferred_attention_layer(layer) and not isinstance(layer, Attention):
        raise SwapError(
            f"the draft's {type(layer).__name__} derives weights when it is loaded, which is not "
            "supported"
        )
    info = get_layerwise_info(layer)
    with info.restore_device if _needs_device(layer) else torch.device("cpu"):
        metadata = info.restore_metadata[0]
        made: dict[str, Any] = {
            name: materialize_meta_tensor(meta).zero_() for name, meta in metadata.items()
        }
    for tensor in made.values():
        # vLLM's own reloading leaves the loader wrapped in one that does nothing.
        tensor.weight_loader = _get_original_loader(tensor)
    return {name: restore_layer_refs(tensor, twin) for name, tensor in made.items()}


def _needs_device(layer: Any) -> bool:
    """Whether the weights of this layer are packed on its device, as quantised ones are."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(layer, "quant_method", None)
    return method is not None and not isinstance(
        method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    )


def is_head(module: Any) -> bool:
    """Whether a module is an output head, or an embedding that is one too."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, ParallelLMHead)
