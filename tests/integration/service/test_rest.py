"""An engine without requests rests, and so does training that brings nothing."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from osd.service.launch import Service
from tests.support.beside import Beside
from tests.support.processes import cpu_seconds, descendants, named, pid_of
from tests.support.services import current, osd, replica_version, status, wait_until
from tests.support.traffic import PROMPTS, Traffic, prompt_texts

pytestmark = pytest.mark.timeout(1200)


def test_an_idle_engine_rests(service: Service) -> None:
    """Its supervision does not keep it awake."""
    workers = named(descendants(pid_of(service.replicas["replica-0"])), "VLLM::EngineCore")
    assert len(workers) == 1
    time.sleep(6)
    before = cpu_seconds(workers[0])
    time.sleep(4)
    share = (cpu_seconds(workers[0]) - before) / 4
    print(f"an idle engine uses {100 * share:.0f} % of a core")
    assert share < 0.2
    version = replica_version(service.control_url)
    assert version == current(service).version, "it still says what it serves"


def test_training_rests_once_it_brings_nothing_and_wakes_when_acceptance_falls(
    beside: Beside,
) -> None:
    """No round gains the 0.5 that the gate wants beyond the first draft's α of 0.6, so training
    rests. No draft can guess what is then sampled at temperature 2."""
    _, note = beside.running()
    osd("drafts", "promote", 1, "--deployment", "test-beside")
    with Traffic(note.service_url, PROMPTS) as traffic:  # what is usual is to be of this draft
        wait_until(lambda: len(traffic.answers) > 300, 120, "it has served")
    osd("resume", "--deployment", "test-beside")

    def told(kind: str) -> bool:
        events = httpx.get(f"{note.control_url}/osd/events").json()
        return any(event["kind"] == kind for event in events)

    def state() -> dict[str, Any]:
        return status(note.control_url)

    (trainer,) = named(beside.look(), "TrainerActor")
    with Traffic(note.service_url, PROMPTS) as traffic:
        wait_until(lambda: told("rests"), 240, "training rests")
        wait_until(lambda: state()["phase"] == "waiting", 30, "the last round is over")
        before, cpu, clock = state(), cpu_seconds(trainer), time.monotonic()
        num_answers = len(traffic.answers)
        time.sleep(6)
        share = (cpu_seconds(trainer) - cpu) / (time.monotonic() - clock)
        after = state()
        print(f"at rest the trainer uses {100 * share:.1f} % of a core", end="; ")
        print(f"{len(traffic.answers) - num_answers} answers; {after['phase_detail']}")
    assert traffic.failed() == [] and len(traffic.answers) > num_answers + 24
    assert "at rest: " in after["phase_detail"]
    assert (after["version"], after["num_rounds"]) == (before["version"], before["num_rounds"])
    assert share <= 0.05
    with Traffic(note.service_url, prompt_texts(40, seed=99), temperature=2.0) as traffic:
        clock = time.monotonic()
        wait_until(lambda: told("learns"), 120, "other traffic ends the rest")
        print(f"learns again after {time.monotonic() - clock:.1f} s")
    assert traffic.failed() == []
    osd("pause", "--deployment", "test-beside")
