"""The plugin in vLLM's API process: whatever fails, and however long it takes, vLLM starts."""

from __future__ import annotations

import asyncio
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from osd.attach import endpoint as of_endpoint
from osd.attach import plugin
from osd.attach.arguments import ATTACHED_KEY
from osd.attach.endpoint import AttachedEndpoint, attached_loop
from serving.activity import Activity
from serving.vllm import parts

URL = "redis://127.0.0.1:1/0"


class App:
    def __init__(self) -> None:
        self.middleware: list[str] = []

    def add_middleware(self, cls: type, **_: Any) -> None:
        self.middleware.append(cls.__name__)


class Loop:
    """Begins after so many seconds; looks without end."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.error, self.num_looks = seconds, error, 0
        self.is_serving = False
        self._begun = asyncio.Event()
        self.seconds_between_looks = 0.01

    def begun_task(self) -> Any:
        return asyncio.create_task(self._begun.wait())

    async def look(self) -> None:
        self.num_looks += 1
        await asyncio.sleep(self.seconds)
        self._begun.set()
        if self.error is not None:
            raise self.error


def engine(rank: int = 0, num_processes: int = 1, **additional: Any) -> Any:
    """A client of an engine, as vLLM hands it over."""
    parallel = SimpleNamespace(_api_process_rank=rank, _api_process_count=num_processes)
    model = SimpleNamespace(model="/target", revision=None)
    return SimpleNamespace(
        errored=False,
        vllm_config=SimpleNamespace(
            additional_config=additional,
            parallel_config=parallel,
            model_config=model,
            load_config=SimpleNamespace(download_dir=None),
            speculative_config=SimpleNamespace(draft_model_config=model),
        ),
    )


ARGS = SimpleNamespace(host="0.0.0.0", port=8000, ssl_certfile=None)


@pytest.fixture
def attachable(monkeypatch: pytest.MonkeyPatch) -> AttachedEndpoint:
    monkeypatch.setenv(plugin.VARIABLE, URL)
    endpoint = AttachedEndpoint()
    endpoint.attach_router(app := App())
    assert app.middleware == ["HeadersToXargs", "Watched"]
    return endpoint


async def begin(
    endpoint: AttachedEndpoint, monkeypatch: pytest.MonkeyPatch, loop: Any
) -> SimpleNamespace:
    state = SimpleNamespace(osd_task=None)
    monkeypatch.setattr(of_endpoint, "attached_loop", lambda *_: loop)
    await endpoint.init_state(engine(), state, ARGS)
    return state


async def end(state: SimpleNamespace) -> None:
    state.osd_task.cancel()
    await asyncio.gather(state.osd_task, return_exceptions=True)


async def test_vllm_waits_until_what_is_wanted_is_installed(
    attachable: AttachedEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = await begin(attachable, monkeypatch, loop := Loop(seconds=0.1))
    assert loop.num_looks >= 1 and loop.is_serving and not state.osd_task.done()
    await end(state)


async def test_but_not_for_long(
    attachable: AttachedEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_endpoint, "SECONDS_TO_BEGIN", 0.1)
    state = await asyncio.wait_for(begin(attachable, monkeypatch, loop := Loop(seconds=1000)), 5)
    assert loop.is_serving and not state.osd_task.done(), "it goes on beside the server"
    await end(state)


async def test_a_look_that_fails_is_followed_by_others(
    attachable: AttachedEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(error=OSError("no room"))
    state = await begin(attachable, monkeypatch, loop)
    async with asyncio.timeout(5):
        while loop.num_looks < 3:
            await asyncio.sleep(0.01)
    await end(state)


async def test_an_engine_that_cannot_be_looked_at_serves(
    attachable: AttachedEndpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(of_endpoint, "attached_loop", lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR):
        await attachable.init_state(engine(), SimpleNamespace(), ARGS)
    assert "this engine is not attached; it serves as without" in caplog.text


def test_libraries_that_are_missing_keep_vllm_from_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(plugin.VARIABLE, URL)
    for name in ("serving.pull", "osd.attach.arguments"):
        monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level(logging.ERROR):
        plugin.register()
        endpoint = AttachedEndpoint()
        endpoint.attach_router(App())
        asyncio.run(endpoint.init_state(engine(), SimpleNamespace(), ARGS))
    assert caplog.text.count("serves as without") == 2


BUILT = {ATTACHED_KEY: {"k": 4, "off": {}}}


@pytest.fixture
def whole_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "start", lambda *_: None)


@pytest.mark.usefixtures("whole_vllm")
def test_an_engine_that_was_not_built_to_be_attached_has_no_loop() -> None:
    assert attached_loop(engine(), ARGS, URL, Activity()) is None


@pytest.mark.usefixtures("whole_vllm")
async def test_of_several_api_processes_the_first_has_the_loop() -> None:
    """It does not see the requests of the others, so that the engine counts as used; and nothing is
    let pass that the others would refuse."""
    activity = Activity(clock=lambda: 0.0)
    assert attached_loop(engine(1, 2, **BUILT), ARGS, URL, activity) is None
    activity._last_at = -1000.0
    loop = attached_loop(engine(0, 2, **BUILT), ARGS, URL, activity)
    assert activity.is_recent() and loop._permits is False
    activity = Activity(clock=lambda: 0.0)
    activity._last_at = -1000.0
    assert attached_loop(engine(**BUILT), ARGS, URL, activity)._permits is True
    assert not activity.is_recent()


@pytest.mark.usefixtures("whole_vllm")
async def test_its_name_is_its_host_and_port_or_what_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(of_endpoint.socket, "gethostname", lambda: "gpu-2")
    loop = attached_loop(engine(**BUILT), ARGS, URL, Activity())
    assert (loop._name, loop._url) == ("gpu-2-8000", "http://gpu-2:8000")
    monkeypatch.setenv("OSD_REPLICA", "left")
    here = SimpleNamespace(host="10.0.0.7", port=1, ssl_certfile="/cert")
    loop = attached_loop(engine(**BUILT), here, URL, Activity())
    assert (loop._name, loop._url) == ("left", "https://10.0.0.7:1")
    here = SimpleNamespace(host="fd00::7", port=1, ssl_certfile=None)
    assert attached_loop(engine(**BUILT), here, URL, Activity())._url == "http://[fd00::7]:1"
