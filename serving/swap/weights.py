"""The weights of a live vLLM draft: how they are put into the model, and read back through its
layers.

What it needs of vLLM stands in `serving/vllm/layers.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from serving.swap import proof
from serving.swap.live_draft import LiveDraft, Owned
from serving.vllm import layers

KINDS = {False: proof.EMBEDDINGS, True: proof.HEADS}
"""Whether a module is an output head -> parts of its name in checkpoints."""


def live_draft(worker: Any) -> LiveDraft:
    """The draft of this worker."""

    def pack(twin: Any) -> None:
        layers.pack(twin, worker.vllm_config)

    return LiveDraft(
        worker.get_draft_model(), worker.model_runner.get_model(), layers.unpacked, pack
    )


def load_draft_weights(worker: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load Hugging Face tensors into the live draft, between two engine steps."""
    draft = live_draft(worker)
    draft.put(draft.build(tensors))


@torch.no_grad()
def read_back(worker: Any, names: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """What `proof.of_release` yields, read from this rank's part of the live draft, each part with
    its holder. What it shares with the target is left out, but for an embedding and an output head
    that the release carries too: `names` are those of its tensors."""
    draft, target = worker.get_draft_model(), Owned(worker.model_runner.get_model())
    carried = {is_head: proof.holds(names, kind) for is_head, kind in KINDS.items()}
    head = next((getattr(draft, name) for name in proof.HEADS if hasattr(draft, name)), None)
    for module in draft.modules():
        own = list(module.parameters(recurse=False))
        if not (hasattr(module, "embedding_dim") and carried[_is_head(module)]):
            own = [] if module in target.modules else [p for p in own if p not in target]
        if hasattr(module, "embedding_dim"):
            if own and not _is_head(module):
                yield _holder(module), _rows(module)
            if own and (_is_head(module) or module is head):
                yield _holder(module), _columns(module, proof.columns(module.embedding_dim))
        elif hasattr(module, "input_size") and hasattr(module, "quant_method"):
            yield from _by_holder(module, _columns(module, _local_columns(module)))
            if getattr(module, "bias", None) is not None:
                yield from _biases(module)
        else:
            yield from ((proof.EVERY_RANK, part) for part in own)


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
    return layers.is_head(module)


def _holder(module: Any) -> str:
    """Who holds what this layer keeps on this rank. Only some of its kinds are split over ranks:
    the matrix that combines a head's taps is not."""
    is_whole = module.tp_size == 1 or (
        not hasattr(module, "embedding_dim") and not _is_split(module)
    )
    return proof.EVERY_RANK if is_whole else f"rank {module.tp_rank}"


def _is_split(module: Any) -> bool:
    return any(hasattr(module, f"{side}_size_per_partition") for side in ("input", "output"))


def _rows(module: Any) -> torch.Tensor:
    """[<= NUM_ROWS, features]: the compared rows of an embedding that lie on this rank."""
    first, end = (
        getattr(module.shard_indices, f"org_vocab_{side}_index") for side in ("start", "end")
    )
    chosen = proof.rows(module.org_vocab_size)
    held: torch.Tensor = module.weight[chosen[(chosen >= first) & (chosen < end)] - first]
    return held


def _local_columns(module: Any) -> torch.Tensor:
    """int64 [<= NUM_COLUMNS]: the compared input features of a matrix that lie on this rank,
    counted from its first."""
    chosen, here = proof.columns(module.input_size), _num_inputs(module)
    first = module.tp_rank * here if here < module.input_size else 0
    return chosen[(chosen >= first) & (chosen < first + here)] - first


def _num_inputs(module: Any) -> int:
    """Input features of a linear layer on this rank."""
    return int(getattr(module, "input_size_per_partition", module.input_size))


def _columns(module: Any, chosen: torch.Tensor) -> torch.Tensor:
    """[chosen, outputs on this rank]: the layer's answers to unit vectors, without its bias."""
    size = module.embedding_dim if hasattr(module, "embedding_dim") else _num_inputs(module)
    like = next(module.parameters(recurse=False))
    units = torch.zeros(len(chosen), size, dtype=like.dtype, device=like.device)
    units[torch.arange(len(chosen)), chosen] = 1
    answer: torch.Tensor = module.quant_method.apply(module, units)
    return answer


def _biases(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A layer's bias. Where the inputs are split, every rank has all of it."""
    if _num_inputs(module) < module.input_size:
        yield proof.EVERY_RANK, module.bias
    else:
        yield from _by_holder(module, module.bias)


def _by_holder(module: Any, outputs: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Values along the last axis of a layer's outputs, with their holders. Where ranks outnumber
    the heads of keys and values, several of them hold each head."""
    copies = getattr(module, "num_kv_head_replicas", 1)
    if copies == 1:
        yield _holder(module), outputs
        return
    num_queries = module.num_heads * module.head_size
    first = module.tp_rank // copies * copies
    yield _holder(module), outputs[..., :num_queries]
    yield f"ranks {first} to {first + copies - 1}", outputs[..., num_queries:]


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
