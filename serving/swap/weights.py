"""The weights of a live vLLM draft: how they are put into the model, and read back through its
layers.

This module uses private names of vLLM, which `serving/vllm/names.py` lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from osd.errors import SwapError
from serving.swap import proof
from serving.swap.live_draft import LiveDraft, Owned

SERVED_METHOD = "draft_model"
"""vLLM's method for a draft model of its own. All others are heads, or need no weights."""


def check_method(worker: Any) -> None:
    """Raise `SwapError` unless the draft is a model of its own."""
    method = worker.vllm_config.speculative_config.method
    if method != SERVED_METHOD:
        raise SwapError(
            f"vLLM would draft by the method {method!r}, which is not served: only a draft model "
            "of its own is. vLLM goes by the name of the draft's directory too: it must not "
            "contain eagle3, eagle-, dflash or dspark"
        )


def live_draft(worker: Any) -> LiveDraft:
    """The draft of this worker."""

    def pack(twin: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        method = getattr(twin, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            # Some methods do nothing when this is set.
            vars(twin).pop("_already_called_process_weights_after_loading", None)
            with set_current_vllm_config(worker.vllm_config):
                method.process_weights_after_loading(twin)

    return LiveDraft(worker.get_draft_model(), worker.model_runner.get_model(), unpacked, pack)


def load_draft_weights(worker: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load Hugging Face tensors into the live draft, between two engine steps."""
    draft = live_draft(worker)
    draft.put(draft.build(tensors))


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


@torch.no_grad()
def read_back(worker: Any) -> Iterator[torch.Tensor]:
    """What `proof.of_release` yields, read from the live draft, without what it shares with the
    target."""
    draft, target = worker.get_draft_model(), Owned(worker.model_runner.get_model())
    head = next((getattr(draft, name) for name in proof.HEADS if hasattr(draft, name)), None)
    for module in draft.modules():
        own = []
        if module not in target.modules:
            own = [p for p in module.parameters(recurse=False) if p not in target]
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
    """Parts of the target that a swap could change by mistake: vectors, and some rows of its
    matrices."""
    for parameter in worker.model_runner.get_model().parameters():
        is_number = parameter.is_floating_point() and parameter.element_size() >= 2
        if not is_number or not parameter.numel():
            continue  # empty, or quantised, which no draft shares
        if parameter.dim() == 1:
            yield parameter
        elif parameter.dim() == 2:
            yield parameter[proof.rows(len(parameter))]


def _is_head(module: Any) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, ParallelLMHead)


def _columns(module: Any, num_features: int) -> torch.Tensor:
    """[<= NUM_COLUMNS, outputs]: the layer's answers to unit vectors, without its bias."""
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
    """A number that changes when any weight of the target does. Buffers count too, since linear
    layers may be packed into them on a CPU."""
    target = worker.model_runner.get_model()
    total = 0.0
    for tensor in [*target.parameters(), *target.buffers()]:
        if tensor.numel() and tensor.is_floating_point():
            flat = tensor.detach().double().flatten()
            total += float(flat.sum()) + float(flat.abs().sum()) * 3.0
    return total
