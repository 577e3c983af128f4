"""The controller of a deployment: its two loops (`osd/control/loops.py`), and what the control port
shows and commands."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from osd.common.clock import Clock
from osd.config.schema import Config
from osd.control.engine_terms import TermsKeeper
from osd.control.loops import ControlLoops
from osd.control.protocols import Buffer, Feed, Trainer
from osd.observe.history import History
from osd.observe.status import describe_replica
from osd.records import DraftRelease, DraftView, Event, ServiceStatus, conditional_acceptance
from osd.releases.store import ReleaseStore


class Controller:
    """Runs the loops, and answers the control port. One per deployment.

    `trainer` is None where nothing is trained. Then nothing is published or rolled back by itself.

    Example:
        controller = Controller(
            config, registry, releases, History(), trainer, buffer, target_id="9f2c"
        )
        await controller.run()
    """

    def __init__(
        self,
        config: Config,
        registry: Feed,
        releases: ReleaseStore,
        history: History,
        trainer: Trainer | None,
        buffer: Buffer,
        *,
        target_id: str,
        backoff_s: float = 0.5,
        clock: Clock | None = None,
        drafts_url: str = "",
        drafts_token: str = "",
    ) -> None:
        self._config, self._history, self._target_id = config, history, target_id
        self._buffer, self._registry, self._clock = buffer, registry, clock or Clock()
        self._started_at = self._clock.time()
        self._loops = ControlLoops(
            config,
            registry,
            releases,
            history,
            trainer,
            buffer,
            target_id,
            backoff_s,
            self._clock,
            TermsKeeper(config, registry, releases, target_id, drafts_url, drafts_token),
        )
        self._releases, self._tell = self._loops.releases, self._loops.feed.tell

    async def run(self) -> None:
        """Run both loops until one ends. That is an error, raised under the loop's name."""
        await self._loops.run()

    # What it shows

    async def status(self) -> ServiceStatus:
        """What the service is doing now, for `osd status` and the dashboard."""
        config, history, loops = self._config, self._history, self._loops
        current, pinned = await self._releases.current(), await self._releases.pinned()
        version = current.version if current is not None else 0
        tested, accepted = history.served(version)
        rounds = history.rounds()
        return ServiceStatus(
            deployment=config.deployment,
            target=config.serving.target,
            draft=config.serving.draft,
            served_model_name=config.serving.served_model_name or config.serving.target,
            engines=config.serving.engines,
            url=config.front_door_url,
            target_id=self._target_id,
            version=version,
            predicted_alpha=current.predicted_alpha if current is not None else None,
            served_alpha=conditional_acceptance(accepted, tested),
            pinned=pinned,
            paused=self._releases.is_paused,
            training=loops.trainer is not None and config.trainer.enabled,
            phase=loops.phase,
            phase_detail=loops.phase_detail,
            k=config.speculation.k_max,
            mode=config.speculation.mode,
            proposers=tuple(config.speculation.proposers),
            replicas=tuple(
                describe_replica(
                    status,
                    self._releases.wanted_of(status.replica, version),
                    status.replica in loops.replicas.lagging,
                )
                for status in loops.replicas.statuses
            ),
            members=tuple(loops.replicas.members),
            buffer=loops.buffer_stats,
            alarm=loops.alarm,
            redis="away" if loops.is_redis_away else "ok",
            trainer="away" if loops.is_trainer_away else "ok",
            trainer_trouble=loops.trainer_trouble,
            payback=loops.payback.figures(),
            last_round=rounds[-1] if rounds else None,
            num_rounds=history.total("osd_round_total"),
            num_swaps=history.total("osd_swap_total"),
            num_rollbacks=history.total("osd_rollback_total"),
            started_at=self._started_at,
            uptime_s=self._clock.time() - self._started_at,
        )

    async def drafts(self) -> list[DraftView]:
        """Every release in the store, oldest first, with the α that the gate predicted and the α it
        served with."""
        return [self._with_served(draft) for draft in await self._releases.describe()]

    def _with_served(self, draft: DraftView) -> DraftView:
        tested, accepted = self._history.served(draft.version)
        alpha = conditional_acceptance(accepted, tested)
        return replace(draft, served_alpha=alpha, served_tested=tested)

    # What an administrator may do

    async def pause(self) -> None:
        """Stop training and publishing, also after a restart. Serving and rollbacks go on."""
        await self._set_paused(True)

    async def resume(self) -> None:
        """Train and publish again."""
        await self._set_paused(False)

    async def promote(self, version: int) -> DraftRelease:
        """Serve this version."""
        return await self._releases.promote(version)

    async def rollback(self) -> DraftRelease:
        """Serve the parent of what serves now."""
        return await self._releases.rollback()

    async def pin(self, version: int) -> DraftRelease:
        """Serve this version until unpinned."""
        return await self._releases.pin(version)

    async def unpin(self) -> None:
        """Let newer drafts serve again."""
        await self._releases.unpin()

    async def keep(self, version: int) -> DraftRelease:
        """Never prune this version."""
        return await self._releases.keep(version)

    async def set_steps(self, steps: tuple[str, ...]) -> None:
        """Switch on these steps and no others in attached engines."""
        await self._loops.terms.set_steps(steps)
        text = ", ".join(steps) or "all is off"
        await self._tell(Event(at=self._clock.time(), kind="steps", text=f"engines: {text}"))

    async def purge(self, domain: str | None = None, before: float | None = None) -> dict[str, Any]:
        """Delete stored traces of all targets: all, those of a domain, or those that ended before a
        time. The memories of all engines are emptied.

        Returns `{"purged": number of traces, "trained_on": versions}`. The versions are all trained
        drafts in the store: anchors outlive the buffer, so each may have learnt from the traces.
        """
        purge = partial(self._buffer.purge, domain=domain, before=before, all_targets=True)
        try:
            num_purged = await asyncio.to_thread(purge)
        finally:  # some may be gone where it failed
            await asyncio.to_thread(self._registry.note_purge)
        drafts = await self._releases.describe()
        learnt = [draft.version for draft in drafts if draft.num_steps]
        text = f"{num_purged} traces deleted"
        text += f"; drafts that may have learnt from them: {_versions(learnt)}" if learnt else ""
        await self._tell(Event(at=self._clock.time(), kind="purged", text=text))
        return {"purged": num_purged, "trained_on": learnt}

    async def _set_paused(self, paused: bool) -> None:
        await self._releases.set_paused(paused)
        text = "no training, no publishing" if paused else "training and publishing"
        kind = "paused" if paused else "resumed"
        await self._tell(Event(at=self._clock.time(), kind=kind, text=text))


def _versions(versions: list[int]) -> str:
    return ", ".join(f"v{version}" for version in versions)
