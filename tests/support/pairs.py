"""Random model pairs, small enough to build in a second.

They serve tests of exactness, which need no trained models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 96


@dataclass(frozen=True)
class Pair:
    """Directories of a target and of two drafts that agree with it more and less."""

    target: Path
    draft: Path
    """A copy of the target's weights with a little noise: often accepted."""
    stranger: Path
    """Same shape, other random weights: hardly ever accepted."""


def build_pair(
    directory: Path, *, scale: float = 2.0, noise: float = 0.06, seed: int = 0, tied: bool = False
) -> Pair:
    """`scale` sharpens the target's distribution; `noise` is added to the draft's weights.

    With `tied` weights the output head is the embedding.
    """
    torch.manual_seed(seed)
    target = LlamaForCausalLM(config_of(tied)).eval()
    if not tied:
        with torch.no_grad():
            target.lm_head.weight.mul_(scale)
    draft = LlamaForCausalLM(config_of(tied)).eval()
    draft.load_state_dict(
        {k: v.clone() for k, v in target.state_dict().items() if k in draft.state_dict()}
    )
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * noise * parameter.std())
    stranger = LlamaForCausalLM(config_of(tied)).eval()
    paths = Pair(directory / "target", directory / "draft", directory / "stranger")
    for model, path in ((target, paths.target), (draft, paths.draft), (stranger, paths.stranger)):
        model.save_pretrained(path)
        tokenizer().save_pretrained(path)
    return paths


def tokenizer() -> PreTrainedTokenizerFast:
    """One word a token: "t0" to "t95", so that any token ids are a text."""
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t2"))
    words.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t0", eos_token="t1", pad_token="t1"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return fast


def config_of(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
