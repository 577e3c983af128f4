"""Two deployments of one user share nothing."""

from __future__ import annotations

import os

import pytest

from osd.client.load import Answer
from osd.service.launch import Service
from tests.support.beside import Beside
from tests.support.processes import descendants, named, ray_directories
from tests.support.services import (
    current,
    num_stored,
    osd,
    pause_training,
    replica_version,
    status,
    wait_for_version,
)
from tests.support.traffic import PROMPTS, ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_two_deployments_side_by_side(
    service: Service, beside: Beside, learnt: list[Answer]
) -> None:
    served = beside.start()
    beside.note = note = served.wait_ready()
    assert len({service.url, service.control_url, note.service_url, note.control_url}) == 4
    theirs, ours = beside.look(), descendants(os.getpid()) - beside.processes
    for name in ("valkey-server", "raylet", "VLLM::EngineCore"):
        assert len(named(theirs, name)) >= 1, name
    assert ray_directories(theirs).isdisjoint(ray_directories(ours))
    wait_for_version(note.control_url, 2)

    pause_training(service)
    pause_training(note)  # with traffic, its better first draft would serve again
    ours_before, theirs_before = num_stored(service.control_url), num_stored(note.control_url)
    rows_before = status(service.control_url)["replicas"][0]["capture_rows"]
    ask(note.service_url, PROMPTS * 2)
    theirs_after = num_stored(note.control_url)
    assert theirs_after > theirs_before
    assert num_stored(service.control_url) == ours_before
    assert status(service.control_url)["replicas"][0]["capture_rows"] == rows_before
    ask(service.url, PROMPTS * 2)
    assert num_stored(service.control_url) > ours_before
    assert num_stored(note.control_url) == theirs_after

    mine = current(service).version
    assert "several services are running" in osd("status", ok=False)
    beside.promote_by_hand()
    assert replica_version(service.control_url) == mine
