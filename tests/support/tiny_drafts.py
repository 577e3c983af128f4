"""Tiny random Llamas, and traces of a target that always says one token after another.

They are enough to see learning.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from osd.common.files import sha256
from osd.records import ACCEPTED, REJECTED, DraftRelease, Trace
from tests.support.builders import trace_id

VOCAB_SIZE = 64
TARGET_ID = "target-a"


def tiny_llama(
    seed: int = 0, *, tied: bool = False, scale: float = 0.02, vocab_size: int = VOCAB_SIZE
) -> LlamaForCausalLM:
    """One layer, hidden size 32; `scale` is the spread of the random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=scale,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def save_draft(
    directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """A random draft as a Hugging Face directory."""
    tiny_llama(seed, **options).to(dtype).save_pretrained(directory)
    return directory


def release_of(directory: Path, version: int = 1) -> DraftRelease:
    """A release of the directory."""
    return DraftRelease(
        version=version,
        parent=version - 1,
        path=str(directory),
        sha256=sha256(directory / "model.safetensors"),
        target_id=TARGET_ID,
        created_at=0.0,
    )


def after(token: int, step: int = 5) -> int:
    """The planted bigram: the target's token after `token`. Another `step` is another language."""
    return (token * step + 3) % VOCAB_SIZE


def chain_trace(
    index: int, *, holdout: bool = False, step: int = 5, num_output: int = 12, **fields: Any
) -> Trace:
    """A request whose tokens all follow from the one before, with a row at each output position."""
    tokens = [int(np.random.default_rng(index).integers(VOCAB_SIZE))]
    while len(tokens) < 4 + num_output:
        tokens.append(after(tokens[-1], step))
    served = np.array(tokens[4:])
    num_rows = len(served)
    values: dict[str, Any] = {
        "trace_id": trace_id(index, holdout=holdout),
        "target_id": TARGET_ID,
        "finished_at": float(index),
        "prompt_ids": tokens[:4],
        "output_ids": served,
        "position": np.arange(4, 4 + num_rows),
        "kind": np.where(served % 2, REJECTED, ACCEPTED),
        "draft_ids": served,
        "target_ids": np.stack([served, (served + 1) % VOCAB_SIZE], 1),
        "target_logprobs": np.log(np.tile([0.97, 0.02], (num_rows, 1))),
        "tail_logprob": np.log(np.full(num_rows, 0.01)),
        "keep_prob": np.where(served % 2, 1.0, 0.5),
        "draft_version": np.ones(num_rows),
    }
    return Trace(**(values | fields))


def chain_traces(num: int, *, start: int = 0, **fields: Any) -> list[Trace]:
    """`num` of them, with indices from `start`."""
    return [chain_trace(index, **fields) for index in range(start, start + num)]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writing more than that into a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_over(directory: Path) -> None:
    """Put zeros in the place of all weights, in the same files: whoever maps these sees them."""
    for file in directory.rglob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
