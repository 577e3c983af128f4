"""Low-rank adaptation of the draft (LoRA, arXiv 2106.09685), by peft: W + (α / r) B A in place of every linear layer.

Only A and B are trained; embeddings and the output layer stay. What leaves the trainer is always merged: a plain model,
so neither the release, nor the swap, nor the engine knows how it was trained. Every function here takes a model without
adapters too, and then treats it as what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel

ADAPTER = "default"


def add_lora(hf: PreTrainedModel, rank: int, alpha: int) -> None:
    """Freeze the model and put adapters that do nothing yet (B = 0) into all its linear layers but the output's."""
    with _always_the_same():
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"), hf, ADAPTER)
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(".lora_" in name)


@torch.no_grad()
def merged(hf: PreTrainedModel) -> dict[str, Tensor]:
    """The state of the plain model: each adapter folded into its layer, under its layer's own name."""
    deltas = {f"{name}.weight": _delta(layer) for name, layer in _layers(hf)}
    return {name: value + deltas[name] if name in deltas else value for name, value in below(hf).items()}


def below(hf: PreTrainedModel) -> dict[str, Tensor]:
    """The state of the plain model that the adapters stand beside."""
    return {plain_name(name): value for name, value in hf.state_dict().items() if ".lora_" not in name}


def restart_from(hf: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Take the weights of a plain model; adapters do nothing again."""
    own = hf.state_dict()
    hf.load_state_dict({name: weights[plain_name(name)] for name in own if ".lora_" not in name}, strict=False)
    with _always_the_same():
        for _, layer in _layers(hf):
            layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)


def adapters(hf: PreTrainedModel) -> dict[str, Tensor]:
    """A and B of every layer, and how often they count (α / r); empty without adapters."""
    scales = {f"{name}.scale": torch.tensor(layer.scaling[ADAPTER]) for name, layer in _layers(hf)}
    return scales | {name: value for name, value in hf.state_dict().items() if ".lora_" in name}


def restore(hf: PreTrainedModel, found: Mapping[str, Tensor]) -> None:
    """Give A and B their values back. Raises `ValueError` when they are of another rank, scale or model."""
    own = adapters(hf)
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in found.items()}:
        raise ValueError("adapters of another rank, or of another model")
    if any(not torch.equal(own[name], found[name]) for name in own if name.endswith(".scale")):
        raise ValueError("adapters of another lora_alpha")
    hf.load_state_dict({name: value for name, value in found.items() if ".lora_" in name}, strict=False)


@contextmanager
def _always_the_same() -> Iterator[None]:
    """A is random at first: from one seed, so that a trainer that was killed ends with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def plain_name(name: str) -> str:
    """The name of a tensor in the model without adapters."""
    return name.replace(".base_layer.", ".")


def _delta(layer: LoraLayer) -> Tensor:
    """(α / r) B A, as peft computes it for this kind of layer."""
    delta: Tensor = layer.get_delta_weight(ADAPTER)  # type: ignore[attr-defined]  # every subclass has it
    return delta


def _layers(hf: PreTrainedModel) -> list[tuple[str, LoraLayer]]:
    return [(name, module) for name, module in hf.named_modules() if isinstance(module, LoraLayer)]
