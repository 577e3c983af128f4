"""A whole service whose draft tokens are drawn from the draft's distribution."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support import acceptance, services
from tests.support.pairs import Pair
from tests.support.services import current, pause_training, status, wait_until
from tests.support.traffic import PROMPTS, ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_draft_that_learns_from_samples_serves_as_the_gate_predicted(
    pair: Pair, tmp_path: Path
) -> None:
    arguments = [
        *services.settings("test-sampled", tmp_path / "data", pair.target, pair.stranger),
        "speculation.draft_sample_method=probabilistic",
    ]
    with services.supervised(arguments) as service:
        wait_until(lambda: status(service.control_url)["replicas"], 60, "the replica is known")
        greedy = [answer.token_ids for answer in ask(service.url, PROMPTS)]
        deadline = time.monotonic() + 240
        while (release := current(service)).version == 1:
            assert time.monotonic() < deadline, "no draft passed the gate"
            ask(service.url, PROMPTS * 2, streams=6, temperature=1.0)
        pause_training(service)
        (replica,) = status(service.control_url)["replicas"]
        assert "memory" not in replica["speculation"]["left_out"] and replica["off"] == {}
        release = current(service)
        measured = acceptance.measured_alpha(release)
        services.wait_for_version(service.control_url, release.version)
        before = acceptance.served_counts(service, release.version)
        ask(service.url, PROMPTS * 4, streams=6, temperature=1.0)
        after = acceptance.served_counts(service, release.version)
        served = acceptance.alpha((after - before)[None])
        print(f"v{release.version}: the gate predicted {measured:.3f}, it serves {served:.3f}")
        assert served == pytest.approx(measured, abs=0.1), "gate.rollback_margin"
        assert [answer.token_ids for answer in ask(service.url, PROMPTS)] == greedy


def test_beside_sampled_drafts_the_memory_proposes(pair: Pair, tmp_path: Path) -> None:
    """As soon as the worker tells its tokens from drawn ones."""
    arguments = [
        *services.settings("test-mixed", tmp_path / "data", pair.target, pair.draft),
        *("speculation.draft_sample_method=probabilistic", "trainer.enabled=false"),
        "speculation.proposers=[memory, draft]",
    ]
    with services.supervised(arguments) as service:
        greedy = [answer.token_ids for answer in ask(service.url, PROMPTS)]
        ask(service.url, PROMPTS * 2, streams=6, temperature=1.0)
        assert [answer.token_ids for answer in ask(service.url, PROMPTS)] == greedy

        def is_brought_by_the_memory() -> bool:
            (replica,) = status(service.control_url)["replicas"]
            assert replica["off"] == {} and replica["speculation"]["left_out"] == {}
            return bool(replica["speculation"]["sources"]["memory"][1] > 100)

        wait_until(is_brought_by_the_memory, 30, "the memory's tokens are accepted")
