"""Small EAGLE-3 heads with random weights, in both forms, for any Llama target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from osd.models import eagle3

SPREAD = 0.1


def write_head(
    directory: Path,
    target: Path,
    *,
    form: eagle3.Form = "specforge",
    taps: tuple[int, ...] = (2, 4, 5),
    draft_vocab_size: int | None = None,
    has_embedding: bool | None = None,
    seed: int = 0,
    **keys: Any,
) -> Path:
    """A head for the target in `target`. Its draft vocabulary is the target's first ids from 2 on,
    all ids by default. `has_embedding`: whether it holds a copy of the target's embedding, as heads
    of speculators do by default. `keys` are put on top of its configuration."""
    of_target = json.loads((target / "config.json").read_text())
    num = draft_vocab_size or of_target["vocab_size"]
    config = _config(of_target, form, taps, num) | keys
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = _tensors(eagle3.spec_of(config, directory), seed)
    tensors |= _maps(num, of_target["vocab_size"])
    if (form == "speculators") if has_embedding is None else has_embedding:
        tensors[eagle3.EMBEDDING] = embedding_of(target)
    if form == "specforge":
        tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def embedding_of(target: Path) -> torch.Tensor:
    """[V, H]"""
    return load_file(target / "model.safetensors")["model.embed_tokens.weight"]


def _config(
    of_target: dict[str, Any], form: eagle3.Form, taps: tuple[int, ...], num: int
) -> dict[str, Any]:
    layer = {
        k: v for k, v in of_target.items() if k not in ("architectures", "tie_word_embeddings")
    }
    layer |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    if form == "specforge":
        return layer | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": num,
            eagle3.TAPS: list(taps),
        }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": ""},
        },
        "draft_vocab_size": num,
        "norm_before_residual": False,
        eagle3.TAPS: list(taps),
        eagle3.LAYER: layer | {"model_type": "llama"},
    }


def _tensors(spec: eagle3.HeadSpec, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 1 + 0.01 * torch.randn(shape, generator=generator)
        if len(shape) == 1 and not name.endswith("bias")
        else SPREAD * torch.randn(shape, generator=generator)
        for name, shape in eagle3.shapes(spec).items()
    }


def _maps(num_draft: int, num_target: int) -> dict[str, torch.Tensor]:
    """d2t int64 [D] (offsets), t2d bool [V]; {} where the vocabularies are the same."""
    if num_draft == num_target:
        return {}
    first = min(2, num_target - num_draft)
    t2d = torch.zeros(num_target, dtype=torch.bool)
    t2d[first : first + num_draft] = True
    return {eagle3.D2T: torch.full((num_draft,), first), eagle3.T2D: t2d}
