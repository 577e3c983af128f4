"""Traces into tensors: the shift, truncation, weights, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from osd.records import REJECTED, Trace
from tests.builders import VOCAB_SIZE, make_minimal_trace, make_trace
from trainer.batch import check_rows, collate, collate_outputs, well_formed


def example(**fields: Any) -> Trace:
    """The trace of `osd.records.Trace`'s docstring."""
    values: dict[str, Any] = {
        "trace_id": "cmpl-1",
        "target_id": "9f2c",
        "finished_at": 1.7e9,
        "prompt_ids": [1, 7, 9],
        "output_ids": [4, 4, 2],
        "position": [4],
        "kind": [REJECTED],
        "draft_ids": [8],
        "target_ids": [[4, 2]],
        "target_logprobs": np.log([[0.9, 0.08]]),
        "tail_logprob": np.log([0.02]),
        "keep_prob": [1.0],
        "draft_version": [1],
    }
    return Trace(**(values | fields))


def test_a_row_is_fed_what_came_before_it_and_nothing_of_itself() -> None:
    batch = collate([example()], max_length=16, vocab_size=10)
    assert batch.ids_BS.tolist() == [[1, 7, 9, 4]]  # tokens[:4]: what the target had seen when it spoke of token 4
    assert (batch.row_b_N.tolist(), batch.row_s_N.tolist()) == ([0], [3])
    assert batch.label_ids_N.tolist() == [4]
    assert batch.draft_ids_N.tolist() == [8]
    torch.testing.assert_close(batch.target_logprobs_NK.exp(), torch.tensor([[0.9, 0.08]]), atol=1e-3, rtol=0)
    torch.testing.assert_close(batch.tail_logprob_N.exp(), torch.tensor([0.02]), atol=1e-3, rtol=0)


def test_float16_rounding_is_taken_out_of_the_mass() -> None:
    batch = collate([make_trace(num_rows=8, top_k=20)], max_length=64, vocab_size=VOCAB_SIZE)
    mass_N = batch.target_logprobs_NK.double().exp().sum(-1) + batch.tail_logprob_N.double().exp()
    assert (mass_N - 1).abs().max() < 1e-6


@pytest.mark.parametrize("max_length", [5, 9, 14, 100])
def test_every_row_keeps_its_label_whatever_is_cut_off(max_length: int) -> None:
    traces = [make_trace(index=i, num_prompt=3 + i, num_output=8, num_rows=8) for i in range(4)]
    batch = collate(traces, max_length=max_length, vocab_size=VOCAB_SIZE)
    assert batch.ids_BS.shape[1] <= max_length
    expected = {t: min(8, max_length) for t in range(4)}
    assert np.bincount(batch.row_b_N).tolist() == list(expected.values())
    for b, s, label in zip(batch.row_b_N.tolist(), batch.row_s_N.tolist(), batch.label_ids_N.tolist(), strict=True):
        tokens = np.concatenate([traces[b].prompt_ids, traces[b].output_ids]).tolist()
        fed = batch.ids_BS[b, : s + 1].tolist()
        assert batch.attention_mask_BS[b, : s + 1].all()
        end = len(tokens) - 1 - (int(batch.attention_mask_BS[b].sum()) - (s + 1))
        assert tokens[end - len(fed) : end] == fed  # the tokens right before ...
        assert tokens[end] == label  # ... the one that is predicted


def test_tokens_after_the_last_row_are_not_fed() -> None:
    trace = example(output_ids=[4, 4, 2, 5, 5, 5, 5])
    assert collate([trace], max_length=4, vocab_size=10).ids_BS.tolist() == [[1, 7, 9, 4]]


def test_rows_weigh_as_much_as_they_were_unlikely_to_be_kept() -> None:
    rows: dict[str, Any] = {
        name: np.repeat(getattr(example(), name), 3, axis=0)
        for name in ("kind", "draft_ids", "target_ids", "target_logprobs", "tail_logprob", "draft_version")
    }
    trace = example(position=[3, 4, 5], keep_prob=[1.0, 0.25, 0.5], **rows)
    weight_N = collate([trace], max_length=16, vocab_size=10).weight_N
    torch.testing.assert_close(weight_N, torch.tensor([1.0, 4.0, 2.0]) / 7)


def test_traces_with_different_top_k_share_a_batch() -> None:
    narrow, wide = make_trace(index=1, top_k=3), make_trace(index=2, top_k=6)
    batch = collate([narrow, wide], max_length=64, vocab_size=VOCAB_SIZE)
    assert batch.target_ids_NK.shape == (8, 6)
    assert (batch.target_logprobs_NK[:4, 3:] == -torch.inf).all()
    alone = collate([narrow], max_length=64, vocab_size=VOCAB_SIZE)
    torch.testing.assert_close(batch.target_logprobs_NK[:4, :3], alone.target_logprobs_NK)


def test_outputs_are_all_tokens_but_the_first() -> None:
    batch = collate_outputs([example(), make_minimal_trace("empty")], max_length=16, vocab_size=10)
    assert batch.ids_BS[0].tolist() == [1, 7, 9, 4, 4]
    assert batch.row_b_N.tolist() == [0, 0]
    assert batch.row_s_N.tolist() == [3, 4]
    assert batch.label_ids_N.tolist() == [4, 2]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "prompt token too high": ({"prompt_ids": [1, 10, 9]}, r"cmpl-1: prompt_ids holds 10, .* vocabulary has 10"),
    "negative output token": ({"output_ids": [4, -3, 2]}, r"cmpl-1: output_ids holds -3"),
    "listed token too high": ({"target_ids": [[4, 11]]}, r"cmpl-1: target_ids holds 11"),
    "token listed twice": ({"target_ids": [[4, 4]]}, r"cmpl-1: target_ids lists a token twice"),
    "mass missing": ({"tail_logprob": [-20.0], "target_logprobs": [[-1.0, -2.0]]}, r"cmpl-1: target_logprobs .* 0.503"),
    "infinite tail": ({"tail_logprob": [np.inf]}, r"cmpl-1: target_logprobs and tail_logprob of row 0 add up to inf"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_trace_is_named_with_its_field(name: str) -> None:
    fields, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        collate([example(), example(**fields)], max_length=16, vocab_size=10)


def test_a_trace_without_rows_cannot_be_trained_on() -> None:
    with pytest.raises(ValueError, match="trace empty: position has no rows"):
        collate([make_minimal_trace("empty")], max_length=16, vocab_size=10)


def test_a_wrong_trace_among_many_is_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    check: Callable[[Trace, int], None] = check_rows
    kept = well_formed([example(), example(trace_id="bad", prompt_ids=[1, 99, 9])], check, 10)
    assert [trace.trace_id for trace in kept] == ["cmpl-1"]
    assert "trace bad: prompt_ids holds 99" in caplog.text
