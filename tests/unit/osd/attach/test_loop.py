"""An attached engine follows the terms of its deployment."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from osd.attach import loop as of_loop
from osd.attach.loop import AttachedLoop, Models
from osd.errors import ReplayBufferError
from osd.models.resolve import fingerprint
from osd.records import STEPS, DraftRelease, EngineTerms
from osd.releases.store import ReleaseStore
from serving.activity import Activity
from tests.unit.osd.releases.test_store import make_model

OBSERVED, CAPTURED, DEAF = (True, False), (True, True), (False, False)


class Engine:
    """Notes what workers and core are asked. `error`: what workers answer instead of obeying."""

    def __init__(self) -> None:
        self.switched: list[tuple[bool, bool]] = []
        self.fractions: list[float] = []
        self.held: list[str] = []
        self.kept: list[str] = []
        """Shares of requests that the memory may keep, as they were told."""
        self.error = ""
        self.engine_core = SimpleNamespace(call_utility_async=self._utility)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[str]:
        assert method == "osd_switch"
        if self.error:
            return [json.dumps({"error": self.error})]
        self.switched.append(args[:2])
        self.fractions.append(args[2])
        return ["{}"]

    async def _utility(self, method: str, name: str, argument: str) -> str:
        assert method == "osd_speculation"
        {"hold": self.held, "keep": self.kept}[name].append(argument)
        return "{}"


class Beside:
    """Stands where the engine's own loop does."""

    made: list[Beside]
    num_failing = 0
    """Of the next starts."""

    def __init__(self, engine: Any, config: Any, **given: Any) -> None:
        self.config, self.given = config, given
        self.steps: tuple[str, ...] = ()
        self.started: dict[str, bool] = {}
        self.num_looks = 0
        self.went_back_to: list[DraftRelease] = []
        self.goes_back = True
        Beside.made.append(self)

    async def start(self, **how: bool) -> None:
        if Beside.num_failing:
            Beside.num_failing -= 1
            raise RuntimeError("the engine is busy")
        self.started = how

    async def look(self) -> None:
        self.num_looks += 1

    def set_steps(self, steps: tuple[str, ...]) -> None:
        self.steps = steps

    async def go_back(self, release: DraftRelease) -> bool:
        self.went_back_to.append(release)
        return self.goes_back


class Attached:
    """A loop, its engine, and the deployment's Redis."""

    def __init__(self, directory: Path, *, name: str = "gpu-2-8000", **built: Any) -> None:
        self.target, self.draft = make_model(directory / "target", b"t"), directory / "draft"
        make_model(self.draft, b"d")
        self.store = ReleaseStore(directory / "releases")
        self.first = self.store.publish(self.draft, parent=0, target_id=fingerprint(self.target))
        self.engine, self.now, self.is_away = Engine(), 100.0, False
        self.told: EngineTerms | None = None
        self.loop = AttachedLoop(
            self.engine,
            self,  # type: ignore[arg-type]
            redis_url="redis://there",
            deployment="here",
            name=name,
            url="http://gpu-2:8000",
            models=Models(str(self.target), str(self.draft)),
            built={"k": 4, "off": {}, **built},
            activity=Activity(),
            clock=lambda: self.now,
        )

    def terms(self) -> EngineTerms | None:
        if self.is_away:
            raise ReplayBufferError("Redis is away")
        return self.told

    async def tell(self, *steps: str, **changes: Any) -> None:
        given: dict[str, Any] = {
            "target_id": fingerprint(self.target),
            "capture": {"top_k": 16},
            "buffer": {"max_traces": 9, "max_domains": 2},
            "first": self.first,
        }
        self.told = EngineTerms(steps=steps, **given | changes)
        await self.look()

    async def look(self) -> None:
        self.now += 1
        await self.loop.look()

    @property
    def beside(self) -> Beside:
        return Beside.made[-1]


@pytest.fixture(autouse=True)
def no_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Beside.made, Beside.num_failing = [], 0
    monkeypatch.setattr(of_loop, "EngineLoop", Beside)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def attached(tmp_path: Path) -> Attached:
    return Attached(tmp_path)


async def test_nothing_is_installed_until_something_is_switched_on(attached: Attached) -> None:
    await attached.look()
    attached.is_away = True
    await attached.look()
    attached.is_away = False
    await attached.tell()
    assert Beside.made == []
    assert attached.engine.switched == [] and attached.engine.held == []


@pytest.mark.parametrize(
    ("steps", "heard", "held"),
    [
        (("observe",), OBSERVED, ["true"]),
        (("capture",), CAPTURED, ["true"]),
        (("swap",), DEAF, ["true"]),
        (("observe", "capture", "swap"), CAPTURED, ["true"]),
        (("control",), OBSERVED, ["false", "false"]),
        (STEPS, CAPTURED, ["false", "false"]),
    ],
)
async def test_what_is_switched_on_is_what_the_engine_does(
    attached: Attached, steps: tuple[str, ...], heard: tuple[bool, bool], held: list[str]
) -> None:
    await attached.tell(*steps)
    assert attached.beside.given["heard"] == heard, "from its first step"
    assert attached.engine.switched == [heard]
    assert attached.engine.held == held
    assert attached.beside.steps == steps
    assert attached.beside.started["may_measure"] is ("control" in steps)
    await attached.look()
    assert attached.beside.num_looks == 2
    assert len(attached.engine.switched) == 1, "the same terms change nothing"


async def test_an_engine_that_serves_is_not_measured(attached: Attached) -> None:
    attached.loop.is_serving = True
    await attached.tell(*STEPS)
    assert attached.beside.started["may_measure"] is False
    assert attached.engine.held == ["false"]


async def test_the_engines_own_loop_knows_what_the_deployment_said(attached: Attached) -> None:
    await attached.tell("capture")
    given, config = attached.beside.given, attached.beside.config
    assert (config.deployment, config.speculation.k_max, config.capture.top_k) == ("here", 4, 16)
    assert given["sink"] == {
        "url": "redis://there",
        "deployment": "here",
        "target_id": fingerprint(attached.target),
        "max_traces": 9,
        "max_domains": 2,
    }
    own = given["release"]
    assert (own.version, own.sha256) == (1, attached.first.sha256), "it is the first release"
    assert (given["name"], given["url"]) == ("gpu-2-8000", "http://gpu-2:8000")


@pytest.mark.parametrize("name", ["/etc/left", "../../left", "rack/left", "..", "left"])
async def test_whatever_an_engine_is_called_its_note_lies_in_its_directory(
    tmp_path: Path, name: str
) -> None:
    attached = Attached(tmp_path, name=name)
    await attached.tell("swap")
    note = Path(attached.beside.given["awake_note"])
    assert note.resolve().parent == tmp_path / "data" / "osd" / "here"
    assert name != "left" or note.name == "left.awake"


async def test_a_draft_that_is_no_release_has_no_version(attached: Attached) -> None:
    make_model(attached.draft, b"another")
    await attached.tell("swap")
    own = attached.beside.given["release"]
    assert own.version == 0
    assert attached.beside.given["here"](own) == own, "it lies where it is"


async def test_everything_can_be_switched_off_again(attached: Attached) -> None:
    await attached.tell(*STEPS)
    await attached.tell()
    assert attached.engine.switched[-1] == DEAF
    assert attached.engine.held[-1] == "true"
    assert attached.beside.went_back_to == [attached.beside.given["release"]]
    assert attached.beside.steps == ()
    await attached.tell("observe")
    assert attached.engine.switched[-1] == OBSERVED
    assert len(attached.beside.went_back_to) == 1


async def test_while_redis_is_away_the_last_terms_hold(attached: Attached) -> None:
    await attached.tell(*STEPS)
    attached.is_away = True
    for _ in range(3):
        await attached.look()
    assert attached.beside.steps == STEPS and len(attached.engine.switched) == 1
    assert attached.beside.num_looks == 4


async def test_an_engine_of_another_target_is_left_alone_and_told_so(
    attached: Attached, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        await attached.tell(*STEPS, target_id="0123")
    assert Beside.made == [] and attached.engine.switched == []
    assert "not attached to here: its target is 0123, and this engine serves another" in caplog.text


@pytest.mark.parametrize("own", ["greedy", "probabilistic"])
async def test_an_engine_whose_drafts_the_gate_would_judge_wrongly_is_left_alone_and_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own: str
) -> None:
    attached = Attached(tmp_path, draft_sample_method=own)
    other = {"greedy": "probabilistic", "probabilistic": "greedy"}[own]
    with caplog.at_level(logging.ERROR):
        await attached.tell(*STEPS, draft_sample_method=other)
    assert Beside.made == [] and attached.engine.switched == []
    assert (
        f"not attached to here: its gate judges drafts by draft_sample_method={other}, and this "
        f"engine has {own}; start it with the one, or the deployment with the other "
        "(speculation.draft_sample_method)"
    ) in caplog.text
    await attached.tell(*STEPS, draft_sample_method=own)
    assert attached.beside.steps == STEPS


async def test_a_deployment_that_goes_over_to_another_target_lets_its_engines_go(
    attached: Attached,
) -> None:
    await attached.tell(*STEPS)
    await attached.tell(*STEPS, target_id="0123")
    assert attached.engine.switched[-1] == DEAF and attached.beside.steps == ()
    assert len(attached.beside.went_back_to) == 1


async def test_a_control_that_is_off_is_not_asked(tmp_path: Path) -> None:
    attached = Attached(tmp_path, off={"control": "gone"})
    await attached.tell(*STEPS)
    assert attached.engine.held == []
    assert attached.beside.given["is_controlled"] is False


async def test_terms_are_asked_for_once_a_second(attached: Attached) -> None:
    await attached.loop.look()
    attached.told = EngineTerms(target_id=fingerprint(attached.target), steps=())
    attached.now += 0.5
    await attached.loop.look()
    assert attached.loop._terms is None
    attached.now += 0.5
    await attached.loop.look()
    assert attached.loop._terms == attached.told


async def test_how_requests_are_captured_follows_the_terms(attached: Attached) -> None:
    await attached.tell("capture")
    await attached.tell("capture", capture={"request_fraction": 0.5})
    assert attached.engine.fractions == [1.0, 0.5]
    assert attached.engine.kept == ["1.0", "0.5"]
    await attached.tell("capture", capture={"enabled": False})
    assert attached.engine.switched[-1] == DEAF
    assert attached.engine.kept[-1] == "0.0", "what is not captured is not remembered"
    await attached.tell("capture", capture={"enabled": True})
    assert attached.engine.switched[-1] == CAPTURED


async def test_capture_that_is_not_enabled_at_first_may_be_later(attached: Attached) -> None:
    await attached.tell("observe", "capture", capture={"enabled": False})
    assert attached.beside.given["heard"] == OBSERVED
    assert attached.beside.config.capture.enabled, "what is heard decides"
    await attached.tell("observe", "capture")
    assert attached.engine.switched[-1] == CAPTURED


async def test_a_draft_is_fetched_with_the_newest_token(
    attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control port that is started again draws another one."""
    asked: list[tuple[str, str]] = []

    def read(url: str, token: str, version: int, name: str, offset: int, size: int) -> bytes:
        asked.append((url, token))
        return attached.store.read_part(version, name, offset, size)

    monkeypatch.setattr(of_loop, "read_over_http", read)
    here = attached.beside.given["here"] if Beside.made else None
    for number in (1, 2):
        model = make_model(attached.draft.parent / "model", b"%d" % number)
        newer = attached.store.publish(model, parent=1, target_id=fingerprint(attached.target))
        await attached.tell("swap", drafts_url=f"http://{number}", drafts_token=f"t{number}")
        here = attached.beside.given["here"]
        found = here(replace(newer, path="/of/another/machine"))
        assert (Path(found.path) / "model.safetensors").read_bytes() == b"%d" % number
        assert set(asked) == {(f"http://{number}", f"t{number}")}
        asked.clear()
    assert len(Beside.made) == 1


# -- what fails is tried again --------------------------------------------------------------------


async def test_a_start_that_fails_is_tried_again_and_leaves_the_engine_held(
    attached: Attached,
) -> None:
    Beside.num_failing = 1
    with pytest.raises(RuntimeError, match="the engine is busy"):
        await attached.tell(*STEPS)
    assert attached.engine.held == ["false", "true"]
    assert await attached.loop.begun_task(), "the engine's start waits no longer"
    await attached.look()
    assert attached.beside.steps == STEPS and attached.engine.held[-1] == "false"


async def test_an_engine_that_does_not_obey_is_told_again(
    attached: Attached, caplog: pytest.LogCaptureFixture
) -> None:
    await attached.tell(*STEPS)
    attached.engine.error = "KeyError: 3"
    await attached.tell()
    assert "could not be switched: KeyError: 3" in caplog.text
    attached.engine.error = ""
    await attached.look()
    assert attached.engine.switched[-1] == DEAF and attached.beside.steps == ()


@pytest.mark.parametrize("wrong", [{}, {"capture": {"of_a_later_version": 1}}])
async def test_an_engine_that_cannot_follow_goes_on_with_its_heartbeat(
    attached: Attached, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    await attached.tell(*STEPS)
    attached.engine.error = "" if wrong else "KeyError: 3"
    await attached.tell("observe", **wrong)
    for _ in range(99):
        await attached.look()
    assert attached.beside.num_looks == 101 and attached.beside.steps == STEPS
    assert 5 <= caplog.text.count("what here wants could not be followed") <= 9
    attached.engine.error = ""
    await attached.tell("observe")
    for _ in range(30):
        await attached.look()
    assert attached.beside.steps == ("observe",)


async def test_a_draft_that_cannot_be_put_back_is_tried_again(
    attached: Attached, caplog: pytest.LogCaptureFixture
) -> None:
    await attached.tell(*STEPS)
    attached.beside.goes_back = False
    await attached.tell()
    assert "own draft could not be put back" in caplog.text
    attached.beside.goes_back = True
    await attached.look()
    await attached.look()
    assert len(attached.beside.went_back_to) == 2 and attached.beside.steps == ()
