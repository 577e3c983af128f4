"""Learning curves without an engine: requests of a recording arrive one by one, the real trainer learns, the real gate
publishes, and what each draft would have been accepted of each request is counted by replay.

It says how fast a way of training learns per request and per second of training. It says nothing of the speed of
serving: for that, see the benches that run the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from buffers.memory import MemoryTraceBuffer
from osd.bench.curve import Counts, Curve
from osd.bench.recording import Recorded, trace_of
from osd.config import Config
from osd.drift import Appetite
from osd.policy import should_publish
from osd.records import DraftRelease, Event, SpecWindow, Trace
from osd.releases import ReleaseStore
from trainer.draft import RowModel, load_draft
from trainer.evaluate import count_steps, is_match
from trainer.loop import Trainer

TARGET_ID = "recorded"
UNLIMITED = 10**6
"""Tokens of context a replayed draft sees: as many as it can, as in the engine."""


def learn(
    config: Config,
    draft: Path,
    requests: Sequence[Recorded],
    directory: Path,
    *,
    seed: int,
    arrivals: Sequence[float] | None = None,
    may_rest: bool = False,
) -> Curve:
    """Serve the requests in order; train whenever the configuration says so, as if training took no time.

    `arrivals`: seconds at which the requests end, by default one after the other each second. `may_rest`: training
    rests where it brings nothing, as in the service; without it every curve has the same rounds.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    k = config.speculation.k_max
    buffer = MemoryTraceBuffer(target_id=TARGET_ID, max_traces=config.buffer.max_traces)
    store = ReleaseStore(directory / "releases")
    serving = store.publish(draft, parent=0, target_id=TARGET_ID)
    trainer = Trainer(config.trainer, config.gate, k, buffer, directory / "trainer", TARGET_ID)
    appetite = Appetite(config.trainer)
    model, counts, paddings, cpu_s = load_draft(serving.path), [], [], []
    num_rounds = num_published = num_discarded = 0
    published_at: list[int] = []
    train_seconds = train_cpu_s = 0.0
    for number, request in enumerate(requests):
        matches = matches_of(model, request)
        counts.append(counts_of(matches, k))
        at = float(number) if arrivals is None else arrivals[number]
        buffer.put([_trace(config, request, matches, k, at, rng, serving)])
        appetite.add(_window(counts[-1], at, serving.version, k))
        is_wanted = not may_rest or appetite.decide(at).ok
        if is_wanted and trainer.num_new_traces() >= config.trainer.min_new_traces:
            started, cpu_started = time.perf_counter(), time.process_time()
            outcome = trainer.run_round(serving)
            train_seconds += time.perf_counter() - started
            train_cpu_s += time.process_time() - cpu_started
            num_rounds += 1
            appetite.add(outcome)
            is_better = should_publish(outcome, serving, config.gate, False).ok
            appetite.add(Event(at=at, kind="published" if is_better else "refused", text=""))
            num_discarded += bool(outcome.discarded)
            paddings.append(outcome.padding)
            if is_better:
                serving = store.publish(outcome.path, parent=serving.version, target_id=TARGET_ID, outcome=outcome)
                store.prune(2, {serving.version})
                model = load_draft(serving.path)
                num_published += 1
                published_at.append(number)
        cpu_s.append(train_cpu_s)
    return Curve.of(
        counts,
        cpu_s,
        num_rounds=num_rounds,
        num_published=num_published,
        num_discarded=num_discarded,
        train_seconds=train_seconds,
        padding=float(np.mean(paddings)) if paddings else 0.0,
        notes={"published_at": published_at},
    )


def matches_of(model: RowModel, request: Recorded) -> np.ndarray:
    """bool [T - 1]: where the draft's argmax is the served token, from the second output token on."""
    return is_match(model, request.bare_trace(TARGET_ID), max_length=UNLIMITED)


def counts_of(matches: np.ndarray, k: int) -> Counts:
    """One request with a draft model: every step has a draft of k tokens."""
    tested, accepted = count_steps(matches, k)
    num_steps = int(tested[0])
    return Counts(
        tokens=len(matches),
        steps=num_steps,
        drafts=num_steps,
        drafted=k * num_steps,
        tested=int(tested.sum()),
        accepted=int(accepted.sum()),
    )


def _trace(
    config: Config,
    request: Recorded,
    matches: np.ndarray,
    k: int,
    at: float,
    rng: np.random.Generator,
    serving: DraftRelease,
) -> Trace:
    return trace_of(
        request,
        matches,
        k,
        at=at,
        target_id=TARGET_ID,
        accepted_fraction=config.capture.accepted_fraction,
        plain_fraction=config.capture.plain_fraction,
        rng=rng,
        draft_version=serving.version,
    )


def _window(counts: Counts, at: float, version: int, k: int) -> SpecWindow:
    """What the engine would have reported of one request."""
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
    )
