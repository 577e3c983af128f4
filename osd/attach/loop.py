"""What an attached engine does beside serving: it follows the deployment's terms.

    terms in Redis ──► observe   the workers' hooks count accepted drafts
                       capture   they make traces, too
                       swap      the wanted draft serves; off: the one the engine was started with
                       control   k is decided step by step; off: vLLM's own way

Until terms come, and with everything switched off, the engine is as vLLM started it. While Redis is
away, the last terms hold. What fails is tried again with the next look.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from buffers.recent import recent
from osd.attach.fetch import read_over_http
from osd.common.model_directory import WEIGHTS, digests
from osd.config.schema import CaptureConfig, Config
from osd.errors import OSDError
from osd.exchange.registry import Registry
from osd.exchange.transfer import DraftsHere, FetchedDrafts
from osd.models import resolve
from osd.records import NO_VERSION, DraftRelease, EngineTerms
from serving.activity import Activity
from serving.engine_loop import EngineLoop
from serving.pull import Here
from serving.vllm.server import call_core

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS, MAX_PAUSE = 1.0, 30.0
"""Seconds until the deployment is asked again; after each failure in a row twice as many."""


@dataclass(frozen=True, slots=True)
class Models:
    """Target and draft as vLLM was given them."""

    target: str
    draft: str
    target_revision: str | None = None
    draft_revision: str | None = None
    cache_dir: str | None = None


class AttachedLoop:
    """Beside one engine. `built` is what `osd/attach/arguments.py` left in its configuration."""

    def __init__(
        self,
        engine: Any,
        registry: Registry,
        *,
        redis_url: str,
        deployment: str,
        name: str,
        url: str,
        models: Models,
        built: dict[str, Any],
        activity: Activity,
        permits: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._registry, self._activity = engine, registry, activity
        self._redis_url, self._deployment = redis_url, deployment
        self._name, self._url, self._models = name, url, models
        self._k, self._off, self._permits = int(built["k"]), dict(built["off"]), permits
        self._draft_sample_method = str(built.get("draft_sample_method", "greedy"))
        self._clock = clock
        self.is_serving = False
        """Whether requests come, so that the engine's time is theirs."""
        self._terms: EngineTerms | None = None
        """Those that are followed."""
        self._newest: EngineTerms | None = None
        self._look_at, self._pause = 0.0, SECONDS_BETWEEN_LOOKS
        self._has_begun = asyncio.Event()
        self._own: DraftRelease | None = None
        """The draft that the engine was started with."""
        self._target_id = ""
        self._beside: EngineLoop | None = None
        self._is_swapped = False
        """Whether the engine may serve another draft than its own."""

    @property
    def seconds_between_looks(self) -> float:
        return 0.25

    def begun_task(self) -> asyncio.Task[bool]:
        """Ends when the deployment was asked for the first time, and what it wants is installed."""
        return asyncio.create_task(self._has_begun.wait(), name="osd-begun")

    async def look(self) -> None:
        """Follow the terms, then do what is switched on: also where newer terms cannot be
        followed, since the heartbeat is among it."""
        try:
            if self._clock() >= self._look_at:
                self._look_at = self._clock() + self._pause
                await self._ask()
                self._pause = SECONDS_BETWEEN_LOOKS
        except Exception:
            if self._beside is None:
                raise
            self._pause = min(2 * self._pause, MAX_PAUSE)
            logger.exception(
                "what %s wants could not be followed; the engine goes on as it is, and it is tried "
                "again",
                self._deployment,
            )
        finally:
            self._has_begun.set()
        if self._beside is not None:
            await self._beside.look()

    async def _ask(self) -> None:
        try:
            terms = await asyncio.to_thread(self._registry.terms)
        except OSDError:
            return  # Redis is away: the last terms hold
        if terms is None or terms == self._terms:
            return
        self._newest = terms
        if self._own is None:
            found = await asyncio.to_thread(self._look_at_models, terms)
            self._target_id, self._own = found
        own: DraftRelease = self._own
        steps = terms.steps if self._target_id == terms.target_id else ()
        if terms.draft_sample_method != self._draft_sample_method:
            steps = ()
            logger.error(
                "not attached to %s: its gate judges drafts by draft_sample_method=%s, and this "
                "engine has %s; start it with the one, or the deployment with the other "
                "(speculation.draft_sample_method)",
                self._deployment,
                terms.draft_sample_method,
                self._draft_sample_method,
            )
        if self._target_id != terms.target_id:
            logger.error(
                "not attached to %s: its target is %s, and this engine serves another (%s, %s)",
                self._deployment,
                terms.target_id,
                self._models.target,
                self._target_id,
            )
        if self._beside is None and steps:
            self._beside = await self._begin(terms, own)
        if self._beside is not None:
            await self._follow(terms, steps, self._beside, own)
        self._terms = terms

    async def _begin(self, terms: EngineTerms, own: DraftRelease) -> EngineLoop:
        """Install the hooks, deaf to what is switched off."""
        config = self._config(terms)
        is_controlled = "control" not in self._off
        sink = {
            "url": self._redis_url,
            "deployment": self._deployment,
            "target_id": self._target_id,
            **terms.buffer,
        }
        beside = EngineLoop(
            self._engine,
            config,
            name=self._name,
            url=self._url,
            release=own,
            target_id=self._target_id,
            registry=self._registry,
            sink=sink,
            recent=recent(sink),
            is_controlled=is_controlled,
            activity=self._activity,
            here=self._here(config, own),
            off=self._off,
            awake_note=str(config.data_path / f"{quote(self._name, safe='')}.awake"),
            heard=heard(terms.steps, CaptureConfig.model_validate(terms.capture)),
        )
        measures = is_controlled and "control" in terms.steps and not self.is_serving
        if measures:
            await self._hold(False)
        try:
            await beside.start(may_measure=measures, permits=self._permits)
        except BaseException:
            if measures:
                await self._hold(True)
            raise
        return beside

    async def _follow(
        self, terms: EngineTerms, steps: tuple[str, ...], beside: EngineLoop, own: DraftRelease
    ) -> None:
        """Switch on and off. Raises where the engine does not obey."""
        capture = CaptureConfig.model_validate(terms.capture)
        switches = (*heard(steps, capture), capture.request_fraction)
        answers = await self._engine.collective_rpc("osd_switch", args=switches)
        if error := next(filter(None, (json.loads(a).get("error") for a in answers)), ""):
            raise RuntimeError(f"what is heard of the engine could not be switched: {error}")
        if "control" not in self._off:
            kept = capture.request_fraction if switches[1] else 0.0
            await call_core(self._engine, "osd_speculation", "keep", json.dumps(kept))
            await self._hold("control" not in steps)
        beside.set_steps(steps)
        if "swap" in steps:
            self._is_swapped = True
        elif self._is_swapped:
            if not await beside.go_back(own):
                raise RuntimeError("the engine's own draft could not be put back")
            self._is_swapped = False
        logger.info("attached to %s: %s", self._deployment, ", ".join(steps) or "all is off")

    async def _hold(self, is_held: bool) -> None:
        await call_core(self._engine, "osd_speculation", "hold", json.dumps(is_held))

    def _look_at_models(self, terms: EngineTerms) -> tuple[str, DraftRelease]:
        """The target's fingerprint, and the engine's own draft as a release."""
        given = self._models
        target = resolve.cached(given.target, given.target_revision, given.cache_dir)
        draft = resolve.cached(given.draft, given.draft_revision, given.cache_dir)
        files, target_id = digests(draft), resolve.fingerprint(target)
        first = terms.first
        is_first = first is not None and first.sha256 == files.get(WEIGHTS)
        return target_id, DraftRelease(
            version=first.version if first is not None and is_first else NO_VERSION,
            parent=0,
            path=str(draft),
            sha256=files.get(WEIGHTS, ""),
            files=files,
            target_id=target_id,
            created_at=time.time(),
        )

    def _config(self, terms: EngineTerms) -> Config:
        return Config.model_validate(
            {
                "deployment": self._deployment,
                "serving": {"target": self._models.target, "draft": self._models.draft},
                "speculation": {"k_max": self._k},
                "capture": terms.capture | {"enabled": True},  # which `heard` decides
            }
        )

    def _here(self, config: Config, own: DraftRelease) -> Here:
        """Where the control port is, and its token, are those of the newest terms."""

        def read(version: int, name: str, offset: int, size: int) -> bytes:
            assert self._newest is not None
            where, token = self._newest.drafts_url, self._newest.drafts_token
            return read_over_http(where, token, version, name, offset, size)

        fetched = DraftsHere(FetchedDrafts(config.data_path / "fetched"), read)
        return lambda release: release if release.path == own.path else fetched(release)


def heard(steps: tuple[str, ...], capture: CaptureConfig) -> tuple[bool, bool]:
    """Whether the engine's steps are counted, and captured."""
    is_captured = "capture" in steps and capture.enabled
    return is_captured or "observe" in steps or "control" in steps, is_captured
