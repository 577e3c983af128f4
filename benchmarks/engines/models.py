"""Random Llama models of any size, to measure costs without training or downloads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osd.common.files import sha256
from osd.records import DraftRelease
from osd.tiny.models import COST_SHAPED_SIZES

SMALL, LARGE = "77 M", "273 M"
COST_SHAPES = {SMALL: COST_SHAPED_SIZES, LARGE: (1024, 16, 4096)}
"""Parameters that a small target is made to cost as much as -> hidden size, layers, intermediate
size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Shape of a Llama. Its heads have 64 dimensions.

    Example:
        Size(vocab_size=151_936, hidden_size=128, num_layers=2)
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    is_tied: bool = False
    """Whether the output head is the embedding."""

    @property
    def config(self) -> dict[str, Any]:
        """As Hugging Face writes it."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": 4 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.hidden_size // 64,
            "num_key_value_heads": self.hidden_size // 64,
            "head_dim": 64,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": self.is_tied,
            "initializer_range": 0.5 / self.hidden_size**0.5,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        }


def build(size: Size, directory: Path, *, seed: int = 0) -> int:
    """Write a random model to `directory`; returns its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**size.config))
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def copy_with_noise(source: Path, directory: Path, noise: float, *, seed: int = 1) -> Path:
    """The same model with `noise` times each tensor's own deviation added: it often agrees with its
    source."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "config.json", directory / "config.json")
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "model.safetensors")
    noisy = {
        n: t + torch.randn(t.shape, generator=generator) * noise * _deviation(t)
        for n, t in tensors.items()
    }
    save_file(noisy, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def copy_undecided(source: Path, directory: Path) -> Path:
    """The same model at the same cost, but for its last norm: every token is about as likely as any
    other."""
    import shutil

    from safetensors.torch import load_file, save_file

    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "config.json", directory / "config.json")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] *= 0.01
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def release(directory: Path, version: int) -> DraftRelease:
    """The model in `directory` as a release, as the swap wants it."""
    return DraftRelease(
        version=version,
        parent=version - 1,
        path=str(directory),
        sha256=sha256(directory / "model.safetensors"),
        target_id="bench",
        created_at=0.0,
    )


def _deviation(tensor: Any) -> float:
    return float(tensor.std()) if tensor.numel() > 1 else 0.0
