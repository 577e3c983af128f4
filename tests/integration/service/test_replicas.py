"""Two engines behind one service port: whichever answers, comes, goes, and dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from osd.client.http import Client
from osd.client.load import Answer
from osd.models.resolve import fingerprint
from osd.releases.store import ReleaseStore
from osd.service.note import Running
from osd.service.reaper import running as running_processes
from tests.integration.service.test_killed_parts import long_stream
from tests.support import acceptance, services
from tests.support.greedy import greedy_answers
from tests.support.pairs import Pair
from tests.support.processes import descendants, kill, named
from tests.support.services import Served, admin, pause_training, status, wait_until
from tests.support.traffic import MODEL, PROMPTS, Traffic, ask, ids_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MAX_TOKENS = 40
NAMES = ["replica-0", "replica-1"]
TRIAL_SECONDS = 15
NUM_STREAMS = 8
"""Of four answers each: twice as many as the engines answer at a time, so that they last."""
PADDING = "x" * 40_000
"""Makes a request of a short prompt a long one."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def fleet(pair: Pair, directory: Path) -> Iterator[Running]:
    """Its first draft knows nothing of its target."""
    settings = services.settings("test-fleet", directory / "data", pair.target, pair.stranger)
    settings += ["serving.replicas=2", f"gate.canary_seconds={TRIAL_SECONDS}"]
    with running(settings, directory) as note:
        wait_until(lambda: len(replicas(note)) == 2, 60, "both are known")
        yield note


@contextmanager
def running(settings: list[str], directory: Path) -> Iterator[Running]:
    served = Served(settings, directory / "serve.log")
    try:
        yield served.wait_ready()
    finally:
        served.end()


@pytest.fixture(scope="module")
def wanted(pair: Pair) -> list[list[int]]:
    """The target's own answers, token by token."""
    target = AutoModelForCausalLM.from_pretrained(pair.target).eval()
    answers = greedy_answers(target, [ids_of(prompt) for prompt in PROMPTS])
    return [answer.answer_ids[:MAX_TOKENS] for answer in answers]


def replicas(note: Running) -> dict[str, dict[str, object]]:
    return {r["replica"]: r for r in status(note.control_url)["replicas"]}


def versions_of(note: Running) -> set[object]:
    return {replica["version"] for replica in replicas(note).values()}


def is_on_both(seen: list[tuple[float, set[object]]]) -> bool:
    """Whether one draft after the first served on both."""
    return any(len(versions) == 1 and versions != {1} for _, versions in seen)


def test_both_answer_as_the_target_and_learn(fleet: Running, wanted: list[list[int]]) -> None:
    urls = {name: str(replica["url"]) for name, replica in replicas(fleet).items()}
    assert sorted(urls) == NAMES and len({*urls.values(), fleet.service_url}) == 3
    first = ask(fleet.service_url, PROMPTS, max_tokens=MAX_TOKENS)
    answers, newest = list(first), first
    seen: list[tuple[float, set[object]]] = []
    deadline = time.monotonic() + 180
    while not (acceptance.alpha(acceptance.counts(newest)) > 0.6 and is_on_both(seen)):
        assert time.monotonic() < deadline, "it is not learnt, or not passed on"
        newest = ask(fleet.service_url, PROMPTS * 2, streams=6, max_tokens=MAX_TOKENS)
        answers += newest
        seen.append((time.monotonic(), versions_of(fleet)))
    before, now = (acceptance.alpha(acceptance.counts(some)) for some in (first, newest))
    print(f"live α of two replicas: {before:.3f}, then {now:.3f} after {len(answers)} requests")
    assert now > before + 0.3
    assert_are_the_targets(answers, wanted)
    version = pause_training(fleet)
    on_trial = [at for at, versions in seen if len(versions) > 1]
    print(f"drafts served on one alone for {on_trial[-1] - on_trial[0]:.1f} s in all")
    assert on_trial[-1] - on_trial[0] > TRIAL_SECONDS / 2, "a new draft serves on one first"
    wait_until(lambda: versions_of(fleet) == {version}, 60, "the newest serves on both")
    counted = {name: httpx.get(f"{url}/metrics").text for name, url in urls.items()}
    assert all("vllm:request_success_total" in text for text in counted.values())
    for url in urls.values():
        answers = ask(url, PROMPTS, max_tokens=MAX_TOKENS)
        assert_are_the_targets(answers, wanted)
        assert acceptance.alpha(acceptance.counts(answers)) > 0.5, "each has the new draft"


def test_an_earlier_draft_serves_again_on_both_at_once(
    fleet: Running, directory: Path, pair: Pair, wanted: list[list[int]]
) -> None:
    """A recalled draft has served before: it is not tried on one alone."""
    version = pause_training(fleet)
    releases = ReleaseStore(directory / "data" / "releases")
    other = releases.publish(pair.stranger, parent=version, target_id=fingerprint(pair.target))
    wait_until(lambda: versions_of(fleet) == {other.version}, 60, "a draft that knows nothing")
    with Traffic(fleet.service_url, PROMPTS, streams=4, max_tokens=MAX_TOKENS) as traffic:
        admin(fleet).admin("resume")
        wait_until(lambda: "recalled" in kinds(fleet), 180, "an earlier one is better")
        admin(fleet).admin("pause")
        recalled = next(e["version"] for e in events(fleet) if e["kind"] == "recalled")
        wait_until(lambda: versions_of(fleet) == {recalled}, 30, "it serves on both")
        since = kinds(fleet)[: kinds(fleet).index("recalled")]
        assert "rolled_out" not in since, "as after a trial"
        print(f"v{recalled} served again in place of v{other.version}, learnt until v{version}")
    assert traffic.failed() == [] and 1 < recalled <= version
    assert_are_the_targets(ask(fleet.service_url, PROMPTS, max_tokens=MAX_TOKENS), wanted)


@pytest.mark.parametrize("what", ["the whole replica", "its engine"])
def test_a_replica_killed_under_load_fails_no_request(
    what: str, fleet: Running, wanted: list[list[int]]
) -> None:
    """None of which a word was answered; long ones, too. It comes back with the newest draft."""
    version = pause_training(fleet)
    replica = int(str(replicas(fleet)["replica-0"]["pid"]))
    engine = named(descendants(replica), "VLLM::EngineCore")
    with Traffic(fleet.service_url, PROMPTS, streams=8, max_tokens=MAX_TOKENS) as traffic:
        long_ones: list[httpx.Response] = []
        streams: list[str] = []
        threads = [threading.Thread(target=send_long, args=(fleet, long_ones)) for _ in range(6)]
        threads += [
            threading.Thread(target=stream, args=(fleet, streams, i)) for i in range(NUM_STREAMS)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: num_running(fleet, "replica-0") > 4, 20, "it has work")
        kill(replica if what == "the whole replica" else engine[0])
        clock = time.monotonic()
        for thread in threads:
            thread.join(60)

        def is_back() -> bool:
            started = replicas(fleet).get("replica-0", {}).get("pid")
            return started not in (None, replica) and is_asked(fleet, "replica-0")

        wait_until(is_back, 300, "it is back, and is asked")
        print(f"{what} killed, asked again after {time.monotonic() - clock:.1f} s")
        wait_until(lambda: losses(fleet)[:1] == ["replica_back"], 10, "its return is told")
    assert losses(fleet)[:2] == ["replica_back", "replica_lost"]
    assert [answer for answer in long_ones if answer.status_code != 200] == []
    assert len(long_ones) == 6
    failed = {answer.error for answer in traffic.failed()}
    print(f"streams that were under way ended with {failed}, {sorted(streams)}")
    cut_off = [ending for ending in streams if "error" in ending]
    assert cut_off and streams.count("data: [DONE]") == NUM_STREAMS - len(cut_off), (
        "none looks whole"
    )
    assert all("incomplete chunked read" in e or "EngineCore" in e for e in failed), failed
    for answer in traffic.answers:
        assert not answer.ok or list(answer.token_ids) == wanted[answer.index]
    assert replicas(fleet)["replica-0"]["version"] == version
    assert len(traffic.answers) > 20


def events(fleet: Running) -> list[dict[str, Any]]:
    """The newest first."""
    found: list[dict[str, Any]] = httpx.get(f"{fleet.control_url}/osd/events").json()
    return found


def kinds(fleet: Running) -> list[str]:
    return [event["kind"] for event in events(fleet)]


def losses(fleet: Running) -> list[str]:
    """What was told of replica-0, newest first. The other is never lost."""
    told = [e for e in events(fleet) if e["kind"] in ("replica_lost", "replica_back")]
    assert all(event["text"].startswith("replica-0") for event in told)
    return [event["kind"] for event in told]


def send_long(fleet: Running, answers: list[httpx.Response]) -> None:
    body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 200, "ignore_eos": True}
    body["user"] = PADDING
    answers.append(httpx.post(f"{fleet.service_url}/v1/completions", json=body, timeout=120))


def stream(fleet: Running, endings: list[str], seed: int) -> None:
    endings.append(long_stream(fleet.service_url, seed))


def num_running(fleet: Running, name: str) -> int:
    return int(str(replicas(fleet).get(name, {}).get("num_running", 0)))


def is_asked(fleet: Running, name: str) -> bool:
    return num_running(fleet, name) > 0


def assert_are_the_targets(answers: list[Answer], wanted: list[list[int]]) -> None:
    for i, answer in enumerate(answers):
        assert list(answer.token_ids) == wanted[i % len(PROMPTS)], answer


def test_engines_come_and_go_with_the_load_and_no_request_fails(
    pair: Pair, tmp_path: Path, wanted: list[list[int]]
) -> None:
    """From one to two and back, under load throughout."""
    settings = services.settings("test-scaled", tmp_path / "data", pair.target, pair.draft)
    limits = "min: 1, max: 2, requests_each: 2.5, up_seconds: 2, down_seconds: 6"
    settings += [f"serving.replicas={{{limits}}}", "trainer.enabled=false"]
    with running(settings, tmp_path) as note:
        wait_until(lambda: members(note) == {NAMES[0]: "serving"}, 30, "one serves")
        with Traffic(note.service_url, PROMPTS, streams=2, max_tokens=MAX_TOKENS) as little:
            with Traffic(note.service_url, PROMPTS, streams=6, max_tokens=MAX_TOKENS) as much:
                clock = time.monotonic()
                wait_until(lambda: members(note).get(NAMES[1]), 30, "another is started")
                assert members(note)[NAMES[1]] == "starting"
                wait_until(lambda: is_asked(note, NAMES[1]), 240, "it answers, too")
                print(f"1 -> 2: asked {time.monotonic() - clock:.1f} s after the load came")
                pid = int(str(replicas(note)[NAMES[1]]["pid"]))
                num_before = len(little.answers)
            clock = time.monotonic()
            wait_until(lambda: members(note) == {NAMES[0]: "serving"}, 60, "one is left")
            print(f"2 -> 1: {time.monotonic() - clock:.1f} s after the load went")
            wait_until(lambda: len(little.answers) > num_before + 12, 30, "it goes on")
        wait_until(lambda: list(replicas(note)) == NAMES[:1], 8, "it is not shown any more")
        wait_until(lambda: pid not in running_processes(), 10, "its process has ended")
        assert [*little.failed(), *much.failed()] == []
        for answer in (*little.answers, *much.answers):
            assert list(answer.token_ids) == wanted[answer.index]
        time.sleep(5)
        assert losses(note) == [], "it was not lost"
        told = [e["text"] for e in Client(note.control_url).get("/osd/events")]
        for what in ("is started: ", "is drained: ", "is drained, and ended"):
            assert any(f"{NAMES[1]} {what}" in text for text in told), told


def members(note: Running) -> dict[str, str]:
    """What each replica does, as the service that started it sees it."""
    return {m["replica"]: m["state"] for m in status(note.control_url).get("members", ())}
