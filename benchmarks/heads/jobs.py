"""The jobs of the benchmark of heads: one arm over one schedule, and α at home before and after.

The first draft, the one that learns and the one trained offline are replayed alike, be they heads
or models. A head reads features that the replay computes anew from the target.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.drift import jobs, names
from benchmarks.record import Row
from benchmarks.replays.curve import Curve
from benchmarks.replays.step_times import ModelledStepTimes
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED
from benchmarks.traffic.schedule import Arrival, Schedule, arrivals

if TYPE_CHECKING:
    from benchmarks.replays.recording import Recorded
    from benchmarks.replays.served import Server
    from trainer.draft import Draft

TIMELESS = (names.FROZEN, names.OURS, names.CEILING)
"""k tokens of the draft in every step."""
LOOPS = (names.DRAFT_LOOP, names.LEARNING_DRAFT_LOOP, names.FROZEN_LOOP, names.SERVED)
"""Under the control of speculation: without the memory, frozen and learning; then with it."""
LEARNING = (names.OURS, names.LEARNING_DRAFT_LOOP, names.SERVED)
ALONE = (names.DRAFT_LOOP, names.LEARNING_DRAFT_LOOP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One arm over one schedule."""

    name: str
    """Of the schedule."""
    schedule: Schedule
    """Its family says which draft serves."""
    seed: int
    arm: str
    offline_requests: int
    """Of each domain off home, that the ceiling is trained on."""
    home_requests: int
    """Never served, on which the first draft and the last are measured."""


def foreign(schedule: Schedule) -> tuple[str, ...]:
    """The domains off home."""
    home = FAMILIES[schedule.family].home()
    return tuple(domain for domain in schedule.domains if domain != home)


def unserved(coming: Sequence[Arrival], domain: str) -> int:
    """The first request of a domain's stream that a schedule leaves out."""
    return max((one.index + 1 for one in coming if one.domain == domain), default=0)


def run(job: Job, times: ModelledStepTimes) -> Row:
    """Serve the schedule, from cached recordings."""
    from benchmarks.drift.contenders import with_proposers
    from benchmarks.replays.closed_loop import ClosedLoop
    from benchmarks.replays.served import EveryStep, features_of
    from benchmarks.traffic import recordings

    jobs.one_thread()
    family = job.schedule.family
    target, draft = FAMILIES[family].models()
    coming, home = arrivals(job.schedule, job.name, job.seed), FAMILIES[family].home()
    block, first = FIRST_SERVED + job.seed, unserved(coming, home)
    requests = recordings.in_order(family, block, coming)
    at_home = recordings.take(family, home, block, first + job.home_requests)[first:]
    config = jobs.base_config()
    if job.arm in ALONE:
        config = with_proposers(config, ["draft"])
    if job.arm == names.CEILING:
        draft = jobs.ceiling(family, foreign(job.schedule), job.offline_requests)
    k = config.speculation.k_max
    features = features_of(target, k)
    server = (
        EveryStep(requests, k, features)
        if job.arm in TIMELESS
        else ClosedLoop(requests, config, times, seed=job.seed, features=features)
    )
    server.swap(draft, None)
    assert server.model is not None
    before = alpha_of(server.model, at_home, k)
    if job.arm in LEARNING:
        from benchmarks.replays.learning import learn

        with tempfile.TemporaryDirectory(prefix="osd-heads-") as directory:
            curve = learn(
                config,
                draft,
                requests,
                Path(directory),
                seed=job.seed,
                arrivals=[one.at for one in coming],
                may_rest=job.arm not in TIMELESS,
                server=server,
                target=target,
            )
    else:
        curve = served_to_the_end(server)
    return {
        "schedule": job.name,
        "family": family,
        "seed": job.seed,
        "contender": job.arm,
        "home": [before, alpha_of(server.model, at_home, k)],
        **curve.as_row(),
    }


def served_to_the_end(server: Server) -> Curve:
    """All requests with the draft that serves."""
    ended = sorted(server.serve(), key=lambda one: one.index)
    seconds = [one.seconds for one in ended]
    return Curve.of(
        [one.counts for one in ended],
        seconds=None if None in seconds else np.array(seconds, float),
    )


def alpha_of(model: Draft, requests: Sequence[Recorded], k: int) -> float:
    """α of a draft that proposes k tokens in every step."""
    from benchmarks.replays.served import counts_of, matches_of

    return Curve.of([counts_of(matches_of(model, one), k) for one in requests]).alpha()
