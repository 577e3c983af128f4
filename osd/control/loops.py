"""The two loops that drive everything right of the buffer.

    feed, heartbeats ─► WATCH ─► history ─► dashboard       buffer ─► TRAIN ─► candidate
                          │                                             │
         should_rollback? └────► releases on disk ◄─────────────────────┘ should_publish?
                                        │
          feed ◄─ swaps, reports ◄─ replicas ◄─ wanted (Redis)

    loop    consumes                  waits for              unblocked by        may
    watch   feed, heartbeats, stats   seconds_between_looks  time alone          roll back
    train   traces in the buffer      min_new_traces, worth  traffic, `resume`   publish, recall

The drift detector decides whether a round may bring something (`osd/control/drift.py`), the payback
meter whether that is worth what it takes (`osd/control/payback.py`); how much a round replays
follows from the time there is (`osd/control/effort.py`). Between rounds an earlier draft may serve
again, whose traffic has returned (`osd/control/recall.py`). A rollback does not wait for a round:
the trainer's replay runs beside the watch loop. The release store on disk decides what is current,
and `wanted` in Redis follows it. Redis away, a full disk or a dead trainer ends no loop: each
trouble is said once, then tried again with growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from osd.common.backoff import Outage
from osd.common.clock import Clock
from osd.config.schema import Config
from osd.control import policy
from osd.control.canary import CanaryWatch
from osd.control.drift import DriftDetector
from osd.control.effort import Effort
from osd.control.engine_terms import TermsKeeper
from osd.control.feed_client import FeedClient
from osd.control.payback import PaybackMeter
from osd.control.protocols import Buffer, Feed, Trainer
from osd.control.recall import Recall
from osd.control.release_manager import ReleaseManager, as_it_lies
from osd.control.replica_watch import ReplicaWatch
from osd.control.rollback import RollbackMonitor
from osd.control.trace_expiry import TraceExpiry
from osd.control.trainer_link import TrainerLink
from osd.errors import ReleaseError, ReplayBufferError
from osd.observe.history import History
from osd.records import BufferStats, DraftRelease, EarlierReport, Event, Health
from osd.releases.store import ReleaseStore

log = logging.getLogger(__name__)


class ControlLoops:
    """The watch loop, the train loop, and the parts they share. One per deployment.

    `trainer` is None where nothing is trained. Then there is no train loop, and no draft is rolled
    back by itself.
    """

    def __init__(
        self,
        config: Config,
        registry: Feed,
        releases: ReleaseStore,
        history: History,
        trainer: Trainer | None,
        buffer: Buffer,
        target_id: str,
        backoff_s: float,
        clock: Clock,
        terms: TermsKeeper,
    ) -> None:
        self.terms = terms
        self._config, self._history, self._buffer, self._clock = config, history, buffer, clock
        self._detector = DriftDetector(
            config.trainer, target_id, since=releases.began_at(target_id)
        )
        self.payback, self._effort = PaybackMeter(config.trainer), Effort(config.trainer)
        self.feed = FeedClient(registry, history, self._detector)
        tell = self.feed.tell
        self.replicas = ReplicaWatch(registry, tell, clock)
        collect = trainer.candidate if trainer else as_it_lies
        self.releases = ReleaseManager(config, registry, releases, target_id, tell, clock, collect)
        self.trainer = TrainerLink(trainer, tell, clock, backoff_s) if trainer else None
        self._monitor = self._make_monitor(self.trainer, 10 * backoff_s) if self.trainer else None
        self._canary = CanaryWatch(config.gate, history, self.releases, clock)
        self._expiry = TraceExpiry(buffer, config.buffer.max_age_seconds, clock)
        self._redis_outage, self._disk_outage = Outage(backoff_s), Outage(backoff_s)
        self._train_outage = Outage(backoff_s)
        self._is_resting: bool | None = None
        """Whether training rests, as of the last look; None before the feed was read for the first
        time."""
        self._num_wakes = 0
        self._waiting_since: float | None = None
        """When the first trace that is still new was seen."""
        self.buffer_stats: BufferStats | None = None
        self.phase, self.phase_detail = "waiting", ""

    def _make_monitor(self, trainer: TrainerLink, patience_s: float) -> RollbackMonitor:
        return RollbackMonitor(
            self._config.gate,
            self._history,
            self.releases,
            trainer.evaluate_releases,
            self.feed.tell,
            self._clock,
            patience_s,
        )

    def _make_recall(self, trainer: TrainerLink) -> Recall:
        return Recall(
            self._config.gate,
            self.releases,
            self._detector,
            lambda version: self._history.served(version)[0],
            partial(self._compare, trainer),
            self._clock,
        )

    @property
    def alarm(self) -> str:
        """Why the engine seems to run something else than the serving draft; "" when it does
        not."""
        return self._monitor.alarm if self._monitor is not None else ""

    @property
    def is_redis_away(self) -> bool:
        return self._redis_outage.num_failures > 0

    @property
    def is_trainer_away(self) -> bool:
        return self.trainer is not None and self.trainer.is_away

    @property
    def trainer_trouble(self) -> str:
        """Why it is away; "" where it is not, or only Redis is."""
        return self.trainer.trouble if self.trainer is not None else ""

    async def run(self) -> None:
        """Run both loops, and the question where the trainer is, until one ends. That is an error,
        raised under the loop's name."""
        loops = {"watch": self._watch_loop()}
        if self.trainer:
            loops |= {"train": self._train_loop(self.trainer), "trainer": self.trainer.watch()}
        tasks = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = done.pop()
            raise RuntimeError(
                f"the controller's {ended.get_name()} loop ended"
            ) from ended.exception()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._monitor is not None:
                await self._monitor.close()

    # Watch

    async def _watch_loop(self) -> None:
        while True:
            try:
                await self._look()
            except ReplayBufferError as error:
                self.replicas.note_outage()
                self._observe_health(is_redis_up=False)
                await self._redis_outage.pause(f"history stands still: {error}", log)
            except ReleaseError as error:
                self._observe_health(is_redis_up=True)
                await self._disk_outage.pause(str(error), log)
            else:
                self._observe_health(is_redis_up=True)
                self._redis_outage.over(log)
                self._disk_outage.over(log)
            await self._clock.sleep(self._config.control.seconds_between_looks)

    async def _look(self) -> None:
        await self.feed.catch_up()
        self._weigh_anew()
        self._detector.note_price_rest(is_on=self.payback.is_resting)
        await self._tell_resting()
        await self._observe()
        await self.releases.restore_wanted()
        await self.terms.restore()
        await self._expiry.delete_old()
        if (current := await self.releases.current()) is not None:
            await self.replicas.note_lagging(current, self.releases.wanted_of)
            names = [status.replica for status in self.replicas.statuses]
            if self._monitor is not None:
                await self._monitor.look(current, names)
            replicas = self.replicas
            await self._canary.look(replicas.lasting, self._monitor, replicas.draining)

    def _weigh_anew(self) -> None:
        """Where there is another draft to improve, or other traffic, what rounds brought before
        says nothing of the next one."""
        if self._detector.num_wakes > self._num_wakes:
            self._num_wakes = self._detector.num_wakes
            self.payback.renew(self._clock.time(), has_rested=bool(self._is_resting))

    async def _tell_resting(self) -> None:
        """Say when training begins to rest, and why it goes on."""
        before, now = self._is_resting, self._clock.time()
        does_not_pay = self.payback.is_resting or self.payback.is_waiting(now)
        is_resting = self._is_resting = self._detector.is_resting or does_not_pay
        if is_resting:
            self._effort.rest()
        if before is None or before == is_resting:
            return
        kind = "rests" if is_resting else "learns"
        await self.feed.tell(Event(at=now, kind=kind, text=self._is_worth_it(now).reason))

    def _is_worth_it(self, now: float) -> policy.Decision:
        """Whether a round may bring something, and pays."""
        found, pays = self._detector.decide(now), self.payback.decide(now)
        if not found.ok:
            return found
        # Where both agree, why the last rest ended tells more.
        return found if pays.ok and self._detector.woken_by else pays

    async def _observe(self) -> None:
        await self._make_room()
        await self.replicas.refresh()
        self.buffer_stats = await asyncio.to_thread(self._buffer.stats)
        is_training, now = self.phase == "training", self._clock.time()
        self.payback.look(self.replicas.statuses, is_training=is_training, now=now)
        self._history.observe(self.replicas.statuses, self.buffer_stats, now)

    async def _make_room(self) -> None:
        if num := await asyncio.to_thread(self._buffer.make_room):
            log.warning("the memory of Redis is full: the oldest %d traces were deleted", num)

    def _observe_health(self, *, is_redis_up: bool) -> None:
        is_training_wanted = self._config.trainer.enabled and not self.releases.is_paused
        self._history.observe_health(
            Health(
                is_redis_up=is_redis_up,
                is_trainer_up=not (is_training_wanted and self.is_trainer_away),
                is_alarmed=bool(self.alarm),
                lagging=tuple(sorted(self.replicas.lagging)),
                num_wanted=self.replicas.num_wanted,
                payback=self.payback.figures(),
            )
        )

    # Train

    async def _train_loop(self, trainer: TrainerLink) -> None:
        recall = self._make_recall(trainer)
        while True:
            try:
                num_new = await self._num_new_traces(trainer)
                is_due = bool(num_new) and self._is_round_due(num_new)
                await self._look_back(recall, num_new)
                if is_due:
                    await self._run_round(trainer, recall, num_new)
                    self._train_outage.over(log)
            except ReleaseError as error:
                await self._train_outage.pause(str(error), log)
            await self._clock.sleep(self._config.control.seconds_between_looks)

    async def _look_back(self, recall: Recall, num_new: int) -> None:
        """Let an earlier draft serve again, where it is time to look and one is better."""
        is_resting = bool(self._is_resting)
        if self.payback.is_measuring(self._clock.time()):
            return
        if recall.is_due(num_new, is_resting=is_resting) and await recall.look(
            is_resting=is_resting
        ):
            self.payback.note_recall()

    async def _compare(
        self, trainer: TrainerLink, base: DraftRelease, earlier: list[DraftRelease], num_traces: int
    ) -> list[EarlierReport] | None:
        detail = self.phase_detail
        self.phase, self.phase_detail = "comparing", "with earlier drafts"
        self.payback.begin_look()
        try:
            return await trainer.compare_earlier(base, earlier, num_traces)
        finally:
            self.payback.end_look(self._clock.time())
            self.phase, self.phase_detail = "waiting", detail

    async def _num_new_traces(self, trainer: TrainerLink) -> int:
        """Traces that no draft has learnt; 0 while nothing may be done about them."""
        config = self._config.trainer
        if self.releases.is_paused or not config.enabled:
            self._effort.pause()
            return 0
        counted = await trainer.num_new_traces()
        if counted is None:
            self._effort.pause()
        num_new = counted or 0
        self.phase_detail = f"{num_new} of {config.min_new_traces} new traces"
        if not num_new:
            self._waiting_since = None
        return num_new if self.feed.is_caught_up else 0

    def _is_round_due(self, num_new: int) -> bool:
        config = self._config.trainer
        worth = self._is_worth_it(self._clock.time())
        if not worth.ok:
            self.phase_detail, self._waiting_since = worth.reason, None
            return False
        now = self._clock.monotonic()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        waited_s = now - self._waiting_since
        since_fall, is_paused = self._detector.num_since_fall, self.releases.is_paused
        return policy.should_train(num_new, waited_s, config, is_paused, since_fall)

    async def _run_round(self, trainer: TrainerLink, recall: Recall, num_new: int) -> None:
        found = await self.releases.base()
        if found is None:
            return
        base, line = found
        kept = await recall.worth_keeping()  # what the disk refuses costs no round here
        size = self._effort.begin_round(
            num_new,
            now=self._clock.monotonic(),
            may_be_longer=self.payback.may_be_longer(),
        )
        detail = f"from v{base.version}, {size.replay_batches} stored batches for each new one"
        self.phase, self.phase_detail, self._waiting_since = "training", detail, None
        outcome = await trainer.run_round(base, line, size)
        self.phase, self.phase_detail = "waiting", ""
        if outcome is not None:
            self._effort.end_round(outcome)
            first_on = self._canary.choose(self.replicas.lasting, base.target_id)
            is_on_trial = self.releases.canary is not None
            needed = self.replicas.versions | kept
            is_published = await self.releases.conclude(outcome, needed, first_on)
            now = self._clock.time()
            self.payback.add_round(outcome, now, is_published=is_published, is_on_trial=is_on_trial)
