"""A draft that serves worse than was measured is rolled back; one that is worse than an earlier one
is left for that."""

from __future__ import annotations

import time

import httpx
import pytest

from osd.client.load import Answer
from osd.models.resolve import fingerprint
from osd.releases.store import ReleaseStore
from tests.support.beside import Beside
from tests.support.pairs import Pair
from tests.support.services import osd, outcome_of, replica_version, wait_for_version, wait_until
from tests.support.traffic import PROMPTS, Traffic, ask

pytestmark = pytest.mark.timeout(1200)


def test_a_harmful_draft_forced_past_the_gate_is_rolled_back(beside: Beside, pair: Pair) -> None:
    """A draft that knows nothing is released as if the gate had measured α = 0.95, and promoted by
    hand.

    Speculation is controlled, so the draft is soon hardly used: the few tokens that are tested must
    be enough. Twenty requests a second are sent, as it also takes seconds to look, replay and swap.
    """
    _, note = beside.running()
    osd("pause", "--deployment", "test-beside")
    osd("drafts", "promote", 1, "--deployment", "test-beside")
    wait_for_version(note.control_url, 1)
    before = {answer.index: answer.text for answer in ask(note.service_url, PROMPTS)}
    releases = ReleaseStore(beside.directory / "data" / "releases")
    forged = releases.publish(
        pair.stranger,
        parent=1,
        target_id=fingerprint(pair.target),
        outcome=outcome_of(0.95, base=1),
    )
    osd("drafts", "promote", forged.version, "--deployment", "test-beside")
    wait_for_version(note.control_url, forged.version)
    answers: list[Answer] = []
    clock = time.monotonic()
    while replica_version(note.control_url) == forged.version and len(answers) < 400:
        answers += ask(note.service_url, PROMPTS)
        time.sleep(max(0.0, clock + len(answers) / 20 - time.monotonic()))
    print(f"rolled back after {len(answers)} requests, {time.monotonic() - clock:.1f} s")
    assert len(answers) <= 200
    wait_for_version(note.control_url, 1)
    assert all(answer.ok for answer in answers)
    assert all(answer.text == before[answer.index] for answer in answers)
    drafts = osd("drafts", "list", "--json", "--deployment", "test-beside")
    (listed,) = (draft for draft in drafts if draft["version"] == forged.version)
    assert listed["bad"] and "0.95 was measured" in listed["bad_reason"]
    refused = osd("drafts", "promote", forged.version, "--deployment", "test-beside", ok=False)
    assert "not offered again" in refused


def test_an_earlier_draft_serves_again_where_it_is_better_on_the_newest_requests(
    beside: Beside, pair: Pair
) -> None:
    """A draft that knows nothing of this traffic serves. No α was measured of it, so that it cannot
    disappoint: it is no rollback."""
    _, note = beside.running()
    osd("drafts", "promote", 1, "--deployment", "test-beside")
    wait_for_version(note.control_url, 1)
    releases = ReleaseStore(beside.directory / "data" / "releases")
    other = releases.publish(pair.stranger, parent=1, target_id=fingerprint(pair.target))
    wait_for_version(note.control_url, other.version)

    def recalled() -> list[str]:
        events = httpx.get(f"{note.control_url}/osd/events").json()
        return [event["text"] for event in events if event["kind"] == "recalled"]

    num_before = len(recalled())
    with Traffic(note.service_url, PROMPTS) as traffic:
        osd("resume", "--deployment", "test-beside")
        wait_until(lambda: len(recalled()) > num_before, 120, "v1 serves again")
        osd("pause", "--deployment", "test-beside")
        wait_for_version(note.control_url, 1)
    assert traffic.failed() == []
    print(recalled()[0])
    assert any(text.startswith("v1 serves again") for text in recalled())
    drafts = osd("drafts", "list", "--json", "--deployment", "test-beside")
    assert not next(d["bad"] for d in drafts if d["version"] == other.version), "it may come back"
