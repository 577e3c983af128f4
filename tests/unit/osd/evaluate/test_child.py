"""What an engine's process refuses to measure."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from osd.errors import OSDError
from osd.evaluate import child
from osd.evaluate.child import Measured


@pytest.mark.parametrize("mode", [SimpleNamespace(name="FULL_AND_PIECEWISE"), "FULL"])
def test_an_engine_in_which_none_would_look_slow_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    class Engine:
        """One that serves nothing: whoever asks it for more than its configuration fails."""

        def __init__(self, target: str, options: dict[str, Any]) -> None:
            config = SimpleNamespace(
                compilation_config=SimpleNamespace(cudagraph_mode=mode),
                speculative_config=SimpleNamespace(),
            )
            self.scheduler = SimpleNamespace(vllm_config=config)

    monkeypatch.setattr(child, "EngineInProcess", Engine)
    with pytest.raises(OSDError, match="would look too slow; give .*cudagraph_mode=PIECEWISE"):
        Measured("target", {})


@pytest.mark.parametrize("problem", ["", "KeyError: 'a'"])
def test_runs_in_which_the_control_has_ended_are_refused(
    monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    """Its error costs no request, but from then on every arm has the largest k."""

    class Engine:
        """One whose control has this problem."""

        def __init__(self, target: str, options: dict[str, Any]) -> None:
            config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode="NONE"))
            self.scheduler = SimpleNamespace(vllm_config=config, osd_command=self.osd_command)
            self.add = self.step = self.rpc = lambda *given: None

        def osd_command(self, name: str, argument: str) -> str:
            return json.dumps({"report": {"problem": problem}}[name])

    monkeypatch.setattr(child, "EngineInProcess", Engine)
    engine = Measured("target", {})
    if not problem:
        engine.check()
        return
    with pytest.raises(OSDError, match="control of speculation has ended, .*: KeyError: 'a'"):
        engine.check()
