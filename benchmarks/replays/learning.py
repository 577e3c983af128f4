"""Learning curves without an engine: recorded requests arrive one by one, the real trainer learns,
the real gate publishes, and replay counts the acceptance of each draft on each request.

The curves show how fast a way of training learns, per request and per second of training. The
benches that run the engine measure the speed of serving.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.replays.charged import ChargedTraining
from benchmarks.replays.curve import Curve
from benchmarks.replays.recording import Recorded, trace_of
from benchmarks.replays.served import TARGET_ID, EveryStep, Served, Server, features_of
from buffers.memory import MemoryTraceBuffer
from osd.config.schema import Config
from osd.control.drift import DriftDetector
from osd.control.effort import Effort
from osd.control.policy import earlier_to_recall, should_publish, should_train
from osd.control.recall import LookTimes, choose_earlier
from osd.records import DraftRelease, Event, RoundOutcome, SpecWindow, Trace
from osd.releases.store import ReleaseStore
from trainer.loop import Trainer
from trainer.sampling.teacher import Teacher

NO_TIME_S = 1e-6
"""Of a round that takes no time: all that may be replayed fits between two requests."""


def learn(
    config: Config,
    draft: Path,
    requests: Sequence[Recorded],
    directory: Path,
    *,
    seed: int,
    arrivals: Sequence[float] | None = None,
    may_rest: bool = False,
    server: Server | None = None,
    charged: ChargedTraining | None = None,
    max_rounds: int | None = None,
    target: Path | None = None,
) -> Curve:
    """Serve the requests; train whenever the configuration says so, as if training took no time.

    `arrivals`: seconds at which the requests end, by default one after the other each second.
    `may_rest`: training rests where it brings nothing, begins sooner where α falls, and rounds
    replay the most, as by a trainer that takes no time; without it every curve has the same rounds.
    `server`: how they are served, by default with k_max draft tokens in every step. `charged`:
    training rests where it does not pay. `max_rounds`: it ends after so many. `target`: the
    trainer's teacher, which `trainer.sampling` student and mixed, and heads, need.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    k = config.speculation.k_max
    buffer = MemoryTraceBuffer(target_id=TARGET_ID, max_traces=config.buffer.max_traces)
    store = ReleaseStore(directory / "releases")
    serving = store.publish(draft, parent=0, target_id=TARGET_ID)
    is_sampled = config.speculation.is_sampled
    teacher = Teacher(target, top_k=config.capture.top_k) if target is not None else None
    trainer = Trainer(
        *(config.trainer, config.gate, k, buffer, directory / "trainer", TARGET_ID),
        teacher=teacher,
        is_sampled=is_sampled,
    )
    detector = DriftDetector(config.trainer, TARGET_ID)
    server = server or EveryStep(requests, k, features_of(target, k), is_sampled=is_sampled)
    server.swap(serving.path, None)
    releases = _Releases(config, trainer, store, detector)
    rounds = _Rounds(config, trainer, store, charged, may_rest=may_rest)
    ended: list[Served] = []
    cpu_s = np.zeros(len(requests))
    at = 0.0
    for served in server.serve():
        ended.append(served)
        at = max(at, float(served.index) if arrivals is None else arrivals[served.index])
        version = serving.version
        trace = captured(config, requests[served.index], served, rng, at=at, version=version)
        buffer.put([trace])
        window = _window(served, at, version, k)
        detector.add(window)
        releases.add(window)
        is_wanted = not may_rest or detector.decide(at).ok
        is_wanted &= charged is None or charged.pays(detector.num_wakes)
        if charged is not None:
            detector.note_price_rest(is_on=charged.is_resting)
        is_resting = detector.is_resting or (charged is not None and charged.is_resting)
        if is_resting:
            rounds.rest()
        is_wanted &= len(rounds.ended) != max_rounds
        is_due = is_wanted and should_train(
            trainer.num_new_traces(),
            waited_s=0.0,
            config=config.trainer,
            paused=False,
            num_since_fall=detector.num_since_fall if may_rest else None,
        )
        recalled = releases.look(serving, served.index, is_resting=is_resting)
        if recalled is not None:
            serving = recalled
            server.swap(serving.path, serving.predicted_alpha)
            if charged is not None:
                charged.note_recall()
        if is_due:
            one = rounds.run(serving, served.index)
            detector.add(one.outcome)
            detector.add(Event(at=at, kind="published" if one.is_published else "refused", text=""))
            if one.is_published:
                serving = releases.publish(one.outcome, serving, config.releases.keep)
                server.swap(serving.path, serving.predicted_alpha)
        cpu_s[served.index] = rounds.cpu_s + releases.cpu_s
    return _curve(ended, cpu_s, rounds.ended, releases)


@dataclass(frozen=True, slots=True)
class _Round:
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
        self.ended: list[_Round] = []
        self.cpu_s = 0.0

    def run(self, serving: DraftRelease, index: int) -> _Round:
        """After the request with this index. The candidate is not published yet."""
        charged, trainer = self._charged, self._trainer
        batches = self._effort.begin_round(
            trainer.num_new_traces(),
            now=float(index) if charged is None else charged.now,
            may_be_longer=self._may_rest if charged is None else charged.may_be_longer(),
        )
        base = replace(serving, judged_since=self._store.judged_since())
        started, cpu_started = time.perf_counter(), time.process_time()
        outcome = trainer.run_round(base, line=self._store.line(TARGET_ID), replay_batches=batches)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        is_better = should_publish(outcome, base, self._gate, False).ok
        self._effort.end_round(replace(outcome, seconds=NO_TIME_S if charged is None else cpu_s))
        if charged is not None:
            charged.add_round(outcome, cpu_s, is_published=is_better)
        self.ended.append(_Round(outcome, seconds, cpu_s, is_better, index))
        self.cpu_s += cpu_s
        return self.ended[-1]

    def rest(self) -> None:
        """Training rests."""
        self._effort.rest()


class _Releases:
    """What serves: candidates that were published, and earlier drafts that serve again as
    `osd/control/recall.py` decides, but that looks have no share of the time to keep here."""

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

    def add(self, window: SpecWindow) -> None:
        self._tested[window.version] += sum(window.num_tested_per_pos)

    def look(self, serving: DraftRelease, index: int, *, is_resting: bool) -> DraftRelease | None:
        """The earlier draft that serves again; None where none does. `is_resting`: whether training
        rests."""
        most = self._gate.recall_traces
        least = min(most, self._gate.min_holdout_traces)
        if not least or self._trainer.num_new_traces() < least:
            return None
        if not self._times.is_due(self._detector, is_resting=is_resting):
            return None
        self._times.note(self._detector, is_resting=is_resting)
        earlier = self.earlier_than(serving)
        started = time.process_time()
        reports = self._trainer.compare_earlier(serving, earlier, most)
        self.cpu_s += time.process_time() - started
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


def _curve(
    ended: Sequence[Served], cpu_s: np.ndarray, rounds: Sequence[_Round], releases: _Releases
) -> Curve:
    in_order = sorted(ended, key=lambda served: served.index)
    seconds = [served.seconds for served in in_order]
    outcomes = [one.outcome for one in rounds]
    return Curve.of(
        [served.counts for served in in_order],
        np.maximum.accumulate(cpu_s).tolist(),
        num_rounds=len(rounds),
        num_published=sum(one.is_published for one in rounds),
        num_discarded=sum(bool(outcome.discarded) for outcome in outcomes),
        train_seconds=sum(one.seconds for one in rounds),
        padding=float(np.mean([outcome.padding for outcome in outcomes])) if outcomes else 0.0,
        seconds=None if None in seconds else np.array(seconds, float),
        notes={
            "published_at": [one.index for one in rounds if one.is_published],
            "recalled_at": releases.at,
            "looked_at": releases.looks,
            "looks_cpu_s": releases.cpu_s,
            "num_traces": sum(outcome.num_student_traces for outcome in outcomes),
            "sampling_cpu_s": sum(outcome.sampling_cpu_s for outcome in outcomes),
            "scoring_cpu_s": sum(outcome.scoring_cpu_s for outcome in outcomes),
            "features_cpu_s": sum(outcome.features_cpu_s for outcome in outcomes),
        },
    )


def captured(
    config: Config,
    request: Recorded,
    served: Served,
    rng: np.random.Generator,
    *,
    at: float = 0.0,
    version: int = 1,
) -> Trace:
    """What capture keeps of a request as it was served."""
    return trace_of(
        request,
        served.kind_T,
        at=at,
        target_id=TARGET_ID,
        accepted_fraction=config.capture.accepted_fraction,
        plain_fraction=config.capture.plain_fraction,
        rng=rng,
        draft_version=version,
    )


def _window(served: Served, at: float, version: int, k: int) -> SpecWindow:
    """What the engine would have reported of one request."""
    counts = served.of_the_draft
    return SpecWindow(
        at=at,
        replica="recorded",
        version=version,
        seconds=1.0,
        k=k,
        num_drafts=counts.drafts,
        num_draft_tokens=counts.drafted,
        num_accepted_tokens=counts.accepted,
        num_accepted_tokens_per_pos=(counts.accepted,),
        num_tested_per_pos=(counts.tested,),
        num_output_tokens=counts.tokens,
        num_finished=1,
        num_captured=1,
    )
