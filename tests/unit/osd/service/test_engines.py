"""Replicas as actors, with a Ray that is only said to be there."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from osd.config.schema import Config
from osd.errors import AwayError, OSDError
from osd.records import Place
from osd.service import actors, cluster
from osd.service.fleet import engines, room
from osd.service.fleet.engines import SECONDS_TO_RETURN, RayEngines, Started
from tests.support.clocks import HandClock


class Actor:
    """Answers, in turn, what `answers` says."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.num_asked = 0
        self.wait_ready = SimpleNamespace(remote=self._ask)
        self.wait_ended = SimpleNamespace(remote=self._ask)

    def _ask(self) -> Any:
        self.num_asked += 1
        return self.answers.pop(0) if self.answers else None


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference is what comes of it; None = nothing yet."""
    import ray as real

    def wait(refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        done = [ref for ref in refs if ref is not None]
        return done[:num_returns], done[num_returns:]

    def get(ref: Any) -> Any:
        if isinstance(ref, Exception):
            raise ref
        return ref

    monkeypatch.setattr(real, "wait", wait)
    monkeypatch.setattr(real, "get", get)


class Places:
    def __init__(self) -> None:
        self.known: list[Place] = []
        self.cleared: list[str] = []

    def places(self) -> list[Place]:
        return self.known

    def clear_place(self, part: str) -> None:
        self.cleared.append(part)


@pytest.fixture
def made(tmp_path: Path) -> RayEngines:
    plan: Any = SimpleNamespace(config=Config())
    registry: Any = Places()
    return RayEngines(plan, registry, {"log_dir": str(tmp_path)}, lambda text: None)


def started(*answers: Any) -> Started:
    actor = Actor(*answers)
    return Started("replica-1", actor, actor.wait_ready.remote())


def gone() -> ActorUnavailableError:
    return ActorUnavailableError("the actor is temporarily unavailable", None)


@pytest.mark.usefixtures("ray")
def test_a_start_goes_on_succeeds_or_fails(made: RayEngines) -> None:
    assert made.failure(started(None)) == ""
    assert made.failure(started("http://127.0.0.1:1")) == ""
    reason = made.failure(started(ActorDiedError()))
    assert reason.startswith("replica-1: the process of the engine ended: ")


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("is_there", [True, False])
def test_why_one_failed_on_another_machine_is_read_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """This machine may have a log of the same name, of an earlier service."""
    (tmp_path / "replica-1.log").write_text("RuntimeError: of last week")
    log = tmp_path / "there/replica-1.log"
    log.parent.mkdir()
    log.write_text("RuntimeError: no memory for the cache\n")
    place = Place(part="replica-1", host="b", node="b1", log=str(log))
    plan: Any = SimpleNamespace(config=Config.model_validate({"ray": {"replica_resource": "gpu"}}))
    registry: Any = Places()
    registry.known.append(place)

    def run_on(found: Place, function: Any, *arguments: Any) -> Any:
        assert found == place
        if not is_there:
            raise AwayError("b does not answer")
        return function(*arguments)

    monkeypatch.setattr(cluster, "run_on", run_on)
    made = RayEngines(plan, registry, {"log_dir": str(tmp_path)}, lambda text: None)
    reason = made.failure(started(ActorDiedError()))
    assert ("ended: no memory for the cache; " in reason) is is_there
    assert "last week" not in reason and reason.endswith("`osd logs replica-1` says more")


@pytest.mark.usefixtures("ray")
def test_a_process_that_ray_starts_again_is_waited_for_but_not_for_ever(made: RayEngines) -> None:
    """However often it is asked for: a start takes long on a machine that has much to do."""
    clock = HandClock()
    made._clock = clock.monotonic
    handle = started(*[gone() for _ in range(1000)])
    for _ in range(int(SECONDS_TO_RETURN)):
        assert made.failure(handle) == ""
        clock.move(1)
    assert "temporarily unavailable" in made.failure(handle)
    made.expect(handle)
    assert made.failure(handle) == "", "it has served since"


@pytest.mark.usefixtures("ray")
def test_one_that_answered_and_died_fails_when_it_cannot_start_again(made: RayEngines) -> None:
    handle = started("http://127.0.0.1:1", ActorDiedError())
    assert made.failure(handle) == ""
    made.expect(handle)
    assert made.failure(handle) != ""


@pytest.mark.usefixtures("ray")
def test_the_end_of_a_process_is_seen_once_it_is_watched(made: RayEngines) -> None:
    handle = started("http://127.0.0.1:1", None, gone(), None)
    assert not made.has_ended(handle)
    made.watch(handle)
    assert not made.has_ended(handle), "it goes on"
    made.watch(handle)
    assert made.has_ended(handle)
    made.watch(handle)
    assert not made.has_ended(handle), "it serves again"


@pytest.mark.usefixtures("ray")
def test_a_service_serves_when_the_first_does_or_fails_with_it(made: RayEngines) -> None:
    several = [started(None), started("http://127.0.0.1:7")]
    assert made.wait_for_first(several) == ("replica-1", "http://127.0.0.1:7")
    with pytest.raises(OSDError, match="the process of the engine ended"):
        made.wait_for_first([started(None), started(ActorDiedError())])


@pytest.mark.usefixtures("ray")
def test_what_they_wait_for_is_told_once(made: RayEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(made, "_report", said.append)
    monkeypatch.setattr(made, "why_pending", lambda name: "no machine has 'gpu' left")
    waiting = started(None)
    answers = iter([None, None, None, 0])
    monkeypatch.setattr(cluster, "first_ready", lambda refs, seconds: next(answers))
    monkeypatch.setattr(cluster, "url_of", lambda *_: "http://127.0.0.1:1")
    made.wait_for_first([waiting])
    assert said[:-1] == ["waiting for a machine: no machine has 'gpu' left"]


def test_the_head_of_ray_is_asked_beside_and_not_too_often(
    made: RayEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may never answer."""
    may_answer, asked = threading.Event(), []

    def why(*given: Any) -> str:
        asked.append(given)
        may_answer.wait(20)
        return "no room"

    monkeypatch.setattr(engines.room, "why_pending", why)
    assert [made.why_pending("replica-1") for _ in range(50)] == [""] * 50
    assert len(asked) <= 1
    may_answer.set()
    assert made._asking is not None
    made._asking.join(5)
    assert made.why_pending("replica-1") == "no room"
    assert len(asked) == 1


def test_each_replica_that_waits_is_asked_for(
    made: RayEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the first, which may have a machine, and load for long."""
    found = {"replica-0": "", "replica-1": "no machine has 'gpu' left"}
    monkeypatch.setattr(made, "_place", lambda name: name)
    monkeypatch.setattr(engines.room, "why_pending", lambda place, *_: found[place])
    now = 100.0
    monkeypatch.setattr(made, "_clock", lambda: now)
    for _ in range(2):
        for name in found:
            made.why_pending(name)
            assert made._asking is not None
            made._asking.join(5)
        now += engines.SECONDS_BETWEEN_QUESTIONS
    assert {name: made.why_pending(name) for name in found} == found


def test_an_engine_gets_the_key_of_the_environment_unless_it_has_its_own(
    made: RayEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Config] = []

    def start_actor(cls: type, config: Config, *_: Any, **__: Any) -> Actor:
        begun.append(config)
        return Actor()

    monkeypatch.setattr(cluster, "start_actor", start_actor)
    monkeypatch.setattr(cluster, "node_id", lambda: "a")
    monkeypatch.setenv("VLLM_API_KEY", "outer")
    made._plan.target_dir = Path("/target")
    for env in ({"HF_TOKEN": "t"}, {"VLLM_API_KEY": "own"}):
        made.start_with("replica-0", Config.model_validate({"serving": {"env": env}}), None)
    keys = [config.serving.env for config in begun]
    assert keys == [{"VLLM_API_KEY": "outer", "HF_TOKEN": "t"}, {"VLLM_API_KEY": "own"}]


def test_ray_shows_nothing_secret_of_an_engines_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands in the arguments of a process, and in a log that everybody may read."""
    import ray as real

    seen: dict[str, Any] = {}

    def remote(cls: type) -> Any:
        made = SimpleNamespace(remote=lambda *_, **__: None)
        return SimpleNamespace(options=lambda **options: seen.update(options) or made)

    monkeypatch.setattr(real, "remote", remote)
    monkeypatch.setenv("VLLM_API_KEY", "outer")
    env = {"VLLM_API_KEY": "own", "HF_TOKEN": "t", "OMP_NUM_THREADS": "1"}
    cluster.start_actor(Actor, Config(), {}, num_gpus=0, env=env, resource="gpu")
    assert seen["runtime_env"] == {"env_vars": {"OMP_NUM_THREADS": "1"}}


def test_an_engine_has_what_is_secret_of_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(*_: Any) -> None:
        raise InterruptedError

    monkeypatch.setenv("VLLM_API_KEY", "of another")
    monkeypatch.setattr(actors, "begin_log", stop)
    config = Config.model_validate({"serving": {"env": {"VLLM_API_KEY": "own"}}})
    given = {"name": "a", "target_dir": "/t", "target_id": "t", "draft_release": None, "home": "a"}
    with pytest.raises(InterruptedError):
        actors.ReplicaActor(config, redis_url="redis://127.0.0.1:1", log_dir="/", **given)
    assert os.environ["VLLM_API_KEY"] == "own"


def test_a_private_ray_lets_nobody_else_into_its_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It opens its own directory to everybody."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    given: list[Path] = []
    monkeypatch.setattr(cluster.tempfile, "mkdtemp", lambda prefix: str(private))
    monkeypatch.setattr(cluster, "Reaper", lambda directory: SimpleNamespace(close=lambda: None))
    for name in ("_require_token", "set_ray_defaults"):
        monkeypatch.setattr(cluster, name, lambda: None)

    def begin(options: dict[str, Any]) -> None:
        given.append(Path(options["_temp_dir"]))
        raise OSDError("ray does not start")

    monkeypatch.setattr(cluster, "_init_ray", begin)
    with pytest.raises(OSDError, match="ray does not start"), ExitStack() as stack:
        cluster.start_ray(Config(), stack)
    assert given[0].parent == private, "Ray opens what it is given, and not what is around it"


def test_an_end_is_not_waited_for(made: RayEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def stop(*_: Any) -> None:
        may_end.wait(20)
        ended.set()

    monkeypatch.setattr(cluster, "stop_actors", stop)
    handle = started(None)
    made.actors.append(handle.actor)
    made.end(handle)
    assert not ended.is_set() and made.actors == []
    may_end.set()
    assert ended.wait(5)


GPU_AND_WORD = {"GPU": 1.0, "gpu": 1.0}


@pytest.mark.parametrize(
    ("nodes", "free", "resource", "num_gpus", "says"),
    [
        ({"a": {"CPU": 2.0}}, {}, "gpu", 0, "no machine of the Ray cluster has the resource 'gpu'"),
        ({"a": {"GPU": 1.0}, "b": {"GPU": 1.0}}, {"GPU": 2.0}, "", 2, "no machine of the service"),
        ({"a": {"gpu": 1.0}, "b": {"GPU": 1.0}}, {"GPU": 1.0}, "gpu", 1, "no machine with 'gpu'"),
        (
            {"a": GPU_AND_WORD},
            {"GPU": 1.0},
            "gpu",
            1,
            "no machine has 'gpu' (ray.replica",
        ),
        ({"a": GPU_AND_WORD}, {"gpu": 1.0}, "gpu", 1, "and 0 GPUs are free"),
        ({"a": GPU_AND_WORD}, GPU_AND_WORD, "gpu", 1, ""),
    ],
)
def test_why_a_replica_waits(
    nodes: dict[str, dict[str, float]],
    free: dict[str, float],
    resource: str,
    num_gpus: float,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray as real

    total: dict[str, float] = {}
    for has in nodes.values():
        total |= {name: total.get(name, 0) + num for name, num in has.items()}
    alive = [{"NodeID": n, "Alive": True, "Resources": has} for n, has in nodes.items()]
    monkeypatch.setattr(real, "nodes", lambda: alive)
    monkeypatch.setattr(real, "cluster_resources", lambda: total)
    monkeypatch.setattr(real, "available_resources", lambda: free)
    here = SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setattr(real, "get_runtime_context", lambda: here)
    found = room.why_pending(None, resource, num_gpus)
    assert says in found and bool(found) is bool(says)
    assert room.why_pending(place("a"), resource, num_gpus) == "", "it runs"
    if not says:
        assert room.why_pending(place("z"), resource, num_gpus) == "host-z has left the Ray cluster"


def place(node: str) -> Place:
    return Place(part="replica-1", host=f"host-{node}", node=node, log="/x")


def test_a_ray_without_a_head_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray as real

    def fail() -> None:
        raise RuntimeError

    monkeypatch.setattr(real, "nodes", fail)
    assert room.why_pending(None, "", 0) == "the Ray cluster does not answer (RuntimeError)"
