"""The replica's side of the control of speculation. The control itself runs in the engine's own
process (`serving/speculation/scheduler.py`).

    start    is there a profile of this engine on disk (`profile.py`)?
             yes ──► step times from there
             no ──► synthetic requests, k forced, on a request's ordinary path ──► profile
    swap     the control is told which acceptance the new draft was measured with
    report   counters, plan and time split, for the heartbeat
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from osd.config.schema import Config
from osd.records import DraftRelease, SpeculationReport
from serving.speculation.profile import read_profile, write_profile
from serving.vllm import server

logger = logging.getLogger(__name__)

BATCHES = (1, 4, 16, 64)
"""Requests that run at once while the engine is measured."""
SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_TO_ANSWER = 5.0
"""The engine answers between two steps. A heartbeat without a report is better than a late one."""
PROMPT_TOKENS = 64

Utility = Callable[..., Awaitable[str]]
"""`utility(name, argument)`: `EngineCore.osd_speculation` of the engine, JSON text both ways."""


def settings_for(config: Config, release: DraftRelease) -> dict[str, Any]:
    """What the scheduler is started with, under `additional_config`."""
    speculation, capture = config.speculation, config.capture
    return {
        "mode": speculation.mode,
        "k_max": speculation.k_max,
        "proposers": list(speculation.proposers),
        "predicted": release.predicted_alpha,
        "net_interval_seconds": speculation.net_interval_seconds,
        "net_window_seconds": speculation.net_window_seconds,
        "is_alone": True,
        "memory_k_max": speculation.memory_k_max,
        "memory_bytes": speculation.memory_bytes,
        "memory_by_domain": speculation.memory_by_domain,
        "memory_fraction": capture.request_fraction if capture.enabled else 0.0,
    }


def room_for_drafts(config: Config) -> int:
    """Draft tokens per request and step that an engine must have room for (vLLM's
    `num_speculative_tokens`)."""
    speculation = config.speculation
    if "memory" not in speculation.proposers or speculation.mode == "off":
        return speculation.k_max
    return max(speculation.k_max, speculation.memory_k_max)


class SpeculationClient:
    """Talks to one engine. Nothing here raises into serving: a failure is logged, and the control
    goes on by itself."""

    def __init__(self, utility: Utility, config: Config) -> None:
        self._utility = utility
        self._config = config.speculation

    async def restart(self, release: DraftRelease) -> None:
        """Tell the control that another draft serves."""
        await self._call("restart", release.predicted_alpha)

    async def forget(self) -> bool:
        """Empty the memory. Whether it is empty."""
        return await self._call("forget") is not None

    async def remember(self, answers: Sequence[tuple[list[int], list[int], str]]) -> int | None:
        """Have the memory know these earlier answers: (end of the prompt, answer, domain), the
        oldest first. Returns how many of their tokens wait until more is asked of it; None where no
        memory answers."""
        waiting = await self._call("remember", list(answers))
        return None if waiting is None else int(waiting)

    async def report(self) -> SpeculationReport:
        """What the control says of itself; an empty one when it does not answer."""
        answer = await self._call("report") or {}
        try:
            return msgspec.convert(answer, SpeculationReport)
        except msgspec.ValidationError:
            logger.exception("the report of the control of speculation cannot be read")
            return SpeculationReport()

    async def rows(self) -> list[dict[str, Any]]:
        """The cells of step times known now."""
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
                logger.info(
                    "step times measured in %.1f s and kept in %s", time.monotonic() - started, path
                )
        except Exception:
            logger.exception("step times could not be measured; they are learnt from traffic")

    async def calibrate(self, engine: Any) -> bool:
        """Measure steps of every kind at several batch sizes with synthetic requests; False when
        the time did not suffice for all."""
        deadline = time.monotonic() + self._config.calibration_seconds
        max_seqs = engine.vllm_config.scheduler_config.max_num_seqs
        model = engine.vllm_config.model_config
        most = max(self._config.k_max, self._config.memory_k_max)
        length = model.max_model_len - PROMPT_TOKENS - 2 * most
        vocab = model.get_vocab_size()
        for batch in (b for b in BATCHES if b <= max_seqs):
            await self._call("sweep", batch)
            prompts = [_prompt(i, vocab) for i in range(batch)]
            jobs = [
                asyncio.create_task(server.generate_synthetic(engine, p, length)) for p in prompts
            ]
            try:
                while (left := await self._call("sweep_steps_left")) and not any(
                    job.done() for job in jobs
                ):
                    if time.monotonic() > deadline:
                        break
                    await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            finally:
                await self._call("end_sweep")
                for job in jobs:
                    job.cancel()
                await asyncio.gather(*jobs, return_exceptions=True)
            if left != 0:  # out of time, the requests ended too early, or nobody answers
                return False
        return True

    async def _call(self, name: str, argument: Any = None) -> Any:
        try:
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                answer = await self._utility("osd_speculation", name, json.dumps(argument))
                return json.loads(answer)
        except TimeoutError:
            logger.error(
                "the control of speculation did not answer %r within %.0f s",
                name,
                SECONDS_TO_ANSWER,
            )
        except Exception:
            logger.exception("the control of speculation did not answer %r", name)
        return None


def _prompt(i: int, vocab_size: int) -> list[int]:
    size = max(vocab_size - 8, 1)
    return [(7919 * (i + 1) + 104729 * j) % size + 4 for j in range(PROMPT_TOKENS)]
