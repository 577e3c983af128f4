"""The trace codec returns what it was given, and takes nothing else for a trace."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest

from buffers.codec import (
    MAX_TRACE_BYTES,
    SCHEMA_VERSION,
    CorruptTrace,
    UnknownSchema,
    decode_trace,
    encode_trace,
)
from osd.records import PLAIN, REJECTED, TRACE_ARRAYS, Trace
from tests.support.builders import assert_same_trace, make_minimal_trace, make_trace

PREFIX = 12
MAX_HEADER_BYTES = 16 << 10


def with_header(data: bytes, change) -> bytes:
    """The encoding with its header altered by `change(dict)` and its CRC made right again."""
    length = struct.unpack_from("<I", data, 8)[0]
    header = msgspec.json.decode(data[PREFIX : PREFIX + length])
    change(header)
    return with_raw_header(data, msgspec.json.encode(header))


def with_raw_header(data: bytes, head: bytes) -> bytes:
    length = struct.unpack_from("<I", data, 8)[0]
    return with_crc(data[:8] + struct.pack("<I", len(head)) + head + data[PREFIX + length : -4])


def with_crc(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def header_of(data: bytes) -> bytes:
    return data[PREFIX : PREFIX + struct.unpack_from("<I", data, 8)[0]]


def test_every_field_comes_back():
    trace = make_trace(
        trace_id="chatcmpl-äöü-漢字-1",
        domain="code",
        draft="d2",
        finished_at=1_763_000_000.123456789,
        temperature=0.7,
        top_p=0.95,
        top_k=40,
        num_drafts=7,
        num_draft_tokens=28,
        num_accepted_tokens=11,
    )
    assert_same_trace(decode_trace(encode_trace(trace)), trace)


def test_extreme_values_come_back():
    trace = Trace(
        trace_id="x",
        target_id="9f2c",
        finished_at=0.0,
        prompt_ids=[0, 2**31 - 1],
        output_ids=[5],
        position=[2],
        kind=[PLAIN],
        draft_ids=[-1],
        target_ids=[[1, 2]],
        target_logprobs=[[0.0, -np.inf]],
        tail_logprob=[-np.inf],
        keep_prob=[1e-30],
        draft_version=[2**31 - 1],
    )
    assert_same_trace(decode_trace(encode_trace(trace)), trace)


def test_trace_without_rows_comes_back():
    trace = make_minimal_trace("nothing captured")
    assert_same_trace(decode_trace(encode_trace(trace)), trace)


def test_decoded_arrays_are_their_own():
    data = encode_trace(make_trace())
    trace = decode_trace(data)
    for name in TRACE_ARRAYS:
        array = getattr(trace, name)
        assert array.flags.writeable and array.flags.aligned, name
        assert not np.shares_memory(array, np.frombuffer(data, np.int8)), name


def test_codec_covers_every_array_of_the_record():
    from buffers.codec import _ARRAYS

    assert {name: (np.dtype(d), n) for name, (d, n) in _ARRAYS.items()} == {
        name: (np.dtype(d), n) for name, (d, n) in TRACE_ARRAYS.items()
    }


def test_encoding_is_stable():
    assert encode_trace(make_trace(index=4)) == encode_trace(make_trace(index=4))


def test_overhead_is_small():
    trace = make_trace(num_prompt=500, num_output=200, num_rows=100, top_k=64)
    assert len(encode_trace(trace)) < trace.num_bytes + 1000


@pytest.mark.parametrize("field", ["finished_at", "temperature", "top_p"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_scalars_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        encode_trace(make_trace(**{field: value}))


def test_a_header_that_could_not_be_read_back_is_refused():
    with pytest.raises(ValueError, match="header"):
        encode_trace(make_trace(trace_id="x" * 20_000))


def test_the_longest_header_is_read_back_and_a_longer_one_neither_written_nor_read():
    room = MAX_HEADER_BYTES - len(header_of(encode_trace(make_trace(trace_id=""))))
    longest = encode_trace(make_trace(trace_id="x" * room))
    assert len(header_of(longest)) == MAX_HEADER_BYTES
    assert decode_trace(longest).trace_id == "x" * room
    with pytest.raises(ValueError, match="header of 16385 bytes, at most 16384"):
        encode_trace(make_trace(trace_id="x" * (room + 1)))
    with pytest.raises(CorruptTrace, match="header of 16385 bytes"):
        decode_trace(with_raw_header(longest, header_of(longest) + b" "))


def test_the_largest_trace_is_read_back_and_a_larger_one_neither_written_nor_read():
    def sized(num_prompt: int, name: str) -> Trace:
        return make_trace(trace_id=name, num_output=0, prompt_ids=np.zeros(num_prompt, np.int32))

    room = MAX_TRACE_BYTES - len(encode_trace(sized(10_000_000, ""))) + 40_000_000
    largest = encode_trace(sized(room // 4, "x" * (room % 4)))
    assert len(largest) == MAX_TRACE_BYTES and len(decode_trace(largest).prompt_ids) == room // 4
    with pytest.raises(ValueError, match=f"at most {MAX_TRACE_BYTES}"):
        encode_trace(sized(room // 4, "x" * (room % 4 + 1)))
    with pytest.raises(CorruptTrace, match=f"{MAX_TRACE_BYTES + 1} bytes, at most"):
        decode_trace(largest + b"\0")


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [(0, b"OSDX", "starts with b'OSDX'"), (6, b"\x01\0", "header of"), (6, b"\0\x01", "header of")],
)
def test_a_false_beginning_with_a_right_crc_is_corrupt(at: int, value: bytes, said: str):
    body = bytearray(encode_trace(make_trace())[:-4])
    body[at : at + len(value)] = value
    with pytest.raises(CorruptTrace, match=said):
        decode_trace(with_crc(bytes(body)))


def test_a_header_that_would_reach_into_the_crc_is_corrupt():
    whole = encode_trace(make_minimal_trace("x"))
    assert len(whole) == PREFIX + len(header_of(whole)) + 4, "a trace without any array"
    for too_long in range(1, 5):
        body = whole[:8] + struct.pack("<I", len(header_of(whole)) + too_long) + whole[PREFIX:-4]
        with pytest.raises(CorruptTrace, match="header of"):
            decode_trace(with_crc(body))


@pytest.mark.parametrize("length", [MAX_TRACE_BYTES + 1, 2**40])
def test_an_impossible_shape_without_bytes_is_corrupt(length: int):
    def widen(header: dict) -> None:
        for name in ("target_ids", "target_logprobs"):
            shape_of(header, name)[:] = [0, length]

    with pytest.raises(CorruptTrace, match="target_ids: impossible shape"):
        decode_trace(with_header(encode_trace(make_minimal_trace("x")), widen))


def test_a_negative_length_that_another_makes_good_is_corrupt():
    def shift(header: dict) -> None:
        (num_prompt,) = shape_of(header, "prompt_ids")
        shape_of(header, "prompt_ids")[0] = -1
        grow(header, "output_ids", num_prompt + 1)

    with pytest.raises(CorruptTrace, match="prompt_ids: impossible shape"):
        decode_trace(with_header(encode_trace(make_trace()), shift))


def test_every_truncation_is_corrupt():
    data = encode_trace(make_trace(num_prompt=3, num_output=3, num_rows=2, top_k=2))
    for length in range(len(data)):
        with pytest.raises(CorruptTrace):
            decode_trace(data[:length])


def test_trailing_bytes_are_corrupt():
    with pytest.raises(CorruptTrace):
        decode_trace(encode_trace(make_trace()) + b"\0")


def test_every_flipped_bit_is_noticed():
    data = bytearray(encode_trace(make_trace(num_prompt=3, num_output=3, num_rows=2, top_k=2)))
    for index in range(len(data)):
        for bit in range(8):
            data[index] ^= 1 << bit
            with pytest.raises((CorruptTrace, UnknownSchema)):
                decode_trace(bytes(data))
            data[index] ^= 1 << bit


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, 65535])
def test_another_schema_version_is_unknown(version):
    data = bytearray(encode_trace(make_trace()))
    struct.pack_into("<H", data, 4, version)
    with pytest.raises(UnknownSchema, match=str(version)):
        decode_trace(bytes(data))


def test_what_is_no_trace_is_corrupt():
    rng = np.random.default_rng(0)
    for size in (0, 1, 11, 12, 16, 100, 5000):
        with pytest.raises(CorruptTrace):
            decode_trace(rng.bytes(size))
        with pytest.raises(CorruptTrace):
            decode_trace((b"OSDT\x01\0\0\0" + rng.bytes(size))[: max(size, 8)])


def shape_of(header: dict, name: str) -> list[int]:
    return next(shape for array, _, shape in header["arrays"] if array == name)


def grow(header: dict, name: str, by: int) -> None:
    shape_of(header, name)[0] += by


@pytest.mark.parametrize(
    "change",
    [
        lambda h: grow(h, "prompt_ids", 1),
        lambda h: grow(h, "prompt_ids", -1),
        lambda h: grow(h, "prompt_ids", 10**30),
        lambda h: grow(h, "target_ids", 2**61),
        lambda h: shape_of(h, "prompt_ids").__setitem__(0, -1),
        lambda h: shape_of(h, "target_ids").__setitem__(slice(None), [0, 2**31]),
        lambda h: shape_of(h, "target_ids").append(1),
        lambda h: (
            grow(h, "prompt_ids", 1),
            grow(h, "output_ids", -1),
            grow(h, "position", 1),
            grow(h, "draft_ids", -1),
        ),
        lambda h: h["arrays"].pop(),
        lambda h: h["arrays"].reverse(),
        lambda h: h["arrays"][0].__setitem__(1, "<i8"),
        lambda h: h["arrays"][0].__setitem__(1, "|O"),
        lambda h: h["arrays"][0].__setitem__(1, "V1000000000"),
        lambda h: h["arrays"][0].append(1),
        lambda h: h.pop("trace_id"),
        lambda h: h.update(extra=1),
        lambda h: h.update(finished_at=None),
        lambda h: h.update(top_k="1"),
    ],
)
def test_false_headers_with_a_right_crc_are_corrupt(change):
    with pytest.raises(CorruptTrace):
        decode_trace(with_header(encode_trace(make_trace()), change))


@pytest.mark.parametrize(
    "head", [b"", b"null", b"[" * 16_000, b'{"arrays":' + b"[" * 16_000, b"\xff\xfe", b"1e999"]
)
def test_false_header_bytes_are_corrupt(head):
    with pytest.raises(CorruptTrace):
        decode_trace(with_raw_header(encode_trace(make_trace()), head))


def test_values_the_record_refuses_are_corrupt():
    data = encode_trace(make_trace(num_prompt=2, num_output=2, num_rows=1, top_k=1))
    position = np.asarray([3], "<i4").tobytes()
    at = data.rindex(position, 0, len(data) - 8)
    with pytest.raises(CorruptTrace, match="position"):
        decode_trace(with_crc(data[:at] + np.asarray([400], "<i4").tobytes() + data[at + 4 : -4]))


def test_lying_bytes_cost_no_memory():
    lies = [
        with_header(encode_trace(make_trace()), lambda h: grow(h, "target_ids", 2**26)),
        with_header(encode_trace(make_trace()), lambda h: grow(h, "prompt_ids", 2**26)),
        encode_trace(make_trace())[:8] + b"\xff\xff\xff\x7f" + bytes(100),
    ]
    tracemalloc.start()
    for data in lies:
        with pytest.raises(CorruptTrace):
            decode_trace(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_random_damage_with_a_right_crc_never_crashes():
    rng = np.random.default_rng(1)
    data = encode_trace(
        make_trace(num_prompt=3, num_output=3, num_rows=2, top_k=2, kind=[REJECTED, PLAIN])
    )
    for _ in range(3000):
        body = bytearray(data[:-4])
        for index in rng.integers(0, len(body), rng.integers(1, 6)):
            body[index] = rng.integers(0, 256)
        with contextlib.suppress(CorruptTrace, UnknownSchema):
            assert isinstance(decode_trace(with_crc(bytes(body))), Trace)
