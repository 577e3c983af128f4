"""The service without an engine: buffer, trainer, gate, and the rules by which it trains, rests,
publishes and lets earlier drafts serve again. It is told of each request that has ended.

The rules are the service's own. What is left here is their order, as in `osd/control/loops.py`:

    a round pays? ──► rest ──► an earlier draft serves again ──► a round ──► its candidate serves
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.replays.charged import ChargedTraining
from benchmarks.replays.served import TARGET_ID, Server
from buffers.memory import MemoryTraceBuffer
from osd.config.schema import Config
from osd.control.drift import DriftDetector
from osd.control.effort import Effort
from osd.control.policy import earlier_to_recall, should_publish, should_train
from osd.control.recall import LookTimes, choose_earlier, pause_after
from osd.records import DraftRelease, Event, RoundOutcome, SpecWindow, Trace
from osd.releases.store import ReleaseStore
from trainer.loop import Trainer
from trainer.sampling.teacher import Teacher

NO_TIME_S = 1e-6
"""Of a round that takes no time: all that may be replayed fits between two requests."""


class ReplayedService:
    """One per replay. Training takes no time of it."""

    def __init__(
        self,
        config: Config,
        draft: Path,
        server: Server,
        directory: Path,
        *,
        target: Path | None = None,
        charged: ChargedTraining | None = None,
        may_rest: bool = False,
        max_rounds: int | None = None,
    ) -> None:
        """`draft` serves first, through `server`; releases and candidates lie in `directory`.
        `target`: the trainer's teacher. `charged`: training rests where it does not pay.
        `may_rest`: it rests where it brings nothing, and rounds replay the most. `max_rounds`: it
        ends after so many."""
        self._config, self._server = config, server
        self._charged, self._may_rest, self._max_rounds = charged, may_rest, max_rounds
        self._buffer = MemoryTraceBuffer(target_id=TARGET_ID, max_traces=config.buffer.max_traces)
        store = ReleaseStore(directory / "releases")
        self._trainer = Trainer(
            *(config.trainer, config.gate, config.speculation.k_max, self._buffer),
            *(directory / "trainer", TARGET_ID),
            teacher=None if target is None else Teacher(target, top_k=config.capture.top_k),
            is_sampled=config.speculation.is_sampled,
        )
        self._detector = DriftDetector(config.trainer, TARGET_ID)
        self.releases = _Releases(config, self._trainer, store, self._detector)
        self.rounds = _Rounds(config, self._trainer, store, charged, may_rest=may_rest)
        self._at = 0.0
        """When the newest request ended."""
        self._is_resting = False
        self.serving = store.publish(draft, parent=0, target_id=TARGET_ID)
        server.swap(self.serving.path, None)

    @property
    def cpu_s(self) -> float:
        """Of rounds and looks so far."""
        return self.rounds.cpu_s + self.releases.cpu_s

    def end_request(self, trace: Trace, window: SpecWindow, index: int) -> None:
        """The request with this index has ended; all that it leads to happens before the next."""
        self._at = window.at
        self._buffer.put([trace])
        self._detector.add(window)
        self.releases.add(window)
        is_worth_it = self._is_worth_it()
        does_not_pay = self._charged is not None and self._charged.is_resting
        is_resting = self._is_resting = self._detector.is_resting or does_not_pay
        if is_resting:
            self.rounds.rest()
        is_due = is_worth_it and self._is_due()
        now = None if self._charged is None else self._charged.now
        earlier = self.releases.look(self.serving, index, now, is_resting=is_resting)
        if earlier is not None:
            self._serve(earlier)
            if self._charged is not None:
                self._charged.note_recall()
        if is_due:
            self._run_round(index)

    def _is_worth_it(self) -> bool:
        """Whether a round may bring something, and pays."""
        may_bring = not self._may_rest or self._detector.decide(self._at).ok
        if self._charged is None:
            return may_bring
        pays = self._charged.pays(self._detector.num_wakes, has_rested=self._is_resting)
        self._detector.note_price_rest(is_on=self._charged.rests_for_price)
        return may_bring and pays

    def _is_due(self) -> bool:
        return len(self.rounds.ended) != self._max_rounds and should_train(
            self._trainer.num_new_traces(),
            waited_s=0.0,
            config=self._config.trainer,
            paused=False,
            num_since_fall=self._detector.num_since_fall if self._may_rest else None,
        )

    def _run_round(self, index: int) -> None:
        one = self.rounds.run(self.serving, index)
        self._detector.add(one.outcome)
        kind = "published" if one.is_published else "refused"
        self._detector.add(Event(at=self._at, kind=kind, text=""))
        if one.is_published:
            keep = self._config.releases.keep
            self._serve(self.releases.publish(one.outcome, self.serving, keep))

    def _serve(self, release: DraftRelease) -> None:
        self.serving = release
        self._server.swap(release.path, release.predicted_alpha)


@dataclass(frozen=True, slots=True)
class Round:
    """One that has ended."""

    outcome: RoundOutcome
    seconds: float
    cpu_s: float
    is_published: bool
    index: int
    """Of the request after which it ran."""


class _Rounds:
    """Rounds as the service runs them: how much each replays, and what it costs."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        store: ReleaseStore,
        charged: ChargedTraining | None,
        *,
        may_rest: bool,
    ) -> None:
        self._gate, self._effort = config.gate, Effort(config.trainer)
        self._trainer, self._store = trainer, store
        self._charged, self._may_rest = charged, may_rest
        self.ended: list[Round] = []
        self.cpu_s = 0.0

    def run(self, serving: DraftRelease, index: int) -> Round:
        """After the request with this index. The candidate is not published yet."""
        charged, trainer = self._charged, self._trainer
        size = self._effort.begin_round(
            trainer.num_new_traces(),
            now=float(index) if charged is None else charged.now,
            may_be_longer=self._may_rest if charged is None else charged.may_be_longer(),
        )
        base = replace(serving, judged_since=self._store.judged_since())
        started, cpu_started = time.perf_counter(), time.process_time()
        outcome = trainer.run_round(base, line=self._store.line(TARGET_ID), size=size)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        is_better = should_publish(outcome, base, self._gate, False).ok
        self._effort.end_round(replace(outcome, seconds=NO_TIME_S if charged is None else cpu_s))
        if charged is not None:
            charged.add_round(outcome, cpu_s, is_published=is_better)
        self.ended.append(Round(outcome, seconds, cpu_s, is_better, index))
        self.cpu_s += cpu_s
        return self.ended[-1]

    def rest(self) -> None:
        """Training rests."""
        self._effort.rest()


class _Releases:
    """What serves: candidates that were published, and earlier drafts that serve again as
    `osd/control/recall.py` decides. Where training takes no time, looks take none either."""

    def __init__(
        self, config: Config, trainer: Trainer, store: ReleaseStore, detector: DriftDetector
    ) -> None:
        self._gate, self._trainer, self._store = config.gate, trainer, store
        self._detector, self._times = detector, LookTimes(config.gate.recall_traces)
        self._tested = defaultdict[int, int](int)
        """version -> draft tokens tested while it served"""
        self.looks: list[int] = []
        self.at: list[int] = []
        """Requests after which there was a look, and another draft served."""
        self.cpu_s = 0.0
        self._looked_at, self._took_s = 0.0, 0.0
        """When the last look began, and what it took."""

    def add(self, window: SpecWindow) -> None:
        self._tested[window.version] += sum(window.num_tested_per_pos)

    def look(
        self, serving: DraftRelease, index: int, now: float | None, *, is_resting: bool
    ) -> DraftRelease | None:
        """The earlier draft that serves again; None where none does. `now`: None where looks take
        no time. `is_resting`: whether training rests."""
        most = self._gate.recall_traces
        least = min(most, self._gate.min_holdout_traces)
        if not least or self._trainer.num_new_traces() < least:
            return None
        pause_s = pause_after(self._took_s, is_resting=is_resting)
        if now is not None and now < self._looked_at + self._took_s + pause_s:
            return None
        if not self._times.is_due(self._detector, is_resting=is_resting):
            return None
        self._times.note(self._detector, is_resting=is_resting)
        earlier = self.earlier_than(serving)
        started = time.process_time()
        reports = self._trainer.compare_earlier(serving, earlier, most)
        self._looked_at, self._took_s = now or 0.0, time.process_time() - started
        self.cpu_s += self._took_s
        self.looks.append(index)
        if (found := earlier_to_recall(reports)) is None:
            return None
        self.at.append(index)
        return self._store.recall(found.version, TARGET_ID, found.since)

    def publish(self, outcome: RoundOutcome, parent: DraftRelease, keep: int) -> DraftRelease:
        """A round's candidate serves, and what may be recalled stays on disk."""
        serving = self._store.publish(
            outcome.path, parent=parent.version, target_id=TARGET_ID, outcome=outcome
        )
        needed = {serving.version, *(r.version for r in self.earlier_than(serving))}
        self._store.prune(keep, needed)
        return serving

    def earlier_than(self, serving: DraftRelease) -> list[DraftRelease]:
        recallable = self._store.recallable(TARGET_ID)
        return choose_earlier(recallable, serving, lambda version: self._tested[version])
