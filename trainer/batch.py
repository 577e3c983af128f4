"""Traces into tensors. Only this module turns positions into logit rows.

**The shift.** A trace's `position` t means: the target's distribution for token t given tokens[:t].
A causal model fed tokens[:t] gives that distribution at its *last* input, index t − 1. So a
captured position t is trained at `row_s = t − 1`. `_locate` shifts once; all other code uses
`row_b` and `row_s`.

**Packing.** Traces differ in length, so several share a line of the batch (`trainer/pack.py`).
`position_ids_BS` begins at 0 for each of them. From that alone transformers masks the attention
between them.

Legend: B lines, S tokens (padded on the right), N rows, K top-k.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from osd.records import Trace
from trainer.pack import one_a_line, pack

logger = logging.getLogger(__name__)

MASS_TOLERANCE = 0.05
"""The sum of a row's probabilities may differ from 1 by this much. float16 explains less than 0.01;
a larger difference means a wrong capture."""

LEAST_RATIO, LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-4, 0.07, 2.0
"""A row is believed when the served token has at least `LEAST_RATIO` of the likeliest token's
probability, at the temperature of the request clamped to the two bounds.

The lower bound stands for greedy requests, whose token is the likeliest one except for rounding. A
row that fails belongs to another position, or the sampler was made to serve another token
(penalties, forced tokens). It is wrong to train on in both cases. The higher the temperature, the
fewer such rows are found."""
MANY_CONTRADICT = 0.01
"""A warning is logged when more than this share of the rows contradicts the text."""

Batch = TypeVar("Batch", bound="RowBatch")


NUM_LIKELIEST = 5
"""Tokens of the draft that are held against the served one."""


class Proposals(NamedTuple):
    """What a draft would propose at the rows of a `RowBatch`."""

    ids_GN: Tensor
    """int64; as the token at depth g of a step."""
    likeliest_KN: Tensor
    """int64; its k-th likeliest token, at the first depth; -1 beyond its vocabulary."""


def likeliest(logits_NV: Tensor) -> Tensor:
    """int64 [K, N]: ids of the `NUM_LIKELIEST` largest logits, in their order; -1 where there are
    fewer."""
    ids_NK = logits_NV.topk(min(NUM_LIKELIEST, logits_NV.shape[-1]), dim=-1).indices
    num_missing = NUM_LIKELIEST - ids_NK.shape[-1]
    return torch.nn.functional.pad(ids_NK, (0, num_missing), value=-1).T


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """Token sequences and the rows of their logits that are used: logits_BSV[row_b_N, row_s_N]
    predict label_ids_N."""

    ids_BS: Tensor
    """int64; padding is 0."""
    position_ids_BS: Tensor
    """int64; begins at 0 for every trace; 0 in the padding."""
    row_b_N: Tensor
    """int64"""
    row_s_N: Tensor
    """int64; logits at row_s predict the token that follows there."""
    label_ids_N: Tensor
    """int64; the token that was served after row_s."""
    trace_N: Tensor
    """int64; index of the trace a row belongs to; ascending."""
    num_tokens: int
    """Tokens in the batch without padding."""
    features_BSF: Tensor | None = None
    """The target's hidden states, for a head."""

    @property
    def num_rows(self) -> int:
        return len(self.row_b_N)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `trainer.draft.RowModel` takes."""
        return self.ids_BS, self.position_ids_BS, self.row_b_N, self.row_s_N


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch(RowBatch):
    """The captured rows of several traces and the target's distribution at each.

    Example:
        Of a trace with tokens [1, 7, 9, 4, 4, 2] and a row at position 4:
        ids_BS=[[1, 7, 9, 4]], row_b_N=[0], row_s_N=[3], label_ids_N=[4], target_ids_NK=[[4, 2]],
        target_logprobs_NK=[[-0.1, -2.5]], tail_logprob_N=[-4.1], weight_N=[1.0], num_positions=1.0
    """

    target_ids_NK: Tensor
    """int64; 0 where padded."""
    target_logprobs_NK: Tensor
    """float32, normalised together with the tail; -inf where padded."""
    tail_logprob_N: Tensor
    """float32; -inf when the K tokens hold all mass."""
    weight_N: Tensor
    """float32, proportional to 1 / keep_prob, sums to 1."""
    num_positions: float
    """How many positions the rows stand for: the sum of 1 / keep_prob."""


def collate(
    traces: Sequence[Trace], max_length: int, vocab_size: int, *, packed: bool = True
) -> TrainBatch:
    """The captured rows of `traces`. Each trace gets a line of its own unless `packed`.

    A sequence ends before its last captured position, because later tokens teach nothing. If it is
    still longer than `max_length` tokens, it loses its start, and the rows there are dropped.
    Raises `ValueError` naming trace and field.
    """
    if not traces:
        raise ValueError("a batch needs at least one trace")
    for trace in traces:
        check_rows(trace, vocab_size)
    located = [_locate(trace, trace.position, max_length) for trace in traces]
    kept = [
        trace.with_rows(is_kept_N) for trace, (_, _, is_kept_N) in zip(traces, located, strict=True)
    ]
    num_k = max(trace.target_ids.shape[1] for trace in traces)
    logprobs_NK = np.concatenate(
        [_pad_k(t.target_logprobs.astype(np.float32), num_k, -np.inf) for t in kept]
    )
    tail_N = _joined(kept, "tail_logprob")
    log_mass_N = np.logaddexp(np.logaddexp.reduce(logprobs_NK, axis=1), tail_N)
    weight_N = 1.0 / _joined(kept, "keep_prob").astype(np.float64)
    target_ids_NK = np.concatenate([_pad_k(trace.target_ids, num_k, 0) for trace in kept])
    return TrainBatch(
        **_sequences(traces, located, packed),
        target_ids_NK=torch.from_numpy(target_ids_NK).long(),
        target_logprobs_NK=torch.from_numpy(logprobs_NK - log_mass_N[:, None]).float(),
        tail_logprob_N=torch.from_numpy(tail_N - log_mass_N).float(),
        weight_N=torch.from_numpy(weight_N / weight_N.sum()).float(),
        num_positions=float(weight_N.sum()),
    )


def collate_outputs(
    traces: Sequence[Trace],
    max_length: int,
    vocab_size: int,
    *,
    packed: bool = True,
    first: int = 1,
) -> RowBatch:
    """Every output token of each trace from index `first` on; by default all but the very first:
    prefill produces it, so no draft ever proposes it.

    Rows of one trace are consecutive and in order. An output longer than `max_length` loses its
    start.
    """
    if not traces:
        raise ValueError("a batch needs at least one trace")
    for trace in traces:
        check_tokens(trace, vocab_size)
    located = []
    for trace in traces:
        num_prompt = len(trace.prompt_ids)
        located.append(
            _locate(
                trace, np.arange(num_prompt + first, num_prompt + len(trace.output_ids)), max_length
            )
        )
    return RowBatch(**_sequences(traces, located, packed))


def check_rows(trace: Trace, vocab_size: int) -> None:
    """Raise `ValueError`, naming trace and field, unless the trace can be trained on."""
    check_tokens(trace, vocab_size)
    if not trace.num_rows:
        raise _wrong(trace, "position", "has no rows")
    _check_ids(trace, "target_ids", vocab_size)
    sorted_NK = np.sort(trace.target_ids, axis=1)
    if (sorted_NK[:, 1:] == sorted_NK[:, :-1]).any():
        raise _wrong(trace, "target_ids", "lists a token twice in one row")
    mass_N = np.exp(trace.target_logprobs.astype(np.float64)).sum(1) + np.exp(
        trace.tail_logprob.astype(np.float64)
    )
    if not (np.abs(mass_N - 1) <= MASS_TOLERANCE).all():
        worst = int(np.argmax(np.abs(mass_N - 1)))
        raise _wrong(
            trace,
            "target_logprobs",
            f"and tail_logprob of row {worst} add up to {mass_N[worst]:.3g}, not 1",
        )


def check_tokens(trace: Trace, vocab_size: int) -> None:
    """Raise `ValueError`, naming trace and field, where a token is outside the vocabulary."""
    _check_ids(trace, "prompt_ids", vocab_size)
    _check_ids(trace, "output_ids", vocab_size)


def well_formed(
    traces: Sequence[Trace], check: Callable[[Trace, int], None], vocab_size: int
) -> list[Trace]:
    """The traces that pass. A failure is logged, not raised, because it would stop all rounds."""
    passed = []
    for trace in traces:
        try:
            check(trace, vocab_size)
        except ValueError as error:
            logger.warning("left out: %s", error)
        else:
            passed.append(trace)
    return passed


def trainable(traces: Sequence[Trace], vocab_size: int) -> tuple[list[Trace], int]:
    """The traces that can be trained on, and the number of rows left out because they contradict
    the text (the buffer was tampered with, or the capture is one position off)."""
    passed = well_formed([trace for trace in traces if trace.num_rows], check_rows, vocab_size)
    believed = [trace.with_rows(is_believable(trace)) for trace in passed]
    num_rows = sum(trace.num_rows for trace in passed)
    num_out = num_rows - sum(trace.num_rows for trace in believed)
    if num_out > MANY_CONTRADICT * num_rows:
        logger.warning(
            "left out: %d of %d rows make the token served there all but impossible",
            num_out,
            num_rows,
        )
    return [trace for trace in believed if trace.num_rows], num_out


def is_believable(trace: Trace) -> np.ndarray:
    """bool [N]; whether the served token can have come from the row's distribution."""
    served_N = np.concatenate([trace.prompt_ids, trace.output_ids])[trace.position]
    is_served_NK = trace.target_ids == served_N[:, None]
    logprobs_NK = trace.target_logprobs.astype(np.float32)
    listed_N = np.where(is_served_NK, logprobs_NK, -np.inf).max(1)
    # A token that is not listed has at most the probability of the tail.
    most_N = np.where(is_served_NK.any(1), listed_N, trace.tail_logprob)
    temperature = min(max(trace.temperature, LEAST_TEMPERATURE), MOST_TEMPERATURE)
    return most_N >= logprobs_NK.max(1) + temperature * np.log(LEAST_RATIO)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch on `device`."""
    values: dict[str, Any] = {f.name: getattr(batch, f.name) for f in fields(batch)}
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return type(batch)(**(values | moved))


def _locate(
    trace: Trace, position_N: np.ndarray, max_length: int
) -> tuple[int, np.ndarray, np.ndarray]:
    """Where the tokens at `position_N` are predicted: index of the first token that is fed, row_s
    of the rows that are kept, and which rows are kept [N]."""
    start = max(0, int(position_N.max(initial=0)) - max_length)
    row_s_N = position_N.astype(np.int64) - 1 - start
    is_kept_N = row_s_N >= 0
    return start, row_s_N[is_kept_N], is_kept_N


def _sequences(
    traces: Sequence[Trace], located: list[tuple[int, np.ndarray, np.ndarray]], packed: bool
) -> dict[str, Any]:
    """The fields of `RowBatch`."""
    num_tokens = [int(row_s.max(initial=-1)) + 1 for _, row_s, _ in located]
    places, num_lines, length = pack(num_tokens) if packed else one_a_line(num_tokens)
    ids_BS = np.zeros((num_lines, length), np.int64)
    position_ids_BS = np.zeros_like(ids_BS)
    labels, row_b, row_s = [], [], []
    for trace, place, (start, row_s_N, _), num in zip(
        traces, places, located, num_tokens, strict=True
    ):
        tokens = np.concatenate([trace.prompt_ids, trace.output_ids])
        ids_BS[place.line, place.start : place.start + num] = tokens[start : start + num]
        position_ids_BS[place.line, place.start : place.start + num] = np.arange(num)
        labels.append(tokens[start + row_s_N + 1])
        row_b.append(np.full(len(row_s_N), place.line, np.int64))
        row_s.append(row_s_N + place.start)
    return {
        "ids_BS": torch.from_numpy(ids_BS),
        "position_ids_BS": torch.from_numpy(position_ids_BS),
        "row_b_N": torch.from_numpy(np.concatenate(row_b)),
        "row_s_N": torch.from_numpy(np.concatenate(row_s)),
        "label_ids_N": torch.from_numpy(np.concatenate(labels)).long(),
        "trace_N": torch.from_numpy(
            np.repeat(np.arange(len(traces)), [len(rows) for rows in row_s])
        ),
        "num_tokens": sum(num_tokens),
    }


def _joined(traces: Sequence[Trace], name: str) -> np.ndarray:
    return np.concatenate([getattr(trace, name) for trace in traces])


def _check_ids(trace: Trace, name: str, vocab_size: int) -> None:
    ids = getattr(trace, name)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise _wrong(trace, name, f"holds {outside[0]}, the draft's vocabulary has {vocab_size}")


def _pad_k(values_NK: np.ndarray, num_k: int, value: float) -> np.ndarray:
    return np.pad(values_NK, ((0, 0), (0, num_k - values_NK.shape[1])), constant_values=value)


def _wrong(trace: Trace, name: str, what: str) -> ValueError:
    return ValueError(f"trace {trace.trace_id}: {name} {what}")
