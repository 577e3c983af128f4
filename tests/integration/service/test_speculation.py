"""A served engine controls its speculation and measures what it gains."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from osd.service.note import Running
from tests.support.beside import Beside
from tests.support.services import status, wait_until
from tests.support.traffic import MODEL, PROMPTS, Traffic, ask

pytestmark = pytest.mark.timeout(1200)


def test_a_served_engine_controls_its_speculation(beside: Beside) -> None:
    _, note = beside.running()
    ask(note.service_url, PROMPTS * 2)
    wait_until(lambda: num_steps(note) > 20, 10, "the control is reported, with all its steps")
    found = speculation(note)
    print(f"plan {found['plan']}, {found['num_cells']} shapes known", end=", ")
    print(f"a decision takes {found['decision_us']:.0f} us")
    assert (found["mode"], found["problem"], found["is_async"]) == ("auto", "", False)
    assert found["num_cells"] > 8, "the engine was measured before it served"
    log = (beside.directory / "data" / "logs" / "replica-0.log").read_text()
    assert "step times measured in" in log or "step times from" in log
    assert "Traceback" not in log
    text = httpx.get(f"{note.control_url}/metrics").text
    counted = r'^osd_speculation_steps_total\{plan="[^"]+",replica="replica-0"\} \d'
    assert re.search(counted, text, re.M), text
    capped = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0}
    for cap in (0, 1):
        body = {**capped, "vllm_xargs": {"osd_spec_k": cap}}
        answer = httpx.post(f"{note.service_url}/v1/completions", json=body)
        assert answer.status_code == 200
        drafted = (answer.json().get("metrics") or {}).get("speculative_decoding") or {}
        assert drafted.get("num_draft_tokens", 0) <= cap * 40


def num_steps(note: Running) -> int:
    """So far; a heartbeat may be of the middle of the requests."""
    return sum(int(plan["steps"]) for plan in speculation(note)["plans"].values())


def test_what_speculation_gains_is_measured_while_it_serves(beside: Beside) -> None:
    _, note = beside.running()
    reasons: set[str] = set()

    def is_measured() -> bool:
        found = speculation(note)
        # Only the newest changes are reported.
        reasons.update(change["reason"] for change in found.get("changes", []))
        return bool(found["net"]["windows"]) and "net window" in reasons

    with Traffic(note.service_url, PROMPTS, max_tokens=80):
        wait_until(is_measured, 240, "a window without speculation")
        found = speculation(note)
        assert found["plans"]["off"]["steps"] >= 10
        text = httpx.get(f"{note.control_url}/metrics").text
    print(f"net: {found['net']}")
    # Of one window or two, beside other load: the right order of magnitude.
    assert 0.1 < found["net"]["ratio"] < 10
    mean = r'^osd_speculation_net_ratio\{bound="mean",replica="replica-0"\} \d'
    assert re.search(mean, text, re.M), text


def speculation(note: Running) -> dict[str, Any]:
    """The newest report of the speculation control."""
    found: dict[str, Any] = status(note.control_url)["replicas"][0]["speculation"]
    return found or {"plans": {}, "net": {"windows": 0}}
