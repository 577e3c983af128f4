"""The replica's side of the speculation control.

Profiles on disk, the scheduler's settings at the start, and the measurement of an engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from osd.config.schema import Config
from osd.records import DraftRelease, SpeculationReport
from osd.service.profile import table
from serving.pull import HEARTBEAT_TTL
from serving.speculation import client, profile
from serving.speculation.client import (
    SpeculationClient,
    room_for_drafts,
    settings_for,
)
from serving.speculation.control import Settings, settings_of
from serving.speculation.profile import profile_path, read_profile, write_profile
from serving.speculation.step_times import Shape, StepTimes
from serving.vllm import names, server
from tests.unit.osd.control.test_policy import OUTCOME

ROWS = [{"batch": 1, "tokens": 1, "context": 64, "drafted": 0, "seconds": 0.01, "steps": 8}]


def release() -> DraftRelease:
    return DraftRelease(version=1, parent=0, path="/d", sha256="ab", target_id="t", created_at=0.0)


class FakeEngine:
    """An `AsyncLLM` as far as measuring sees it; its control takes a sweep step at every look."""

    def __init__(self, steps_per_look: int = 8) -> None:
        model = SimpleNamespace(max_model_len=256, get_vocab_size=lambda: 512)
        scheduler = SimpleNamespace(max_num_seqs=4)
        self.vllm_config = SimpleNamespace(model_config=model, scheduler_config=scheduler)
        self.steps_per_look = steps_per_look
        self.left = 0
        self.takes_rows = True
        self.said: list[tuple[str, Any]] = []
        self.most_running = self.running = 0
        self.asked: list[tuple[list[int], int]] = []

    async def utility(self, method: str, name: str, argument: str) -> str:
        assert method == "osd_speculation"
        given = json.loads(argument)
        self.said.append((name, given))
        if name == "sweep":
            self.left = 32
        if name == "sweep_steps_left":
            self.left = max(0, self.left - self.steps_per_look)
            return str(self.left)
        return json.dumps({"rows": ROWS, "load_rows": self.takes_rows}.get(name, {}))

    async def generate(self, prompt: list[int], num_tokens: int) -> None:
        self.asked.append((prompt, num_tokens))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(60)
        finally:
            self.running -= 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(
        server, "generate_synthetic", lambda engine, *given: engine.generate(*given)
    )
    monkeypatch.setattr(client, "SECONDS_BETWEEN_LOOKS", 0.001)
    return fake


def test_what_was_measured_is_kept_and_found_again(tmp_path: Path, engine: FakeEngine) -> None:
    path = tmp_path / "profiles" / "p.json"
    asyncio.run(SpeculationClient(engine.utility, Config()).prepare(engine, path))
    # 16 and 64 do not fit in 4 sequences.
    assert [given for name, given in engine.said if name == "sweep"] == [1, 4]
    assert engine.most_running == 4
    assert engine.running == 0
    prompts = [tuple(prompt) for prompt, _ in engine.asked]
    assert len(set(prompts)) == 4, "the requests of one batch share no prefix"
    assert {len(prompt) for prompt in prompts} == {64}
    assert all(4 <= token < 512 for prompt in prompts for token in prompt)
    assert {num_tokens for _, num_tokens in engine.asked} == {256 - 64 - 2 * 8}, (
        "what fits, drafts included"
    )
    assert read_profile(path) == ROWS
    engine.said.clear()
    asyncio.run(SpeculationClient(engine.utility, Config()).prepare(engine, path))
    assert engine.said == [("load_rows", ROWS)]


def test_a_profile_whose_rows_are_refused_is_measured_anew(
    tmp_path: Path, engine: FakeEngine
) -> None:
    engine.takes_rows = False
    write_profile(tmp_path / "p.json", [{"batch": -1}])
    asyncio.run(SpeculationClient(engine.utility, Config()).prepare(engine, tmp_path / "p.json"))
    assert read_profile(tmp_path / "p.json") == ROWS


def test_measuring_ends_in_time_and_keeps_no_half_of_it(tmp_path: Path, engine: FakeEngine) -> None:
    engine.steps_per_look = 0
    config = Config.model_validate({"speculation": {"calibration_seconds": 0.05}})
    asyncio.run(SpeculationClient(engine.utility, config).prepare(engine, tmp_path / "p.json"))
    assert [given for name, given in engine.said if name == "sweep"] == [1]
    assert engine.running == 0
    assert ("end_sweep", None) in engine.said, "no step of it may fall into traffic"
    assert read_profile(tmp_path / "p.json") is None


def test_requests_that_end_before_the_sweep_make_no_profile(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any) -> None:
        raise ValueError("max_tokens must be at least 1")

    engine.steps_per_look = 0
    monkeypatch.setattr(engine, "generate", refused)
    asyncio.run(SpeculationClient(engine.utility, Config()).prepare(engine, tmp_path / "p.json"))
    assert read_profile(tmp_path / "p.json") is None
    assert ("end_sweep", None) in engine.said
    assert [name for name, _ in engine.said].count("sweep_steps_left") <= 3, (
        "nobody waits for what has ended"
    )


@pytest.mark.parametrize(
    "speculation", [{"calibration_seconds": 0}, {"mode": "fixed"}, {"mode": "off"}]
)
def test_nothing_is_measured_where_nothing_is_decided(
    tmp_path: Path, engine: FakeEngine, speculation: dict[str, Any]
) -> None:
    config = Config.model_validate({"speculation": speculation})
    asyncio.run(SpeculationClient(engine.utility, config).prepare(engine, tmp_path / "p.json"))
    assert engine.said == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}'])
def test_a_damaged_profile_is_measured_anew(tmp_path: Path, engine: FakeEngine, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    asyncio.run(SpeculationClient(engine.utility, Config()).prepare(engine, path))
    assert read_profile(path) == ROWS


def test_a_control_that_does_not_answer_is_logged_and_serving_goes_on(
    tmp_path: Path, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def silent(*_: Any) -> str:
        raise RuntimeError("gone")

    client = SpeculationClient(silent, Config())
    with caplog.at_level(logging.ERROR):
        assert asyncio.run(client.report()) == SpeculationReport()
        asyncio.run(client.restart(release()))
        asyncio.run(client.prepare(engine, tmp_path / "p.json"))
    assert "gone" in caplog.text
    assert not (tmp_path / "p.json").exists()


def test_a_report_that_cannot_be_read_is_none_and_said(caplog: pytest.LogCaptureFixture) -> None:
    async def strange(*_: Any) -> str:
        return '{"plan": "off", "plans": {"off": {"seconds": null}}}'

    with caplog.at_level(logging.ERROR):
        found = asyncio.run(SpeculationClient(strange, Config()).report())
    assert found == SpeculationReport()
    assert "cannot be read" in caplog.text


def test_a_control_that_never_answers_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def stuck(*given: Any) -> str:
        await asyncio.sleep(60)
        return "{}"

    assert client.SECONDS_TO_ANSWER < HEARTBEAT_TTL
    monkeypatch.setattr(client, "SECONDS_TO_ANSWER", 0.05)
    found = asyncio.run(asyncio.wait_for(SpeculationClient(stuck, Config()).report(), 5))
    assert found == SpeculationReport()
    assert "did not answer 'report' within" in caplog.text


def test_the_profile_is_another_for_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSD_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    draft = str(tmp_path)
    base = profile_path(Config(), "target", draft)
    assert base == profile_path(Config(), "target", draft)
    assert base == profile_path(
        Config.model_validate({"serving": {"vllm": {"api_key": "k"}}}), "target", draft
    )
    assert base.parent == tmp_path / "cache" / "profiles"
    with_key = Config.model_validate({"serving": {"env": {"VLLM_API_KEY": "sk-1"}}})
    assert base == profile_path(with_key, "target", draft), "`osd profile` has none of a service's"
    others = {profile_path(Config(), "another", draft)}
    for change in (
        {"serving": {"vllm": {"dtype": "bfloat16"}}},
        {"serving": {"env": {"OMP_NUM_THREADS": "1"}}},
    ):
        others.add(profile_path(Config.model_validate(change), "target", draft))
    for change in ({"k_max": 3}, {"proposers": ["draft"]}):
        others.add(profile_path(Config.model_validate({"speculation": change}), "target", draft))
    (tmp_path / "model.safetensors").write_text("other weights take as long")
    fixed = Config.model_validate({"speculation": {"mode": "fixed"}})
    assert profile_path(fixed, "target", draft) == base
    monkeypatch.setattr(names, "engine_version", lambda: "another")
    others.add(profile_path(Config(), "target", draft))
    monkeypatch.setattr(profile, "hardware", lambda: "another machine")
    others.add(profile_path(Config(), "target", draft))
    (tmp_path / "config.json").write_text('{"hidden_size": 1}')
    others.add(profile_path(Config(), "target", draft))
    assert base not in others
    assert len(others) == 8


def test_the_scheduler_gets_what_the_configuration_says() -> None:
    speculation = {
        "mode": "fixed",
        "k_max": 7,
        "proposers": ["memory"],
        "memory_k_max": 12,
        "memory_bytes": 2 << 20,
        "memory_by_domain": True,
    }
    config = Config.model_validate(
        {"speculation": speculation, "capture": {"request_fraction": 0.25}}
    )
    given = json.loads(json.dumps({"osd": settings_for(config, release())}))
    expected = Settings(
        "fixed",
        7,
        ("memory",),
        None,
        600.0,
        2.0,
        memory_k_max=12,
        memory_bytes=2 << 20,
        memory_by_domain=True,
        memory_fraction=0.25,
        is_alone=True,
    )
    assert settings_of(given) == expected
    assert settings_of({}) == Settings()


def test_where_nothing_is_captured_nothing_is_remembered_beyond_its_end() -> None:
    config = Config.model_validate({"capture": {"enabled": False, "request_fraction": 0.5}})
    assert settings_for(config, release())["memory_fraction"] == 0.0


@pytest.mark.parametrize(
    "speculation, room",
    [
        ({}, 8),
        ({"k_max": 3, "memory_k_max": 4}, 4),
        ({"k_max": 9}, 9),
        ({"proposers": ["draft"]}, 5),
        ({"mode": "off"}, 5),
        ({"draft_sample_method": "probabilistic"}, 8),
    ],
)
def test_an_engine_has_room_for_whoever_may_propose(speculation: dict[str, Any], room: int) -> None:
    config = Config.model_validate({"speculation": speculation})
    assert room_for_drafts(config) == room


def test_a_draft_is_expected_to_do_what_its_gate_measured() -> None:
    published = replace(release(), outcome=OUTCOME)
    assert OUTCOME.eval is not None
    settings = settings_for(Config(), published)
    assert settings["predicted"] == OUTCOME.eval.alpha_candidate
    assert settings_for(Config(), release())["predicted"] is None


def test_a_profile_can_be_read_into_a_table() -> None:
    times = StepTimes()
    for batch in (1, 4):
        for k in (0, 1, 3):
            for _ in range(8):
                drafted = Shape(batch, batch * (1 + k), 64 * batch, k)
                times.add(drafted, 0.010 + 0.001 * drafted.tokens + 0.002 * k)
                times.add(drafted._replace(drafted=0), 0.010 + 0.001 * drafted.tokens)
    write_profile_rows = json.loads(json.dumps(times.to_rows()))
    lines = table(write_profile_rows, 3).splitlines()
    assert [line.split()[:2] for line in lines] == [["step,", "ms"], ["batch", "1"], ["batch", "4"]]
    one, four = (line.split() for line in lines[1:])
    assert float(one[2]) == pytest.approx(11.0, rel=0.03)
    assert float(one[5]) == pytest.approx(20.0, rel=0.05)
    assert float(one[6]) == pytest.approx(11 / 14, abs=0.03)  # T(1) / T(4), the target alone
    assert float(four[6]) == pytest.approx(14 / 26, abs=0.03)


def test_a_profile_is_written_whole(tmp_path: Path) -> None:
    write_profile(tmp_path / "a" / "p.json", ROWS)
    found = json.loads((tmp_path / "a" / "p.json").read_text())
    assert found == {"schema_version": 1, "hardware": profile.hardware(), "cells": ROWS}


def test_the_control_hears_of_a_swap_and_what_was_predicted(engine: FakeEngine) -> None:
    asyncio.run(
        SpeculationClient(engine.utility, Config()).restart(replace(release(), outcome=OUTCOME))
    )
    asyncio.run(SpeculationClient(engine.utility, Config()).restart(release()))
    assert engine.said == [
        ("restart", replace(release(), outcome=OUTCOME).predicted_alpha),
        ("restart", None),
    ]


def test_a_report_and_rows_are_what_the_control_says(engine: FakeEngine) -> None:
    async def says(method: str, name: str, argument: str) -> str:
        assert (method, argument) == ("osd_speculation", "null")
        return json.dumps({"report": {"plan": "off"}, "rows": ROWS}[name])

    said = asyncio.run(SpeculationClient(says, Config()).report())
    assert said == SpeculationReport(plan="off")
    assert asyncio.run(SpeculationClient(says, Config()).rows()) == ROWS


def test_where_step_times_cannot_be_measured_the_service_starts_all_the_same(
    tmp_path: Path, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    del engine.vllm_config
    asyncio.run(SpeculationClient(engine.utility, Config()).prepare(engine, tmp_path / "p.json"))
    assert "step times could not be measured; they are learnt from traffic" in caplog.text
    assert read_profile(tmp_path / "p.json") is None


def test_a_control_that_knows_no_step_leaves_no_profile(tmp_path: Path, engine: FakeEngine) -> None:
    async def empty(method: str, name: str, argument: str) -> str:
        return "[]" if name == "rows" else await engine.utility(method, name, argument)

    asyncio.run(SpeculationClient(empty, Config()).prepare(engine, tmp_path / "p.json"))
    assert not (tmp_path / "p.json").exists()


def test_a_missing_profile_is_no_trouble_and_a_damaged_one_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_profile(tmp_path / "none.json") is None
    assert caplog.messages == []
    (tmp_path / "p.json").write_text("{")
    assert read_profile(tmp_path / "p.json") is None
    assert len(caplog.messages) == 1
    assert f"{tmp_path / 'p.json'} cannot be read" in caplog.text
