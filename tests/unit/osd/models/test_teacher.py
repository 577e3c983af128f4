"""What is said, before anything is started, where the trainer cannot load the target."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file

from osd.common.wording import size
from osd.config import reading
from osd.config.schema import Config
from osd.doctor.pair_checks import check_models
from osd.errors import ConfigError
from osd.models import teacher
from osd.models.teacher import check_teacher, dtype_of, is_needed
from osd.service import plan
from tests.support.heads import write_head
from tests.support.pairs import Pair, build_pair
from tests.support.served_targets import served_target

LEARNS_ITSELF = "use trainer.sampling=teacher, which learns from what was served"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def config_of(pair: Pair, *overrides: str, sampling: str = "student") -> Config:
    given = [f"serving.target={pair.target}", f"serving.draft={pair.draft}"]
    given += [f"trainer.sampling={sampling}", *overrides]
    return reading.load(None, given, environ={}).config


def refused(config: Config, target: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_teacher(config, target)
    line = str(caught.value)
    assert line.startswith("trainer.sampling=student: ") and line.endswith(f"; {LEARNS_ITSELF}")
    assert "\n" not in line
    return line


def test_a_target_that_fits_is_said_with_its_size(pair: Pair) -> None:
    text = check_teacher(config_of(pair), pair.target)
    assert "of weights in the trainer; " in text and text.endswith("of memory are free here")


@pytest.mark.parametrize(
    "override, said",
    [
        ("ray.trainer_resource=train", "another machine (ray.trainer_resource=train)"),
        (
            "serving.vllm.enable_lora=true",
            "an adapter of the target (serving.vllm.enable_lora=True)",
        ),
        ("serving.vllm.quantization=fp8", "quantised weights (serving.vllm.quantization=fp8)"),
    ],
)
def test_another_target_than_the_trainer_would_load(pair: Pair, override: str, said: str) -> None:
    assert said in refused(config_of(pair, override), pair.target)


def test_a_quantised_checkpoint(pair: Pair, tmp_path: Path) -> None:
    config = json.loads((pair.target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    assert "is quantised" in refused(config_of(pair), tmp_path)


def sparse(directory: Path, num_bytes: int, config: Mapping[str, object]) -> Path:
    """A model whose weights are of that size, and take no room on the disk."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    with (directory / "model.safetensors").open("wb") as file:
        os.truncate(file.fileno(), num_bytes)
    return directory


def test_memory_has_to_hold_it_twice_beside_an_engine_on_the_cpu(
    pair: Pair, tmp_path: Path
) -> None:
    third = psutil.virtual_memory().available // 3
    whole = json.loads((pair.target / "config.json").read_text())
    small, large = sparse(tmp_path / "s", third, whole), sparse(tmp_path / "l", 2 * third, whole)
    check_teacher(config_of(pair), small)
    line = refused(config_of(pair), large)
    assert f" in the trainer, in the engine {size(2 * third)}, and " in line
    assert " of memory are free here" in line
    # Without an engine here there is room; and in half as many bytes a number there is, too.
    check_teacher(config_of(pair), large, is_offline=True)
    halved = whole | {"dtype": "float32"}
    larger = sparse(tmp_path / "h", 2 * third, halved)
    check_teacher(config_of(pair, "serving.vllm.dtype=bfloat16"), larger)


def test_what_stays_in_files_needs_no_memory(pair: Pair, tmp_path: Path) -> None:
    available = psutil.virtual_memory().available
    whole = json.loads((pair.target / "config.json").read_text())
    large = sparse(tmp_path / "l", 4 * available, whole)
    line = refused(config_of(pair), large)
    assert "(with a lower trainer.target_memory_bytes, layers stay in files)" in line
    few = config_of(pair, f"trainer.target_memory_bytes={1 << 20}")
    assert check_teacher(few, large, is_offline=True).startswith("1.0 MiB of weights in the train")
    # An engine here has all of it all the same.
    assert f"take 1.0 MiB in the trainer, in the engine {size(4 * available)}" in refused(
        few, large
    )


def test_a_gpu_has_to_hold_it_in_the_share_of_the_trainer(pair: Pair, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 1024\n")
    program.chmod(0o755)
    whole = json.loads((pair.target / "config.json").read_text())
    large = sparse(tmp_path / "l", 300 << 20, whole)
    line = refused(config_of(pair), large)
    assert "take 300.0 MiB in the trainer, and 204.8 MiB of a GPU are its own" in line
    check_teacher(config_of(pair, "trainer.gpu_memory_fraction=0.4"), large)
    check_teacher(config_of(pair, "trainer.num_gpus=1"), large)


def test_a_gpu_that_hangs_is_said_and_not_waited_for(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(teacher, "SECONDS_FOR_GPUS", 0.2)
    whole = json.loads((pair.target / "config.json").read_text())
    began = time.monotonic()
    with pytest.raises(ConfigError, match="nvidia-smi does not answer within 0 s, so a GPU or"):
        check_teacher(config_of(pair), sparse(tmp_path / "l", 300 << 20, whole))
    assert time.monotonic() - began < 30


def test_it_computes_in_the_type_of_the_engine(pair: Pair) -> None:
    assert dtype_of(config_of(pair)) == "auto"
    for given, name in (("half", "float16"), ("bfloat16", "bfloat16"), ("float", "float32")):
        dtype = dtype_of(config_of(pair, f"serving.vllm.dtype={given}"))
        assert dtype == name and isinstance(getattr(torch, dtype), torch.dtype)


def test_served_text_alone_needs_no_target_in_the_trainer(pair: Pair) -> None:
    assert not is_needed(config_of(pair, sampling="teacher"), is_head=False)
    assert not is_needed(config_of(pair, "trainer.enabled=false"), is_head=False)
    assert is_needed(config_of(pair, sampling="mixed"), is_head=False)


def test_a_head_always_needs_it_where_it_is_trained(pair: Pair) -> None:
    assert is_needed(config_of(pair, sampling="teacher"), is_head=True)
    assert not is_needed(config_of(pair, "trainer.enabled=false"), is_head=True)


def test_the_service_says_it_before_it_starts_and_the_doctor_too(pair: Pair) -> None:
    lora = "serving.vllm.enable_lora=true"
    with pytest.raises(ConfigError, match="trainer.sampling=student: requests may be answered by"):
        plan.check(config_of(pair, lora))
    plan.check(config_of(pair, lora, sampling="teacher"))
    said = {check.name: check for check in check_models(config_of(pair, lora))}
    assert said["teacher"].ok is False and LEARNS_ITSELF in said["teacher"].text
    fine = {check.name: check for check in check_models(config_of(pair))}
    assert fine["teacher"].ok is True
    assert "teacher" not in {c.name for c in check_models(config_of(pair, sampling="teacher"))}


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and a head as its draft."""
    where = tmp_path_factory.mktemp("with-head")
    target = served_target(where / "target")
    head = write_head(where / "head", target, draft_vocab_size=40)
    return Pair(target=target, draft=head, stranger=head)


def said_at_start(config: Config) -> str:
    """What the service says, which is what the doctor says."""
    with pytest.raises(ConfigError) as caught:
        plan.check(config)
    said = {check.name: check for check in check_models(config)}
    assert said["fit"].ok is True
    assert said["teacher"].ok is False and said["teacher"].text == str(caught.value)
    return str(caught.value)


FROZEN = "use trainer.enabled=false, which serves the head as it is, or let the trainer have the"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["serving.vllm.enable_lora=true"], "requests may be answered by an adapter"),
        (["serving.vllm.quantization=fp8"], "the engine serves quantised weights"),
        (
            ["ray.trainer_resource=train", "ray.address=h:1", "buffer.redis_url=redis://10.0.0.2"],
            "the trainer runs on another machine (ray.trainer_resource=train)",
        ),
    ],
)
def test_a_head_is_not_trained_without_the_target(
    with_head: Pair, overrides: list[str], why: str
) -> None:
    line = said_at_start(config_of(with_head, *overrides, sampling="teacher"))
    assert line.startswith(f"serving.draft={with_head.draft}: is a head, which learns from the ")
    assert why in line and FROZEN in line and "\n" not in line
    frozen = config_of(with_head, *overrides, "trainer.enabled=false", sampling="teacher")
    assert plan.check(frozen)[1] == with_head.draft
    said = {check.name: check for check in check_models(frozen)}
    assert "teacher" not in said
    assert said["fit"].text == "the EAGLE-3 head can propose 40 of the target's 96 tokens"


def test_a_target_too_large_for_the_trainer_of_a_head(with_head: Pair, tmp_path: Path) -> None:
    whole = json.loads((with_head.target / "config.json").read_text())
    large = sparse(tmp_path / "l", 2 * psutil.virtual_memory().available // 3, whole)
    config = config_of(with_head, sampling="teacher")
    with pytest.raises(ConfigError, match=f"in the trainer, in the engine .*; {FROZEN}"):
        check_teacher(config, large, head=with_head.draft)
    huge = sparse(tmp_path / "h", 2 * psutil.virtual_memory().total, whole)
    with pytest.raises(ConfigError, match="; train where the target as it was served can be"):
        check_teacher(config, huge, head=with_head.draft, is_offline=True)


@pytest.mark.parametrize("method, copies", [("full", 4), ("lora", 1)])
def test_what_a_head_is_trained_with_needs_room_too(
    with_head: Pair, monkeypatch: pytest.MonkeyPatch, method: str, copies: int
) -> None:
    tensors = load_file(with_head.draft / "model.safetensors")
    held = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    num = sum(t.numel() for name, t in held.items() if name != "embed_tokens.weight")
    target = json.loads((with_head.target / "config.json").read_text())
    embedding = target["vocab_size"] * target["hidden_size"]
    weights = (with_head.target / "model.safetensors").stat().st_size
    config = config_of(with_head, f"trainer.method={method}", sampling="teacher")
    room = weights + 4 * (copies * num + embedding)
    for missing in (0, 1):
        memory = SimpleNamespace(available=room - missing)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        with pytest.raises(ConfigError, match="the head's training") if missing else nullcontext():
            check_teacher(config, with_head.target, head=with_head.draft, is_offline=True)


@pytest.mark.parametrize("sampling", ["student", "mixed"])
def test_a_head_learns_from_what_was_served_alone(with_head: Pair, sampling: str) -> None:
    line = said_at_start(config_of(with_head, sampling=sampling))
    assert line == (
        f"trainer.sampling={sampling}: an EAGLE-3 head learns from what was served alone; use "
        "trainer.sampling=teacher"
    )


def test_engines_of_others_may_have_heads(with_head: Pair) -> None:
    attached = ["serving.engines=attached", "buffer.redis_url=redis://10.0.0.2"]
    target, head, _ = plan.check(config_of(with_head, *attached, sampling="teacher"))
    assert (target, head) == (with_head.target, with_head.draft)
