"""A trainer, control plane or engine killed with SIGKILL comes back and goes on."""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress

import httpx
import pytest

from osd.client.load import Answer
from osd.service.launch import Service
from tests.support import acceptance
from tests.support.processes import alive, descendants, kill, named, pid_of
from tests.support.services import (
    admin,
    current,
    osd,
    pause_training,
    status,
    store,
    wait_for_version,
    wait_until,
)
from tests.support.traffic import MODEL, PROMPTS, Traffic, ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_killed_trainer_goes_on_from_its_checkpoint(
    service: Service, learnt: list[Answer]
) -> None:
    latest = service.config.checkpoint_path / service.plan.target_id / "checkpoints" / "latest"
    rounds = int(latest.read_text())
    assert rounds >= 1
    trainer = pid_of(service.trainer)
    kill(trainer)
    clock = time.monotonic()
    admin(service).admin("resume")
    with Traffic(service.url, PROMPTS) as traffic:
        wait_until(lambda: pid_of(service.trainer) not in (0, trainer), 120, "the trainer is back")
        print(f"trainer killed and back after {time.monotonic() - clock:.1f} s")
        wait_until(lambda: int(latest.read_text()) > rounds, 180, "a round after the checkpoint's")
    assert traffic.failed() == []
    log = (service.log_dir / "trainer.log").read_text()
    assert f"trainer resumes after round {rounds}" in log
    pause_training(service)


def test_a_killed_control_plane_finds_history_and_version_again(
    service: Service, learnt: list[Answer]
) -> None:
    def events() -> set[tuple[float, str]]:
        found = httpx.get(f"{service.control_url}/osd/events").json()
        return {(event["at"], event["text"]) for event in found}

    version = pause_training(service)
    before = events()
    control = pid_of(service.control)
    with Traffic(service.url, PROMPTS) as traffic:
        kill(control)
        clock = time.monotonic()
        what = "the control actor is back"
        wait_until(lambda: pid_of(service.control) not in (0, control), 120, what)
        state = wait_until(lambda: status(service.control_url), 60, "the control port answers")
        print(f"control plane killed and back after {time.monotonic() - clock:.1f} s")
    assert traffic.failed() == []
    assert state["version"] == version and state["paused"] is True

    wait_until(lambda: before <= events(), 30, "every event from before is there")
    assert httpx.get(f"{service.control_url}/osd/history").json()["series"]["at"]
    newest = max(release.version for release in store(service).list())
    assert osd("drafts", "list", "--json")[-1]["version"] == newest
    osd("drafts", "promote", version)  # the token is still the same


def test_a_killed_engine_comes_back_with_the_newest_draft(
    service: Service, learnt: list[Answer]
) -> None:
    version = pause_training(service)
    assert version > 1
    replica = pid_of(service.replicas["replica-0"])
    process = named(descendants(replica), "VLLM::EngineCore")
    assert len(process) == 1
    endings: list[str] = []

    def stream(seed: int) -> None:
        endings.append(long_stream(service.url, seed))

    def num_running() -> int:
        return int(status(service.control_url)["replicas"][0]["num_running"])

    streams = [threading.Thread(target=stream, args=(seed,)) for seed in range(4)]
    for thread in streams:
        thread.start()
    wait_until(lambda: num_running() >= 4, 30, "all four are running")
    old = descendants(replica)
    kill(process[0])
    clock = time.monotonic()
    for thread in streams:
        thread.join(60)
    print(f"streams ended {time.monotonic() - clock:.1f} s after the kill: {sorted(set(endings))}")
    assert len(endings) == 4 and all("error" in ending for ending in endings)
    before_s = time.monotonic() - clock
    wait_until(lambda: not status(service.control_url)["replicas"], 15, "it is not shown any more")
    state = status(service.control_url)
    assert state["problems"][0].startswith("no engine answers, replica-0 starting")
    wait_until(lambda: "replica_lost" in kinds_of_events(service), 8, "its loss is told")
    print(f"its loss was told {time.monotonic() - clock:.1f} s after the kill ({before_s:.1f})")

    def is_back() -> bool:
        return is_healthy(service.url) and pid_of(service.replicas["replica-0"]) not in (0, replica)

    wait_until(is_back, 600, "it is back")
    print(f"engine killed, serving again after {time.monotonic() - clock:.1f} s")
    wait_for_version(service.control_url, version)
    cold, warm = begun_with(service)
    print(f"its memory began with {warm} tokens of earlier answers")
    assert cold == 0 and warm > 1000
    wait_until(lambda: "replica_back" in kinds_of_events(service), 10, "its return is told")
    assert kinds_of_events(service).count("replica_lost") == 1
    wait_until(lambda: not alive(old), 30, "nothing of the old engine is left")
    before = acceptance.served_counts(service, version)
    answers = ask(service.url, PROMPTS * 2)
    assert all(answer.ok for answer in answers)
    served = acceptance.alpha((acceptance.served_counts(service, version) - before)[None])
    replayed = acceptance.replayed_counts(current(service), PROMPTS * 2, answers)
    assert served == pytest.approx(acceptance.alpha(replayed), abs=0.003)


def begun_with(service: Service) -> list[int]:
    """Tokens that the memory of the replica began with, at each of its starts."""
    log = (service.log_dir / "replica-0.log").read_text()
    return [int(num) for num in re.findall(r"the memory begins with (\d+) tokens of", log)]


def kinds_of_events(service: Service) -> list[str]:
    """Newest first."""
    return [event["kind"] for event in httpx.get(f"{service.control_url}/osd/events").json()]


def long_stream(service_url: str, seed: int) -> str:
    """Reads a stream to its end and says how it ended."""
    body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 240, "ignore_eos": True}
    body |= {"stream": True, "temperature": 1.0, "seed": seed, "n": 4}
    url = f"{service_url}/v1/completions"
    lines = ["none"]
    try:
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines += [line for line in response.iter_lines() if line]
    except httpx.HTTPError as error:
        return f"connection error: {type(error).__name__}"
    return "error event" if any('"error"' in line for line in lines[-2:]) else lines[-1]


def is_healthy(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False
