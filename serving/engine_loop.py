"""What runs beside one engine: it installs the hooks, then pulls drafts and reports.

    start   hooks in every worker ─► what is off is noted ─► step times, where k is controlled
    run     `DraftPuller.look`, again and again

It talks to the engine through vLLM's own calls to workers and core. Nothing here touches a request.
"""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from typing import Any, Protocol

from osd.config.schema import Config
from osd.exchange.registry import Registry
from osd.records import DraftRelease
from serving.activity import Activity
from serving.pull import DraftPuller, Here, as_it_lies
from serving.speculation.client import SpeculationClient
from serving.speculation.memory.warm import Recent, Warming
from serving.speculation.profile import profile_path
from serving.swap.ranks import Ranks
from serving.vllm import parts
from serving.vllm.server import call_core
from serving.vllm.undrafted import permit_undrafted
from serving.worker import start_settings

logger = logging.getLogger(__name__)

MAX_PAUSE = 30.0
SECONDS_TO_WARM = 5.0
"""How long an engine's first request may wait for what was served before; the rest comes while it
serves."""


class EngineLoop:
    """Of an `AsyncLLM` whose workers have the extension, started with `release`.

    `registry` None: nothing is pulled and reported. `heard`: whether steps are counted and
    captured from the start (`WorkerExtension.osd_switch`). `off`, part that does not work -> why,
    is written to; the other arguments are those of `serving.replica.Replica`.
    """

    def __init__(
        self,
        engine: Any,
        config: Config,
        *,
        name: str,
        url: str,
        release: DraftRelease,
        target_id: str,
        registry: Registry | None,
        sink: dict[str, Any],
        is_controlled: bool,
        activity: Activity,
        here: Here = as_it_lies,
        off: dict[str, str] | None = None,
        awake_note: str = "",
        heard: tuple[bool, bool] = (True, True),
        recent: Recent | None = None,
    ) -> None:
        self._engine, self._config = engine, config
        self._name, self._url = name, url
        self._release, self._target_id = release, target_id
        self._registry, self._sink = registry, sink
        self._is_controlled, self._awake_note = is_controlled, awake_note
        self._activity, self._here, self._heard = activity, here, heard
        self._recent = recent
        self._off = {} if off is None else off
        self._puller: DraftPuller | None = None
        self.speculation_client: SpeculationClient | None = None

    async def start(self, *, may_measure: bool = True, permits: bool = True) -> None:
        """Install the hooks. `may_measure`: take the engine's time to measure its steps, which is
        best done before its first request. `permits`: let requests pass that are not drafted for.

        Raises `SwapError` where the hooks are refused.
        """
        k = self._config.speculation.k_max
        settings = start_settings(
            self._release,
            self._config.capture,
            k=k,
            sink=self._sink,
            target_id=self._target_id,
            is_controlled=self._is_controlled,
            awake_note=self._awake_note,
            is_observed=self._heard[0],
            is_captured=self._heard[1],
        )
        ranks = Ranks(self._call, is_asleep=self._is_asleep)
        await ranks.start(settings)
        for off in await self._call("osd_parts_off"):
            self._off |= json.loads(off)
        if "sleep" in self._off:
            await self._call("osd_stay_awake")
        if "memory" not in self._off:
            await self._call("osd_begin_to_ask")
        if permits and (problem := await permit_undrafted(self._engine)):
            parts.switch_off(self._off, "undrafted", problem)
        if self._is_controlled:
            utility = partial(call_core, self._engine)
            self.speculation_client = SpeculationClient(utility, self._config)
            if may_measure:
                path = profile_path(self._config, self._target_id, self._release.path)
                await self.speculation_client.prepare(self._engine, path)
            # Take the counters of the measurement out of the first report.
            await ranks.report(self._name, self._release.draft)
        if self._registry is not None:
            self._puller = DraftPuller(
                self._registry,
                ranks,
                self._activity,
                name=self._name,
                url=self._url,
                k=k,
                release=self._release,
                speculation_client=self.speculation_client,
                warming=self._warming(),
                off=self._off,
                here=self._here,
            )
            if may_measure:
                await self._puller.warm(SECONDS_TO_WARM)

    def _warming(self) -> Warming | None:
        """None where nothing is remembered of requests."""
        is_kept = self._config.capture.enabled and self._heard[1]
        if self._recent is None or self.speculation_client is None or not is_kept:
            return None
        assert self._registry is not None
        return Warming(self._recent, self.speculation_client, self._registry, self._config)

    @property
    def seconds_between_looks(self) -> float:
        return self._config.serving.seconds_between_polls

    async def look(self) -> None:
        """Swap if another draft is wanted, and report if a report is due."""
        if self._puller is not None:
            await self._puller.look()

    async def finish(self) -> None:
        """Send what has been counted. Nothing is served any more."""
        if self._puller is not None:
            await self._puller.finish()

    def set_steps(self, steps: tuple[str, ...]) -> None:
        """What is switched on from now on."""
        if self._puller is not None:
            self._puller.steps = steps

    async def go_back(self, release: DraftRelease) -> bool:
        """Serve a draft that is not the wanted one. Whether it went well."""
        return self._puller is not None and await self._puller.turn_to(release)

    async def _is_asleep(self) -> bool:
        return bool(await self._engine.is_sleeping())

    async def _call(self, method: str, *args: Any) -> list[str]:
        """Call the worker extension on all ranks. Returns their answers in order."""
        answers: list[str] = await self._engine.collective_rpc(method, args=args)
        return answers


class Beside(Protocol):
    """What is done beside an engine, again and again."""

    @property
    def seconds_between_looks(self) -> float: ...
    async def look(self) -> None: ...


async def look_after(engine: Any, beside: Beside | None) -> None:
    """Ends only when the engine is dead. Whatever else goes wrong here, requests are still
    answered."""
    pause = usual = beside.seconds_between_looks if beside is not None else 1.0
    while not engine.errored:
        try:
            if beside is not None:
                await beside.look()
            pause = usual
        except Exception:
            pause = min(2 * pause, MAX_PAUSE)
            logger.exception(
                "pulling drafts failed; serving goes on, the next try is in %.1f s", pause
            )
        await asyncio.sleep(pause)
    raise RuntimeError("the engine died")
