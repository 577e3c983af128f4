"""Data from outside never crashes its parser: HTTP requests, files of a release, encoded traces.

Each run takes seconds. `OSD_FUZZ_SECONDS=600` makes each take that long (all of HTTP together).
"""

from __future__ import annotations

import json
import logging
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file
from schemathesis.checks import not_a_server_error

from buffers.codec import CorruptTrace, UnknownSchema, decode_trace, encode_trace
from osd.errors import ReleaseError, SwapError
from osd.observe.dashboard import build_app
from osd.records import DraftRelease
from osd.releases.store import ReleaseStore
from serving.swap.shape import DraftShape, read_release
from tests.support.builders import make_trace
from tests.unit.osd.observe.test_dashboard import RIGHT, TOKEN, FakeController, FakeHistory

SECONDS = float(os.environ.get("OSD_FUZZ_SECONDS", "0"))
NUM_EXAMPLES = 1_000_000 if SECONDS else 40
QUICKLY = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    database=None,
    derandomize=not SECONDS,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
)


class Clock:
    """Hypothesis counts examples, not seconds: with so many of them, each part ends here, as
    skipped, when its time is over without a failure."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._done: dict[str, int] = {}
        self._failed: set[str] = set()

    @contextmanager
    def example(self, name: str, seconds: float) -> Iterator[None]:
        """Around each one. Once one has failed, Hypothesis may take the time it needs to find the
        smallest."""
        now = time.monotonic()
        self._done[name] = self._done.get(name, 0) + 1
        if (
            SECONDS
            and now - self._begun.setdefault(name, now) > seconds
            and name not in self._failed
        ):
            pytest.skip(f"{name}: {self._done[name]} examples in {seconds:.0f} s, none failed")
        try:
            yield
        except Exception:
            self._failed.add(name)
            raise


CLOCK = Clock()
HERE = {"Host": "127.0.0.1:8001"}
schema = schemathesis.openapi.from_asgi(
    "/openapi.json", build_app(FakeController(), FakeHistory(), TOKEN), headers=HERE
)

NUM_OPERATIONS = sum(1 for _ in schema.exclude(path="/osd/stream").get_all_operations())


@schema.exclude(path="/osd/stream").parametrize()
@QUICKLY
def test_no_request_ends_in_a_server_error(case: schemathesis.Case) -> None:
    """Of the control port, by its own description, with and against it. (`/osd/stream` never
    ends.)"""
    with CLOCK.example(case.operation.label, SECONDS / NUM_OPERATIONS):
        case.call_and_validate(
            headers={**(case.headers or {}), **RIGHT, **HERE}, checks=[not_a_server_error]
        )


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two releases of a tiny model."""
    root = tmp_path_factory.mktemp("fuzz")
    model = root / "model"
    model.mkdir()
    save_file(
        {"a.weight": torch.randn(6, 4), "b.bias": torch.randn(5)}, model / "model.safetensors"
    )
    (model / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 4})
    )
    store = ReleaseStore(root / "releases")
    store.publish(model, parent=0, target_id="t")
    store.publish(model, parent=1, target_id="t")
    return root


def for_a_while(look: Callable[[np.random.Generator], None], num: int) -> None:
    """`look` again and again: `num` times, or as long as was asked for; memory must not grow."""
    rng, ends, done = np.random.default_rng(5), time.monotonic() + SECONDS, 0
    logging.disable(logging.WARNING)  # pytest would remember every one
    tracemalloc.start()
    try:
        while done < num or time.monotonic() < ends:
            look(rng)
            done += 1
            if done == num // 2:
                before, _ = tracemalloc.get_traced_memory()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        logging.disable(logging.NOTSET)
    assert after - before < 2 << 20


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Some bytes changed, a piece cut out, doubled or exchanged for noise."""
    array = bytearray(data)
    start = int(rng.integers(len(array) + 1))
    stop = min(len(array), start + int(rng.integers(1, 64)))
    match rng.integers(4):
        case 0:
            for at in rng.integers(len(array), size=rng.integers(1, 5)):
                array[at] = rng.integers(256)
        case 1:
            del array[start:stop]
        case 2:
            array[start:start] = array[start:stop]
        case _:
            array[start:stop] = rng.bytes(stop - start)
    return bytes(array)


@pytest.mark.parametrize("name", ["release.json", "config.json", "model.safetensors"])
def test_a_damaged_release_is_refused_or_whole(release: Path, name: str) -> None:
    """Whatever became of a file: the store and the swap say what is wrong, or find nothing
    wrong."""
    store, path = ReleaseStore(release / "releases"), release / "releases" / "v000002" / name
    good, current = path.read_bytes(), store.get(2)
    expected = DraftShape.of(release / "model")

    def look(rng: np.random.Generator) -> None:
        path.write_bytes(damaged(good, rng))
        try:
            assert all(
                isinstance(found, DraftRelease)
                for found in ReleaseStore(release / "releases").list()
            )
            ReleaseStore(release / "releases").current("t")
            store.verify(current)
        except ReleaseError as error:
            assert "\n" not in str(error)
        try:
            tensors = read_release(current, expected)
        except SwapError as error:
            assert "\n" not in str(error)
        else:
            assert all(torch.isfinite(tensor).all() for tensor in tensors.values())

    try:
        for_a_while(look, 60)
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("name", ["CURRENT", "state.json"])
def test_a_damaged_store_still_offers_a_release(release: Path, name: str) -> None:
    path = release / "releases" / name
    ReleaseStore(release / "releases").set_paused(False)
    good = path.read_bytes()

    def look(rng: np.random.Generator) -> None:
        path.write_bytes(damaged(good, rng))
        try:
            found = ReleaseStore(release / "releases").current("t")
            assert found is None or found.version in (1, 2)
        except ReleaseError as error:
            assert "\n" not in str(error)

    try:
        for_a_while(look, 60)
    finally:
        path.write_bytes(good)


def test_a_damaged_trace_is_a_trace_or_corrupt() -> None:
    good = encode_trace(make_trace(domain="code", num_prompt=40, num_output=30, num_rows=20))

    def look(rng: np.random.Generator) -> None:
        with suppress(CorruptTrace, UnknownSchema):
            decode_trace(damaged(good, rng))

    for_a_while(look, 2000)


@given(st.binary(max_size=400))
@QUICKLY
def test_any_bytes_are_a_trace_or_corrupt(data: bytes) -> None:
    with CLOCK.example("bytes", SECONDS), pytest.raises((CorruptTrace, UnknownSchema)):
        decode_trace(data)
