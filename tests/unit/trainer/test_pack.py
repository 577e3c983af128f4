"""Several traces on one line: how tightly they are packed, and that none sees another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from osd.records import Trace
from tests.support.builders import make_trace
from tests.support.tiny_drafts import chain_traces, release_of
from tests.support.tiny_rounds import buffer_with, trainer_at
from trainer.batch import collate, collate_outputs
from trainer.draft import RowModel
from trainer.evaluate import replay
from trainer.pack import Place, one_a_line, pack

VOCAB_SIZE = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
GROUPED = COMMON | {"num_key_value_heads": 1}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**COMMON)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            initializer_range=0.3,
        )
    ),
}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def bloom() -> PreTrainedModel:
    """A model that places tokens by attention alone, and takes no positions."""
    torch.manual_seed(0)
    config = BloomConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=2, initializer_range=0.3
    )
    return BloomForCausalLM(config).eval()


def mixed_traces(num: int, seed: int = 0) -> list[Trace]:
    """Prompts of 1 to 40 tokens, outputs of 4 to 20."""
    rng = np.random.default_rng(seed)
    return [
        make_trace(
            index=i,
            num_prompt=int(rng.integers(1, 41)),
            num_output=int(rng.integers(4, 21)),
            vocab_size=VOCAB_SIZE,
        )
        for i in range(num)
    ]


def alone(hf: PreTrainedModel, traces: list[Trace], max_length: int) -> torch.Tensor:
    """The logits [N, V] that predict each captured token, by the plain model, a trace at a time."""
    rows = []
    for trace in traces:
        tokens = np.concatenate([trace.prompt_ids, trace.output_ids])
        start = max(0, int(trace.position[-1]) - max_length)
        logits_SV = hf(torch.from_numpy(tokens[start:]).long()[None]).logits[0]
        rows.append(logits_SV[trace.position - 1 - start])
    return torch.cat(rows)


# Models do not notice


@torch.no_grad()
@pytest.mark.parametrize("max_length", [30, 64])
@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_are_those_of_each_trace_alone(name: str, max_length: int) -> None:
    hf = build(name)
    model = RowModel(hf)
    assert model.can_pack
    traces = mixed_traces(12)
    batch = collate(traces, max_length, VOCAB_SIZE)
    assert len(batch.ids_BS) < len(traces), "something must be packed"
    expected_NV = alone(hf, traces, max_length)
    torch.testing.assert_close(model(*batch.inputs), expected_NV, atol=2e-4, rtol=1e-3)
    # The rows do depend on their context: the wrong positions would have shown.
    wrong_BS = (torch.arange(batch.ids_BS.shape[1]) % 64).expand_as(batch.ids_BS)
    wrong_NV = model(batch.ids_BS, wrong_BS, batch.row_b_N, batch.row_s_N)
    assert (wrong_NV - expected_NV).abs().max() > 0.1


@torch.no_grad()
def test_a_model_without_positions_gets_a_line_for_each_trace() -> None:
    hf = bloom()
    model = RowModel(hf)
    assert not model.can_pack
    traces = mixed_traces(6)
    batch = collate(traces, 64, VOCAB_SIZE, packed=model.can_pack)
    assert len(batch.ids_BS) == len(traces)
    torch.testing.assert_close(model(*batch.inputs), alone(hf, traces, 64), atol=2e-4, rtol=1e-3)


class DeafLlama(LlamaForCausalLM):
    """Takes positions, and does with them what it likes."""

    def forward(self, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_model_that_lets_packed_traces_see_each_other_is_found_out() -> None:
    torch.manual_seed(0)
    assert not RowModel(DeafLlama(LlamaConfig(**GROUPED)).eval()).can_pack


def test_such_a_model_learns_all_the_same(tmp_path: Path) -> None:
    bloom().save_pretrained(tmp_path / "base")
    buffer = buffer_with(*chain_traces(64), *chain_traces(12, start=500, holdout=True))
    outcome = trainer_at(tmp_path / "t", buffer).run_round(release_of(tmp_path / "base"))
    assert outcome.discarded == ""
    assert outcome.loss_last < outcome.loss_first / 2
    assert outcome.eval is not None and outcome.eval.alpha_candidate > outcome.eval.alpha_base + 0.3


@pytest.mark.parametrize("hf", [build("llama"), bloom()], ids=["packed", "a line each"])
def test_acceptance_does_not_depend_on_who_shares_the_batch(hf: PreTrainedModel) -> None:
    model, traces = RowModel(hf), mixed_traces(10)
    together = replay(model, traces, 4, max_length=64, batch_size=10)
    for index, trace in enumerate(traces):
        single = replay(model, [trace], 4, max_length=64)
        assert single.tested_RG[0].tolist() == together.tested_RG[index].tolist()
        assert single.accepted_RG[0].tolist() == together.accepted_RG[index].tolist()


def test_gradients_are_those_of_unpacked_lines() -> None:
    model, traces = RowModel(build("qwen2")), mixed_traces(8)
    gradients = []
    for packed in (True, False):
        batch = collate(traces, 64, VOCAB_SIZE, packed=packed)
        model.zero_grad()
        model(*batch.inputs).log_softmax(-1).gather(1, batch.label_ids_N[:, None]).mean().backward()
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-5, rtol=1e-3)


# How tightly


def cover(lengths: list[int]) -> float:
    """Check that every sequence has a place of its own; return the share that is padding."""
    places, num_lines, length = pack(lengths)
    used = np.zeros((num_lines, length), int)
    for place, num in zip(places, lengths, strict=True):
        assert place.start + num <= length
        used[place.line, place.start : place.start + num] += 1
    assert used.max(initial=0) <= 1 and used.sum() == sum(lengths)
    assert length >= max(lengths, default=0)
    return 1 - float(used.mean())


def lengths_of(kind: str, rng: np.random.Generator, num: int) -> list[int]:
    if kind == "chat":  # log-normal prompts, most of them short
        return np.clip(rng.lognormal(5, 1, num), 8, 1024).astype(int).tolist()
    if kind == "two classes":
        return rng.choice([40, 900], num).tolist()
    if kind == "one giant":
        return [1024, *rng.integers(10, 60, num - 1).tolist()]
    return rng.integers(1, 1025, num).tolist()


@pytest.mark.parametrize("kind", ["chat", "two classes", "one giant", "any"])
@pytest.mark.parametrize("num", [2, 8, 32])
def test_padding_stays_low_whatever_the_lengths(kind: str, num: int) -> None:
    rng = np.random.default_rng([num, len(kind)])
    padding, padding_alone = [], []
    for _ in range(60):
        lengths = lengths_of(kind, rng, num)
        padding.append(cover(lengths))
        padding_alone.append(1 - sum(lengths) / (num * max(lengths)))
    assert max(padding) < 0.15
    if num == 32:
        assert np.mean(padding_alone) > 0.4, "without packing there would be much"


def test_equal_lengths_need_nothing() -> None:
    assert pack([7, 7, 7]) == ([Place(0, 0), Place(1, 0), Place(2, 0)], 3, 7)


def test_the_longest_go_first_and_the_short_fill_up() -> None:
    # 10 | 6 + 4 | 7 + 3
    places, num_lines, length = pack([4, 10, 7, 3, 6])
    assert (num_lines, length) == (3, 10)
    assert places == [Place(2, 6), Place(0, 0), Place(1, 0), Place(1, 7), Place(2, 0)]


@pytest.mark.parametrize("lengths", [[0], [0, 0], [0, 5], [1]])
def test_traces_without_tokens_take_no_room(lengths: list[int]) -> None:
    cover([*lengths])
    for layout in (pack(lengths), one_a_line(lengths)):
        assert layout[2] == max(1, *lengths, 0)


def test_a_trace_of_which_nothing_is_fed_still_has_its_turn() -> None:
    traces = [make_trace(index=0, num_output=1, num_rows=1), make_trace(index=1, num_output=8)]
    batch = collate_outputs(traces, 64, 128)
    assert batch.trace_N.tolist() == [1] * 7
    assert batch.num_tokens == 6 + 8 - 1
