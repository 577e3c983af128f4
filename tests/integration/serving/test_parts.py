"""An engine of a vLLM that lacks a name: one part is off and says why, the others work, and it
serves the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from osd.config.schema import CaptureConfig, Config
from osd.errors import ConfigError
from osd.records import DraftRelease
from serving import worker
from serving.replica import Replica
from serving.vllm import fixes, names, parts
from serving.vllm.names import Part
from tests.integration.conftest import release_of
from tests.support.engines import Engine
from tests.support.pairs import Pair

GONE: dict[Part, str] = {
    "capture": "vllm.v1.core.sched.output:NewRequestData",
    "swap": "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
    "sleep": "vllm.forward_context:set_forward_context",
    "split": "vllm.v1.utils:record_function_or_nullcontext",
    "repairs": "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
}
"""A name of each part in the worker, without which vLLM itself works as it is loaded by now."""


@pytest.fixture(scope="module")
def bare(pair: Pair, plain: Engine) -> Engine:
    """A controlled engine without hooks."""
    return Engine(pair.target, release_of(pair.draft, 1), control={"mode": "fixed"})


@pytest.fixture
def unhooked(bare: Engine) -> Iterator[Engine]:
    """The same engine, which has its hooks taken off afterwards."""
    yield bare
    runner, lazy = bare.worker.model_runner, bare.worker.osd_lazy_draft
    if bare.worker.osd_hook is not None:
        bare.worker.osd_hook.remove()
    if lazy is not None:
        for owner, name in (
            (runner.drafter, "propose"),
            (runner, "propose_draft_token_ids"),
            (runner.rejection_sampler, "forward"),
        ):
            vars(owner).pop(name)
    bare.worker.osd_started = ""
    bare.command("force", None)
    bare.llm.reset_prefix_cache()


def remove(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, _, last = name.rpartition(":")
    monkeypatch.delattr(f"{owner}.{last}")


def parts_that_work(engine: Engine, draft: DraftRelease, prompts: list[list[int]]) -> set[str]:
    """Parts that do what they are for. At the end nothing is speculated."""
    worker, found = engine.worker, set()
    engine.traces()
    engine.generate(prompts, ignore_eos=True, max_tokens=8)
    if len(engine.traces()) == len(prompts):
        found.add("capture")
    if engine.swap(draft)["error"] == "" and worker.osd_swapper.version == draft.version:
        found.add("swap")
    engine.command("force", ("off", 0))
    engine.generate(prompts, ignore_eos=True, max_tokens=8)
    if engine.command("report")["plan"] == "off":
        found.add("control")
    if worker.osd_lazy_draft is not None and worker.osd_lazy_draft.num_forwards_saved:
        found.add("sleep")
    if json.loads(engine.rpc("osd_report", "r", "default"))["split"]["steps"]:
        found.add("split")
    return found


@pytest.mark.parametrize("part", [None, "capture", "swap", "sleep", "split"])
def test_a_part_whose_name_is_gone_is_off_and_the_others_work(
    unhooked: Engine,
    plain: Engine,
    pair: Pair,
    prompts: list[list[int]],
    part: Part | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if part is not None:
        remove(monkeypatch, GONE[part])
    with caplog.at_level(logging.WARNING):
        unhooked.start_hooks(CaptureConfig(top_k=16, accepted_fraction=1, plain_fraction=1))
    off = json.loads(unhooked.rpc("osd_parts_off"))
    assert json.loads(unhooked.rpc("osd_report", "r", "default"))["off"] == off
    if part is None:
        assert off == {}
    else:
        assert list(off) == [part] and GONE[part].rpartition(":")[2] in off[part]
        assert off[part].endswith(parts.CONSEQUENCES[part])
        assert f"{part} is off, serving is not affected: {off[part]}" in caplog.text
    served = unhooked.generate(prompts, ignore_eos=True, max_tokens=24)
    assert served == plain.generate(prompts, ignore_eos=True, max_tokens=24)
    working = parts_that_work(unhooked, release_of(pair.stranger, 2), prompts[:4])
    assert working == {"capture", "swap", "control", "sleep", "split"} - {part}
    assert unhooked.generate(prompts, ignore_eos=True, max_tokens=24) == served
    if part == "swap":
        refused = unhooked.swap(release_of(pair.stranger, 3))["error"]
        assert refused == f"swap is off: {off['swap']}"
        put = json.loads(unhooked.rpc("osd_put", 3, True))
        assert (put["error"], put["version"]) == (refused, 1)


def replica(pair: Pair, **speculation: Any) -> Any:
    made = Replica.__new__(Replica)
    made._config, made._off = Config.model_validate({"speculation": speculation}), {}
    made._release, made._registry = release_of(pair.draft, 1), None
    made._target_dir, made._is_controlled, made._extension = str(pair.target), False, "x.Y"
    return made


def test_where_sampling_cannot_be_repaired_nothing_is_speculated(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replica(pair)._control_arguments()["additional_config"]["osd"]["mode"] == "auto"
    remove(monkeypatch, GONE["repairs"])
    monkeypatch.setattr(worker, "_OFF_AT_IMPORT", {})
    worker._repair()
    assert list(worker._OFF_AT_IMPORT) == ["repairs"]
    made = replica(pair)
    assert made._control_arguments()["additional_config"]["osd"]["mode"] == "off"
    remove(monkeypatch, "vllm.v1.core.sched.async_scheduler:AsyncScheduler")
    with pytest.raises(ConfigError, match="outputs at temperature > 0 would be wrong"):
        made._control_arguments()


async def test_a_vllm_without_the_parts_of_its_server_is_refused_in_one_line(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(monkeypatch, "vllm.entrypoints.launchers.app:build_app")
    tested = " or ".join(names.TESTED_VERSIONS)
    with pytest.raises(ConfigError, match=rf"cannot be served: .*build_app.*; use {tested}$"):
        await replica(pair)._build()


def test_on_another_device_sampling_needs_no_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    remove(monkeypatch, GONE["repairs"])
    assert "expand_batch_to_tokens" in fixes.problem_with_sampling()
    monkeypatch.setattr(fixes, "_is_on_cpu", lambda: False)
    assert fixes.problem_with_sampling() == "" and not fixes.fix_cpu_sampling()
