"""Makes the first release of a draft fit its target: one file of weights, and an embedding with as
many rows.

Models with the same tokenizer often differ in rows that pad the embedding to a round number
(Qwen2.5: 151936 tokens in the 0.5B, 152064 in the 7B), and vLLM wants them equal. Missing rows are
appended, surplus rows are cut off.

A padding row is the mean of the draft's own rows in the embedding, in the output head and in the
head's bias. Its logit is the mean of all the draft's logits. It is therefore never the largest, and
the token is never proposed. (Zeros would be the largest logit wherever all others are negative, and
a copy of a row would tie with it.)
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from osd.common.files import fsync
from osd.common.model_directory import copy_model, model_files
from osd.errors import ConfigError
from osd.models.checkpoint_files import (
    INDEX,
    WEIGHTS,
    StoredTensor,
    stored_tensors,
    weight_files,
    write_checkpoint,
)
from osd.models.compatibility import read_config, vocab_size
from osd.models.eagle3 import is_eagle3
from osd.models.head_files import write_head

IN_A_LAYER = re.compile(r"(^|\.)\d+\.")
NUMBERS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def write_fitting(source: Path, aside: Path, num_tokens: int) -> None:
    """Copy the draft in `source` to `aside` as one file of weights with `num_tokens` rows. A head
    has the target's rows already.

    Memory use does not grow with the draft: its weights are copied in pieces. Raises `ConfigError`
    for a damaged draft.
    """
    if is_eagle3(read_config(source)):
        write_head(source, aside)
        return
    own = vocab_size(read_config(source), source)
    tensors = stored_tensors(source)
    if own == num_tokens and weight_files(source) == [source / WEIGHTS]:
        copy_model(source, aside)
        return
    counted = tensors_per_token(tensors, own, source) if own != num_tokens else set()
    fitted = {
        name: t.with_rows(num_tokens) if name in counted else t for name, t in tensors.items()
    }
    write_checkpoint(aside / WEIGHTS, fitted, lambda name: _content(tensors[name], fitted[name]))
    for path in model_files(source):
        if path.name != INDEX and path.suffix != ".safetensors":
            shutil.copyfile(path, aside / path.name)
    _set_vocab_size(aside / "config.json", num_tokens)
    for path in aside.iterdir():
        fsync(path)


def _set_vocab_size(file: Path, num_tokens: int) -> None:
    config = json.loads(file.read_text())
    for part in (config, config.get("text_config") or {}):
        if "vocab_size" in part:
            part["vocab_size"] = num_tokens
    file.write_text(json.dumps(config, indent=2) + "\n")


def tensors_per_token(tensors: dict[str, StoredTensor], num_tokens: int, source: Path) -> set[str]:
    """Names of the tensors with a row per token: the embedding, a separate output head, and its
    bias."""
    outside = {name: t for name, t in tensors.items() if not IN_A_LAYER.search(name)}
    found = {name for name, t in outside.items() if len(t.shape) == 2 and t.shape[0] == num_tokens}
    found |= {
        name
        for name, t in outside.items()
        if t.shape == (num_tokens,) and f"{name.removesuffix('.bias')}.weight" in found
    }
    if not found:
        raise ConfigError(
            f"serving.draft={source}: config.json says vocab_size {num_tokens}, but no embedding "
            "has so many rows; copy the draft again"
        )
    if odd := sorted(name for name in found if tensors[name].dtype not in NUMBERS):
        raise ConfigError(
            f"serving.draft={source}: {odd[0]} is {tensors[odd[0]].dtype}, which cannot be padded "
            f"as the target needs; use a draft in {', '.join(NUMBERS)}"
        )
    return found


def _content(tensor: StoredTensor, fitted: StoredTensor) -> Iterator[bytes]:
    """The tensor's bytes, with as many rows as `fitted` has."""
    yield from tensor.chunks(min(tensor.num_bytes, fitted.num_bytes))
    num_missing = fitted.shape[0] - tensor.shape[0] if fitted.shape else 0
    if num_missing > 0:
        row = _mean_row(tensor)
        for _ in range(num_missing):
            yield row


def _mean_row(tensor: StoredTensor) -> bytes:
    """The mean of all rows, in the tensor's own dtype."""
    total_H = np.zeros(tensor.shape[1:], np.float64)
    for chunk in tensor.chunks():
        numbers = _widen(np.frombuffer(chunk, NUMBERS[tensor.dtype]), tensor.dtype)
        total_H += numbers.reshape(-1, *tensor.shape[1:]).sum(0, dtype=np.float64)
    return _narrow(total_H / tensor.shape[0], tensor.dtype).tobytes()


def _widen(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """bfloat16 is the upper half of a float32; numpy knows the others."""
    return (numbers.astype("<u4") << 16).view("<f4") if dtype == "BF16" else numbers


def _narrow(numbers: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "BF16":
        return numbers.astype(NUMBERS[dtype])
    bits = numbers.astype("<f4").reshape(-1).view("<u4")
    rounding = 0x7FFF + ((bits >> 16) & 1)  # to the nearest, ties to even
    return ((bits + rounding) >> 16).astype("<u2")
