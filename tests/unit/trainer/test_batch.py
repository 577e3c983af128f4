"""Traces into tensors: the shift, truncation, weights, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from osd.records import REJECTED, Trace
from tests.support.builders import VOCAB_SIZE, make_minimal_trace, make_trace
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
    # tokens[:4]: what the target had seen when it predicted token 4.
    assert batch.ids_BS.tolist() == [[1, 7, 9, 4]]
    assert (batch.row_b_N.tolist(), batch.row_s_N.tolist()) == ([0], [3])
    assert batch.label_ids_N.tolist() == [4]

    torch.testing.assert_close(
        batch.target_logprobs_NK.exp(), torch.tensor([[0.9, 0.08]]), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(batch.tail_logprob_N.exp(), torch.tensor([0.02]), atol=1e-3, rtol=0)


def several(num: int, **fields: Any) -> Trace:
    """The example with its row `num` times, at the positions that are given."""
    names = (
        "kind",
        "draft_ids",
        "target_ids",
        "target_logprobs",
        "tail_logprob",
        "keep_prob",
        "draft_version",
    )
    return example(
        **({name: np.repeat(getattr(example(), name), num, axis=0) for name in names} | fields)
    )


def test_what_is_missing_of_the_mass_is_made_up_for_by_all_alike() -> None:
    # A mass of 1.04 in all.
    trace = example(target_logprobs=np.log([[0.9, 0.1]]), tail_logprob=np.log([0.04]))
    batch = collate([trace], max_length=16, vocab_size=10)
    torch.testing.assert_close(
        batch.target_logprobs_NK.exp(), torch.tensor([[0.9, 0.1]]) / 1.04, atol=1e-3, rtol=0
    )
    torch.testing.assert_close(
        batch.tail_logprob_N.exp(), torch.tensor([0.04]) / 1.04, atol=1e-4, rtol=0
    )
    assert {batch.target_logprobs_NK.dtype, batch.tail_logprob_N.dtype, batch.weight_N.dtype} == {
        torch.float32
    }


def test_float16_rounding_is_taken_out_of_the_mass() -> None:
    batch = collate([make_trace(num_rows=8, top_k=20)], max_length=64, vocab_size=VOCAB_SIZE)
    mass_N = batch.target_logprobs_NK.double().exp().sum(-1) + batch.tail_logprob_N.double().exp()
    assert (mass_N - 1).abs().max() < 1e-6


def fed_before(batch: RowBatch, b: int, s: int) -> list[int]:
    """What the model sees of the sequence that ends at logits [b, s]: as many tokens as its
    position says."""
    num = int(batch.position_ids_BS[b, s]) + 1
    assert batch.position_ids_BS[b, s + 1 - num : s + 1].tolist() == list(range(num))
    return batch.ids_BS[b, s + 1 - num : s + 1].tolist()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("max_length", [5, 9, 14, 100])
@pytest.mark.parametrize("num_traces", [1, 4, 9])
def test_every_row_keeps_its_label_whatever_is_cut_off(
    num_traces: int, max_length: int, packed: bool
) -> None:
    traces = [
        make_trace(index=i, num_prompt=3 + i, num_output=8, num_rows=8) for i in range(num_traces)
    ]
    batch = collate(traces, max_length=max_length, vocab_size=VOCAB_SIZE, packed=packed)
    assert batch.trace_N.bincount().tolist() == [min(8, max_length)] * num_traces
    if not packed:
        assert batch.ids_BS.shape == (num_traces, min(num_traces + 9, max_length))
        assert batch.row_b_N.tolist() == batch.trace_N.tolist()
    places = zip(
        batch.trace_N.tolist(), batch.row_b_N.tolist(), batch.row_s_N.tolist(), strict=True
    )
    for row, (index, b, s) in enumerate(places):
        trace = traces[index]
        tokens = np.concatenate([trace.prompt_ids, trace.output_ids]).tolist()
        nth = row - int((batch.trace_N < index).sum())  # of the rows that are left, all at the end
        position = int(trace.position[nth + 8 - min(8, max_length)])
        fed = fed_before(batch, b, s)
        assert len(fed) <= max_length
        # The tokens right before the one that is predicted.
        assert fed == tokens[max(0, len(tokens) - 1 - max_length) : position]
        assert int(batch.label_ids_N[row]) == tokens[position]  # ... the one that is predicted
        # and what the target said there, not elsewhere
        kept = int(np.flatnonzero(trace.position == position)[0])
        assert batch.target_ids_NK[row].tolist() == trace.target_ids[kept].tolist()


INPUTS = ["ids_BS", "position_ids_BS", "row_b_N", "row_s_N"]
"""In the order that a model takes them."""


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_and_padding_add_up(packed: bool) -> None:
    traces = [make_trace(index=i, num_prompt=1 + 3 * i) for i in range(7)]
    batch = collate_outputs(traces, max_length=64, vocab_size=VOCAB_SIZE, packed=packed)
    assert batch.num_tokens == sum(len(t.prompt_ids) + len(t.output_ids) - 1 for t in traces)
    padding = 1 - batch.num_tokens / batch.ids_BS.numel()
    assert (padding < 0.15) is packed
    assert batch.num_rows == len(batch.label_ids_N) == 7 * 7
    assert [
        part is getattr(batch, name) for part, name in zip(batch.inputs, INPUTS, strict=True)
    ] == [True] * 4
    # No position is beyond what a sequence needs: a learnt position embedding has no more.
    assert int(batch.position_ids_BS.max()) == len(traces[-1].prompt_ids) + 7 - 1


def test_a_batch_moves_whole() -> None:
    batch = to_device(collate([example()], max_length=16, vocab_size=10), torch.device("meta"))
    tensors = [
        value
        for value in map(batch.__getattribute__, batch.__dataclass_fields__)
        if torch.is_tensor(value)
    ]
    assert len(tensors) == 10 and all(tensor.device.type == "meta" for tensor in tensors)
    assert batch.num_tokens == 4
    with pytest.raises(AttributeError, match="cannot assign"):
        batch.num_tokens = 5  # type: ignore[misc]  # what several steps and threads look at does not change


def test_tokens_after_the_last_row_are_not_fed() -> None:
    trace = example(output_ids=[4, 4, 2, 5, 5, 5, 5])
    assert collate([trace], max_length=4, vocab_size=10).ids_BS.tolist() == [[1, 7, 9, 4]]


def test_rows_weigh_as_much_as_they_were_unlikely_to_be_kept() -> None:
    trace = several(3, position=[3, 4, 5], keep_prob=[1.0, 0.25, 0.5])
    weight_N = collate([trace], max_length=16, vocab_size=10).weight_N
    torch.testing.assert_close(weight_N, torch.tensor([1.0, 4.0, 2.0]) / 7)
    # The first row's context is gone: it weighs nothing among those that are left, of this trace
    # and of others.
    weight_N = collate([trace, example()], max_length=2, vocab_size=10).weight_N
    torch.testing.assert_close(weight_N, torch.tensor([4.0, 2.0, 1.0]) / 7)


def test_traces_with_different_top_k_share_a_batch() -> None:
    narrow, wide = make_trace(index=1, top_k=3), make_trace(index=2, top_k=6)
    batch = collate([narrow, wide], max_length=64, vocab_size=VOCAB_SIZE)
    assert batch.target_ids_NK.shape == (8, 6)
    assert (batch.target_logprobs_NK[:4, 3:] == -torch.inf).all()
    assert (batch.target_ids_NK[:4, 3:] == 0).all(), (
        "a token that there is: the loss looks its logit up"
    )
    alone = collate([narrow], max_length=64, vocab_size=VOCAB_SIZE)
    torch.testing.assert_close(batch.target_logprobs_NK[:4, :3], alone.target_logprobs_NK)


def test_outputs_are_all_tokens_but_the_first() -> None:
    batch = collate_outputs([example(), make_minimal_trace("empty")], max_length=16, vocab_size=10)
    assert batch.ids_BS[0].tolist() == [1, 7, 9, 4, 4]
    assert batch.row_b_N.tolist() == [0, 0]
    assert batch.row_s_N.tolist() == [3, 4]
    assert batch.label_ids_N.tolist() == [4, 2]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "prompt token too high": (
        {"prompt_ids": [0, 10, 11]},
        r"cmpl-1: prompt_ids holds 10, .* vocabulary has 10",
    ),
    "negative output token": (
        {"output_ids": [0, -1, -3]},
        r"cmpl-1: output_ids holds -1, .* vocabulary has 10",
    ),
    "listed token too high": (
        {"target_ids": [[0, 10]]},
        r"cmpl-1: target_ids holds 10, .* vocabulary has 10",
    ),
    "negative listed token": (
        {"target_ids": [[0, -1]]},
        r"cmpl-1: target_ids holds -1, .* vocabulary has 10",
    ),
    "token listed twice": ({"target_ids": [[4, 4]]}, r"cmpl-1: target_ids lists a token twice"),
    "token listed twice, not at first": (
        {"target_ids": [[4, 2, 2]], "target_logprobs": np.log([[0.9, 0.04, 0.04]])},
        r"cmpl-1: target_ids lists a token twice",
    ),
    "mass missing": (
        {"tail_logprob": [-20.0], "target_logprobs": [[-1.0, -2.0]]},
        r"cmpl-1: target_logprobs .* 0.503",
    ),
    "infinite tail": (
        {"tail_logprob": [np.inf]},
        r"cmpl-1: target_logprobs and tail_logprob of row 0 add up to inf",
    ),
}


@pytest.mark.parametrize(
    "mass, is_right", [(0.94, False), (0.96, True), (1.04, True), (1.06, False)]
)
def test_a_row_is_whole_but_for_rounding(mass: float, is_right: bool) -> None:
    trace = example(target_logprobs=np.log([[0.6, mass - 0.65]]), tail_logprob=np.log([0.05]))
    assert (well_formed([trace], check_rows, 10) == [trace]) is is_right


@pytest.mark.parametrize("others, worst", [([0.9, 1.6], 1), ([1.1, 0.5], 1), ([1.5, 1.1], 0)])
def test_the_row_named_is_the_one_that_is_furthest_off(others: list[float], worst: int) -> None:
    trace = several(
        2, position=[4, 5], target_logprobs=[[-20, -20]] * 2, tail_logprob=np.log(others)
    )
    with pytest.raises(ValueError, match=f"of row {worst} add up to {others[worst]}, not 1"):
        check_rows(trace, 10)


@pytest.mark.parametrize("make", [collate, collate_outputs])
def test_traces_share_lines_unless_told_otherwise(make: Callable[..., RowBatch]) -> None:
    traces = [make_trace(index=index, num_prompt=1 + 3 * index) for index in range(7)]
    untold, padded = make(traces, 64, VOCAB_SIZE), make(traces, 64, VOCAB_SIZE, packed=False)
    assert len(untold.ids_BS) < len(padded.ids_BS) == 7


@pytest.mark.parametrize("make", [collate, collate_outputs])
def test_a_batch_of_nothing_is_refused(make: Callable[..., RowBatch]) -> None:
    with pytest.raises(ValueError, match="a batch needs at least one trace"):
        make([], 16, 10)


def test_outputs_are_checked_too() -> None:
    with pytest.raises(ValueError, match="cmpl-1: output_ids holds 10"):
        collate_outputs([example(), example(output_ids=[4, 10, 2])], max_length=16, vocab_size=10)


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


def row(
    served: float, likeliest: float, tail: float = 0.0, temperature: float = 0.0, listed: int = 4
) -> Trace:
    """One row where token 4 was served: the probabilities of token `listed`, of the likeliest and
    of all others."""
    with np.errstate(divide="ignore"):
        return example(
            target_ids=[[2, listed]],
            target_logprobs=np.log([[likeliest, served]]),
            tail_logprob=np.log([tail]),
            temperature=temperature,
        )


@pytest.mark.parametrize(
    "temperature, least",
    [
        (0.0, 0.5248),  # as of a temperature of 0.07: 10000^-0.07
        (0.07, 0.5248),
        (0.1, 0.3981),
        (0.5, 0.01),
        (1.0, 1e-4),
        (1.5, 1e-6),
        (2.0, 1e-8),
        (9.0, 1e-8),  # no more than at 2
    ],
)
@pytest.mark.parametrize("is_listed", [True, False])
def test_the_served_token_has_its_least_part_of_the_likeliest(
    temperature: float, least: float, is_listed: bool
) -> None:
    for ratio, is_enough in ((1.03 * least, True), (0.97 * least, False)):
        served, likeliest = ratio / (1 + ratio), 1 / (1 + ratio)
        one = row(served, likeliest, temperature=temperature)
        if not is_listed:  # then it is within the tail
            one = row(1e-9, likeliest, served, temperature, listed=3)
        assert is_believable(one).tolist() == [is_enough]


def test_each_row_is_held_against_the_token_served_there() -> None:
    # Token 4 was served at positions 3 and 4, token 2 at 5. The rows name the likeliest, and one
    # that is impossible.
    target_ids = [[4, 2], [2, 4], [4, 2]]
    rows = several(3, position=[3, 4, 5], target_ids=target_ids, target_logprobs=[[-0.01, -20]] * 3)
    assert is_believable(rows).tolist() == [True, False, False]


def test_rows_that_contradict_the_text_are_left_out_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    both = several(2, position=[4, 5], target_ids=[[7, 3], [2, 3]], keep_prob=[1.0, 0.5])
    (kept,), num_out = trainable([both, row(0.001, 0.999), make_minimal_trace("no rows")], 10)
    assert num_out == 2
    assert kept.position.tolist() == [5] and kept.keep_prob.tolist() == [0.5]
    assert [record.message for record in caplog.records] == [
        "left out: 2 of 3 rows make the token served there all but impossible"
    ]


@pytest.mark.parametrize("num_wrong, is_warned", [(0, False), (1, False), (2, True)])
def test_one_row_in_a_hundred_may_contradict_in_silence(
    num_wrong: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    good, wrong = example(), row(0.001, 0.999)
    assert trainable([good] * (100 - num_wrong) + [wrong] * num_wrong, 10) == (
        [good] * (100 - num_wrong),
        num_wrong,
    )
    assert bool(caplog.records) is is_warned
