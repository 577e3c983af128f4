"""An EAGLE-3 head for a target that has none, to begin `osd distil --new-head` with.

    target's files ─► stand-in ─► the service loads it; it proposes nothing while the target answers
    answers ─► counts of tokens ─► draft vocabulary ─► fresh head ─► `osd train`

Of the target, only the configuration and the output layer are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osd.errors import ConfigError, first_line
from osd.models.checkpoint_files import StoredTensor, stored_tensors
from osd.models.compatibility import check_target, read_config, vocab_size
from osd.models.eagle3 import EMBEDDING, LM_HEAD, default_taps

if TYPE_CHECKING:
    from torch import Tensor

    from osd.records import Trace

USUAL_SIZE = 32_000
"""Draft tokens where `--draft-vocab` does not say, as in EAGLE's and SpecForge's heads."""
STAND_IN_SIZE = 64
"""Draft tokens of a head that never proposes: the fewer, the less memory it takes."""


def size_for(target: Path, asked: int | None) -> int:
    """Tokens of the draft vocabulary. Raises `ConfigError` where `target` cannot get a head, or not
    one of so many tokens (None = `USUAL_SIZE`, or all where there are fewer)."""
    check_target(target)
    _check_layers(target)
    num_tokens = vocab_size(read_config(target), target)
    size = min(USUAL_SIZE, num_tokens) if asked is None else asked
    if not 1 <= size <= num_tokens:
        raise ConfigError(
            f"--draft-vocab={size}: must be between 1 and the {num_tokens} tokens of {target}"
        )
    _output_layer(target, num_tokens)
    _whole_config(target)
    return size


def write_stand_in(out: Path, target: Path) -> Path:
    """A head with which an engine can start before it is known what the target says."""
    import torch

    return _write(out, target, torch.arange(STAND_IN_SIZE), seed=0)


def write_for(out: Path, target: Path, texts: Sequence[Trace], *, size: int, seed: int) -> Path:
    """A head, not yet trained, for the `size` tokens that the answers hold most often; where they
    hold fewer, the lowest ids are taken beside them."""
    import torch

    from osd.offline.first_head import counts
    from trainer.eagle3.fresh import most_frequent

    num_tokens = vocab_size(read_config(target), target)
    counts_V = counts(texts, num_tokens) if texts else torch.zeros(num_tokens)
    return _write(out, target, most_frequent(counts_V, size), seed=seed)


def _write(out: Path, target: Path, ids_D: Tensor, *, seed: int) -> Path:
    from safetensors import safe_open

    from trainer.eagle3.fresh import write_head

    num_tokens = vocab_size(read_config(target), target)
    name, stored = _output_layer(target, num_tokens)
    with safe_open(stored.file, framework="pt") as file:
        output_VH = file.get_tensor(name)
    known_D = ids_D[ids_D < num_tokens]
    return write_head(out, _whole_config(target), output_VH, known_D, seed=seed)


def _whole_config(target: Path) -> dict[str, Any]:
    """The target's configuration, of its text model, with what its `config.json` leaves out. Raises
    `ConfigError`."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(
            target, local_files_only=True, trust_remote_code=False
        )
        return dict(config.get_text_config().to_dict())
    except Exception as error:  # noqa: BLE001  transformers raises many types
        raise ConfigError(
            f"--new-head: {target}: its config.json is none that transformers can read "
            f"({first_line(error)}); use another target, or a draft model"
        ) from None


def _check_layers(target: Path) -> None:
    """That vLLM's own choice of layers exists: three different ones."""
    num = read_config(target).get("num_hidden_layers")
    taps = default_taps(num) if isinstance(num, int) else ()
    if len(set(taps)) < 3 or min(taps) < 0:
        raise ConfigError(
            f"--new-head: {target}: has {num} layers, and a head reads before the third, the "
            "middle and the third last of them; use a deeper target, or a draft model"
        )


def _output_layer(target: Path, num_tokens: int) -> tuple[str, StoredTensor]:
    """Name and place of the target's output layer, from which that of a head begins: the embedding
    where they are one. Raises `ConfigError` where it is not there."""
    known = stored_tensors(target)
    is_tied = read_config(target).get("tie_word_embeddings")
    # Without the key they are one where the checkpoint has no output layer.
    ends = [LM_HEAD, EMBEDDING] if is_tied is None else [EMBEDDING if is_tied else LM_HEAD]
    for end in ends:
        for name, tensor in known.items():
            if name.endswith(end) and tensor.shape[0] == num_tokens:
                return name, tensor
    raise ConfigError(
        f"--new-head: {target}: holds no {ends[0]} of {num_tokens} rows, with which the head's "
        "output layer begins; use a target that has it, or a draft model"
    )
