"""Releases of a few small tensors on disk, for code that reads and checks them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from osd.records import DraftRelease

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "vocab_size": 8,
    "rope_theta": 1e4,
}


def written(
    path: Path, tensors: dict[str, torch.Tensor], *, version: int = 1, **config: Any
) -> DraftRelease:
    """A directory with these tensors, and its release."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    return DraftRelease(
        version=version,
        parent=version - 1,
        path=str(path),
        sha256=digest,
        target_id="target",
        created_at=0.0,
    )
