"""A run over an engine that is stood in for: who is in flight when, and what is written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from osd.errors import ConfigError
from osd.evaluate.drive import Drive, Driver, arrivals
from osd.evaluate.plan import Load
from osd.evaluate.recorder import Seen
from osd.evaluate.runs import Request
from serving.vllm.in_process import Brought

REQUESTS = [
    Request(prompt_ids=(1,), data="x", max_tokens=n, at=at)
    for n, at in ((2, 5.0), (4, 5.02), (2, 5.01), (2, 5.3))
]


class OneTokenAStep:
    """Two draft tokens for each request in each step, of which none is accepted."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.in_flight: list[list[str]] = []
        self.sent: list[str] = []
        self.settings: list[dict[str, Any]] = []

    def add(self, req_id: str, prompt_ids: Sequence[int], *, max_tokens: int, **more: Any) -> None:
        self.running[req_id] = max_tokens
        self.sent.append(req_id)
        self.settings.append(more)

    def step(self) -> dict[str, Brought]:
        self.in_flight.append(list(self.running))
        self.running = {req_id: left - 1 for req_id, left in self.running.items()}
        brought = {req_id: Brought([7], left == 0) for req_id, left in self.running.items()}
        self.running = {req_id: left for req_id, left in self.running.items() if left}
        return brought

    def take(self) -> Seen:
        ids = self.in_flight[-1]
        return Seen(
            batch=len(ids),
            width=3 * len(ids),
            verified={f"{req_id}-8f3a": (1, [4, 5], 0) for req_id in ids},
        )


def driven(load: Load) -> tuple[OneTokenAStep, Drive]:
    engine = OneTokenAStep()
    driver = Driver(engine, REQUESTS, load, temperature=0.5, stop_token_ids=(9,))
    return engine, driver.run()


def test_so_many_streams_are_kept_busy_to_the_end() -> None:
    engine, found = driven(Load(streams=2))
    assert engine.in_flight[:-1] == [["0", "1"], ["0", "1"], ["1", "2"], ["1", "2"], ["3"], ["3"]]
    assert engine.settings == [{"temperature": 0.5, "stop_token_ids": (9,)}] * 4
    assert [one.index for one in found.requests] == [0, 1, 2, 3]
    assert [len(one.token_ids) for one in found.requests] == [2, 4, 2, 2]
    assert [part.step for part in found.requests[2].steps] == [2, 3]
    assert found.requests[2].steps[0].drafted == (4, 5)
    assert len(found.steps) == 6 and found.steps[4].width == 3
    assert all(one.arrived <= one.first_at <= one.ended for one in found.requests)


def test_recorded_arrivals_are_kept_from_the_first_one_on() -> None:
    engine, found = driven(Load())
    assert engine.sent == ["0", "2", "1", "3"]
    arrived = [one.arrived for one in found.requests]
    assert arrived == pytest.approx([0.0, 0.02, 0.01, 0.3])
    assert found.seconds >= 0.3
    assert all(one.first_at >= one.arrived for one in found.requests)


def test_poisson_arrivals_have_the_rate_and_are_the_same_for_all_arms() -> None:
    requests = REQUESTS * 500
    times = arrivals(Load(rate=4.0), requests)
    assert times == arrivals(Load(rate=4.0), requests) and times is not None
    assert times == sorted(times) and times[0] == 0
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.1)


def test_arrivals_that_were_not_recorded_are_missed() -> None:
    requests = [*REQUESTS, Request(prompt_ids=(1,), data="x", max_tokens=1)]
    with pytest.raises(ConfigError, match='requests without "at"'):
        arrivals(Load(), requests)
