"""What `TraceBuffer` promises, checked for every implementation and for two servers."""

from __future__ import annotations

import inspect
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from buffers import recent
from buffers.base import Cursor, TraceBuffer, holdout_capacity
from buffers.memory import MemoryTraceBuffer
from buffers.recent import newest_shared
from buffers.redis_stream import RedisTraceBuffer
from osd.config.schema import BufferConfig
from osd.records import clean_domain, encode
from tests.support import servers
from tests.support.builders import assert_same_trace, ids, make_trace, make_traces

Open = Callable[..., TraceBuffer]
"""Opens a buffer: the same deployment, draft and target_id name the same stored traces."""


@pytest.fixture(scope="module", params=("memory", *servers.PROGRAMS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A running server; None stands for memory."""
    if request.param == "memory":
        yield None
        return
    with servers.start(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def open_buffer(server: Any) -> Iterator[Open]:
    opened: dict[tuple[Any, ...], TraceBuffer] = {}

    def open_one(
        *, deployment: str = "a", draft: str = "default", target_id: str = "target-a", **limits: Any
    ):
        key = (deployment, draft, target_id, *sorted(limits.items()))
        if key not in opened:
            opened[key] = (
                MemoryTraceBuffer(draft=draft, target_id=target_id, **limits)
                if server is None
                else RedisTraceBuffer(
                    server.url, deployment=deployment, draft=draft, target_id=target_id, **limits
                )
            )
        return opened[key]

    yield open_one
    for buffer in opened.values():
        buffer.purge()
        buffer.close()


@pytest.fixture
def buffer(open_buffer: Open) -> TraceBuffer:
    return open_buffer()


def read_all(buffer: TraceBuffer, cursor: Cursor | None = None) -> list[str]:
    return ids(buffer.read(cursor or {}, 10_000)[0])


def seen(buffer: TraceBuffer) -> Cursor:
    return buffer.read({}, 10_000)[1]


# -- order and content ----------------------------------------------------------------------------


def test_empty(buffer: TraceBuffer):
    assert buffer.read({}, 10) == ([], {})
    assert buffer.num_unread({}) == 0
    assert buffer.skip_to_newest({}, 3) == {}
    assert buffer.sample(3, np.random.default_rng(0), {}) == []
    assert buffer.holdout(3) == []
    assert buffer.put([]) == 0
    assert buffer.purge() == 0
    stats = buffer.stats()
    assert (stats.num_traces, stats.num_holdout, stats.num_put, stats.oldest_at) == (0, 0, 0, 0.0)


def test_traces_come_back_unchanged(buffer: TraceBuffer):
    trace = make_trace(
        domain="code", temperature=0.5, num_prompt=50, num_output=40, num_rows=30, top_k=16
    )
    assert buffer.put([trace]) == 1
    assert_same_trace(buffer.read({}, 1)[0][0], trace)
    assert_same_trace(buffer.sample(1, np.random.default_rng(0), seen(buffer))[0], trace)


def test_order_is_that_of_arrival(buffer: TraceBuffer):
    traces = make_traces(70)
    assert buffer.put(traces[:20]) == 20
    assert sum(buffer.put([trace]) for trace in traces[20:]) == 50
    assert read_all(buffer) == ids(traces)


def test_arrival_counts_within_a_domain_also_when_clocks_differ(buffer: TraceBuffer):
    traces = [make_trace(index=i, finished_at=at) for i, at in enumerate([5.0, 3.0, 9.0, 1.0])]
    buffer.put(traces)
    assert read_all(buffer) == ids(traces)


def test_domains_are_merged_by_time(buffer: TraceBuffer):
    traces = [make_trace(index=i, domain="abc"[i % 3]) for i in range(60)]
    for domain in "cab":
        buffer.put([trace for trace in traces if trace.domain == domain])
    assert read_all(buffer) == ids(traces)


# -- cursors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 7, 32, 1000])
def test_reading_in_pieces_neither_loses_nor_repeats(buffer: TraceBuffer, limit: int):
    traces = [make_trace(index=i, domain=["", "code", "chat"][i % 3]) for i in range(100)]
    late = traces[60:]
    buffer.put(traces[:60])
    cursor: Cursor = {}
    got: list[str] = []
    while buffer.num_unread(cursor):
        some, cursor = buffer.read(cursor, limit)
        assert 0 < len(some) <= limit
        got += ids(some)
        if late and len(got) > 30:
            buffer.put(late)
            late = []
    assert got == ids(traces)
    assert buffer.read(cursor, limit) == ([], cursor)


def test_a_cursor_is_plain_json_and_works_for_another_client(open_buffer: Open):
    writer, other = open_buffer(), open_buffer(max_traces=20_000)
    if isinstance(writer, MemoryTraceBuffer):
        other = writer
    writer.put(make_traces(10, domain="code"))
    _, cursor = writer.read({}, 4)
    cursor = json.loads(encode(cursor))
    assert all(0 < seq < 2**53 for seq in cursor.values())
    assert read_all(other, cursor) == ids(make_traces(10))[4:]


def test_reading_nothing_moves_nothing(buffer: TraceBuffer):
    buffer.put(make_traces(5))
    _, cursor = buffer.read({}, 2)
    assert buffer.read(cursor, 0) == ([], cursor)
    traces, after = buffer.read(cursor, 10)
    assert len(traces) == 3
    assert buffer.read(after, 10) == ([], after)


def test_the_cursor_handed_in_is_not_changed(buffer: TraceBuffer):
    buffer.put(make_traces(5))
    cursor: Cursor = {}
    buffer.read(cursor, 3)
    buffer.skip_to_newest(cursor, 1)
    assert cursor == {}


def test_skip_to_newest(buffer: TraceBuffer):
    traces = [make_trace(index=i, domain="a" if i < 80 else "b") for i in range(150)]
    buffer.put(traces)
    assert read_all(buffer, buffer.skip_to_newest({}, 100)) == ids(traces[50:])
    assert read_all(buffer, buffer.skip_to_newest({}, 70)) == ids(traces[80:])
    assert read_all(buffer, buffer.skip_to_newest({}, 1)) == ids(traces[149:])
    assert read_all(buffer, buffer.skip_to_newest({}, 0)) == []
    assert read_all(buffer, buffer.skip_to_newest({}, 150)) == ids(traces)
    assert read_all(buffer, buffer.skip_to_newest({}, 999)) == ids(traces)
    half = buffer.read({}, 75)[1]
    assert read_all(buffer, buffer.skip_to_newest(half, 100)) == ids(traces[75:])
    assert read_all(buffer, buffer.skip_to_newest(half, 10)) == ids(traces[140:])


def test_what_was_trimmed_is_not_unread(open_buffer: Open):
    buffer = open_buffer(max_traces=16)
    buffer.put(make_traces(10))
    _, cursor = buffer.read({}, 5)
    buffer.put(make_traces(40, start=10))
    assert buffer.num_unread(cursor) == 16
    assert read_all(buffer, cursor) == ids(make_traces(16, start=34))


def test_a_cursor_from_before_a_purge_misses_nothing_after_it(buffer: TraceBuffer):
    buffer.put(make_traces(200))
    cursor = seen(buffer)
    buffer.purge()
    buffer.put(make_traces(3, start=200))
    assert buffer.num_unread(cursor) == 3
    assert read_all(buffer, cursor) == ids(make_traces(3, start=200))


def test_nor_from_before_two_of_them_in_a_domain_that_had_less(buffer: TraceBuffer):
    buffer.put(make_traces(2, domain="a") + make_traces(50, start=2))
    cursor = seen(buffer)
    for _ in range(2):
        buffer.purge()
    assert buffer.stats().num_put == 0
    later = [make_trace(index=i, domain=["", "a"][i % 2]) for i in range(90, 94)]
    buffer.put(later)
    assert read_all(buffer, cursor) == ids(later)


def test_a_cursor_ahead_of_the_buffer_comes_back_to_it(buffer: TraceBuffer):
    buffer.put(make_traces(5))
    ahead = {domain: seq + 1000 for domain, seq in seen(buffer).items()}
    _, cursor = buffer.read(ahead, 10)
    buffer.put(make_traces(2, start=5))
    assert read_all(buffer, cursor) == ids(make_traces(2, start=5))


# -- what may be proposed to others ----------------------------------------------------------------


def test_whether_a_trace_may_be_shared_comes_back_with_it(buffer: TraceBuffer):
    traces = [make_trace(index=i, is_shared=i % 3 == 0, domain="ab"[i % 2]) for i in range(12)]
    held_out = make_traces(2, start=20, holdout=True, is_shared=True)
    buffer.put([*traces, *held_out])
    shared = {trace.trace_id: trace.is_shared for trace in [*traces, *held_out]}
    read, cursor = buffer.read({}, 99)
    for got in (read, buffer.sample(12, np.random.default_rng(0), cursor), buffer.holdout(9)):
        assert len(got) in (12, 2)
        assert {trace.trace_id: trace.is_shared for trace in got}.items() <= shared.items()


def newest(buffer: TraceBuffer, num_tokens: int) -> list[str]:
    return [name for some in newest_shared(buffer, num_tokens) for name in ids(some)]


def test_the_newest_that_may_be_shared_are_found_oldest_first(buffer: TraceBuffer):
    traces = [make_trace(index=i, is_shared=i % 4 > 0, domain="ab"[i % 2]) for i in range(200)]
    buffer.put([*traces, *make_traces(3, start=300, holdout=True, is_shared=True)])
    assert newest(buffer, 10_000) == ids([trace for trace in traces if trace.is_shared])
    assert newest(buffer, 60 * 8 - 1) == ids([trace for trace in traces[140:] if trace.is_shared])


def test_no_more_are_read_than_a_number_and_those_that_come_meanwhile_are_left(
    buffer: TraceBuffer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recent, "MOST", 70)
    buffer.put(traces := make_traces(100, is_shared=True))
    found = newest_shared(buffer, 10_000)
    read = ids(next(found))
    buffer.put(make_traces(50, start=100, is_shared=True))
    assert read + [name for some in found for name in ids(some)] == ids(traces[30:])


def test_an_empty_buffer_has_nothing_to_share(buffer: TraceBuffer):
    assert newest(buffer, 10_000) == []
    buffer.put(make_traces(3, num_output=0, num_rows=0, is_shared=True))
    assert newest(buffer, 10_000) == []


# -- bounds ---------------------------------------------------------------------------------------


def test_oldest_out_per_domain(open_buffer: Open):
    buffer = open_buffer(max_traces=20)
    quiet = make_traces(3, domain="quiet")
    busy = make_traces(95, start=3, domain="busy")
    buffer.put(quiet)
    for i in range(0, 95, 10):
        buffer.put(busy[i : i + 10])
    assert read_all(buffer) == ids(quiet + busy[-20:])
    stats = buffer.stats()
    assert (stats.num_traces, stats.num_put, stats.oldest_at) == (23, 98, quiet[0].finished_at)
    assert stats.dropped == {}


def test_a_single_put_larger_than_the_buffer(open_buffer: Open):
    buffer = open_buffer(max_traces=16)
    assert buffer.put(make_traces(300)) == 300
    assert read_all(buffer) == ids(make_traces(16, start=284))


def test_holdout_is_bounded(open_buffer: Open):
    buffer = open_buffer(max_traces=16)
    buffer.put(make_traces(200, holdout=True))
    assert buffer.stats().num_holdout == holdout_capacity(16) == 64
    assert ids(buffer.holdout(1000)) == ids(make_traces(64, start=136, holdout=True))


def test_domains_are_bounded_in_number(open_buffer: Open):
    buffer = open_buffer(max_domains=3, max_traces=100)
    traces = [make_trace(index=i, domain=f"d{i % 10}") for i in range(100)]
    buffer.put([make_trace(index=1000)])
    for trace in traces:
        assert buffer.put([trace]) == 1
    stored, cursor = buffer.read({}, 1000)
    assert len(stored) == 101
    assert set(cursor) == {trace.domain for trace in stored} == {"", "d0", "d1", "d2"}
    assert Counter(trace.domain for trace in stored) == {"": 71, "d0": 10, "d1": 10, "d2": 10}


def test_many_new_domains_in_one_put(open_buffer: Open):
    buffer = open_buffer(max_domains=3)
    buffer.put([make_trace(index=i, domain=f"d{i}") for i in range(50)])
    assert len(seen(buffer)) == 4


@pytest.mark.parametrize("label", ["code/python 3", "x" * 5000, "a}{b:c", "*", "é\n\0", " padded "])
def test_any_label_is_stored_cleaned(buffer: TraceBuffer, label: str):
    buffer.put([make_trace(domain=label)])
    (trace,) = buffer.read({}, 10)[0]
    assert trace.domain == clean_domain(label)
    assert 0 < len(trace.domain) <= 48
    assert set(trace.domain) <= set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
    )


def test_stats_and_purge(buffer: TraceBuffer):
    buffer.put(
        make_traces(12, domain="code", num_output=50, num_rows=40)
        + make_traces(5, start=12, holdout=True)
    )
    stats = buffer.stats()
    assert (stats.num_traces, stats.num_holdout, stats.num_put, stats.oldest_at) == (
        12,
        5,
        12,
        1000.0,
    )
    written = sum(trace.num_bytes for trace in make_traces(12, num_output=50, num_rows=40))
    assert stats.num_bytes > written // 2
    assert buffer.purge() == 17
    stats = buffer.stats()
    assert (stats.num_traces, stats.num_holdout, stats.num_bytes) == (0, 0, 0)
    assert (read_all(buffer), buffer.holdout(10)) == ([], [])


# -- held-out traces ------------------------------------------------------------------------------


def test_held_out_traces_are_never_read_or_sampled(buffer: TraceBuffer):
    traces = [make_trace(index=i, holdout=None, domain=["", "code"][i % 2]) for i in range(400)]
    held_out = [trace for trace in traces if trace.is_holdout]
    assert 20 < len(held_out) < 100
    assert buffer.put(traces) == 400
    assert set(read_all(buffer)) == set(ids(traces)) - set(ids(held_out))
    sampled = buffer.sample(400, np.random.default_rng(0), seen(buffer))
    assert len(sampled) == 400 - len(held_out)
    assert not any(trace.is_holdout for trace in sampled)
    assert buffer.num_unread({}) == buffer.stats().num_put == 400 - len(held_out)


def test_holdout_returns_the_newest_of_all_domains(buffer: TraceBuffer):
    traces = [make_trace(index=i, holdout=True, domain="abc"[i % 3]) for i in range(30)]
    for domain in "cba":
        buffer.put([trace for trace in traces if trace.domain == domain])
    assert ids(buffer.holdout(8)) == ids(traces[-8:])
    assert ids(buffer.holdout(100)) == ids(traces)
    assert buffer.holdout(0) == []


# -- sampling -------------------------------------------------------------------------------------


def test_every_domain_gives_as_many_and_within_one_all_are_equally_likely(buffer: TraceBuffer):
    small, large = make_traces(6, domain="small"), make_traces(18, start=6, domain="large")
    buffer.put(small + large)
    cursor = seen(buffer)
    rng = np.random.default_rng(7)
    counts: Counter[str] = Counter()
    for _ in range(300):
        sample = buffer.sample(8, rng, cursor)
        assert Counter(trace.domain for trace in sample) == {"small": 4, "large": 4}
        counts.update(ids(sample))
    for domain in (small, large):
        assert chisquare([counts[name] for name in ids(domain)]).pvalue > 1e-3
    # One that has no more leaves its turns to the others.
    assert Counter(trace.domain for trace in buffer.sample(20, rng, cursor)) == {
        "small": 6,
        "large": 14,
    }


def test_what_cannot_be_shared_equally_falls_to_any_domain(buffer: TraceBuffer):
    for i, domain in enumerate(["", "a", "b"]):
        buffer.put(make_traces(10, start=10 * i, domain=domain))
    cursor = seen(buffer)
    rng = np.random.default_rng(1)
    singles = Counter(trace.domain for _ in range(300) for trace in buffer.sample(1, rng, cursor))
    assert chisquare([singles[domain] for domain in ("", "a", "b")]).pvalue > 1e-3
    for _ in range(20):
        counts = Counter(trace.domain for trace in buffer.sample(8, rng, cursor))
        assert sorted(counts.values()) == [2, 3, 3]


def test_a_sample_holds_no_trace_twice(buffer: TraceBuffer):
    buffer.put(make_traces(100))
    cursor = seen(buffer)
    assert len(set(ids(buffer.sample(60, np.random.default_rng(0), cursor)))) == 60
    assert sorted(ids(buffer.sample(500, np.random.default_rng(0), cursor))) == sorted(
        ids(make_traces(100))
    )
    assert buffer.sample(0, np.random.default_rng(0), cursor) == []


def test_sampling_is_deterministic_in_rng_and_content(buffer: TraceBuffer):
    traces = [make_trace(index=i, domain=["", "code", "chat"][i % 3]) for i in range(50)]
    buffer.put(traces)
    first = ids(buffer.sample(10, np.random.default_rng(3), seen(buffer)))
    again = ids(buffer.sample(10, np.random.default_rng(3), seen(buffer)))
    other = ids(buffer.sample(10, np.random.default_rng(4), seen(buffer)))
    buffer.purge()
    buffer.put(traces)
    refilled = ids(buffer.sample(10, np.random.default_rng(3), seen(buffer)))
    assert first == again == refilled != other


def test_only_traces_at_or_before_the_cursor_are_sampled(open_buffer: Open):
    buffer = open_buffer(max_traces=40)
    buffer.put(make_traces(30, domain="code"))
    _, cursor = buffer.read({}, 12)
    buffer.put(make_traces(20, start=30, domain="chat"))
    rng = np.random.default_rng(0)
    assert sorted(ids(buffer.sample(100, rng, cursor))) == sorted(ids(make_traces(12)))
    buffer.put(make_traces(15, start=50, domain="code"))
    assert sorted(ids(buffer.sample(100, rng, cursor))) == sorted(ids(make_traces(7, start=5)))
    assert buffer.sample(100, rng, {}) == []


def test_a_sample_since_a_cursor_holds_nothing_from_before_it(open_buffer: Open):
    buffer = open_buffer(max_traces=30)
    buffer.put(make_traces(10, domain="code") + make_traces(10, start=10))
    _, since = buffer.read({}, 14)
    buffer.put(make_traces(5, start=20, domain="chat"))
    _, cursor = buffer.read(since, 8)
    buffer.put(make_traces(5, start=30))
    rng = np.random.default_rng(0)
    assert sorted(ids(buffer.sample(100, rng, cursor, since=since))) == sorted(
        ids(make_traces(8, start=14))
    )
    assert len(buffer.sample(3, rng, cursor, since=since)) == 3
    assert buffer.sample(100, rng, since, since=since) == []
    assert sorted(ids(buffer.sample(100, rng, since, since={}))) == sorted(ids(make_traces(14)))
    # A place that was trimmed since, or was before a purge, is as good as the start.
    buffer.put(make_traces(30, start=40))
    assert len(buffer.sample(100, rng, seen(buffer), since={"": since[""]})) == 10 + 5 + 30
    buffer.purge()
    buffer.put(make_traces(4, start=90))
    assert sorted(ids(buffer.sample(9, rng, seen(buffer), since=since))) == ids(
        make_traces(4, start=90)
    )


# -- anchors --------------------------------------------------------------------------------------


def test_anchors_stand_in_their_slots_until_replaced(buffer: TraceBuffer):
    old, new = make_traces(5, domain="code", top_k=7), make_traces(2, start=10)
    buffer.set_anchors(dict(enumerate(old)))
    buffer.set_anchors({3: new[0], 700: new[1]})
    got = buffer.anchors([700, 0, 3, 0])
    for trace, expected in zip(got, [new[1], old[0], new[0], old[0]], strict=True):
        assert_same_trace(trace, expected)
    assert ids(buffer.anchors([1, 5, 6, 2])) == ids(old[1:3]), "empty slots are left out"
    assert buffer.anchors([]) == buffer.anchors([99]) == []
    buffer.set_anchors({})
    assert len(buffer.anchors(range(701))) == 6
    buffer.set_anchors({0: None, 5: None, 2: new[0]})
    assert ids(buffer.anchors([0, 2, 5])) == ids(new[:1])


def test_anchors_are_no_part_of_the_streams(open_buffer: Open):
    buffer = open_buffer(max_traces=16)
    anchors = make_traces(4, domain="gone")
    buffer.set_anchors(dict(enumerate(anchors)))
    assert (read_all(buffer), buffer.num_unread({}), buffer.stats().num_traces) == ([], 0, 0)
    buffer.put(make_traces(50, start=100))
    assert sorted(read_all(buffer)) == sorted(ids(make_traces(16, start=134)))
    assert len(buffer.sample(100, np.random.default_rng(0), seen(buffer))) == 16
    assert ids(buffer.anchors([0, 1, 2, 3])) == ids(anchors), (
        "they outlive what the streams let go of"
    )


def test_one_domain_is_purged(buffer: TraceBuffer):
    labelled, plain = make_traces(9, domain="code"), make_traces(7, start=9)
    held_out = [make_trace(index=i, holdout=True, domain="code") for i in range(20, 23)]
    buffer.put([*labelled, *plain, *held_out])
    buffer.set_anchors({0: labelled[0], 1: plain[0]})
    assert buffer.purge(domain="code") == 12
    assert read_all(buffer) == ids(plain) and buffer.holdout(9) == []
    assert ids(buffer.anchors([0, 1])) == ids(plain[:1])
    assert buffer.purge(domain="") == 7
    assert buffer.purge(domain="unknown") == 0


def test_what_is_old_is_purged(buffer: TraceBuffer):
    old = [make_trace(index=i, domain="ab"[i % 2], finished_at=100.0 + i) for i in range(150)]
    new = [make_trace(index=i, domain="ab"[i % 2], finished_at=300.0 + i) for i in range(150, 160)]
    held_out = [make_trace(index=i, holdout=True, finished_at=i) for i in (200, 400)]
    buffer.put([*old, *new, *held_out])
    buffer.set_anchors({0: old[0], 1: new[0]})
    cursor = buffer.read({}, 40)[1]
    assert buffer.purge(before=300.0) == 151
    assert sorted(read_all(buffer)) == sorted(ids(new))
    assert ids(buffer.holdout(9)) == ids(held_out[1:])
    assert ids(buffer.anchors([0, 1])) == ids(new[:1])
    assert buffer.num_unread(cursor) == 10
    later = make_traces(3, start=300, domain="a")
    buffer.put(later)
    assert buffer.num_unread(cursor) == 13, "cursors go on counting"
    assert buffer.purge(before=1.0) == 0
    assert buffer.purge(domain="b", before=1e12) == 5
    stats = buffer.stats()
    assert (stats.num_traces, stats.num_put, stats.oldest_at) == (8, 163, 450.0), (
        "what went was stored once"
    )


def test_a_domain_that_was_emptied_has_no_oldest(buffer: TraceBuffer):
    buffer.put([*make_traces(2, domain="old"), make_trace(index=9, domain="new")])
    buffer.purge(domain="old")
    stats = buffer.stats()
    assert (stats.num_traces, stats.oldest_at) == (1, 1009.0)
    assert ids(buffer.sample(9, np.random.default_rng(0), seen(buffer))) == ids(
        [make_trace(index=9)]
    )
    buffer.purge(before=2000.0)
    assert buffer.stats().oldest_at == 0.0


def test_an_old_trace_that_came_late_goes_with_what_came_before_it(buffer: TraceBuffer):
    buffer.put(
        [make_trace(index=i, finished_at=at) for i, at in enumerate([50.0, 500.0, 60.0, 600.0])]
    )
    assert buffer.purge(before=100.0) == 3
    assert [trace.finished_at for trace in buffer.read({}, 9)[0]] == [600.0]


def test_a_purge_takes_the_anchors_too(buffer: TraceBuffer):
    buffer.put(make_traces(3))
    buffer.set_anchors(dict(enumerate(make_traces(3))))
    assert buffer.purge() == 3
    assert buffer.anchors([0, 1, 2]) == []
    buffer.set_anchors({1: make_traces(1)[0]})
    assert ids(buffer.anchors([0, 1])) == ids(make_traces(1))


# -- kept apart -----------------------------------------------------------------------------------


def test_targets_deployments_and_drafts_never_meet(open_buffer: Open):
    places = [
        {"deployment": "a"},
        {"deployment": "b"},
        {"target_id": "target-b"},
        {"draft": "small"},
        {"deployment": "b", "target_id": "target-b", "draft": "small"},
    ]
    for i, place in enumerate(places):
        fields = {key: value for key, value in place.items() if key != "deployment"}
        traces = make_traces(3, start=10 * i, domain="code", **fields)
        traces += make_traces(2, start=10 * i, holdout=True, **fields)
        assert open_buffer(**place).put(traces) == 5
        open_buffer(**place).set_anchors({0: traces[0]})
    for i, place in enumerate(places):
        assert read_all(open_buffer(**place)) == ids(make_traces(3, start=10 * i))
        assert ids(open_buffer(**place).holdout(9)) == ids(
            make_traces(2, start=10 * i, holdout=True)
        )
        assert ids(open_buffer(**place).anchors([0])) == ids(make_traces(1, start=10 * i))
    assert open_buffer(**places[0]).purge() == 5
    assert [len(open_buffer(**place).anchors([0])) for place in places] == [0, 1, 1, 1, 1]
    assert all(open_buffer(**place).stats().num_traces == 3 for place in places[1:])


def test_traces_of_another_target_or_draft_are_dropped_and_counted(buffer: TraceBuffer):
    others = make_trace(target_id="other"), make_trace(draft="other")
    assert buffer.put([others[0], make_trace(index=1), others[1]]) == 1
    assert read_all(buffer) == ids([make_trace(index=1)])
    assert buffer.dropped == buffer.stats().dropped == {"mismatch": 2}
    buffer.dropped["mismatch"] = 9
    assert buffer.dropped == {"mismatch": 2}, "it is a copy"


def test_an_anchor_that_ended_at_that_very_time_stays(buffer: TraceBuffer):
    (trace,) = make_traces(1)
    buffer.put([trace])
    buffer.set_anchors({0: trace})
    assert buffer.purge(before=trace.finished_at) == 0
    assert ids(buffer.anchors([0])) == ids([trace])
    assert buffer.purge(before=trace.finished_at + 0.001) == 1
    assert buffer.anchors([0]) == []


# -- concurrency ----------------------------------------------------------------------------------


def test_two_producers_and_a_reader(buffer: TraceBuffer):
    mine = [make_traces(150, start=1000 * (k + 1), domain=["", "code"][k]) for k in range(2)]
    shared = [make_traces(150, start=1000 * (k + 3), domain="shared") for k in range(2)]

    def produce(k: int) -> None:
        for i in range(0, 150, 10):
            assert buffer.put(mine[k][i : i + 10] + shared[k][i : i + 10]) == 20

    threads = [threading.Thread(target=produce, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    got: list[str] = []
    cursor: Cursor = {}
    while any(thread.is_alive() for thread in threads) or buffer.num_unread(cursor):
        traces, cursor = buffer.read(cursor, 17)
        got += ids(traces)
    for thread in threads:
        thread.join()
    for own in (*mine, *shared):
        names = set(ids(own))
        assert [name for name in got if name in names] == ids(own)
    assert len(got) == len(set(got)) == 600
    assert buffer.dropped == {}


@pytest.mark.parametrize("kind", [MemoryTraceBuffer, RedisTraceBuffer])
def test_limits_that_are_not_given_are_those_of_the_settings(kind: type[TraceBuffer]) -> None:
    parameters = inspect.signature(kind).parameters
    for name in ("max_traces", "max_domains"):
        assert parameters[name].default == getattr(BufferConfig(), name)
