"""Traces assembled from steps: replays, skip reasons, budget, repeated prefixes."""

from __future__ import annotations

import gc
import time
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from buffers.codec import encode_trace
from osd.observe.exposition import Totals
from osd.records import HOLDOUT_ONE_IN, ReplicaStatus, Trace
from serving.capture import rows
from serving.capture.assemble import STORED_OVERHEAD, Schedule, Step
from serving.capture.budget import ByteBudget
from serving.capture.pick import Lot, pick_on_host
from serving.capture.prefixes import BLOCK, StoredPrefixes
from serving.capture.skips import SKIP_REASONS, skip_reason
from serving.vllm.hooks import new_request
from tests.support.captures import (
    VOCAB,
    Bench,
    Clock,
    Landing,
    Stuck,
    make_capture,
    make_request,
    step,
    verification,
)

# ------------------------------------------------------------------------------------------ replays


def test_each_position_is_there_once_with_its_own_row() -> None:
    bench = Bench()
    bench.begin(make_request())
    bench.add(step(3, [10]), step(4, [11, 12, 13], num_drafts=4), step(7, [14], num_drafts=4))
    bench.finish("r")
    trace = bench.only_trace()
    assert trace.output_ids.tolist() == [10, 11, 12, 13, 14]
    assert trace.position.tolist() == [3, 4, 5, 6, 7]
    assert trace.target_ids[:, 0].tolist() == [11, 12, 13, 14, 15]


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_trace_says_whether_its_answer_may_be_shared(is_shared: bool) -> None:
    bench = Bench()
    bench.begin(make_request(is_shared=is_shared))
    bench.add(step(3, [10]))
    bench.finish("r")
    assert bench.only_trace().is_shared is is_shared


def test_a_replay_replaces_what_it_computes_again() -> None:
    """The engine threw away the step at positions 4 to 8 and came back with other tokens and fewer
    rows."""
    bench = Bench()
    bench.begin(make_request())
    bench.add(step(3, [10]), step(4, [11, 12, 13, 14, 15], num_drafts=4))
    bench.add(step(4, [21, 22], num_drafts=4, chance=0.9), step(6, [23]))
    bench.finish("r")
    trace = bench.only_trace()
    assert trace.output_ids.tolist() == [10, 21, 22, 23]
    # Position 4 was an accepted token whose row was not drawn this time: the old one must not stand
    # in for it.
    assert trace.position.tolist() == [3, 5, 6]
    assert trace.target_ids[:, 0].tolist() == [11, 23, 24]


def test_a_replayed_end_is_no_end() -> None:
    bench = Bench()
    bench.begin(make_request(stop_ids=frozenset({7})))
    bench.add(step(3, [10, 7, 11], num_drafts=4), step(3, [10, 12], num_drafts=4), step(5, [13]))
    bench.finish("r")
    assert bench.only_trace().output_ids.tolist() == [10, 12, 13]


def test_it_does_not_matter_how_many_steps_are_handled_together() -> None:
    """Requests that begin, are replayed, end and come again under their name, with rows that wait
    for their top-k."""
    rng = np.random.default_rng(5)
    items: list[Any] = []
    at: dict[str, int] = {}
    for _ in range(400):
        name = f"r{rng.integers(4)}"
        if name not in at:
            items.append(Schedule(0.0, [make_request(name)], set()))
            at[name] = 3
        elif at[name] > 12 and rng.random() < 0.2:
            items.append(Schedule(1.0, [], {name}))
            del at[name]
        else:
            back = int(rng.integers(1, 5)) if rng.random() < 0.1 else 0
            position = max(3, at[name] - back)
            emitted = rng.integers(0, 90, rng.integers(1, 4)).tolist()
            items.append((position, emitted, name, float(rng.choice([0.0, 0.9]))))
            at[name] = position + len(emitted)

    def traces(every: int) -> list[Trace]:
        bench = Bench()
        for number, item in enumerate(items, 1):
            if isinstance(item, tuple):
                position, emitted, name, chance = item
                item = step(position, emitted, num_drafts=4, req_id=name, chance=chance)
            bench.assembler.add(item)
            if number % every == 0:
                bench.assembler.flush()
        bench.assembler.flush()
        assert sum(bench.assembler.skipped.values()) == 0
        return bench.traces

    expected = [encode_trace(trace) for trace in traces(1)]
    assert len(expected) > 10
    for every in (2, 7, 1000):
        assert [encode_trace(trace) for trace in traces(every)] == expected


def test_rows_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.capture.assemble.MAX_WAITING_BYTES", 4 * VOCAB * 4)
    bench = Bench()
    bench.begin(make_request())
    for position in range(3, 40):
        bench.add(step(position, [10]))
        assert bench.assembler._num_waiting_bytes <= 4 * VOCAB * 4
    bench.finish("r")
    assert bench.only_trace().num_rows == 37


def test_rows_name_the_draft_that_proposed_them() -> None:
    bench = Bench()
    bench.begin(make_request())
    for position, version in ((3, 4), (4, 4), (5, 7)):
        bench.add(replace(step(position, [10]), version_B=np.array([version])))
    bench.finish("r")
    assert bench.only_trace().draft_version.tolist() == [4, 4, 7]


def test_no_rows_are_kept_beyond_the_stored_output() -> None:
    bench = Bench(max_output=16)
    bench.begin(make_request())
    bench.add(*(step(position, [10]) for position in range(3, 30)))
    assert sum(len(one.owner_R) for one in bench.assembler._waiting) == 16
    bench.finish("r")
    assert bench.only_trace().position.tolist() == list(range(3, 19))


def test_memory_of_rows_that_are_not_wanted_is_given_back() -> None:
    given: list[int] = []

    def late(position: int, emitted: Sequence[int]) -> Step:
        made = step(position, emitted, num_drafts=4)
        landed = made.picked.land()
        assert landed.rows is not None and isinstance(landed.rows.scores, rows.Logits)
        landed.rows.scores = replace(landed.rows.scores, give_back=lambda: given.append(position))
        return replace(made, picked=Landing(landed))

    bench = Bench()
    bench.begin(make_request(max_tokens=4))
    bench.add(late(3, [10, 11]))
    assert given == [], "they wait for their top-k"
    bench.add(late(5, [12, 13, 14]), late(8, [15]))  # one of three is beyond its end, and then all
    assert given == [5, 8]
    bench.finish("r")
    assert given == [5, 8, 3]
    assert bench.only_trace().num_rows == 4


def test_one_that_cannot_be_handed_out_does_not_keep_the_others_from_it() -> None:
    bench = Bench()
    names = [f"r{i}" for i in range(4)]
    bench.begin(*(make_request(name) for name in names))
    bench.add(*(step(3, [10], req_id=name) for name in names))
    put, tried = bench._put, []

    def fails_once(traces: Sequence[Trace]) -> int:
        tried.append(traces)
        if len(tried) == 1:
            raise OSError("no space")
        return put(traces)

    bench.assembler._put = fails_once
    with pytest.raises(ExceptionGroup, match="1 requests could not be handed out"):
        bench.finish(*names)
    assert len(bench.traces) == 3


def test_rows_that_cannot_be_summarised_cost_their_requests_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What fails in the midst of a replay must not leave half of it behind."""
    bench = Bench()
    bench.begin(make_request("one"), make_request("two"))
    bench.add(step(3, [10, 11], num_drafts=4, req_id="one"))
    with monkeypatch.context() as broken:
        broken.setattr("serving.capture.assemble.top_of", lambda *_: 1 / 0)
        bench.add(step(4, [12], req_id="one"))  # computes again what waits
    bench.add(step(5, [13], req_id="one"), step(3, [20], req_id="two"))
    bench.finish("one", "two")
    assert bench.only_trace().output_ids.tolist() == [20]
    assert bench.assembler.skipped == {"assembly_error": 1, "gap": 1}
    bench.begin(make_request("three"))
    bench.add(step(3, [30], req_id="three"))
    with monkeypatch.context() as broken:
        broken.setattr("serving.capture.assemble.top_of", lambda *_: 1 / 0)
        bench.finish("three")  # its end came before its rows did
    assert len(bench.traces) == 1
    assert bench.assembler.skipped == {"assembly_error": 2, "gap": 2}


def test_a_request_announced_again_goes_on() -> None:
    """vLLM's V2 model runner is told of a resumed request as if it were new."""
    bench = Bench()
    bench.begin(make_request())
    bench.add(step(3, [10]), step(4, [11]))
    bench.begin(make_request())
    bench.add(step(5, [12]))
    bench.finish("r")
    trace = bench.only_trace()
    assert trace.output_ids.tolist() == [10, 11, 12]
    assert trace.position.tolist() == [3, 4, 5]
    assert bench.assembler.skipped == {}


def test_a_request_whose_prompt_grew_starts_over_and_what_was_is_counted() -> None:
    bench = Bench()
    bench.begin(make_request())
    bench.add(step(3, [10]))
    bench.begin(make_request(prompt_ids=[1, 2, 3, 10, 5]))
    bench.add(step(5, [12]))
    bench.finish("r")
    assert bench.only_trace().output_ids.tolist() == [12]
    assert bench.assembler.skipped == {"gap": 1}


def test_steps_past_the_end_change_nothing() -> None:
    """Under asynchronous scheduling the engine runs one step more before it sees that a request has
    ended."""
    bench = Bench()
    bench.begin(make_request(stop_ids=frozenset({7})))
    bench.add(step(3, [10, 7], num_drafts=4), step(5, [12, 13], num_drafts=4))
    bench.finish("r")
    trace = bench.only_trace()
    assert trace.output_ids.tolist() == [10, 7]
    assert trace.position.tolist() == [3, 4]
    (window,) = bench.windows.take("r", "default")
    assert window.num_output_tokens == 2


def test_a_request_with_a_gap_leaves_no_trace_and_is_counted() -> None:
    bench = Bench()
    bench.begin(make_request())
    bench.begin(make_request("another"))
    bench.add(step(3, [10]), step(6, [13]), step(3, [20], req_id="another"))
    bench.finish("r", "another")
    assert [trace.output_ids.tolist() for trace in bench.traces] == [[20]]
    assert bench.assembler.skipped == {"gap": 1}


# ------------------------------------------------------------------------------------- skip reasons


def announced(**fields: Any) -> Any:
    """A request as vLLM's scheduler announces it to the worker (the fields of `NewRequestData` that
    are read)."""
    params: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 4,
        "ignore_eos": True,
        "stop_token_ids": [],
        "all_stop_token_ids": set(),
        "extra_args": None,
        "structured_outputs": None,
    }
    data: dict[str, Any] = {
        "req_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
    }
    params |= {k: fields.pop(k) for k in list(fields) if k in params}
    return SimpleNamespace(sampling_params=SimpleNamespace(**params), **(data | fields))


ANNOUNCED = {
    "": announced(),
    "opted_out": announced(extra_args={"osd_capture": "off"}),
    "structured_output": announced(structured_outputs=SimpleNamespace(json="{}")),
    "multimodal": announced(mm_features=[object()]),
    "prompt_embeds": announced(prompt_token_ids=None, prompt_embeds=torch.zeros(3, 4)),
    "target_adapter": announced(lora_request=object()),
    "pooling": SimpleNamespace(req_id="r", sampling_params=None),
}


@pytest.mark.parametrize("reason", ANNOUNCED)
def test_what_must_not_be_captured_is_left_out_and_counted(reason: str) -> None:
    request = new_request(ANNOUNCED[reason])
    assert skip_reason(request) == reason
    bench = Bench()
    bench.begin(request)
    bench.add(step(len(request.prompt_ids), [10]))
    bench.finish("r")
    assert dict(bench.assembler.skipped) == ({reason: 1} if reason else {})
    assert bench.assembler.num_traces == (0 if reason else 1)
    assert len(bench.traces) == (0 if reason else 1)


def test_a_session_that_goes_on_leaves_its_later_part_alone() -> None:
    """vLLM extends the very list that it announced: by what it has answered, but for the last
    token, and by what its client says then."""
    prompt, bench = [1, 2, 3], Bench()
    bench.begin(new_request(announced(prompt_token_ids=prompt, max_tokens=None)))
    bench.add(step(3, [10]), step(4, [11]))
    prompt += [10, 50, 51]
    bench.begin(new_request(announced(prompt_token_ids=prompt, max_tokens=None)))
    bench.add(step(6, [12]))
    bench.finish("r")
    trace = bench.only_trace()
    assert (trace.prompt_ids.tolist(), trace.output_ids.tolist()) == ([1, 2, 3, 10, 50, 51], [12])
    assert trace.position.tolist() == [6], "none of a token that was not what followed"
    assert dict(bench.assembler.skipped) == {"gap": 1}


def test_prompts_of_tokens_and_embeddings_count_as_embeddings() -> None:
    assert new_request(announced(prompt_embeds=torch.zeros(3, 4))).skip_reason == "prompt_embeds"


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
def test_a_share_of_requests_is_captured(fraction: float) -> None:
    requests = [new_request(announced(req_id=f"chatcmpl-{i:x}-{i * 7919}")) for i in range(2000)]
    reasons = [skip_reason(request, fraction) for request in requests]
    assert set(reasons) <= {"", "not_sampled"}
    taken = [request for request, reason in zip(requests, reasons, strict=True) if not reason]
    assert len(taken) / 2000 == pytest.approx(fraction, abs=0.03)
    if taken:
        held_out = sum(
            zlib.crc32(request.req_id.encode()) % HOLDOUT_ONE_IN == 0 for request in taken
        )
        assert held_out / len(taken) == pytest.approx(1 / HOLDOUT_ONE_IN, abs=0.07), (
            "held-out ones are among them"
        )


def test_what_is_not_sampled_leaves_no_trace_and_is_not_judged_by() -> None:
    bench = Bench(request_fraction=0.0)
    request = new_request(announced())
    bench.begin(request)
    bench.add(step(len(request.prompt_ids), [10]))
    bench.finish("r")
    assert dict(bench.assembler.skipped) == {"not_sampled": 1}
    assert bench.traces == []
    (window,) = bench.windows.take("r", "default")
    assert (window.num_finished, window.num_captured, sum(window.num_tested_per_pos)) == (1, 0, 0)


def test_a_wish_to_be_left_out_comes_before_other_reasons() -> None:
    both = announced(extra_args={"osd_capture": "off", "osd_domain": "mine"}, lora_request=object())
    assert skip_reason(new_request(both)) == "opted_out"


def test_a_full_queue_drops_rows_but_no_tokens_and_is_counted() -> None:
    sink = Stuck()
    capture = make_capture(sink, queue_size=4)
    try:
        capture.on_schedule([make_request("first"), make_request("second")], set())
        capture.on_verify(verification(3, [10], 0, "first"))
        capture.drain()
        capture.on_schedule([], {"first"})
        assert sink.entered.wait(5)
        for i in range(20):
            capture.on_verify(verification(3 + i, [10 + i], 0, "second"))
        assert capture.assembler.skipped["queue_full"] == 16
        sink.let_go.set()
        capture.on_schedule([], {"second"})
        capture.drain()
        _, trace = sink.traces
        assert len(trace.output_ids) == 20
        assert trace.position.tolist() == [3, 4, 5, 6]
        assert capture._num_bytes_in == capture._num_bytes_out > 0
    finally:
        sink.let_go.set()
        capture.close()


def test_steps_that_come_together_are_handled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps that wait are not handled until this time is over.
    monkeypatch.setattr("serving.capture.capture.SECONDS_TO_GATHER", 60.0)
    sizes: list[int] = []
    summarise = rows.summarise

    def spy(logits_RV: torch.Tensor, top_k: int) -> Any:
        sizes.append(len(logits_RV))
        return summarise(logits_RV, top_k)

    monkeypatch.setattr(rows, "summarise", spy)
    traces: list[Trace] = []
    capture = make_capture(lambda some: traces.extend(some) or len(some), queue_size=100)
    try:
        capture.on_schedule([make_request()], set())
        for i in range(12):
            capture.on_verify(verification(3 + i, [10 + i], 0))
        time.sleep(0.05)
        assert not sizes
        capture.drain()
        assert sizes == [12]
        for i in range(12, 40):  # a quarter of the queue is enough
            capture.on_verify(verification(3 + i, [10 + i], 0))
        deadline = time.monotonic() + 10
        while len(sizes) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        capture.on_schedule([], {"r"})
        capture.drain()
        assert traces[0].num_rows == 40
    finally:
        capture.close()


@pytest.mark.parametrize("why", ["full", "off"])
def test_what_is_not_captured_is_not_copied(why: str) -> None:
    sink = Stuck()
    capture = make_capture(sink, queue_size=4, enabled=why == "full")
    try:
        capture.on_schedule([make_request("first"), make_request("second")], set())
        capture.on_verify(verification(3, [10], 0, "first"))
        capture.drain()
        held = capture._num_bytes_in
        capture.on_schedule([], {"first"})
        assert why == "off" or sink.entered.wait(5)
        for i in range(20):
            capture.on_verify(verification(3 + i, [10 + i], 0, "second"))
        assert capture._num_bytes_in - held == (4 * VOCAB * 4 if why == "full" else 0)
    finally:
        sink.let_go.set()
        capture.close()


def test_what_has_been_handled_is_not_held() -> None:
    capture = make_capture(len)
    try:
        capture.on_schedule([make_request()], set())
        steps = [capture._take(verification(3 + i, [10 + i], 0)) for i in range(20)]
        alive = [weakref.ref(one.picked.step.logits) for one in steps]  # type: ignore[attr-defined]
        while steps:
            capture._queue.put(steps.pop())
        capture.drain()
        gc.collect()
        assert sum(ref() is not None for ref in alive) == 0
    finally:
        capture.close()


def test_what_ended_before_the_end_of_capture_is_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serving.capture.capture.SECONDS_TO_GATHER", 60.0)
    traces: list[Trace] = []
    capture = make_capture(lambda some: traces.extend(some) or len(some))
    capture.on_schedule([make_request()], set())
    capture.on_verify(verification(3, [10], 0))
    capture.on_schedule([], {"r"})
    capture.close()
    assert len(traces) == 1


def test_failures_of_hook_and_thread_are_counted() -> None:
    def broken(traces: Sequence[Trace]) -> int:
        raise OSError("no space")

    capture = make_capture(broken)
    try:
        capture.on_schedule([make_request()], set())
        capture.on_verify(verification(3, [10], 0))
        capture.on_schedule([], {"r"})
        capture.on_failure(ValueError("a tensor was missing"))
        capture.drain()
        assert capture.assembler.skipped == {"assembly_error": 1, "hook_error": 1}
    finally:
        capture.close()


def test_every_reason_reaches_the_metrics_by_its_name() -> None:
    status = ReplicaStatus(
        at=1.0,
        replica="replica-0",
        url="",
        version=1,
        target_id="target",
        k=4,
        pid=1,
        started_at=0.0,
        engine="",
        capture_skipped={reason: i + 1 for i, reason in enumerate(SKIP_REASONS)},
    )
    totals = Totals()
    totals.observe([status], None)
    text = totals.render()
    for i, reason in enumerate(SKIP_REASONS):
        assert f'osd_capture_skipped_total{{reason="{reason}"}} {i + 1}.0' in text


def test_a_queue_of_large_steps_is_full_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Stuck()
    capture = make_capture(sink, queue_size=1000)
    try:
        capture.on_schedule([make_request("first"), make_request("second")], set())
        capture.on_verify(verification(3, [10], 0, "first"))
        capture.drain()
        size = capture._num_bytes_in
        monkeypatch.setattr("serving.capture.capture.MAX_QUEUED_BYTES", 2 * size)
        capture.on_schedule([], {"first"})
        assert sink.entered.wait(5)
        for i in range(20):
            capture.on_verify(verification(3 + i, [10 + i], 0, "second"))
        assert capture.assembler.skipped["queue_full"] == 17, "three steps exceed two steps' worth"
    finally:
        sink.let_go.set()
        capture.close()


# ------------------------------------------------------------------------------------------- budget


def test_a_budget_bounds_the_bytes_of_any_stretch_of_time() -> None:
    clock = Clock()
    budget = ByteBudget(10_000, clock)
    spent: list[tuple[float, int]] = []
    rng = np.random.default_rng(0)
    while clock.now < 120:
        # 500 traces of 200 to 3000 bytes a second: 80 times the budget.
        clock.now += float(rng.exponential(0.002))
        size = int(rng.integers(200, 3000))
        if budget.spend(size):
            spent.append((clock.now, size))
    assert sum(size for _, size in spent) > 0.95 * 120 * 10_000
    for start in np.arange(0, 110, 0.37):
        for length in (0.1, 1.0, 10.0):
            inside = sum(size for at, size in spent if start <= at < start + length)
            assert inside <= 10_000 * (length + 1)


def test_a_rest_saves_up_for_one_second_alone() -> None:
    clock = Clock()
    budget = ByteBudget(10_000, clock)
    clock.now += 3600
    assert [budget.spend(4_000) for _ in range(4)] == [True, True, False, False]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_trace_costs_its_bytes_and_what_storing_it_adds(missing: int) -> None:
    trace = full_trace(40, 26)
    num_bytes = trace.num_bytes + len(trace.trace_id) + STORED_OVERHEAD
    assert len(full_traces(40, 26, ByteBudget(num_bytes - missing, Clock()))) == 1 - missing


def test_a_flood_of_requests_stores_what_the_budget_allows_and_counts_the_rest() -> None:
    clock = Clock()
    bench = Bench(ByteBudget(20_000, clock))
    num_seconds, per_second = 10, 40
    for i in range(num_seconds * per_second):
        clock.now = i / per_second
        req_id = f"r{i}"
        bench.begin(make_request(req_id))
        bench.add(*(step(3 + t, [t], req_id=req_id) for t in range(12)))
        bench.finish(req_id)
    stored = sum(len(encode_trace(trace)) for trace in bench.traces)
    assert 0.5 * num_seconds * 20_000 < stored <= (num_seconds + 1) * 20_000
    assert bench.assembler.skipped == {"budget": num_seconds * per_second - len(bench.traces)}
    assert bench.assembler.num_traces == len(bench.traces)
    assert 0 < len(bench.traces) < 0.5 * num_seconds * per_second
    assert bench.assembler.rows["plain"] == 12 * len(bench.traces)


def test_a_long_id_is_a_part_of_what_a_trace_costs() -> None:
    """Clients choose it (`X-Request-Id`)."""
    clock = Clock()
    bench = Bench(ByteBudget(40_000, clock))
    for i in range(10):
        req_id = f"chatcmpl-{i}" + "x" * 12_000
        bench.begin(make_request(req_id))
        bench.add(step(3, [5], req_id=req_id))
        bench.finish(req_id)
    assert 0 < sum(len(encode_trace(trace)) for trace in bench.traces) <= 40_000


def full_trace(num_prompt: int, num_output: int) -> Trace:
    (trace,) = full_traces(num_prompt, num_output)
    return trace


def full_traces(num_prompt: int, num_output: int, budget: ByteBudget | None = None) -> list[Trace]:
    """A captured row for every other output token, at the default top-k; none when it is over the
    budget."""
    bench = Bench(budget, top_k=64)
    bench.begin(
        make_request("chatcmpl-" + "0" * 41, range(num_prompt), extra_args={"osd_domain": "d" * 64})
    )
    for t in range(num_output):
        lot = Lot(np.array([t % 2 == 0]), np.zeros((1, 1)), np.ones(3), top_k=64)
        shown = verification(num_prompt + t, [t % 90], 0, "chatcmpl-" + "0" * 41)
        bench.add(
            Step(
                1.0,
                shown.req_ids,
                np.array([1]),
                shown.num_draft_tokens_B,
                pick_on_host(shown, lot),
            )
        )
    bench.finish("chatcmpl-" + "0" * 41)
    return bench.traces


def test_a_stored_row_costs_about_four_hundred_bytes_and_a_trace_little_more() -> None:
    trace = full_trace(num_prompt=300, num_output=200)
    assert trace.num_rows == 100
    tokens = trace.prompt_ids.nbytes + trace.output_ids.nbytes
    assert (trace.num_bytes - tokens) / trace.num_rows == 405
    encoded = len(encode_trace(trace))
    assert encoded / trace.num_rows < 450
    assert encoded - trace.num_bytes < STORED_OVERHEAD


# -------------------------------------------------------------------------------- repeated prefixes


def chat(bench: Bench, num_turns: int, tokens_per_turn: int = 200) -> list[Trace]:
    """Turns of a user's 50 tokens and an answer, each turn's prompt being all that was said
    before."""
    rng = np.random.default_rng(0)
    said: list[int] = []
    for turn in range(num_turns):
        said += rng.integers(0, VOCAB - 1, 50).tolist()
        answer = rng.integers(0, VOCAB - 1, tokens_per_turn - 50).tolist()
        req_id = f"turn-{turn}"
        bench.begin(make_request(req_id, said))
        bench.add(*(step(len(said) + i, [token], req_id=req_id) for i, token in enumerate(answer)))
        bench.finish(req_id)
        said += answer
    return bench.traces


def test_turns_of_a_chat_do_not_store_the_chat_again_and_again() -> None:
    whole = chat(Bench(max_context=1 << 20, max_repeated_context=1 << 20), 16)
    cut = chat(Bench(max_context=1 << 20, max_repeated_context=256), 16)
    sizes = [len(trace.prompt_ids) for trace in cut]
    assert [len(trace.prompt_ids) for trace in whole] == [50 + 200 * turn for turn in range(16)]
    assert max(sizes) <= 256 + 50 + 31  # a block may be cut by the end of what was stored
    assert len(set(sizes[4:])) <= 4  # turns cost the same from then on
    for long, short in zip(whole, cut, strict=True):
        # The context that is left is the end of the whole one, and rows stand at the same tokens as
        # before.
        gone = len(long.prompt_ids) - len(short.prompt_ids)
        assert short.prompt_ids.tolist() == long.prompt_ids[gone:].tolist()
        assert short.output_ids.tolist() == long.output_ids.tolist()
        assert (short.position + gone).tolist() == long.position.tolist()
        assert short.target_ids.tolist() == long.target_ids.tolist()


def test_a_prefix_counts_as_stored_only_when_it_was() -> None:
    bench = Bench(max_repeated_context=64, max_bytes_per_second=0)
    chat(bench, 4)
    assert bench.assembler.skipped == {"budget": 4}
    bench.assembler._budget = ByteBudget(1 << 30)
    assert [len(trace.prompt_ids) for trace in chat(bench, 4)] == [
        50,
        64 + 50 + 8,
        64 + 50 + 16,
        64 + 50 + 24,
    ]


def test_a_prefix_the_buffer_did_not_take_does_not_count() -> None:
    bench = Bench(max_repeated_context=64)
    bench.assembler._put = lambda traces: 0
    chat(bench, 4)
    bench.assembler._put = bench._put
    assert [len(trace.prompt_ids) for trace in chat(bench, 4)] == [
        50,
        64 + 50 + 8,
        64 + 50 + 16,
        64 + 50 + 24,
    ]


def test_what_the_context_limit_cut_off_was_never_stored() -> None:
    bench = Bench(max_context=64, max_repeated_context=16)
    system = list(range(64))
    for number, prompt in enumerate([system + [7] * 128, system + [9] * 4]):
        bench.begin(make_request(f"r{number}", prompt))
        bench.add(step(len(prompt), [1], req_id=f"r{number}"))
        bench.finish(f"r{number}")
    first, second = bench.traces
    assert first.prompt_ids.tolist() == [7] * 64
    assert second.prompt_ids.tolist() == (system + [9] * 4)[-64:], "nothing of it was there before"


def test_prompts_that_share_nothing_are_kept_whole() -> None:
    bench = Bench(max_repeated_context=16)
    rng = np.random.default_rng(1)
    for i in range(5):
        bench.begin(make_request(f"r{i}", rng.integers(0, VOCAB, 300).tolist()))
        bench.add(step(300, [1], req_id=f"r{i}"))
        bench.finish(f"r{i}")
    assert [len(trace.prompt_ids) for trace in bench.traces] == [300] * 5


def test_the_same_prompt_again_keeps_its_end_and_all_rows() -> None:
    bench = Bench(max_repeated_context=16)
    for i in range(2):
        bench.begin(make_request(f"r{i}", range(64)))
        bench.add(*(step(64 + t, [t], req_id=f"r{i}") for t in range(3)))
        bench.finish(f"r{i}")
    first, second = bench.traces
    assert first.prompt_ids.tolist() == list(range(64))
    assert second.prompt_ids.tolist() == list(range(48, 64))
    assert second.position.tolist() == [16, 17, 18]


def test_what_is_remembered_is_bounded_and_the_oldest_is_forgotten() -> None:
    prefixes = StoredPrefixes(max_blocks=10)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, VOCAB, 4 * BLOCK + 5) for _ in range(4)]
    for prompt in prompts:
        prefixes.remember(prompt)
    assert [prefixes.repeated(prompt) for prompt in prompts] == [0, 0, 4 * BLOCK, 4 * BLOCK]
    assert len(prefixes._seen) == 10
    assert prefixes.repeated(prompts[3][: 2 * BLOCK - 1]) == BLOCK
    changed = prompts[3].copy()
    changed[0] += 1  # a block counts only after all that came before it
    assert prefixes.repeated(changed) == 0
