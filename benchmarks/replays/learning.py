"""Learning curves without an engine: recorded requests arrive one by one, the real trainer learns,
the real gate publishes, and replay counts the acceptance of each draft on each request.

The curves show how fast a way of training learns, per request and per second of training. The
benches that run the engine measure the speed of serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.replays.charged import ChargedTraining
from benchmarks.replays.curve import Curve
from benchmarks.replays.recording import Recorded, trace_of
from benchmarks.replays.served import TARGET_ID, EveryStep, Served, Server, features_of
from benchmarks.replays.service import ReplayedService
from osd.config.schema import Config
from osd.records import SpecWindow, Trace


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
    k, is_sampled = config.speculation.k_max, config.speculation.is_sampled
    server = server or EveryStep(requests, k, features_of(target, k), is_sampled=is_sampled)
    service = ReplayedService(
        *(config, draft, server, directory),
        target=target,
        charged=charged,
        may_rest=may_rest,
        max_rounds=max_rounds,
    )
    ended: list[Served] = []
    cpu_s = np.zeros(len(requests))
    at = 0.0
    for served in server.serve():
        ended.append(served)
        at = max(at, float(served.index) if arrivals is None else arrivals[served.index])
        version = service.serving.version
        trace = captured(config, requests[served.index], served, rng, at=at, version=version)
        service.end_request(trace, _window(served, at, version, k), served.index)
        cpu_s[served.index] = service.cpu_s
    return _curve(ended, cpu_s, service)


def _curve(ended: Sequence[Served], cpu_s: np.ndarray, service: ReplayedService) -> Curve:
    in_order = sorted(ended, key=lambda served: served.index)
    seconds = [served.seconds for served in in_order]
    rounds, releases = service.rounds.ended, service.releases
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
