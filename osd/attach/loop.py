"""What an attached engine does beside serving: it follows the deployment's terms.

    terms in Redis ──► observe   the workers' hooks count accepted drafts
                       capture   they make traces, too
                       swap      the wanted draft serves; off: the one the engine was started with
                       control   k is decided step by step; off: vLLM's own way

Until terms come, and with everything switched off, the engine is as vLLM started it. While Redis is
away, the last terms hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from osd.attach.fetch import read_over_http
from osd.common.model_directory import WEIGHTS, digests
from osd.config.schema import Config
from osd.errors import OSDError
from osd.exchange.registry import Registry
from osd.exchange.transfer import DraftsHere, FetchedDrafts
from osd.models import resolve
from osd.records import DraftRelease, EngineTerms
from serving.capture.capture import NO_VERSION
from serving.engine_loop import EngineLoop
from serving.pull import Activity, Here

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0


class AttachedLoop:
    """Beside one engine. `built` is what `osd/attach/arguments.py` left in its configuration.

    `models` names target and draft as the engine was given them.
    """

    def __init__(
        self,
        engine: Any,
        registry: Registry,
        *,
        redis_url: str,
        deployment: str,
        name: str,
        url: str,
        models: tuple[str, str],
        built: dict[str, Any],
        activity: Activity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._registry, self._activity = engine, registry, activity
        self._redis_url, self._deployment = redis_url, deployment
        self._name, self._url, self._models = name, url, models
        self._k, self._off = int(built["k"]), dict(built["off"])
        self._clock = clock
        self._terms: EngineTerms | None = None
        self._look_at = 0.0
        self._own: DraftRelease | None = None
        """The draft that the engine was started with."""
        self._beside: EngineLoop | None = None
        self._steps: tuple[str, ...] = ()

    @property
    def seconds_between_looks(self) -> float:
        return 0.25

    async def look(self) -> None:
        """Follow the terms, then do what is switched on."""
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + SECONDS_BETWEEN_LOOKS
            await self._ask()
        if self._beside is not None:
            await self._beside.look()

    async def _ask(self) -> None:
        try:
            terms = await asyncio.to_thread(self._registry.terms)
        except OSDError:
            return  # Redis is away: the last terms hold
        if terms is None or terms == self._terms:
            return
        self._terms = terms
        if self._beside is None and terms.steps:
            await self._begin(terms)
        if self._beside is not None:
            await self._follow(terms.steps)

    async def _begin(self, terms: EngineTerms) -> None:
        """Install the hooks. An engine of another target is left alone, and the log says so."""
        target, own = await asyncio.to_thread(self._look_at_models, terms)
        if target != terms.target_id:
            return logger.error(
                "not attached to %s: its target is %s, and this engine serves another (%s, %s)",
                self._deployment,
                terms.target_id,
                self._models[0],
                target,
            )
        config = self._config(terms)
        is_controlled = "control" not in self._off
        beside = EngineLoop(
            self._engine,
            config,
            name=self._name,
            url=self._url,
            release=own,
            target_id=target,
            registry=self._registry,
            sink={
                "url": self._redis_url,
                "deployment": self._deployment,
                "target_id": target,
                **terms.buffer,
            },
            is_controlled=is_controlled,
            activity=self._activity,
            here=self._here(config, terms, own),
            off=self._off,
            awake_note=str(config.data_path / f"{self._name}.awake"),
        )
        if is_controlled and "control" in terms.steps:
            await self._hold(False)
        await beside.start(may_measure="control" in terms.steps)
        self._own, self._beside = own, beside
        return None

    async def _follow(self, steps: tuple[str, ...]) -> None:
        """Switch on and off. What is off already stays so."""
        assert self._beside is not None and self._own is not None
        is_captured = "capture" in steps
        is_observed = is_captured or "observe" in steps or "control" in steps
        await self._engine.collective_rpc("osd_switch", args=(is_observed, is_captured))
        if "control" not in self._off:
            await self._hold("control" not in steps)
        if "swap" in self._steps and "swap" not in steps:
            await self._beside.go_back(self._own)
        self._beside.set_steps(steps)
        self._steps = steps
        logger.info("attached to %s: %s", self._deployment, ", ".join(steps) or "all is off")

    async def _hold(self, is_held: bool) -> None:
        from serving.vllm.server import call_core

        await call_core(self._engine, "osd_speculation", "hold", "true" if is_held else "false")

    def _look_at_models(self, terms: EngineTerms) -> tuple[str, DraftRelease]:
        """The target's fingerprint, and the engine's own draft as a release."""
        target = resolve.fingerprint(resolve.resolve(self._models[0], "the engine's target"))
        draft = resolve.resolve(self._models[1], "the engine's draft")
        files = digests(draft)
        first = terms.first
        is_first = first is not None and first.sha256 == files.get(WEIGHTS)
        return target, DraftRelease(
            version=first.version if first is not None and is_first else NO_VERSION,
            parent=0,
            path=str(draft),
            sha256=files.get(WEIGHTS, ""),
            files=files,
            target_id=target,
            created_at=time.time(),
        )

    def _config(self, terms: EngineTerms) -> Config:
        return Config.model_validate(
            {
                "deployment": self._deployment,
                "serving": {"target": self._models[0], "draft": self._models[1]},
                "speculation": {"k_max": self._k},
                "capture": terms.capture,
            }
        )

    def _here(self, config: Config, terms: EngineTerms, own: DraftRelease) -> Here:
        read = partial(read_over_http, terms.drafts_url, terms.drafts_token)
        fetched = DraftsHere(FetchedDrafts(config.data_path / "fetched"), read)
        return lambda release: release if release.path == own.path else fetched(release)
