"""Other ways to have a draft for changing traffic, under the service's own control of speculation
and beside its memory: what learning online is held against."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.drift import names
from benchmarks.drift.contenders import (
    Contender,
    OsdLearner,
    Setup,
    fixed,
    ours,
    replayed,
    served,
    train_offline,
    with_proposers,
    with_suffix,
)
from benchmarks.replays.closed_loop import ClosedLoop
from benchmarks.replays.curve import Curve
from benchmarks.replays.learning import captured
from benchmarks.replays.served import Served
from osd.records import Trace

NIGHT = 192
"""Requests of a day."""
AGAIN = 1000
"""Added to the seed of the control."""


def again(setup: Setup) -> Curve:
    """The service with its trainer off once more, with other noise: how far two alike differ."""
    return replayed(_loop(replace(setup, seed=setup.seed + AGAIN)), setup)


def nightly(setup: Setup) -> Curve:
    """Trained offline once a night, from the first draft, on the traces of all days so far: the
    same that the trainer gets. Nights take no time here; their CPU seconds are kept."""
    torch.manual_seed(setup.seed)
    rng, loop = np.random.default_rng(setup.seed), _loop(setup)
    loop.swap(setup.draft, None)
    ended: list[Served] = []
    traces: list[Trace] = []
    cpu_s = np.zeros(len(setup.requests))
    spent, num_nights = 0.0, 0
    for one in loop.serve():
        ended.append(one)
        traces.append(captured(setup.config, setup.requests[one.index], one, rng))
        if len(ended) % NIGHT == 0 and len(ended) < len(setup.requests):
            started, num_nights = time.process_time(), num_nights + 1
            out = setup.directory / f"night-{num_nights}"
            with_rows = [trace for trace in traces if trace.num_rows]
            train_offline(setup.config, setup.draft, with_rows, out)
            spent += time.process_time() - started
            loop.swap(out, None)
        cpu_s[one.index] = spent
    return _curve(ended, cpu_s, num_nights)


def osd(setup: Setup, *, every: int, learning_rate: float) -> Curve:
    """OSD's recipe: what an update has learnt serves the next requests."""
    learner, loop = OsdLearner(setup, every, learning_rate), _loop(setup)
    loop.swap(setup.draft, None)
    ended: list[Served] = []
    cpu_s = np.zeros(len(setup.requests))
    for one in loop.serve():
        ended.append(one)
        learner.add(setup.requests[one.index], one.kind_T)
        loop.serve_with(learner.model)
        cpu_s[one.index] = learner.cpu_s
    return _curve(ended, cpu_s, learner.num_updates)


def sampled_osd(setup: Setup, *, every: int, learning_rate: float) -> Curve:
    """OSD's recipe with sampled drafts."""
    return osd(mixed(setup), every=every, learning_rate=learning_rate)


def without_memory(setup: Setup) -> Curve:
    """The service, learning, with nothing but its draft."""
    return served(replace(setup, config=with_proposers(setup.config, ["draft"])), learns=True)


def drawn(setup: Setup) -> Setup:
    """With sampled drafts alone."""
    return mixed(replace(setup, config=with_proposers(setup.config, ["draft"])))


def mixed(setup: Setup) -> Setup:
    """With sampled drafts, and the memory beside them."""
    how = {"draft_sample_method": "probabilistic"}
    speculation = setup.config.speculation.model_copy(update=how)
    return replace(setup, config=setup.config.model_copy(update={"speculation": speculation}))


def never_back(setup: Setup) -> Setup:
    """No earlier draft serves again."""
    gate = setup.config.gate.model_copy(update={"recall_traces": 0})
    return replace(setup, config=setup.config.model_copy(update={"gate": gate}))


def replaying_the_least(setup: Setup) -> Setup:
    """No round replays more than it must, whatever the time."""
    trainer = setup.config.trainer.model_copy(update={"max_replay_growth": 1.0})
    return replace(setup, config=setup.config.model_copy(update={"trainer": trainer}))


def _loop(setup: Setup) -> ClosedLoop:
    assert setup.times is not None, "the control decides by step times"
    return ClosedLoop(setup.requests, setup.config, setup.times, seed=setup.seed)


def _curve(ended: Sequence[Served], cpu_s: np.ndarray, num_rounds: int) -> Curve:
    """`cpu_s`: float [requests], by place; 0 where a request ended before anything was learnt."""
    in_order = sorted(ended, key=lambda one: one.index)
    return Curve.of(
        [one.counts for one in in_order],
        np.maximum.accumulate(cpu_s).tolist(),
        num_rounds=num_rounds,
        num_published=num_rounds,
        seconds=np.array([one.seconds for one in in_order], float),
    )


RIVALS: dict[str, Contender] = {
    names.DRAWN_FROZEN: lambda setup: fixed(drawn(setup)),
    names.DRAWN_CEILING: lambda setup: fixed(drawn(setup)),
    names.DRAWN_OURS: lambda setup: ours(drawn(setup)),
    names.DRAWN_DRAFT_LOOP: lambda setup: replayed(_loop(drawn(setup)), setup),
    names.DRAWN_STATIC: lambda setup: replayed(_loop(drawn(setup)), setup),
    names.DRAWN_SERVED: lambda setup: served(drawn(setup), learns=True),
    names.DRAWN_CHARGED: lambda setup: served(drawn(setup), learns=True, is_charged=True),
    names.MIXED_FROZEN_LOOP: lambda setup: replayed(_loop(mixed(setup)), setup),
    names.MIXED_SERVED: lambda setup: served(mixed(setup), learns=True),
    names.MIXED_CHARGED: lambda setup: served(mixed(setup), learns=True, is_charged=True),
    names.MIXED_NEVER_BACK: lambda setup: served(never_back(mixed(setup)), learns=True),
    names.MIXED_LEAST: lambda setup: served(replaying_the_least(mixed(setup)), learns=True),
    names.MIXED_STATIC: lambda setup: replayed(_loop(mixed(setup)), setup),
    names.MIXED_NIGHTLY: lambda setup: nightly(mixed(setup)),
    names.MIXED_SUFFIX_LOOP: lambda setup: with_suffix(mixed(setup)),
    names.AGAIN: again,
    names.STATIC: lambda setup: replayed(_loop(setup), setup),
    names.NIGHTLY: nightly,
    names.LEARNING_DRAFT_LOOP: without_memory,
    **{
        name: partial(osd, every=every, learning_rate=rate)
        for name, (every, rate) in names.OSD_LOOP.items()
    },
    **{
        name: partial(sampled_osd, every=every, learning_rate=rate)
        for name, (every, rate) in names.MIXED_OSD.items()
    },
}
"""By the names the report gives them."""
