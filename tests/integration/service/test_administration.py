"""Commands choose the draft and hold training; nothing changes without the token."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from osd.client.load import Answer
from osd.service.launch import Service
from tests.support.services import current, osd, status, store, wait_for_version, wait_until
from tests.support.traffic import PROMPTS, Traffic, ask

pytestmark = pytest.mark.timeout(1200)


def test_drafts_are_chosen_by_command(service: Service, learnt: list[Answer]) -> None:
    versions = [release.version for release in store(service).list()]
    newest = max(versions)
    drafts = osd("drafts", "list", "--json")
    assert [draft["version"] for draft in drafts] == versions
    assert [draft["version"] for draft in drafts if draft["serving"]] == [current(service).version]

    osd("drafts", "promote", 1)
    wait_for_version(service.control_url, 1)
    osd("drafts", "pin", newest)
    wait_for_version(service.control_url, newest)
    assert f"draft v{newest} is pinned" in osd("drafts", "promote", 1, ok=False)
    osd("drafts", "unpin")
    parent = store(service).get(newest).parent
    osd("drafts", "rollback")
    wait_for_version(service.control_url, parent)
    osd("drafts", "promote", newest)
    wait_for_version(service.control_url, newest)
    assert "no such release" in osd("drafts", "promote", 999, ok=False)


def test_a_pause_holds_training_until_resumed(service: Service, learnt: list[Answer]) -> None:
    def state() -> dict[str, Any]:
        return status(service.control_url)

    osd("resume")
    assert osd("status", "--json")["paused"] is False
    rounds = state()["num_rounds"]
    with Traffic(service.url, PROMPTS):
        wait_until(lambda: state()["num_rounds"] > rounds, 120, "a round after the resume")
    osd("pause")
    wait_until(lambda: osd("status", "--json")["phase"] == "waiting", 60, "no round is under way")
    rounds = osd("status", "--json")["num_rounds"]
    put = state()["buffer"]["num_put"]
    ask(service.url, PROMPTS * 4)
    wait_until(lambda: state()["buffer"]["num_put"] >= put + 24, 30, "new traces are stored")
    now = osd("status", "--json")
    assert (now["paused"], now["num_rounds"]) == (True, rounds)


def test_nothing_is_changed_without_the_token(service: Service) -> None:
    url = f"{service.control_url}/osd/admin/promote"
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        response = httpx.post(url, json={"version": 1}, headers=headers)
        assert response.status_code == 401
