"""A whole service whose draft tokens are drawn from the draft's distribution."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from osd.service.note import Running
from tests.support import services
from tests.support.pairs import Pair
from tests.support.services import Served, osd, pause_training, status, wait_until
from tests.support.traffic import PROMPTS, ask

pytestmark = [pytest.mark.slow, pytest.mark.variants, pytest.mark.timeout(600)]


@contextmanager
def running(name: str, directory: Path, draft: Path, pair: Pair, *more: str) -> Iterator[Running]:
    """In a process of its own: the service that other tests share has this one's Ray."""
    arguments = services.settings(name, directory / "data", pair.target, draft)
    drawn = "speculation.draft_sample_method=probabilistic"
    served = Served([*arguments, drawn, *more], directory / "serve.log")
    try:
        note = served.wait_ready()
        wait_until(lambda: status(note.control_url)["replicas"], 60, "the replica is known")
        yield note
    finally:
        served.end()


def test_a_draft_that_learns_from_samples_serves_as_the_gate_predicted(
    pair: Pair, tmp_path: Path
) -> None:
    with running("test-sampled", tmp_path, pair.stranger, pair) as note:
        greedy = [answer.token_ids for answer in ask(note.service_url, PROMPTS)]
        deadline = time.monotonic() + 240
        # One that has just begun to learn was measured on a handful of requests.
        while (status(note.control_url)["predicted_alpha"] or 0.0) < 0.2:
            assert time.monotonic() < deadline, "no draft of some worth passed the gate"
            ask(note.service_url, PROMPTS * 2, streams=6, temperature=1.0)
        version = pause_training(note)
        (replica,) = status(note.control_url)["replicas"]
        assert "memory" not in replica["speculation"]["left_out"] and replica["off"] == {}
        before = served_of(version)
        ask(note.service_url, PROMPTS * 4, streams=6, temperature=1.0)
        after = served_of(version)
        assert after[1] > before[1], "nothing was reported"
        served = (after[0] - before[0]) / (after[1] - before[1])
        measured = draft_of(version)["predicted_alpha"]
        print(f"v{version}: the gate predicted {measured:.3f}, it serves {served:.3f}")
        assert served == pytest.approx(measured, abs=0.1), "gate.rollback_margin"
        assert [answer.token_ids for answer in ask(note.service_url, PROMPTS)] == greedy


def draft_of(version: int) -> dict[str, Any]:
    drafts = osd("drafts", "list", "--json", "--deployment", "test-sampled")
    found: dict[str, Any] = next(draft for draft in drafts if draft["version"] == version)
    return found


def served_of(version: int) -> tuple[float, float]:
    """Accepted and tested draft tokens of a version, when its replica reports nothing more."""
    newest = draft_of(version)
    while True:
        time.sleep(1.5)  # a replica reports once a second
        before, newest = newest, draft_of(version)
        if before["served_tested"] == newest["served_tested"]:
            num_tested = newest["served_tested"]
            return (newest["served_alpha"] or 0.0) * num_tested, num_tested


def test_beside_sampled_drafts_the_memory_proposes(pair: Pair, tmp_path: Path) -> None:
    """As soon as the worker tells its tokens from drawn ones."""
    more = ("trainer.enabled=false", "speculation.proposers=[memory, draft]")
    with running("test-mixed", tmp_path, pair.draft, pair, *more) as note:
        greedy = [answer.token_ids for answer in ask(note.service_url, PROMPTS)]
        ask(note.service_url, PROMPTS * 2, streams=6, temperature=1.0)
        assert [answer.token_ids for answer in ask(note.service_url, PROMPTS)] == greedy

        def is_brought_by_the_memory() -> bool:
            (replica,) = status(note.control_url)["replicas"]
            assert replica["off"] == {} and replica["speculation"]["left_out"] == {}
            return bool(replica["speculation"]["sources"]["memory"][1] > 100)

        wait_until(is_brought_by_the_memory, 30, "the memory's tokens are accepted")
