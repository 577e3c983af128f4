"""Low-rank adaptation of the draft (LoRA, arXiv 2106.09685), by peft: W + (α / r) B A replaces W in
every linear layer.

Only A and B are trained; embeddings and the output layer stay as they are. The trainer exports the
merged weights, a plain model: release, swap and engine do not depend on how it was trained. All
functions except `add_lora` also take a model without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.eagle3.layer import Eagle3Head

Body = PreTrainedModel | Eagle3Head
"""The module that holds a draft's weights."""
ADAPTER = "default"


def add_lora(hf: Body, rank: int, alpha: int) -> None:
    """Freeze the model and add adapters to all its linear layers except the output layer. B is 0 at
    first, so the model's output does not change."""
    with _fixed_seed(hf):
        inject_adapter_in_model(
            LoraConfig(r=rank, lora_alpha=alpha, target_modules=_linear_layers(hf)), hf, ADAPTER
        )
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(".lora_" in name)


@torch.no_grad()
def merged(hf: Body) -> dict[str, Tensor]:
    """The state of the plain model, each adapter folded into the weight of its layer."""
    deltas = {f"{name}.weight": _delta(layer) for name, layer in _layers(hf)}
    return {
        name: value + deltas[name] if name in deltas else value for name, value in below(hf).items()
    }


def below(hf: Body) -> dict[str, Tensor]:
    """The state of the plain model without what the adapters add."""
    return {
        plain_name(name): value for name, value in hf.state_dict().items() if ".lora_" not in name
    }


def restart_from(hf: Body, weights: Mapping[str, Tensor]) -> None:
    """Take the weights of a plain model, and reset the adapters so that they do nothing."""
    own = hf.state_dict()
    hf.load_state_dict(
        {name: weights[plain_name(name)] for name in own if ".lora_" not in name}, strict=False
    )
    with _fixed_seed(hf):
        for _, layer in _layers(hf):
            layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)


def adapters(hf: Body) -> dict[str, Tensor]:
    """A, B and the scale α / r of every layer; empty without adapters."""
    scales = {f"{name}.scale": torch.tensor(layer.scaling[ADAPTER]) for name, layer in _layers(hf)}
    return scales | {name: value for name, value in hf.state_dict().items() if ".lora_" in name}


def restore(hf: Body, found: Mapping[str, Tensor]) -> None:
    """Restore the values of A and B. Raises `ValueError` when they are of another rank, scale or
    model."""
    own = adapters(hf)
    if {name: value.shape for name, value in own.items()} != {
        name: value.shape for name, value in found.items()
    }:
        raise ValueError("adapters of another rank, or of another model")
    if any(not torch.equal(own[name], found[name]) for name in own if name.endswith(".scale")):
        raise ValueError("adapters of another lora_alpha")
    hf.load_state_dict(
        {name: value for name, value in found.items() if ".lora_" in name}, strict=False
    )


@contextmanager
def _fixed_seed(hf: Body) -> Iterator[None]:
    """A starts random. The seed is fixed so that a trainer that was killed ends with the same
    weights."""
    # By default torch would take memory of every GPU, also of those that train nothing.
    device = next(hf.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def plain_name(name: str) -> str:
    """The name of a tensor in the model without adapters."""
    return name.replace(".base_layer.", ".")


def _linear_layers(hf: Body) -> str | list[str]:
    """All but the output layer, as peft takes them."""
    if isinstance(hf, PreTrainedModel):
        return "all-linear"
    head = hf.get_output_embeddings()
    return [name for name, m in hf.named_modules() if isinstance(m, nn.Linear) and m is not head]


def _delta(layer: LoraLayer) -> Tensor:
    """(α / r) B A, as peft computes it for this kind of layer."""
    delta: Tensor = layer.get_delta_weight(ADAPTER)  # type: ignore[attr-defined]  # every subclass has it
    return delta


def _layers(hf: Body) -> list[tuple[str, LoraLayer]]:
    return [(name, module) for name, module in hf.named_modules() if isinstance(module, LoraLayer)]
