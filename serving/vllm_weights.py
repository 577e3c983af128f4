"""The weights of a live vLLM draft: put into the model, and read back through its layers.

Like `serving/vllm_compat.py`, which says what was run, this holds private names of vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from serving import proof


@contextmanager
def _vllm_config(worker: Any) -> Iterator[None]:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        yield


def load_draft_weights(worker: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load Hugging Face tensors into the live draft, in place, between two engine steps.

    Layerwise reload is the only way that re-packs CPU linears and keeps storage addresses on CUDA. Should loading
    raise, the draft is left usable only after another complete load: callers must load a good state again.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    draft = worker.get_draft_model()
    draft_config = worker.vllm_config.speculative_config.draft_model_config
    with _vllm_config(worker), torch.no_grad(), _nothing_said_of_layers_without_weights():
        initialize_layerwise_reload(draft)
        try:
            draft.load_weights(list(tensors.items()))
        finally:
            finalize_layerwise_reload(draft, draft_config)
            _repack_tied_heads(draft)


WITHOUT_WEIGHTS = ("RotaryEmbedding", "ParallelLMHead")


@contextmanager
def _nothing_said_of_layers_without_weights() -> Iterator[None]:
    """vLLM warns at each reload of layers that have no tensors of their own (rotary embeddings, tied heads), as if they
    had failed. What did arrive, `serving/proof.py` reads back."""

    def is_news(record: logging.LogRecord) -> bool:
        layer, _, text = record.getMessage().partition(": ")
        return text != "Failed to load weights" or layer not in WITHOUT_WEIGHTS

    vllm_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    vllm_logger.addFilter(is_news)
    try:
        yield
    finally:
        vllm_logger.removeFilter(is_news)


def _repack_tied_heads(draft: Any) -> None:
    """Refresh CPU output heads that are tied to the embedding.

    Their weight is the embedding's own tensor, so a reload loads nothing "into" them, and the packed copy the CPU
    multiplies with would stay that of the draft the engine started with.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in draft.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)


def names_shared_with_target(worker: Any) -> set[str]:
    """Parameter names of the draft whose storage belongs to the target (EAGLE heads share its embedding)."""
    target = worker.model_runner.get_model()
    target_ids = {id(p) for p in target.parameters()}
    return {name for name, p in worker.get_draft_model().named_parameters() if id(p) in target_ids}


@torch.no_grad()
def read_back(worker: Any) -> Iterator[torch.Tensor]:
    """What `proof.of_release` compares, from the live draft. What it shares with the target is left out."""
    draft = worker.get_draft_model()
    shared = {id(p) for p in worker.model_runner.get_model().parameters()}
    head = next((getattr(draft, name) for name in proof.HEADS if hasattr(draft, name)), None)
    for module in draft.modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in shared]
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
