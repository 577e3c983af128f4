"""A service whose parts all live while something under them breaks.

That is a file, the disk, the memory of the engine, or the target. One service runs, as a user
starts it: its second draft is fair and measured, its first knows nothing.
"""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from osd.client.load import Answer
from osd.models.resolve import fingerprint
from osd.releases.files import WEIGHTS
from osd.releases.store import ReleaseStore
from osd.service.note import find_all
from tests.support import services
from tests.support.pairs import Pair
from tests.support.processes import descendants, named
from tests.support.services import (
    Served,
    osd,
    outcome_of,
    replica_version,
    status,
    wait_for_version,
    wait_until,
)
from tests.support.traffic import PROMPTS, Traffic, ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MEASURED = 0.6
"""About what the fair draft reaches on these prompts."""


class Damaged:
    """The service, and what it answered while nothing was broken."""

    def __init__(self, directory: Path, pair: Pair) -> None:
        self.data, self.pair = directory / "data", pair
        self.releases = ReleaseStore(self.data / "releases")
        target_id = fingerprint(pair.target)
        self.releases.publish(pair.stranger, parent=0, target_id=target_id)
        self.releases.publish(
            pair.draft, parent=1, target_id=target_id, outcome=outcome_of(MEASURED, base=1)
        )
        self.releases.set_paused(True)
        self.served = self.start(pair.target)

    def wait(self) -> None:
        self.note = self.served.wait_ready()
        wait_for_version(self.note.control_url, 2)
        self.answers = self.ask()

    def start(self, target: Path) -> Served:
        arguments = services.settings("test-damage", self.data, target, self.pair.draft)
        arguments += ["gate.rollback_min_tested=24", "trainer.min_new_traces=8"]
        return Served(arguments, self.data.parent / f"serve-{target.name}.log")

    def ask(self) -> dict[int, str]:
        """Place -> text of the answers to the prompts, none of which may fail."""
        return texts(ask(self.note.service_url, PROMPTS))

    def status(self) -> dict[str, Any]:
        return status(self.note.control_url)

    def events(self, kind: str) -> list[str]:
        found = httpx.get(f"{self.note.control_url}/osd/events", timeout=10).json()
        return [event["text"] for event in found if event["kind"] == kind]

    def trouble(self) -> list[str]:
        """What the control port says of a trainer or a store that cannot write."""
        return [text for kind in ("trainer_failed", "publish_failed") for text in self.events(kind)]

    def process(self, name: str) -> int:
        (pid,) = named(descendants(self.served.process.pid), name)
        return pid


def texts(answers: list[Answer]) -> dict[int, str]:
    assert [answer.error for answer in answers if not answer.ok] == []
    return {answer.index: answer.text for answer in answers}


@pytest.fixture(scope="module")
def damaged(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Damaged]:
    with services.runtime_directory(tmp_path_factory.mktemp("run")):
        damaged = Damaged(tmp_path_factory.mktemp("damage"), pair)
        try:
            damaged.wait()
            yield damaged
        finally:
            damaged.served.end()


def test_a_release_tampered_with_never_serves(damaged: Damaged) -> None:
    """One bit of one weight, after it was published: every number in it is still finite."""
    url, releases = damaged.note.control_url, damaged.releases
    target_id = fingerprint(damaged.pair.target)
    tampered = releases.publish(damaged.pair.draft, parent=2, target_id=target_id)
    file = Path(tampered.path) / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(content)
    with Traffic(damaged.note.service_url, PROMPTS) as traffic:
        wait_until(lambda: status(url)["version"] == tampered.version, 30, "it is wanted")
        wait_until(lambda: damaged.events("lagging"), 60, "the replica is shown as lagging")
        assert replica_version(url) == 2
    assert texts(traffic.answers) == damaged.answers
    failed = damaged.events("swap_failed")
    print(failed)
    assert failed and all(f"v{tampered.version}" in text and "sha256" in text for text in failed)
    osd("drafts", "promote", 2)
    wait_until(lambda: not status(url)["replicas"][0]["lagging"], 30, "nothing lags")
    releases.mark_bad(tampered.version, "tampered with by the test")


def test_a_full_disk_stops_learning_and_nothing_else(damaged: Damaged) -> None:
    """No file of the trainer and of the control plane grows beyond a few bytes: what a full disk
    does to both."""
    pids = [damaged.process("TrainerActor"), damaged.process("ControlActor")]
    versions = [release.version for release in damaged.releases.list()]
    try:
        with full_disk(pids):
            osd("resume")
            with Traffic(damaged.note.service_url, PROMPTS) as traffic:
                (told, *_) = wait_until(damaged.trouble, 120, "the trouble is told")
                print(told)
                time.sleep(3)
            assert texts(traffic.answers) == damaged.answers
            assert "too large" in told
            assert "\x1b" not in told and "Traceback" not in told, "a reason, no more"
            assert damaged.status()["version"] == 2
            assert [release.version for release in damaged.releases.list()] == versions
        rounds = damaged.status()["num_rounds"]
        with Traffic(damaged.note.service_url, PROMPTS) as traffic:
            what = "a round once there is room again"
            wait_until(lambda: damaged.status()["num_rounds"] > rounds, 120, what)
        assert texts(traffic.answers) == damaged.answers
    finally:
        osd("pause")
    now = [damaged.process("TrainerActor"), damaged.process("ControlActor")]
    assert now == pids, "neither had to be started again"
    assert list(damaged.data.rglob(".tmp-*")) == []


@contextmanager
def full_disk(pids: list[int], num_bytes: int = 4096) -> Iterator[None]:
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def test_an_engine_that_runs_something_else_raises_the_alarm(damaged: Damaged) -> None:
    """The live draft's embedding is overwritten in the memory of the engine, behind everybody's
    back. The file is as good as before, so nothing is rolled back: the next swap mends it."""
    url = damaged.note.control_url
    settle(damaged)
    assert damaged.status()["alarm"] == ""
    weights = load_file(Path(damaged.releases.get(2).path) / WEIGHTS)
    embedding = weights["model.embed_tokens.weight"].numpy()
    rolled_back = damaged.status()["num_rollbacks"]
    engine = damaged.process("VLLM::EngineCore")
    num = overwrite(engine, embedding.tobytes(), embedding[::-1].tobytes())
    assert num >= 1, "the draft was not found"
    clock = time.monotonic()
    with Traffic(damaged.note.service_url, PROMPTS) as traffic:
        alarm = wait_until(lambda: damaged.status()["alarm"], 120, "the alarm")
        print(f"after {len(traffic.answers)} requests, {time.monotonic() - clock:.1f} s: {alarm}")
    assert "the engine is not running what we think" in alarm
    wait_until(lambda: "\nosd_alarm 1.0" in httpx.get(f"{url}/metrics").text, 5, "the gauge")
    assert texts(traffic.answers) == damaged.answers, "a draft of garbage changes no answer"
    assert (damaged.status()["version"], damaged.status()["num_rollbacks"]) == (2, rolled_back)
    settle(damaged)
    with Traffic(damaged.note.service_url, PROMPTS) as traffic:
        wait_until(lambda: damaged.status()["alarm"] == "", 60, "the alarm is over")
    assert texts(traffic.answers) == damaged.answers
    log = (damaged.data / "logs" / "replica-0.log").read_text()
    assert "Traceback" not in log


def settle(damaged: Damaged) -> None:
    """Swap to another draft and back."""
    for version in (1, 2):
        osd("drafts", "promote", version)
        wait_for_version(damaged.note.control_url, version)


def overwrite(pid: int, old: bytes, new: bytes) -> int:
    """Replace every copy of `old` in the memory of a process; how many there were."""
    assert len(old) == len(new)
    num = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            region, permissions, *_ = line.split()
            start, end = (int(bound, 16) for bound in region.split("-"))
            if not permissions.startswith("rw"):
                continue
            try:
                memory.seek(start)
                content = memory.read(end - start)
            except (OSError, OverflowError):
                continue
            at = content.find(old)
            while at >= 0:
                memory.seek(start + at)
                memory.write(new)
                num, at = num + 1, content.find(old, at + 1)
    return num


def test_another_target_starts_its_own_line_and_finds_no_traces_of_the_first(
    damaged: Damaged, tmp_path: Path
) -> None:
    """The same data directory, the target exchanged in between."""
    first_id = fingerprint(damaged.pair.target)
    assert damaged.status()["buffer"]["num_traces"] > 0
    other = tmp_path / "other-target"
    shutil.copytree(damaged.pair.target, other)
    weights = load_file(other / WEIGHTS)
    weights["lm_head.weight"] = weights["lm_head.weight"] * 1.01
    save_file(weights, other / WEIGHTS, {"format": "pt"})
    damaged.served.end()
    versions = [release.version for release in damaged.releases.list()]
    damaged.served = damaged.start(other)
    damaged.note = damaged.served.wait_ready()
    wait_for_version(damaged.note.control_url, versions[-1] + 1)
    assert damaged.status()["buffer"]["num_traces"] == 0
    assert ask(damaged.note.service_url, PROMPTS)[0].ok
    newest = damaged.releases.list()[-1]
    assert (newest.parent, newest.target_id) == (0, fingerprint(other))
    assert newest.target_id != first_id
    kept = damaged.releases.current(first_id)
    assert kept is not None and kept.version == 2, "the first target's line is as it was"
    assert [r.deployment for r in find_all()] == ["test-damage"]
