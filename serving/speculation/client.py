"""The replica's hand on the control of speculation: it measures the engine at start, and asks it how it goes.

    start    profile of this hardware, models and versions on disk? ──no──► synthetic requests, k forced, through the
             ordinary path of a request ──► profile          yes ──► step times from there
    swap     the control is told which acceptance the new draft was measured with
    report   counters, plan and time split, for the heartbeat

The control itself stands in the engine's own process (`serving/speculation/scheduler.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from osd.common.files import cache_root, replace_file, sha256
from osd.config.schema import Config, SpeculationConfig
from osd.records import DraftRelease
from serving.vllm import names, server

logger = logging.getLogger(__name__)

BATCHES = (1, 4, 16, 64)
"""Requests that run at once while the engine is measured."""
SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_TO_ANSWER = 5.0
"""The engine answers between two steps. A heartbeat that lacks a report is better than one that comes too late."""
PROMPT_TOKENS = 64
SCHEMA_VERSION = 1

Utility = Callable[..., Awaitable[str]]
"""`utility(name, argument)`: `EngineCore.osd_speculation` of the engine, JSON text both ways."""


def settings_for(speculation: SpeculationConfig, release: DraftRelease) -> dict[str, Any]:
    """What the scheduler is started with, under `additional_config`."""
    return {
        "mode": speculation.mode,
        "k_max": speculation.k_max,
        "proposers": list(speculation.proposers),
        "predicted": predicted_acceptance(release),
        "net_interval_seconds": speculation.net_interval_seconds,
        "net_window_seconds": speculation.net_window_seconds,
    }


def predicted_acceptance(release: DraftRelease) -> float | None:
    """Conditional acceptance on held-out traffic, as the gate measured it; None for a draft nobody has measured."""
    outcome = release.outcome
    return outcome.eval.alpha_candidate if outcome is not None and outcome.eval is not None else None


class Steering:
    """One engine's. Nothing here raises into serving: what fails is logged, and the control goes on by itself."""

    def __init__(self, utility: Utility, config: Config) -> None:
        self._utility = utility
        self._config = config.speculation

    async def restart(self, release: DraftRelease) -> None:
        """Another draft serves."""
        await self._call("restart", predicted_acceptance(release))

    async def report(self) -> dict[str, Any]:
        """What the control says of itself; {} when it does not answer."""
        return dict(await self._call("report") or {})

    async def rows(self) -> list[dict[str, Any]]:
        """The cells of step times as they are known now."""
        return list(await self._call("rows") or [])

    async def prepare(self, engine: Any, path: Path) -> None:
        """Load the stored profile, or measure one and store it."""
        if (rows := read_profile(path)) is not None and await self._call("load_rows", rows):
            logger.info("step times from %s", path)
            return
        if not self._config.calibration_seconds or self._config.mode != "auto":
            return
        started = time.monotonic()
        try:
            is_complete = await self.calibrate(engine)
            if (rows := await self.rows()) and is_complete:
                write_profile(path, rows)
                logger.info("step times measured in %.1f s and kept in %s", time.monotonic() - started, path)
        except Exception:
            logger.exception("step times could not be measured; they are learnt from traffic")

    async def calibrate(self, engine: Any) -> bool:
        """Steps of every kind at several batch sizes, by synthetic requests; False where the time did not allow all."""
        deadline = time.monotonic() + self._config.calibration_seconds
        max_seqs = engine.vllm_config.scheduler_config.max_num_seqs
        length = engine.vllm_config.model_config.max_model_len - PROMPT_TOKENS - 2 * self._config.k_max
        vocab = engine.vllm_config.model_config.get_vocab_size()
        for batch in (b for b in BATCHES if b <= max_seqs):
            await self._call("sweep", batch)
            prompts = [_prompt(i, vocab) for i in range(batch)]
            jobs = [asyncio.create_task(server.generate_synthetic(engine, p, length)) for p in prompts]
            try:
                while (left := await self._call("sweep_steps_left")) and not any(job.done() for job in jobs):
                    if time.monotonic() > deadline:
                        break
                    await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            finally:
                await self._call("end_sweep")
                for job in jobs:
                    job.cancel()
                await asyncio.gather(*jobs, return_exceptions=True)
            if left != 0:
                return False  # out of time, the requests ended before the sweep did, or nobody answers
        return True

    async def _call(self, name: str, argument: Any = None) -> Any:
        try:
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                return json.loads(await self._utility("osd_speculation", name, json.dumps(argument)))
        except TimeoutError:
            logger.error("the control of speculation did not answer %r within %.0f s", name, SECONDS_TO_ANSWER)
        except Exception:
            logger.exception("the control of speculation did not answer %r", name)
        return None


def _prompt(i: int, vocab_size: int) -> list[int]:
    return [(7919 * (i + 1) + 104729 * j) % max(vocab_size - 8, 1) + 4 for j in range(PROMPT_TOKENS)]


# ------------------------------------------------------------------------------------------------------------- profiles


def profile_path(config: Config, target_id: str, draft_dir: str) -> Path:
    """Where the step times of this hardware, these models and this engine are kept."""
    what = {
        "schema": SCHEMA_VERSION,
        "engine": names.engine_version(),
        "hardware": hardware(),
        "target": target_id,
        "draft": sha256(Path(draft_dir) / "config.json"),
        "k_max": config.speculation.k_max,
        "proposers": config.speculation.proposers,
        "env": config.serving.env,
        "vllm": {key: str(value) for key, value in sorted(config.serving.vllm.items()) if key != "api_key"},
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
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores"


def read_profile(path: Path) -> list[dict[str, Any]] | None:
    """The cells of a stored profile; None when there is none that can be read."""
    try:
        found = json.loads(path.read_text())
        return list(found["cells"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s); step times are measured anew", path, error)
        return None


def write_profile(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Keep the cells for the next start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema_version": SCHEMA_VERSION, "hardware": hardware(), "cells": rows}, indent=1)
    replace_file(path, text.encode())
