"""Builders of records for tests: keyword-only, small, deterministic, valid by default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from osd.records import ACCEPTED, PLAIN, REJECTED, Trace

VOCAB_SIZE = 128


def trace_id(index: int, *, holdout: bool | None = False, prefix: str = "t") -> str:
    """An id whose stable hash makes the trace held out (True) or not (False); None: either."""
    for salt in range(10_000):
        name = f"{prefix}-{index}-{salt}"
        if holdout is None or _is_holdout(name) == holdout:
            return name
    raise AssertionError("no id found")


def make_trace(
    *,
    index: int = 0,
    holdout: bool | None = False,
    num_prompt: int = 6,
    num_output: int = 8,
    num_rows: int = 4,
    top_k: int = 5,
    vocab_size: int = VOCAB_SIZE,
    seed: int | None = None,
    **fields: Any,
) -> Trace:
    """A valid trace. The same arguments give the same trace; `index` tells traces apart.

    `holdout`: True or False chooses a `trace_id` that is (not) held out, None takes whatever comes.
    `fields` replaces any field of `Trace`, `trace_id` included. Rows sit at the last `num_rows`
    output positions (at most `num_output`).

    Example:
        make_trace(index=3, domain="code", finished_at=12.0)
    """
    rng = np.random.default_rng(index if seed is None else seed)
    num_rows = min(num_rows, num_output)
    num_tokens = num_prompt + num_output
    target_ids, target_logprobs, tail_logprob = _distributions(rng, num_rows, top_k, vocab_size)
    kind = rng.choice(np.asarray([REJECTED, ACCEPTED, PLAIN], np.int8), num_rows)
    draft_ids = np.where(kind == PLAIN, -1, rng.integers(0, vocab_size, num_rows)).astype(np.int32)
    values: dict[str, Any] = {
        "trace_id": trace_id(index, holdout=holdout),
        "target_id": "target-a",
        "finished_at": 1_000.0 + index,
        "prompt_ids": rng.integers(0, vocab_size, num_prompt).astype(np.int32),
        "output_ids": rng.integers(0, vocab_size, num_output).astype(np.int32),
        "position": np.arange(num_tokens - num_rows, num_tokens, dtype=np.int32),
        "kind": kind,
        "draft_ids": draft_ids,
        "target_ids": target_ids,
        "target_logprobs": target_logprobs,
        "tail_logprob": tail_logprob,
        "keep_prob": np.where(kind == REJECTED, 1.0, 0.25).astype(np.float32),
        "draft_version": np.ones(num_rows, np.int32),
        "num_drafts": num_rows,
        "num_draft_tokens": 4 * num_rows,
        "num_accepted_tokens": int((kind == ACCEPTED).sum()),
    }
    return Trace(**(values | fields))


def make_traces(num: int, *, start: int = 0, **fields: Any) -> list[Trace]:
    """`num` traces with indices `start`, `start + 1`, ...; `fields` as in `make_trace`."""
    return [make_trace(index=index, **fields) for index in range(start, start + num)]


def trace_fields() -> Iterator[str]:
    """Names of every field of `Trace`."""
    return iter(Trace.__dataclass_fields__)


def assert_same_trace(got: Trace, expected: Trace) -> None:
    """Every field equal, arrays bit by bit with dtype and shape."""
    for name in trace_fields():
        left, right = getattr(got, name), getattr(expected, name)
        if isinstance(right, np.ndarray):
            assert left.dtype == right.dtype, name
            assert left.shape == right.shape, name
            assert left.tobytes() == right.tobytes(), name
        else:
            assert left == right, name


def ids(traces: Sequence[Trace]) -> list[str]:
    """Their `trace_id`s, in order."""
    return [trace.trace_id for trace in traces]


def _distributions(
    rng: np.random.Generator, num_rows: int, top_k: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Top-k ids int32[N, K], float16[N, K] log-probabilities, float32[N] log of the tail mass, of
    random logits."""
    logits = rng.normal(size=(num_rows, vocab_size)) * 2
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-logprobs, axis=-1)[:, :top_k]
    top = np.take_along_axis(logprobs, order, axis=-1)
    with np.errstate(divide="ignore"):
        tail = np.log(np.clip(1 - np.exp(top).sum(-1), 0, 1))
    return order.astype(np.int32), top.astype(np.float16), tail.astype(np.float32)


def _is_holdout(name: str) -> bool:
    return make_minimal_trace(name).is_holdout


def make_minimal_trace(name: str) -> Trace:
    """A trace without captured rows."""
    empty = np.zeros(0, np.int32)
    return Trace(
        trace_id=name,
        target_id="target-a",
        finished_at=0.0,
        prompt_ids=empty,
        output_ids=empty,
        position=empty,
        kind=empty,
        draft_ids=empty,
        target_ids=empty.reshape(0, 0),
        target_logprobs=empty.reshape(0, 0),
        tail_logprob=empty,
        keep_prob=empty,
        draft_version=empty,
    )
