"""Drives everything right of the buffer with two short loops.

    feed, heartbeats ─► WATCH ─► history ─► dashboard       buffer ─► TRAIN ─► candidate
                          │                                             │
         should_rollback? └────► releases on disk ◄─────────────────────┘ should_publish?
                                        │
          feed ◄─ swaps, reports ◄─ replicas ◄─ wanted (Redis)

    loop    consumes                  waits for              unblocked by        may
    watch   feed, heartbeats, stats   seconds_between_looks  time alone          roll back
    train   traces in the buffer      min_new_traces, worth  traffic, `resume`   publish

Whether a round is worth it, `osd/control/drift.py` tells. A rollback never waits for one: the replay it asks the
trainer for runs beside the watch loop. The release store on disk decides what is current
(`osd/control/release_manager.py` makes the changes); `wanted` in Redis follows, and is written again whenever it was
lost. Neither a dead trainer, nor Redis away, nor a full disk ends a loop: each is said once, and tried again with
growing pauses. Any other end of a loop ends the controller.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from osd.common.backoff import Backoff
from osd.common.clock import Clock
from osd.config.schema import Config
from osd.control import policy
from osd.control.drift import Appetite
from osd.control.protocols import Buffer, Feed, Trainer
from osd.control.release_manager import Drafts
from osd.control.rollback import Judge
from osd.errors import ReleaseError, ReplayBufferError
from osd.exchange.registry import FeedRecord
from osd.observe.history import History
from osd.observe.status import describe_replica
from osd.records import (
    BufferStats,
    DraftRelease,
    Event,
    Health,
    MetricPoint,
    ReplicaStatus,
    conditional_acceptance,
)
from osd.releases.store import ReleaseStore

log = logging.getLogger(__name__)
T = TypeVar("T")

LAGGING_AFTER_S = 15.0
"""A replica that serves another version than the wanted one for so long is lagging."""
FEED_CHUNK = 1000
SECONDS_BETWEEN_FORGETTING = 60.0
"""Each time the server may write its append-only file anew."""


class Controller:
    """The watch loop, the train loop, and what an administrator may do. One per deployment.

    `trainer` is None where nothing is trained: then nothing is published, and no draft is judged live.

    Example:
        controller = Controller(config, registry, releases, History(), trainer, buffer, target_id="9f2c")
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
    ) -> None:
        self.config, self.history, self.target_id = config, history, target_id
        self._clock = clock = clock or Clock()
        self._appetite = Appetite(config.trainer, target_id, since=releases.began_at(target_id))
        self._told_resting: bool | None = None
        """What was last said of it; None until the feed was read for the first time."""
        self._registry, self._releases = registry, releases
        self._trainer, self._buffer = trainer, buffer
        self._changes = Drafts(config, registry, releases, target_id, self._tell, clock)
        self._started_at = self._clock.time()
        self._cursor = "0"
        self._replicas: list[ReplicaStatus] = []
        self._buffer_stats: BufferStats | None = None
        self._behind_since: dict[str, float] = {}
        self._lagging: set[str] = set()
        self._forget_at = -math.inf
        self._phase, self._phase_detail = "waiting", ""
        self._waiting_since: float | None = None
        """When the first trace that is still new was seen."""
        self._redis_trouble, self._disk_trouble = Backoff(backoff_s), Backoff(backoff_s)
        self._trainer_trouble = Backoff(backoff_s)
        self._has_trainer_failed = False
        """Whether that was said, and is not over: while Redis is away, the trainer has not failed."""
        self._judge = self._make_judge(trainer, 10 * backoff_s) if trainer else None

    async def run(self) -> None:
        """Both loops until one ends, which is an error: it is raised under the loop's name."""
        loops = {"watch": self._watch_loop()} | ({"train": self._train_loop(self._trainer)} if self._trainer else {})
        tasks = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = done.pop()
            raise RuntimeError(f"the controller's {ended.get_name()} loop ended") from ended.exception()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._judge is not None:
                await self._judge.close()

    # Watch

    async def _watch_loop(self) -> None:
        while True:
            try:
                await self._look()
            except ReplayBufferError as error:
                self._observe_health(is_redis_up=False)
                await self._redis_trouble.pause(f"history stands still: {error}", log)
            except ReleaseError as error:
                self._observe_health(is_redis_up=True)
                await self._disk_trouble.pause(str(error), log)
            else:
                self._observe_health(is_redis_up=True)
                self._redis_trouble.over(log)
                self._disk_trouble.over(log)
            await self._clock.sleep(self.config.control.seconds_between_looks)

    async def _look(self) -> None:
        await self._read_feed()
        await self._tell_appetite()
        await self._observe()
        await self._changes.restore_wanted()
        await self._forget_old()
        if (current := await self._changes.current()) is not None:
            await self._note_lagging(current)
            if self._judge is not None:
                await self._judge.look(current)

    async def _read_feed(self) -> None:
        while True:
            found = await asyncio.to_thread(self._registry.read, self._cursor, FEED_CHUNK)
            for self._cursor, record in found:
                self._hear(record)
            if len(found) < FEED_CHUNK:
                return

    def _hear(self, record: FeedRecord) -> None:
        self.history.add(record)
        self._appetite.add(record)

    async def _tell_appetite(self) -> None:
        """Say when training begins to rest, and why it rests no longer."""
        told, resting = self._told_resting, self._appetite.is_resting
        self._told_resting = resting
        if told is None or told == resting:
            return
        kind, text = ("rests" if resting else "learns"), self._appetite.decide(self._clock.time()).reason
        await self._tell(Event(at=self._clock.time(), kind=kind, text=text))

    async def _observe(self) -> None:
        self._replicas = await asyncio.to_thread(self._registry.replicas)
        self._buffer_stats = await asyncio.to_thread(self._buffer.stats)
        self.history.observe(self._replicas, self._buffer_stats)

    def _observe_health(self, *, is_redis_up: bool) -> None:
        is_training_wanted = self.config.trainer.enabled and not self._changes.is_paused
        self.history.observe_health(
            Health(
                is_redis_up=is_redis_up,
                is_trainer_up=not (is_training_wanted and self._trainer_trouble.num_failures),
                is_alarmed=self._judge is not None and bool(self._judge.alarm),
                lagging=tuple(sorted(self._lagging)),
            )
        )

    async def _note_lagging(self, current: DraftRelease) -> None:
        now = self._clock.monotonic()
        behind = {status.replica: status for status in self._replicas if status.version != current.version}
        self._behind_since = {name: self._behind_since.get(name, now) for name in behind}
        lagging = {name for name, since in self._behind_since.items() if now - since >= LAGGING_AFTER_S}
        for name in sorted(lagging - self._lagging):
            text = f"{name} still serves v{behind[name].version}, wanted is v{current.version}"
            await self._tell(Event(at=self._clock.time(), kind="lagging", text=text, version=current.version))
        self._lagging = lagging

    async def _forget_old(self) -> None:
        """Delete traces beyond `buffer.max_age_seconds`, a twentieth of that too late at most."""
        max_age, now = self.config.buffer.max_age_seconds, self._clock.monotonic()
        if max_age is not None and now >= self._forget_at:
            self._forget_at = now + SECONDS_BETWEEN_FORGETTING  # soon again, should it fail
            await asyncio.to_thread(partial(self._buffer.purge, before=self._clock.time() - max_age, all_targets=True))
            self._forget_at = now + max(SECONDS_BETWEEN_FORGETTING, max_age / 20)

    def _make_judge(self, trainer: Trainer, patience_s: float) -> Judge:
        def replay(versions: list[DraftRelease], num_traces: int) -> Awaitable[dict[int, float] | None]:
            return self._ask(lambda: trainer.evaluate_releases(versions, num_traces))

        return Judge(self.config.gate, self.history, self._changes, replay, self._tell, self._clock, patience_s)

    # Train

    async def _train_loop(self, trainer: Trainer) -> None:
        while True:
            try:
                if await self._is_round_due(trainer):
                    await self._run_round(trainer)
            except ReleaseError as error:
                await self._disk_trouble.pause(str(error), log)
            await self._clock.sleep(self.config.control.seconds_between_looks)

    async def _is_round_due(self, trainer: Trainer) -> bool:
        if self._changes.is_paused or not self.config.trainer.enabled:
            return False
        num_new = await self._ask(trainer.num_new_traces)
        self._phase_detail = f"{num_new or 0} of {self.config.trainer.min_new_traces} new traces"
        if not num_new:
            self._waiting_since = None
            return False
        if self._told_resting is None:
            return False  # what was before is not known yet
        appetite = self._appetite.decide(self._clock.time())
        if not appetite.ok:
            self._phase_detail, self._waiting_since = appetite.reason, None
            return False
        now = self._clock.monotonic()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        return policy.should_train(num_new, now - self._waiting_since, self.config.trainer, self._changes.is_paused)

    async def _run_round(self, trainer: Trainer) -> None:
        found = await self._changes.base()
        if found is None:
            return
        base, line = found
        self._phase, self._phase_detail = "training", f"from v{base.version}"
        self._waiting_since = None
        outcome = await self._ask(lambda: trainer.run_round(base, line))
        self._phase, self._phase_detail = "waiting", ""
        if outcome is not None:
            serving = {status.version for status in self._replicas}
            await self._changes.conclude(outcome, serving)

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """The trainer's answer; None after an error, which is said once, followed by a growing pause."""
        try:
            answer = await call()
        except Exception as error:  # noqa: BLE001  whatever ended the trainer: serving goes on, Ray restarts it
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            if not isinstance(error, ReplayBufferError):
                await self._tell_trainer_failed(text)
            await self._trainer_trouble.pause(f"trainer: {text}", log)
            return None
        if self._trainer_trouble.over(log) and self._has_trainer_failed:
            self._has_trainer_failed = False
            await self._tell(Event(at=self._clock.time(), kind="trainer_back", text="the trainer answers again"))
        return answer

    async def _tell_trainer_failed(self, text: str) -> None:
        """The first of several failures in a row is an event, each is counted."""
        now = self._clock.time()
        if not self._has_trainer_failed:
            self._has_trainer_failed = True
            await self._tell(Event(at=now, kind="trainer_failed", text=text))
        await self._tell(MetricPoint(at=now, name="osd_trainer_failures_total", value=1))

    async def _tell(self, *records: FeedRecord) -> None:
        """To the feed, from where they reach the history; straight to the history when Redis is away."""
        for record in records:
            if isinstance(record, Event):
                log.info("%s: %s", record.kind, record.text)
        try:
            await asyncio.to_thread(self._registry.publish, *records)
        except ReplayBufferError:
            for record in records:
                self._hear(record)

    # The control port

    async def status(self) -> dict[str, Any]:
        """What the service is doing now, for `osd status` and the dashboard."""
        current, pinned = await self._changes.current(), await self._changes.pinned()
        version = current.version if current is not None else 0
        rounds = self.history.rounds()
        return {
            "deployment": self.config.deployment,
            "target": self.config.serving.target,
            "draft": self.config.serving.draft,
            "served_model_name": self.config.serving.served_model_name or self.config.serving.target,
            "target_id": self.target_id,
            "version": version,
            "predicted_alpha": policy.predicted_alpha(current) if current is not None else None,
            "served_alpha": conditional_acceptance(*self.history.served(version)[::-1]),
            "pinned": pinned,
            "paused": self._changes.is_paused,
            "training": self._trainer is not None and self.config.trainer.enabled,
            "phase": self._phase,
            "phase_detail": self._phase_detail,
            "k": self.config.speculation.k_max,
            "mode": self.config.speculation.mode,
            "proposers": self.config.speculation.proposers,
            "replicas": [describe_replica(s, version, s.replica in self._lagging) for s in self._replicas],
            "buffer": self._buffer_stats,
            "alarm": self._judge.alarm if self._judge is not None else "",
            "redis": "away" if self._redis_trouble.num_failures else "ok",
            "trainer": "away" if self._trainer_trouble.num_failures else "ok",
            "last_round": rounds[-1] if rounds else None,
            "num_rounds": self.history.total("osd_round_total"),
            "num_swaps": self.history.total("osd_swap_total"),
            "num_rollbacks": self.history.total("osd_rollback_total"),
            "started_at": self._started_at,
            "uptime_s": self._clock.time() - self._started_at,
        }

    async def drafts(self) -> list[dict[str, Any]]:
        """Every release in the store, oldest first, with the α the gate predicted and the α it served with."""
        return [draft | self._alphas(draft) for draft in await self._changes.describe()]

    def _alphas(self, draft: dict[str, Any]) -> dict[str, Any]:
        """`predicted_alpha` by the gate's replay and `served_alpha` in the history kept; None where there is none."""
        tested, accepted = self.history.served(draft["version"])
        return {
            "predicted_alpha": draft["eval"]["alpha_candidate"] if draft["eval"] else None,
            "served_alpha": conditional_acceptance(accepted, tested),
            "served_tested": tested,
        }

    async def pause(self) -> None:
        """No training and no publishing, also after a restart. Serving, and rolling back, go on."""
        await self._set_paused(True)

    async def resume(self) -> None:
        """Train and publish again."""
        await self._set_paused(False)

    async def promote(self, version: int) -> DraftRelease:
        """Serve this version."""
        return await self._changes.promote(version)

    async def rollback(self) -> DraftRelease:
        """Serve the parent of what serves now."""
        return await self._changes.rollback()

    async def pin(self, version: int) -> DraftRelease:
        """Serve this version until unpinned."""
        return await self._changes.pin(version)

    async def unpin(self) -> None:
        """Let newer drafts serve again."""
        await self._changes.unpin()

    async def keep(self, version: int) -> DraftRelease:
        """Never prune this version."""
        return await self._changes.keep(version)

    async def purge(self, domain: str | None = None, before: float | None = None) -> dict[str, Any]:
        """Delete stored traces, of all targets: all, or of one domain, or that ended before a time.

        `{"purged": how many, "trained_on": versions that may have learnt from them}`: every trained draft in the store,
        since anchors remember what the buffer has long let go of.
        """
        purge = partial(self._buffer.purge, domain=domain, before=before, all_targets=True)
        num_purged = await asyncio.to_thread(purge)
        drafts = await self._changes.describe()
        learnt = [d["version"] for d in drafts if d["num_steps"]]
        text = f"{num_purged} traces deleted"
        text += f"; drafts that may have learnt from them: {_versions(learnt)}" if learnt else ""
        await self._tell(Event(at=self._clock.time(), kind="purged", text=text))
        return {"purged": num_purged, "trained_on": learnt}

    async def _set_paused(self, paused: bool) -> None:
        await self._changes.set_paused(paused)
        text = "no training, no publishing" if paused else "training and publishing"
        await self._tell(Event(at=self._clock.time(), kind="paused" if paused else "resumed", text=text))


def _versions(versions: list[int]) -> str:
    return ", ".join(f"v{version}" for version in versions)
