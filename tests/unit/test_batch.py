"""Traces into tensors: the shift, truncation, weights, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from osd.records import REJECTED, Trace
from tests.builders import VOCAB_SIZE, make_minimal_trace, make_trace
from trainer.batch import (
    RowBatch,
    check_rows,
    collate,
    collate_outputs,
    is_believable,
    to_device,
    trainable,
    well_formed,
)


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


def fed_before(batch: RowBatch, b: int, s: int) -> list[int]:
    """What the model sees of the sequence that ends at logits [b, s]: as many tokens as its position says."""
    num = int(batch.position_ids_BS[b, s]) + 1
    assert batch.position_ids_BS[b, s + 1 - num : s + 1].tolist() == list(range(num))
    return batch.ids_BS[b, s + 1 - num : s + 1].tolist()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("max_length", [5, 9, 14, 100])
@pytest.mark.parametrize("num_traces", [1, 4, 9])
def test_every_row_keeps_its_label_whatever_is_cut_off(num_traces: int, max_length: int, packed: bool) -> None:
    traces = [make_trace(index=i, num_prompt=3 + i, num_output=8, num_rows=8) for i in range(num_traces)]
    batch = collate(traces, max_length=max_length, vocab_size=VOCAB_SIZE, packed=packed)
    assert batch.trace_N.bincount().tolist() == [min(8, max_length)] * num_traces
    if not packed:
        assert batch.ids_BS.shape == (num_traces, min(num_traces + 9, max_length))
        assert batch.row_b_N.tolist() == batch.trace_N.tolist()
    places = zip(batch.trace_N.tolist(), batch.row_b_N.tolist(), batch.row_s_N.tolist(), strict=True)
    for row, (index, b, s) in enumerate(places):
        trace = traces[index]
        tokens = np.concatenate([trace.prompt_ids, trace.output_ids]).tolist()
        nth = row - int((batch.trace_N < index).sum())  # of the rows that are left, all at the end
        position = int(trace.position[nth + 8 - min(8, max_length)])
        fed = fed_before(batch, b, s)
        assert len(fed) <= max_length
        assert fed == tokens[max(0, len(tokens) - 1 - max_length) : position]  # the tokens right before ...
        assert int(batch.label_ids_N[row]) == tokens[position]  # ... the one that is predicted
        # and what the target said there, not elsewhere
        kept = int(np.flatnonzero(trace.position == position)[0])
        assert batch.target_ids_NK[row].tolist() == trace.target_ids[kept].tolist()
        assert int(batch.draft_ids_N[row]) == trace.draft_ids[kept]


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_and_padding_add_up(packed: bool) -> None:
    traces = [make_trace(index=i, num_prompt=1 + 3 * i) for i in range(7)]
    batch = collate_outputs(traces, max_length=64, vocab_size=VOCAB_SIZE, packed=packed)
    assert batch.num_tokens == sum(len(t.prompt_ids) + len(t.output_ids) - 1 for t in traces)
    assert batch.padding == pytest.approx(1 - batch.num_tokens / batch.ids_BS.numel())
    assert (batch.padding < 0.15) is packed
    # No position is beyond what a sequence needs: a learnt position embedding has no more.
    assert int(batch.position_ids_BS.max()) == len(traces[-1].prompt_ids) + 7 - 1


def test_a_batch_moves_whole() -> None:
    batch = to_device(collate([example()], max_length=16, vocab_size=10), torch.device("meta"))
    tensors = [value for value in map(batch.__getattribute__, batch.__dataclass_fields__) if torch.is_tensor(value)]
    assert len(tensors) == 11 and all(tensor.device.type == "meta" for tensor in tensors)
    assert batch.num_tokens == 4


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


def row(served: float, other: int = 2, listed: int = 4, tail: float = 1e-6, temperature: float = 0.0) -> Trace:
    """One row where token 4 was served; the probability of the token `listed` there, and of what is not listed."""
    return example(
        target_ids=[[other, listed]],
        target_logprobs=np.log([[1 - served - tail, served]]),
        tail_logprob=np.log([tail]),
        temperature=temperature,
    )


def test_rows_that_contradict_the_text_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    assert is_believable(row(0.9)).tolist() == [True]
    assert is_believable(row(0.4)).tolist() == [True], "as likely as the likeliest, but for rounding"
    assert is_believable(row(0.3)).tolist() == [False], "a greedy request serves the likeliest"
    assert is_believable(row(2e-4, temperature=1.0)).tolist() == [True]
    assert is_believable(row(5e-5, temperature=1.0)).tolist() == [False]
    assert is_believable(row(5e-5, temperature=1.5)).tolist() == [True], "at a high temperature much is served"
    assert is_believable(row(0.01, listed=3, tail=1e-3, temperature=1.0)).tolist() == [True], "among those not listed"
    assert is_believable(row(0.01, listed=3, temperature=1.0)).tolist() == [False]
    both = example(
        position=[4, 5],
        kind=[REJECTED, REJECTED],
        draft_ids=[8, 8],
        target_ids=[[7, 3], [2, 3]],
        target_logprobs=np.log([[0.9, 0.1], [0.9, 0.1]]),
        tail_logprob=np.log([1e-6, 1e-6]),
        keep_prob=[1.0, 0.5],
        draft_version=[1, 1],
    )
    (kept,), num_out = trainable([both, row(5e-5)], 10)
    assert num_out == 2
    assert kept.position.tolist() == [5] and kept.keep_prob.tolist() == [0.5]
    assert "2 of 3 rows make the token served there all but impossible" in caplog.text
