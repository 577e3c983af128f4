"""Step times of an engine, kept on disk from one start to the next."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from osd.common.files import cache_root, replace_file, sha256
from osd.config.schema import Config
from osd.config.secrets import SECRET
from serving.vllm import names

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1


def profile_path(config: Config, target_id: str, draft_dir: str) -> Path:
    """The file for step times of this hardware, these models and this engine."""
    what = {
        "schema": SCHEMA_VERSION,
        "engine": names.engine_version(),
        "hardware": hardware(),
        "target": target_id,
        "draft": sha256(Path(draft_dir) / "config.json"),
        "k_max": config.speculation.k_max,
        "proposers": config.speculation.proposers,
        # Another key is no other engine.
        "env": {k: v for k, v in config.serving.env.items() if not SECRET.search(k)},
        "vllm": {
            key: str(value)
            for key, value in sorted(config.serving.vllm.items())
            if key != "api_key"
        },
    }
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    return cache_root() / "profiles" / f"{digest}.json"


def hardware() -> str:
    """CPU model and cores, or GPU names: what step times depend on."""
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores"


def read_profile(path: Path) -> list[dict[str, Any]] | None:
    """The cells of a stored profile; None when it is missing or cannot be read."""
    try:
        found = json.loads(path.read_text())
        return list(found["cells"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s); step times are measured anew", path, error)
        return None


def write_profile(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Store the cells for the next start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    profile = {"schema_version": SCHEMA_VERSION, "hardware": hardware(), "cells": rows}
    replace_file(path, json.dumps(profile, indent=1).encode())
