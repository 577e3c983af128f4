"""Traces longer than a draft's context are cut, not an error.

Learned positions do not reach beyond that context.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from buffers.memory import MemoryTraceBuffer
from osd.config.schema import GateConfig, TrainerConfig
from tests.support.tiny_drafts import TARGET_ID, VOCAB_SIZE, chain_traces, release_of
from trainer.draft import load_draft
from trainer.evaluate import replay
from trainer.loop import Trainer

CONTEXT = 24


def save_gpt2(directory: Path) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, n_positions=CONTEXT)
    config.bos_token_id = config.eos_token_id = None
    GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


def test_a_round_on_traces_longer_than_the_drafts_context_learns(tmp_path: Path) -> None:
    draft = release_of(save_gpt2(tmp_path / "draft"))
    buffer = MemoryTraceBuffer(target_id=TARGET_ID)
    buffer.put(chain_traces(64, num_output=60))
    buffer.put(chain_traces(12, start=100, num_output=60, holdout=True))
    config = TrainerConfig(device="cpu", learning_rate=3e-3, max_length=1024)
    outcome = Trainer(config, GateConfig(), 4, buffer, tmp_path / "trainer", TARGET_ID).run_round(
        draft
    )
    assert outcome.discarded == ""
    assert outcome.eval is not None
    assert outcome.eval.alpha_candidate > outcome.eval.alpha_base + 0.3


def test_a_replay_sees_the_end_of_a_longer_trace(tmp_path: Path) -> None:
    model = load_draft(save_gpt2(tmp_path / "draft"))
    counts = replay(model, chain_traces(4, num_output=60), 4, max_length=1024)
    tested = counts.tested_RG[:, 0]
    assert (tested > 0).all()
    assert (counts.tested_RG.sum(1) <= CONTEXT).all()
