"""What the hot path notes of a step, and the traces and counters made of it.

Each token is credited to the draft that proposed it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from buffers.memory import MemoryTraceBuffer
from osd.errors import CaptureError
from osd.records import ACCEPTED, BY_MEMORY, MAX_DOMAIN_LENGTH, PLAIN, REJECTED, SpecWindow, Trace
from serving.capture.assemble import MAX_WAITING_BYTES, STORED_OVERHEAD, Schedule
from serving.capture.budget import ByteBudget
from serving.capture.capture import (
    MAX_QUEUED_BYTES,
    MAX_STEPS_TO_JUDGE,
    RESTS,
    SECONDS_AT_ONCE,
    SECONDS_TO_GATHER,
)
from serving.capture.pick import Landed, pick_on_device
from serving.capture.skips import skip_reason
from serving.vllm.hooks import NewRequest, Proposed, Verification
from tests.support.captures import (
    VOCAB,
    Bench,
    Clock,
    make_capture,
    make_request,
    step,
    together,
    verification,
)
from tests.support.paths import ROOT
from trainer.batch import collate

ONE_ROW_BYTES = (3 + 1) * 4 + 21 + 8 * 6
"""Of a trace of three tokens of prompt, one of output and one row of eight tokens: ids, the row's
numbers, its top."""


class Line:
    """A capture, told what an engine would tell it; all it hands out is here."""

    def __init__(self, **config: Any) -> None:
        self.traces: dict[str, Trace] = {}
        self.capture = make_capture(self._put, **config)

    def _put(self, traces: Sequence[Trace]) -> int:
        self.traces |= {trace.trace_id: trace for trace in traces}
        return len(traces)

    def begin(self, *requests: NewRequest) -> None:
        self.capture.on_schedule(list(requests), set())

    def verify(self, *shown: Verification) -> None:
        self.capture.on_verify(together(*shown))

    def swap(self, version: int) -> None:
        self.capture.draft_version = version

    def finish(self, *req_ids: str) -> None:
        self.capture.on_schedule([], set(req_ids))
        self.capture.drain()

    @property
    def skipped(self) -> dict[str, int]:
        return dict(self.capture.assembler.skipped)

    def windows(self) -> dict[tuple[int, str], SpecWindow]:
        """By version and domain."""
        found = self.capture.windows.take("replica-0", "default")
        return {(window.version, window.domain): window for window in found}


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.capture.close()


# -------------------------------------------------------------------------- who is credited with it


def test_a_row_names_the_draft_that_proposed_its_token_not_the_one_that_serves_when_it_is_verified(
    line: Line,
) -> None:
    """Draft tokens are proposed at the end of a step and verified in the next: a swap lies in
    between."""
    line.begin(make_request("early"))
    line.verify(verification(3, [10], 0, "early"))
    line.swap(2)
    line.begin(make_request("late"))
    line.verify(verification(4, [50, 51, 12], 4, "early"), verification(3, [10], 0, "late"))
    line.verify(verification(7, [50, 14], 4, "early"), verification(4, [50, 12], 4, "late"))
    line.swap(3)
    line.verify(verification(9, [15], 4, "early"))
    line.verify(verification(10, [16], 4, "early"), verification(6, [13], 4, "late"))
    line.finish("early", "late")
    early, late = line.traces["early"], line.traces["late"]
    assert dict(zip(early.position.tolist(), early.draft_version.tolist(), strict=True)) == {
        3: 1, 4: 1, 5: 1, 6: 1, 7: 2, 8: 2, 9: 2, 10: 3,
    }  # fmt: skip
    assert late.draft_version.tolist() == [2, 2, 2, 2], (
        "proposed before the second swap, which it sat out"
    )
    windows = line.windows()
    assert {version: w.num_drafts for (version, _), w in windows.items()} == {1: 1, 2: 4, 3: 1}
    assert {version: w.num_accepted_tokens for (version, _), w in windows.items()} == {
        1: 2,
        2: 2,
        3: 0,
    }


def test_a_request_that_was_never_announced_is_credited_to_the_draft_that_serves_and_leaves_nothing(
    line: Line,
) -> None:
    line.swap(6)
    line.begin(make_request("known"))
    line.verify(verification(3, [11], 4, "unknown"), verification(3, [10], 4, "known"))
    line.finish("known", "unknown")
    assert list(line.traces) == ["known"]
    assert line.traces["known"].output_ids.tolist() == [10]
    assert line.traces["known"].draft_ids.tolist() == [50]
    assert line.windows()[6, ""].num_drafts == 1
    assert line.skipped == {}


def test_what_the_memory_proposes_is_captured_but_no_draft_is_credited_with_it(line: Line) -> None:
    line.begin(make_request(extra_args={"osd_domain": "sql"}))
    line.verify(verification(3, [10, 11], 4))
    line.verify(replace(verification(5, [50, 51, 12], 4), from_memory=("r",)))
    line.verify(verification(8, [50, 13], 4))
    line.finish("r")
    trace = line.traces["r"]
    assert trace.draft_version.tolist() == [1, 1, *3 * [BY_MEMORY], 1, 1]
    assert trace.kind.tolist() == [
        ACCEPTED,
        REJECTED,
        ACCEPTED,
        ACCEPTED,
        REJECTED,
        ACCEPTED,
        REJECTED,
    ]
    assert (trace.num_drafts, trace.num_draft_tokens, trace.num_accepted_tokens) == (2, 8, 2)
    assert trace.finished_at == pytest.approx(time.time(), abs=60)
    ((key, window),) = line.windows().items()
    assert key == (1, "sql"), "its tokens count under the draft that served before"
    assert (window.num_drafts, window.num_draft_tokens, window.num_accepted_tokens) == (2, 8, 2)
    assert (window.num_steps, window.num_output_tokens) == (3, 7)
    assert (window.num_memory_tokens, window.num_accepted_memory_tokens) == (4, 2)
    assert window.counters.by_source() == {"target": 3, "draft": 2, "memory": 2}
    assert window.num_tested_per_pos == (2, 2, 0, 0)


def test_what_the_memory_proposed_is_learnt_from_as_any_other_position() -> None:
    """Rows are kept by whether what was verified was rejected, and weigh by how often such ones
    are kept: so all positions count alike, whoever proposed."""
    line, chance, num = Line(accepted_fraction=0.25, plain_fraction=0.25), 0.25, 400
    for source in ("memory", "draft"):
        names = [f"{source} {number}" for number in range(num)]
        line.begin(*map(make_request, names))
        shown = together(*(verification(3, [50, 51, 12], 4, name) for name in names))
        line.capture.on_verify(replace(shown, from_memory=names if source == "memory" else ()))
        line.finish(*names)
        batch = collate([line.traces[name] for name in names], 64, VOCAB)
        weight_S = np.bincount(batch.row_s_N, batch.weight_N, 5)[2:]
        assert weight_S == pytest.approx(3 * [1 / 3], abs=4 * np.sqrt((1 / chance - 1) / num) / 3)
        is_rejected_N = batch.row_s_N == 4
        assert int(is_rejected_N.sum()) == num, "each of them is kept"
        assert set(batch.label_ids_N[is_rejected_N].tolist()) == {12}
        assert set(batch.target_ids_NK[is_rejected_N, 0].tolist()) == {13}, "the target's own"
    line.capture.close()


def test_drafts_of_a_swap_that_is_not_decided_count_for_no_version(line: Line) -> None:
    """Those proposed before it count as ever, whenever they are verified."""
    line.begin(make_request())
    line.verify(verification(3, [10], 0))
    line.swap(0)
    line.verify(verification(4, [50, 11], 4))
    line.verify(verification(6, [50, 51, 12], 4))
    line.swap(2)
    line.verify(verification(9, [50, 13], 4))
    line.verify(verification(11, [50, 51, 14], 4))
    line.finish("r")
    assert line.traces["r"].draft_version.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 2, 2, 2]
    windows = line.windows()
    counts = {v: (w.num_drafts, w.num_accepted_tokens) for (v, _), w in windows.items()}
    assert counts == {1: (1, 1), 2: (1, 2)}
    assert sum(window.num_output_tokens for window in windows.values()) == 11


def test_rows_stay_with_their_request_where_those_of_others_are_thrown_away(line: Line) -> None:
    """The engine goes on with one that has ended, and its rows come first."""
    line.begin(make_request("ended", max_tokens=1), make_request("known"))
    line.verify(verification(3, [10], 0, "ended"), verification(3, [11], 0, "known"))
    line.swap(2)
    beyond = replace(verification(4, [60, 13], 2, "ended"), draft_ids=torch.tensor([60, 61]))
    line.verify(beyond, verification(4, [50, 51, 12], 4, "known"))
    line.verify(verification(6, [14], 0, "ended"), verification(7, [15], 4, "known"))
    line.finish("ended", "known")
    trace = line.traces["known"]
    assert trace.position.tolist() == [3, 4, 5, 6, 7]
    assert trace.kind.tolist() == [PLAIN, ACCEPTED, ACCEPTED, REJECTED, REJECTED]
    assert trace.draft_ids.tolist() == [-1, 50, 51, 52, 50]
    assert trace.draft_version.tolist() == [1, 1, 1, 1, 2]
    assert trace.target_ids[:, 0].tolist() == [12, 51, 52, 13, 16]
    assert line.traces["ended"].position.tolist() == [3]


def test_a_draft_is_proposed_by_the_version_at_its_requests_start_until_a_step_has_been_verified(
    line: Line,
) -> None:
    line.begin(make_request())
    line.swap(2)
    line.verify(verification(3, [10, 11], 4))
    line.finish("r")
    assert line.traces["r"].draft_version.tolist() == [1, 1]


# ------------------------------------------------------------------------------------- what is kept


def test_each_kind_of_row_is_kept_with_its_own_probability() -> None:
    line = Line(accepted_fraction=0.5, plain_fraction=0.125, queue_size=10_000)
    line.begin(*(make_request(f"r{i}") for i in range(40)))
    for t in range(5):
        line.verify(*(verification(3 + 4 * t, [50, 51, 52, 9], 4, f"r{i}") for i in range(39)))
    for t in range(200):
        line.verify(verification(3 + t, [9], 0, "r39"))
    line.finish(*(f"r{i}" for i in range(40)))
    line.capture.close()
    kept = list(line.traces.values())
    for kind, share, total in ((REJECTED, 1.0, 195), (ACCEPTED, 0.5, 585), (PLAIN, 0.125, 200)):
        num = sum(int((trace.kind == kind).sum()) for trace in kept)
        assert num == pytest.approx(total * share, abs=4 * (total * share * (1 - share)) ** 0.5)
        assert {p for trace in kept for p in trace.keep_prob[trace.kind == kind].tolist()} == {
            share
        }
    assert line.capture.assembler.rows["rejected"] == 195
    assert line.capture.assembler.rows["accepted"] == sum(
        int((t.kind == ACCEPTED).sum()) for t in kept
    )
    assert line.capture.assembler.rows["plain"] == sum(int((t.kind == PLAIN).sum()) for t in kept)


def test_rows_that_are_summarised_on_the_device_have_as_many_tokens_as_others() -> None:
    line = Line(top_k=5)
    line.capture._pick = partial(pick_on_device)
    line.begin(make_request())
    line.verify(verification(3, [50, 11], 4))
    line.finish("r")
    line.capture.close()
    assert line.traces["r"].target_ids.shape == (2, 5)
    assert line.traces["r"].target_ids[:, 0].tolist() == [51, 12]


def test_a_trace_says_what_its_request_was_and_when_it_ended() -> None:
    bench = Bench(top_k=5)
    request = make_request(
        "r", [4, 5, 6], temperature=0.7, top_p=0.9, top_k=11, extra_args={"osd_domain": " a/b "}
    )
    bench.begin(request)
    bench.add(step(3, [50, 51, 9], 4), step(6, [50, 8], 2), step(8, [7]))
    bench.finish("r")
    trace = bench.only_trace()
    assert (trace.trace_id, trace.draft, trace.target_id, trace.domain) == (
        "r",
        "default",
        "target",
        "a_b",
    )
    assert (trace.temperature, trace.top_p, trace.top_k, trace.finished_at) == (0.7, 0.9, 11, 2.0)
    assert (trace.num_drafts, trace.num_draft_tokens, trace.num_accepted_tokens) == (2, 6, 3)
    assert trace.target_ids.shape == trace.target_logprobs.shape == (6, 5)
    assert trace.draft_ids.tolist() == [50, 51, 52, 50, 51, -1]
    dtypes = {
        "kind": "int8",
        "position": "int32",
        "keep_prob": "float32",
        "target_logprobs": "float16",
    }
    assert {name: getattr(trace, name).dtype.name for name in dtypes} == dtypes


def test_a_trace_without_rows_has_arrays_without_rows() -> None:
    bench = Bench()
    bench.begin(make_request())
    bench.add(step(3, [10], chance=0.9))
    bench.finish("r")
    trace = bench.only_trace()
    assert (trace.num_rows, trace.target_ids.shape, trace.output_ids.tolist()) == (0, (0, 0), [10])
    assert trace.position.dtype == np.int32 and trace.kind.dtype == np.int8


def test_a_request_that_brought_nothing_leaves_nothing(line: Line) -> None:
    line.begin(make_request())
    line.verify(replace(verification(3, [10], 0), is_partial_B=np.array([True])))
    line.finish("r")
    assert (line.traces, line.skipped, line.windows()) == ({}, {}, {})


@pytest.mark.parametrize(
    ("max_output", "positions"), [(16, []), (17, [19]), (18, [19, 20]), (19, [19, 20, 21])]
)
def test_of_the_step_that_crosses_the_limit_the_rows_before_it_are_kept(
    max_output: int, positions: list[int]
) -> None:
    bench = Bench(max_output=max_output)
    bench.begin(make_request())
    bench.add(*(step(3 + t, [10 + t]) for t in range(16)))
    bench.add(step(19, [50, 51, 26], num_drafts=4), step(22, [27]))
    bench.finish("r")
    trace = bench.only_trace()
    assert len(trace.output_ids) == max_output
    assert trace.position.tolist() == [*range(3, 19), *positions]
    assert trace.num_accepted_tokens == 2, "counts are of the whole answer"


def test_a_replay_at_the_limit_keeps_the_rows_of_what_is_stored() -> None:
    bench = Bench(max_output=16)
    bench.begin(make_request())
    bench.add(
        *(step(3 + t, [10]) for t in range(13)),
        step(16, [50, 51, 52, 53, 14], 4),
        step(18, [50, 51, 22], 4),
    )
    bench.finish("r")
    trace = bench.only_trace()
    assert trace.output_ids.tolist()[-4:] == [10, 50, 51, 50]
    assert trace.position.tolist() == list(range(3, 19))
    assert trace.target_ids[-4:, 0].tolist() == [11, 51, 52, 51]


# ------------------------------------------------------------------------------------ where it ends


def test_a_stop_token_ends_a_request() -> None:
    bench = Bench()
    bench.begin(make_request(stop_ids=frozenset({7, 8})))
    bench.add(step(3, [9, 10], 4), step(5, [8, 11, 12], 4))
    bench.finish("r")
    assert bench.only_trace().output_ids.tolist() == [9, 10, 8]
    (window,) = bench.windows.take("r", "default")
    assert window.num_output_tokens == 3


@pytest.mark.parametrize(("max_tokens", "num_served"), [(1, 1), (2, 2), (3, 3), (None, 4)])
def test_a_request_ends_with_its_last_token(max_tokens: int | None, num_served: int) -> None:
    bench = Bench()
    bench.begin(make_request(max_tokens=max_tokens))
    bench.add(step(3, [10, 11], 4), step(5, [12], 4), step(6, [13], 4))
    bench.finish("r")
    assert bench.only_trace().output_ids.tolist() == [10, 11, 12, 13][:num_served]


def test_after_its_end_no_step_counts_and_no_draft_is_credited() -> None:
    bench = Bench()
    bench.begin(make_request(max_tokens=2))
    bench.add(step(3, [50, 11, 12], 4), step(6, [50, 51, 13], 4))
    bench.finish("r")
    trace = bench.only_trace()
    assert (trace.num_drafts, trace.num_draft_tokens, trace.num_accepted_tokens) == (1, 4, 2)
    (window,) = bench.windows.take("r", "default")
    assert (window.num_steps, window.num_drafts, window.num_accepted_tokens) == (1, 1, 2)
    assert window.num_tested_per_pos == (1, 1, 0, 0), "what nobody was served was not tested"


def test_requests_that_end_and_begin_under_one_name_in_one_step_are_two() -> None:
    bench = Bench()
    bench.begin(make_request("r", [1, 2, 3]))
    bench.add(step(3, [10]))
    bench.assembler.add(Schedule(5.0, [make_request("r", [1, 2, 3])], {"r"}))
    bench.add(step(3, [20]))
    bench.finish("r")
    assert [trace.output_ids.tolist() for trace in bench.traces] == [[10], [20]]
    assert [trace.finished_at for trace in bench.traces] == [5.0, 2.0]
    assert bench.assembler.skipped == {}


def test_requests_that_end_and_begin_under_one_name_are_two_for_the_engine_too(line: Line) -> None:
    line.begin(make_request(extra_args={"osd_capture": "off"}))
    line.verify(verification(3, [10], 0))
    line.capture.on_schedule([make_request()], {"r"})
    line.verify(verification(3, [20], 0))
    line.finish("r")
    assert line.traces["r"].output_ids.tolist() == [20]
    assert line.traces["r"].num_rows == 1


def test_what_has_ended_is_remembered_nowhere(line: Line) -> None:
    for i in range(5):
        line.begin(make_request(f"r{i}"))
        line.verify(verification(3, [10], 0, f"r{i}"))
        line.finish(f"r{i}")
    assert line.capture._live == {}
    assert line.capture.assembler.num_running == 0


# ---------------------------------------------------------------------------------- what is counted


def test_speed_is_counted_from_the_first_token_to_the_last() -> None:
    bench = Bench()
    bench.begin(make_request("one", extra_args={"osd_domain": "sql"}), make_request("two"))
    for at, one in (
        (10.0, step(3, [10])),
        (10.5, step(4, [50, 12], 4)),
        (11.5, step(6, [50, 51, 13], 4)),
    ):
        bench.add(replace(one, at=at, req_ids=["one"]))
    bench.add(replace(step(3, [10]), at=20.0, req_ids=["two"]))
    bench.finish("one", "two", "unknown")
    windows = {window.domain: window for window in bench.windows.take("r", "default")}
    assert (windows["sql"].num_finished, windows["sql"].num_captured) == (1, 1)
    assert (windows["sql"].decode_seconds, windows["sql"].num_decode_tokens) == (1.5, 5)
    window = windows[""]
    assert (window.decode_seconds, window.num_decode_tokens, window.num_finished) == (0.0, 0, 1)


def test_a_request_with_a_gap_counts_as_finished_but_not_as_captured() -> None:
    bench = Bench()
    bench.begin(make_request())
    bench.add(step(3, [10]), step(6, [50, 13], 4))
    bench.finish("r")
    (window,) = bench.windows.take("r", "default")
    assert (window.num_finished, window.num_captured, window.num_output_tokens) == (1, 0, 1)


@pytest.mark.parametrize(
    "extra_args", [{"osd_calibration": 1}, {"osd_capture": "off", "osd_calibration": 1}]
)
def test_requests_of_the_calibration_are_left_out_and_counted_apart(
    extra_args: dict[str, Any],
) -> None:
    reason = "opted_out" if "osd_capture" in extra_args else "calibration"
    bench = Bench(request_fraction=0.0)
    bench.begin(make_request(extra_args=extra_args, skip_reason="structured_output"))
    bench.add(step(3, [10]))
    bench.finish("r")
    assert (dict(bench.assembler.skipped), bench.traces) == ({reason: 1}, [])


def test_a_request_that_is_left_out_is_counted_once_however_often_it_is_announced() -> None:
    bench = Bench()
    out = {"extra_args": {"osd_capture": "off"}}
    for prompt in ([1, 2, 3], [1, 2, 3], [1, 2, 3, 10, 11]):
        bench.begin(make_request("r", prompt, **out))
    bench.finish("r")
    assert bench.assembler.skipped == {"opted_out": 1}


def test_where_capture_is_off_nothing_is_handed_out_and_every_step_is_judged() -> None:
    bench = Bench(enabled=False)
    bench.begin(make_request("r"), make_request("s", skip_reason="multimodal"))
    bench.add(step(3, [50, 10], 4), step(3, [50, 10], 4, req_id="s"))
    bench.finish("r", "s")
    assert bench.traces == []
    assert bench.assembler.skipped == {"multimodal": 1}
    (window,) = bench.windows.take("r", "default")
    assert (window.num_tested_per_pos, window.num_captured) == ((2, 2, 0, 0), 0)


def test_the_hot_path_and_the_thread_capture_the_same_share_of_requests() -> None:
    line = Line(request_fraction=0.5, top_k=5)
    names = [f"r{i}" for i in range(40)]
    line.begin(*(make_request(name) for name in names))
    chosen = {name for name in names if not skip_reason(make_request(name), 0.5)}
    assert 10 < len(chosen) < 30
    line.verify(*(verification(3, [10], 0, name) for name in names if name not in chosen))
    assert line.capture._num_bytes_in == 0, "nothing is copied for the others"
    line.verify(*(verification(3, [10], 0, name) for name in names if name in chosen))
    line.finish(*names)
    line.capture.close()
    assert line.traces.keys() == chosen
    assert {trace.target_ids.shape for trace in line.traces.values()} == {(1, 5)}
    assert line.skipped == {"not_sampled": 40 - len(chosen)}


@pytest.mark.parametrize("wish", [" ON ", "yes", 1, "TRUE"])
def test_a_yes_in_any_spelling_is_one(wish: object) -> None:
    assert skip_reason(make_request(extra_args={"osd_capture": wish})) == ""


def test_a_failure_of_ours_is_logged_with_its_place_and_a_known_one_without(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="serving.capture.capture"):
        line.capture.on_failure(CaptureError("this vLLM is not known"))
        line.capture.on_failure(ValueError("a tensor was missing"))
    known, unknown = caplog.records
    assert known.exc_info is None and "this vLLM is not known" in known.getMessage()
    assert unknown.exc_info is not None and "serving is not affected" in unknown.getMessage()
    assert line.skipped == {"hook_error": 2}


class Lost:
    """A step whose copy from the device failed."""

    nbytes = 0

    def land(self) -> Landed:
        raise RuntimeError("the device is gone")


def test_requests_that_cannot_be_handed_out_and_steps_that_cannot_be_read_are_counted() -> None:
    def broken(traces: Sequence[Trace]) -> int:
        raise OSError("no space")

    capture = make_capture(broken)
    names = ["one", "two", "three"]
    capture.on_schedule([make_request(name) for name in names], set())
    capture.on_verify(together(*(verification(3, [10], 0, name) for name in names)))
    capture.on_schedule([], set(names))
    capture.drain()
    assert capture.assembler.skipped == {"assembly_error": 3}
    capture._queue.put(replace(step(3, [10]), picked=Lost()))
    capture.close()
    assert capture.assembler.skipped == {"assembly_error": 4}


class Laborious:
    """A step that takes the thread some milliseconds of CPU."""

    nbytes = 0

    def __init__(self, ends: list[float]) -> None:
        self.ends = ends

    def land(self) -> Landed:
        began = time.thread_time()
        while time.thread_time() - began < 2 * SECONDS_AT_ONCE:
            pass
        self.ends.append(time.monotonic())
        return Landed(np.zeros(0, np.int64), np.zeros((0, 1), np.int64), None)


class Rests(threading.Event):
    """What the thread waits on. It notes for how long it would rest, and rests for `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.noted = seconds, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout == SECONDS_TO_GATHER:
            return super().wait(timeout)
        self.noted.append(timeout or 0.0)
        return super().wait(self.seconds)


def work_through(line: Line, num: int, rests: Rests) -> list[float]:
    """Queue steps; the times of their ends come into the list that is returned."""
    ends: list[float] = []
    line.capture._hurry = rests
    for _ in range(num):
        line.capture._queue.put(replace(step(3, [10]), req_ids=[], picked=Laborious(ends)))
    return ends


def wait_for(ends: list[float], num: int) -> None:
    deadline = time.monotonic() + 4
    while len(ends) < num:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_thread_rests_from_gathered_work_lest_the_engine_waits_for_all_of_it(
    line: Line,
) -> None:
    rests = Rests()
    wait_for(work_through(line, 6, rests), 6)
    assert all(rest >= RESTS * 2 * SECONDS_AT_ONCE for rest in rests.noted[:6])
    assert len(rests.noted) >= 5 and sum(rests.noted) < SECONDS_TO_GATHER
    rests = Rests()
    wait_for(work_through(line, 40, rests), 40)
    assert sum(rests.noted) == pytest.approx(SECONDS_TO_GATHER), "else work would pile up"


@pytest.mark.parametrize("how", ["drain", "close", "steps"])
def test_a_rest_ends_when_somebody_waits_or_much_has_come(how: str) -> None:
    line, rests = Line(queue_size=8), Rests(10.0)
    ends = work_through(line, 6, rests)
    wait_for(ends, 1)
    if how == "steps":
        line.begin(make_request())
        line.verify(verification(3, [10], 0))
    else:
        getattr(line.capture, how)()
    wait_for(ends, 6)
    assert len(rests.noted) <= 1, "who has been hurried does not rest again"
    if how == "steps":
        line.finish("r")
        assert line.traces["r"].output_ids.tolist() == [10]
        assert line.capture._num_bytes_in == line.capture._num_bytes_out > 0
    line.capture.close()


def test_a_batch_in_which_somebody_waits_is_hurried_whenever_the_word_came(line: Line) -> None:
    rests, reached = Rests(), threading.Event()
    work_through(line, 6, rests)
    line.capture._queue.put(reached)  # as `drain` does, its word lost
    assert reached.wait(4)
    assert rests.noted == []


def test_a_budget_is_spent_by_all_that_is_stored_of_a_trace() -> None:
    for spare, is_stored in ((0, True), (-1, False)):
        bench = Bench(ByteBudget(ONE_ROW_BYTES + len("r") + STORED_OVERHEAD + spare, Clock()))
        bench.begin(make_request())
        bench.add(step(3, [10]))
        bench.finish("r")
        assert sum(trace.num_bytes for trace in bench.traces) == ONE_ROW_BYTES * is_stored
        assert bench.assembler.skipped == ({} if is_stored else {"budget": 1})
        assert (bench.assembler.num_traces, bench.assembler.rows["plain"]) == (is_stored, is_stored)


def test_the_limits_are_those_the_docs_give() -> None:
    text = " ".join((ROOT / "docs" / "capture.md").read_text().split())
    assert f"`capture.queue_size` and {MAX_QUEUED_BYTES >> 20} MiB" in text
    assert f"rows of another {MAX_WAITING_BYTES >> 20} MiB may wait for their top-k" in text
    assert SECONDS_TO_GATHER == 0.1 and "within 0.1 seconds" in text
    assert (SECONDS_AT_ONCE, RESTS) == (0.001, 3.0)
    assert "rests three times as long as it works, every millisecond" in text
    assert f"at most {MAX_DOMAIN_LENGTH} characters" in text
    assert STORED_OVERHEAD == 1024 and "header (under 1 KB)" in text


def test_nobody_waits_for_a_capture_that_has_ended_or_hangs(line: Line) -> None:
    line.capture.close()
    assert line.capture._thread.daemon and not line.capture._thread.is_alive()
    started = time.monotonic()
    line.capture.drain(timeout=0.01)
    assert time.monotonic() - started < 4


# ----------------------------------------------------------------------------- one name for a class


@pytest.mark.parametrize(
    "label", ["code/python 3", "x" * 49, "x" * 200, "  padded ", "é\n\0", "a}{b:c", 17, " "]
)
def test_a_class_has_one_name_in_traces_buffer_and_counters(label: object) -> None:
    bench = Bench()
    bench.begin(make_request(extra_args={"osd_domain": label}))
    bench.add(step(3, [50, 10], 4))
    bench.finish("r")
    buffer = MemoryTraceBuffer(target_id="target")
    buffer.put(bench.traces)
    (stored,) = [*buffer.holdout(1), *buffer.read({}, 1)[0]]
    (window,) = bench.windows.take("r", "default")
    assert window.domain == stored.domain == bench.only_trace().domain
    assert bool(stored.domain) == bool(str(label).strip())
    assert buffer.purge(domain=str(label)) == 1, "it is found by the name its client gave it"


# ------------------------------------------------------------------- switched while the engine runs


def test_requests_that_come_after_it_was_switched_off_are_counted_and_not_kept(line: Line) -> None:
    line.begin(make_request("before"))
    line.verify(verification(3, [10], 0, "before"))
    line.capture.set_enabled(False)
    line.begin(make_request("after"))
    line.verify(verification(4, [50, 11], 4, "before"), verification(3, [10], 0, "after"))
    line.finish("before", "after")
    assert set(line.traces) == {"before"}, "what had begun ends as it began"
    assert line.traces["before"].output_ids.tolist() == [10, 50, 11]
    assert line.windows()[1, ""].num_output_tokens == 4
    line.capture.set_enabled(True)
    line.begin(make_request("again"))
    line.verify(verification(3, [10], 0, "again"))
    line.finish("again")
    assert set(line.traces) == {"before", "again"}


def test_what_runs_when_nothing_more_is_heard_ends_there(line: Line) -> None:
    line.begin(make_request("one"), make_request("two"))
    line.verify(verification(3, [10], 0, "one"), verification(3, [10], 0, "two"))
    line.capture.let_go()
    line.capture.drain()
    assert set(line.traces) == {"one", "two"}
    assert line.capture._live == {} and line.capture.assembler.num_running == 0
    line.verify(verification(4, [50, 11], 4, "one"))  # heard again
    line.finish("one")
    assert line.traces["one"].output_ids.tolist() == [10]


def test_without_capture_every_step_is_judged(line: Line) -> None:
    """As in an engine that captures nothing: what is shown of a draft is all there is."""
    line.capture.set_enabled(False)
    line.begin(make_request("r"))
    line.verify(verification(3, [10], 0, "r"))
    line.verify(verification(4, [50, 11], 4, "r"))
    line.finish("r")
    assert line.windows()[1, ""].num_tested_per_pos[0] == 1


def test_how_many_requests_are_captured_may_change(line: Line) -> None:
    """Both sides of the queue choose the same ones: of the others, no text is kept either."""
    line.capture.set_enabled(True, 0.5)
    names = [f"r{i}" for i in range(20)]
    line.begin(*(make_request(name) for name in names))
    line.verify(*(verification(3, [10], 0, name) for name in names))
    line.finish(*names)
    expected = {name for name in names if not skip_reason(make_request(name), 0.5)}
    assert set(line.traces) == expected and 0 < len(expected) < len(names)
    assert all(trace.num_rows for trace in line.traces.values())


def test_drafts_in_whose_place_the_memory_proposed_count_for_those_who_proposed_them(
    line: Line,
) -> None:
    line.begin(make_request("a", extra_args={"osd_domain": "sql"}), make_request("b"))
    opted_out = make_request("out", extra_args={"osd_capture": "off"})
    line.begin(opted_out)
    line.capture.on_proposed(Proposed(7, []))
    line.swap(2)
    line.capture.on_proposed(Proposed(8, [("a", 7, 4, 2), ("b", 7, 4, 0), ("out", 7, 4, 4)]))
    line.capture.on_proposed(Proposed(9, [("a", 8, 4, 4), ("gone", 8, 4, 4)]))
    line.swap(0)  # not decided yet
    line.capture.on_proposed(Proposed(10, []))
    line.capture.on_proposed(Proposed(11, [("a", 10, 4, 4)]))
    line.capture.drain()
    windows = line.windows()
    assert {key: window.num_tested_per_pos for key, window in windows.items()} == {
        (1, "sql"): (1, 1, 1, 0),
        (1, ""): (1, 0, 0, 0),
        (2, "sql"): (1, 1, 1, 1),
    }


def test_a_draft_that_is_judged_too_late_counts_for_nobody(line: Line) -> None:
    """Its step may have been another draft's."""
    line.begin(make_request("a"))
    for number in range(1, 2 + MAX_STEPS_TO_JUDGE):
        line.capture.on_proposed(Proposed(number, []))
    line.capture.on_proposed(Proposed(99, [("a", 1, 4, 4)]))
    line.capture.drain()
    assert line.windows() == {}
