"""`osd bench buffer`: how fast the replay buffer stores and returns traces, and how much it holds.

One writer and one reader use the private Valkey server as the service starts it. Each call of the
buffer is paired with the same bytes through the bare client. The difference is the cost of
encoding, checking, trimming and decoding.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.stats import Estimate, estimate, median_ratio
from osd.records import ACCEPTED, REJECTED, Trace

TOP_K, VOCABULARY = 64, 151_936
ROWS_PER_TOKEN = 0.5
"""As `osd bench capture` finds it where about half of the draft tokens are accepted."""
LENGTHS = {"short": (64, 64), "medium": (256, 256), "long": (1024, 1024)}
"""Prompt and output tokens."""
CALL_SIZES = (1, 16)
"""Traces per `put`: requests that end in the same engine step."""
TOKENS_PER_SECOND = 1000
NUM_TRACES = 64
STREAM = "bench:plain"
CHUNK = 32


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    return Protocol(
        bench="buffer",
        question="How fast do traces go into the replay buffer and come out, and how long does a "
        "GB last?",
        arms=("put", "xadd", "read", "xrange"),
        order="put and xadd in turns (the first of one pair is the second of the next), then read "
        "and xrange likewise.",
        sizes={
            "lengths": LENGTHS,
            "rows_per_token": ROWS_PER_TOKEN,
            "top_k": TOP_K,
            "traces_per_put": CALL_SIZES,
            "num_traces": NUM_TRACES,
            "num_repeats": 4 if options.quick else 40,
            "tokens_per_second": TOKENS_PER_SECOND,
            "server": "private Valkey, append-only file",
        },
    )


def run(options: Options) -> Result:
    """Start a server, fill and empty it."""
    from buffers.embedded import EmbeddedValkey

    plan = protocol(options)
    notebook = Notebook(options, plan)
    with (
        tempfile.TemporaryDirectory(prefix="osd-bench-") as directory,
        EmbeddedValkey(Path(directory)) as server,
    ):
        for name in LENGTHS:
            options.say(f"{name} traces")
            _measure(notebook, plan, name, server.url)
    return summarise(plan, notebook.rows)


def _measure(notebook: Notebook, plan: Protocol, name: str, url: str) -> None:
    import redis

    from buffers.codec import encode_trace
    from buffers.redis_stream import RedisTraceBuffer

    rng = np.random.default_rng(0)
    buffer = RedisTraceBuffer(url, deployment="bench", target_id="bench")
    plain = redis.Redis.from_url(url, protocol=2)
    for repeat in range(-1, plan.sizes["num_repeats"]):  # the first warms up
        traces = [
            make_trace(f"{name}-{repeat}-{i}", *LENGTHS[name], rng) for i in range(NUM_TRACES)
        ]
        encoded = [encode_trace(trace) for trace in traces]
        call_size = CALL_SIZES[repeat % len(CALL_SIZES)]
        calls: dict[str, Callable[[], int]] = {
            "put": partial(_put, buffer, traces, call_size),
            "xadd": partial(_xadd, plain, encoded, call_size),
            "read": partial(_read, buffer),
            "xrange": partial(_xrange, plain),
        }
        rows: dict[str, Row] = {}
        for pair in (("put", "xadd"), ("read", "xrange")):
            for arm in pair if repeat // 2 % 2 else pair[::-1]:
                started = time.perf_counter()
                num_traces = calls[arm]()
                rows[arm] = {"seconds": time.perf_counter() - started, "num_traces": num_traces}
        stats = buffer.stats()
        stored = {"num_bytes": stats.num_bytes, "num_traces": stats.num_traces + stats.num_holdout}
        if repeat >= 0:
            mean_bytes = sum(map(len, encoded)) / len(encoded)
            notebook.add(
                group=name,
                repeat=repeat,
                call_size=call_size,
                trace_bytes=mean_bytes,
                stored=stored,
                **rows,
            )
        buffer.purge()
        plain.delete(STREAM)
    assert not any(buffer.dropped.values()), buffer.dropped
    buffer.close()
    plain.close()


def _put(buffer: Any, traces: Sequence[Trace], call_size: int) -> int:
    return sum(buffer.put(traces[i : i + call_size]) for i in range(0, len(traces), call_size))


def _xadd(plain: Any, encoded: Sequence[bytes], call_size: int) -> int:
    for i in range(0, len(encoded), call_size):
        pipeline = plain.pipeline(transaction=False)
        for data in encoded[i : i + call_size]:
            pipeline.xadd(STREAM, {"p": data})
        pipeline.execute()
    return len(encoded)


def _read(buffer: Any) -> int:
    """Training traces as the trainer reads them; those held out stay behind."""
    return len(buffer.read({}, NUM_TRACES)[0])


def _xrange(plain: Any) -> int:
    num_traces, after = 0, "-"
    while rows := plain.xrange(STREAM, after, "+", count=CHUNK):
        num_traces += len(rows)
        after = "(" + rows[-1][0].decode()
    return num_traces


def make_trace(
    trace_id: str,
    num_prompt: int,
    num_output: int,
    rng: np.random.Generator,
    *,
    vocab_size: int = VOCABULARY,
) -> Trace:
    """A trace of the size that capture makes, with random tokens and distributions: nothing is
    compressed."""
    num_rows = int(num_output * ROWS_PER_TOKEN)
    ids = (rng.integers(0, vocab_size, (num_rows, 1)) + 7 * np.arange(TOP_K)) % vocab_size
    scores = -np.sort(rng.exponential(4.0, (num_rows, TOP_K + 1)), axis=1)
    logprobs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    return Trace(
        trace_id=trace_id,
        target_id="bench",
        finished_at=time.time(),
        prompt_ids=rng.integers(0, vocab_size, num_prompt),
        output_ids=rng.integers(0, vocab_size, num_output),
        position=num_prompt + 2 * np.arange(num_rows),
        kind=rng.choice([REJECTED, ACCEPTED], num_rows),
        draft_ids=ids[:, 0],
        target_ids=ids,
        target_logprobs=logprobs[:, :TOP_K],
        tail_logprob=logprobs[:, TOP_K],
        keep_prob=np.ones(num_rows),
        draft_version=np.ones(num_rows),
        num_drafts=num_rows,
        num_draft_tokens=4 * num_rows,
        num_accepted_tokens=num_output - num_rows,
    )


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures per length of trace."""
    figures: list[Figure] = []
    spread: list[tuple[str, Estimate, tuple[float, ...]]] = []
    for group in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == group]
        title = "{} traces ({} + {} tokens)".format(group, *plan.sizes["lengths"][group])
        parts = {
            f"in, {n} a call": ("put", "xadd", [r for r in mine if r["call_size"] == n])
            for n in CALL_SIZES
        }
        for name, (ours, bare, some) in {**parts, "out": ("read", "xrange", mine)}.items():
            speeds = [
                [_megabytes(r, arm) / r[arm]["seconds"] for r in some] for arm in (ours, bare)
            ]
            found = estimate(speeds[0])
            figures.append(Figure.of(title, name, found, "MB/s"))
            figures.append(Figure.of(title, f"{name}, over the bare client", median_ratio(*speeds)))
            spread.append((f"{group}, {name}", found, tuple(speeds[0])))
        figures += _sizes(title, mine, plan)
    drawing = Spread(title="Through the replay buffer", unit="MB/s", rows=tuple(spread))
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))


def _megabytes(row: Row, arm: str) -> float:
    return row[arm]["num_traces"] * row["trace_bytes"] / 1e6


def _sizes(title: str, rows: Sequence[Row], plan: Protocol) -> list[Figure]:
    stored = sum(r["stored"]["num_bytes"] for r in rows) / sum(
        r["stored"]["num_traces"] for r in rows
    )
    per_token = stored / plan.sizes["lengths"][rows[0]["group"]][1]
    minutes = 1e9 / (per_token * plan.sizes["tokens_per_second"]) / 60
    tokens_per_second = plan.sizes["tokens_per_second"]
    return [
        Figure(
            group=title, name="bytes per trace, encoded", value=rows[0]["trace_bytes"], unit="B"
        ),
        Figure(group=title, name="bytes per trace, in the server", value=stored, unit="B"),
        Figure(
            group=title, name="bytes per output token, in the server", value=per_token, unit="B"
        ),
        Figure(
            group=title,
            name=f"traffic per GB at {tokens_per_second:,} tokens/s",
            value=minutes,
            unit="min",
        ),
    ]
