"""The contenders on drifting traffic: each produces draft tokens in its own way, and all run over
the same recorded requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.drift import names
from benchmarks.replays import lookup
from benchmarks.replays.charged import ChargedTraining
from benchmarks.replays.closed_loop import ClosedLoop
from benchmarks.replays.curve import Curve
from benchmarks.replays.learning import learn
from benchmarks.replays.recording import Recorded, kinds, trace_of
from benchmarks.replays.served import TARGET_ID, counts_of, matches_of
from benchmarks.replays.step_times import ModelledStepTimes
from benchmarks.replays.suffix_memory import SuffixMemory
from osd.config.schema import Config
from osd.records import Trace
from trainer.distiller import Distiller
from trainer.draft import Draft, export_draft, load_draft
from trainer.eagle3.features import TargetFeatures

CEILING_EPOCHS = 24
"""Passes of the ceiling over its recording."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a contender gets. No field tells the domain of a request."""

    config: Config
    draft: Path
    """What serves at first; for the ceiling, the ceiling."""
    requests: Sequence[Recorded]
    arrivals: Sequence[float]
    directory: Path
    """For what it writes; empty."""
    seed: int
    target: Path | None = None
    """Who answered, for a trainer that asks it again."""
    times: ModelledStepTimes | None = None
    """What steps take, for who decides by them."""

    @property
    def k(self) -> int:
        return self.config.speculation.k_max


def fixed(setup: Setup) -> Curve:
    """A draft that never learns."""
    model = load_draft(setup.draft)
    how = {"is_sampled": setup.config.speculation.is_sampled}
    matches = (matches_of(model, request, **how) for request in setup.requests)
    return Curve.of([counts_of(one, setup.k) for one in matches])


def ours(setup: Setup, **trainer: object) -> Curve:
    """The project's trainer and gate as configured, but for the trainer's given fields."""
    config = setup.config.model_copy(
        update={"trainer": setup.config.trainer.model_copy(update=trainer)}
    )
    return learn(
        config,
        setup.draft,
        setup.requests,
        setup.directory,
        seed=setup.seed,
        arrivals=setup.arrivals,
        target=setup.target,
    )


def served(
    setup: Setup, *, learns: bool, is_charged: bool = False, max_rounds: int | None = None
) -> Curve:
    """As `osd serve` serves by default: the closed loop decides what is proposed, and training
    rests where it brings nothing, and if it `is_charged` where it does not pay. Without `learns`:
    the closed loop alone, over the draft there is."""
    loop = ClosedLoop(setup.requests, setup.config, _times(setup), seed=setup.seed)
    if learns:
        return learn(
            setup.config,
            setup.draft,
            setup.requests,
            setup.directory,
            seed=setup.seed,
            arrivals=setup.arrivals,
            may_rest=True,
            server=loop,
            charged=ChargedTraining(setup.config.trainer, loop) if is_charged else None,
            max_rounds=max_rounds,
        )
    return replayed(loop, setup)


def alone(setup: Setup, proposer: str) -> Curve:
    """One proposer under the closed loop: the draft there is, or the memory."""
    config = with_proposers(setup.config, [proposer])
    return replayed(ClosedLoop(setup.requests, config, _times(setup), seed=setup.seed), setup)


def suffix_alone(setup: Setup) -> Curve:
    """Suffix decoding and no draft."""
    return with_suffix(replace(setup, config=with_proposers(setup.config, ["memory"])))


def with_suffix(setup: Setup) -> Curve:
    """Suffix decoding in the place of the memory, with as many bytes, under the closed loop."""
    given = setup.config.speculation
    sizes = [len(one.prompt_ids) + len(one.output_ids) for one in setup.requests]
    memory = SuffixMemory(given.memory_bytes, given.memory_k_max, float(np.mean(sizes)))
    loop = ClosedLoop(setup.requests, setup.config, _times(setup), seed=setup.seed, memory=memory)
    return replayed(loop, setup)


def replayed(loop: ClosedLoop, setup: Setup) -> Curve:
    """Served to the end with the draft there is."""
    loop.swap(setup.draft, None)
    ended = sorted(loop.serve(), key=lambda one: one.index)
    return Curve.of(
        [one.counts for one in ended], seconds=np.array([one.seconds for one in ended], float)
    )


def with_proposers(config: Config, proposers: list[str]) -> Config:
    speculation = config.speculation.model_copy(update={"proposers": proposers})
    return config.model_copy(update={"speculation": speculation})


def _times(setup: Setup) -> ModelledStepTimes:
    if setup.times is None:
        raise ValueError("the closed loop decides by step times, and none were measured")
    return setup.times


class OsdLearner:
    """OSD's published recipe (arXiv 2310.07177 and its released code), trained on the position it
    means.

    Every `every` requests one step of AdamW over their rejected positions alone, forward KL,
    constant rate, no warm-up, no clipping; then they are forgotten. No replay, no held-out
    requests, no gate: what was learnt serves at once.
    """

    def __init__(self, setup: Setup, every: int, learning_rate: float) -> None:
        torch.manual_seed(setup.seed)
        changes = {
            "method": "full",
            "loss": "forward_kl",
            "learning_rate": learning_rate,
            "weight_decay": 0.0,
            "warmup_steps": 0,
            "max_grad_norm": 1e9,
        }
        self._distiller = Distiller(
            load_draft(setup.draft), setup.config.trainer.model_copy(update=changes)
        )
        self._every, self._rng = every, np.random.default_rng(setup.seed)
        self._waiting: list[Trace] = []
        self.num_updates, self.cpu_s = 0, 0.0

    @property
    def model(self) -> Draft:
        """The draft as it is now."""
        return self._distiller.model

    def add(self, request: Recorded, kind_T: np.ndarray, at: float = 0.0) -> None:
        """A request has been served. `kind_T`: how each token of its answer came about."""
        trace = trace_of(
            request,
            kind_T,
            at=at,
            target_id=TARGET_ID,
            accepted_fraction=0.0,
            plain_fraction=0.0,
            rng=self._rng,
        )
        self._waiting.append(trace)
        if len(self._waiting) < self._every:
            return
        started = time.process_time()
        if rejected := [trace for trace in self._waiting if trace.num_rows]:
            self._distiller.step(self._distiller.collate(rejected), 0)
            self.num_updates += 1
        self.cpu_s += time.process_time() - started
        self._waiting = []


def osd(setup: Setup, *, every: int, learning_rate: float) -> Curve:
    """OSD's recipe, k draft tokens in every step."""
    learner = OsdLearner(setup, every, learning_rate)
    counts, cpu_s = [], []
    for request, at in zip(setup.requests, setup.arrivals, strict=True):
        matches = matches_of(learner.model, request)
        counts.append(counts_of(matches, setup.k))
        learner.add(request, kinds(matches, setup.k, len(request.output_ids)), at)
        cpu_s.append(learner.cpu_s)
    num = learner.num_updates
    return Curve.of(counts, cpu_s, num_rounds=num, num_published=num, train_seconds=learner.cpu_s)


def train_ceiling(
    config: Config,
    draft: Path,
    requests: Sequence[Recorded],
    out: Path,
    features: TargetFeatures | None = None,
) -> None:
    """What the draft can be: offline, on every position of a recording of all domains. `features`:
    of the target, which a head reads."""
    rng = np.random.default_rng(config.trainer.seed)
    traces = [
        trace_of(
            request,
            kinds(np.zeros(len(request.output_ids), bool), 1, len(request.output_ids)),
            at=0.0,
            target_id=TARGET_ID,
            accepted_fraction=1.0,
            plain_fraction=1.0,
            rng=rng,
        )
        for request in requests
    ]
    train_offline(config, draft, traces, out, features)


def train_offline(
    config: Config,
    draft: Path,
    traces: Sequence[Trace],
    out: Path,
    features: TargetFeatures | None = None,
) -> None:
    """The same step, loss and peak rate as online, in many passes. The rate falls to zero along a
    cosine: nothing here has to be learnt in passing."""
    torch.set_num_threads(config.trainer.num_threads)
    plain = config.trainer.model_copy(update={"method": "full"})
    distiller = Distiller(load_draft(draft, features), plain)
    rng = np.random.default_rng(config.trainer.seed)
    size = config.trainer.batch_size
    num_steps = CEILING_EPOCHS * -(-len(traces) // size)
    step = 0
    for _ in range(CEILING_EPOCHS):
        order = rng.permutation(len(traces))
        for start in range(0, len(traces), size):
            rate = 0.5 * (1 + np.cos(np.pi * step / num_steps))
            chosen = [traces[i] for i in order[start : start + size]]
            distiller.step(distiller.collate(chosen), step, rate)
            step += 1
    export_draft(distiller.model, draft, out)


Contender = Callable[[Setup], Curve]

CONTENDERS: dict[str, Contender] = {
    names.FROZEN: fixed,
    names.FROZEN_LOOP: partial(served, learns=False),
    names.CEILING: fixed,
    names.NGRAM: lambda setup: lookup.ngram(setup.requests, setup.k),
    names.NGRAM_TUNED: lambda setup: lookup.ngram(
        setup.requests,
        setup.k,
        shortest=names.LOOKUP_TUNED["prompt_lookup_min"],
        longest=names.LOOKUP_TUNED["prompt_lookup_max"],
    ),
    names.SUFFIX: lambda setup: lookup.suffix(setup.requests, setup.k),
    names.SUFFIX_LONG: lambda setup: lookup.suffix(setup.requests, lookup.SUFFIX_TREE_DEPTH),
    **{
        name: partial(osd, every=every, learning_rate=rate)
        for name, (every, rate) in names.OSD_PUBLISHED.items()
    },
    names.OSD_TUNED: lambda setup: osd(
        setup, every=8, learning_rate=setup.config.trainer.learning_rate
    ),
    names.OURS: ours,
    names.OURS_LORA: lambda setup: ours(
        setup, method="lora", learning_rate=names.LORA_RATE * setup.config.trainer.learning_rate
    ),
    names.SERVED: partial(served, learns=True),
    names.MEMORY: partial(alone, proposer="memory"),
    names.DRAFT_LOOP: partial(alone, proposer="draft"),
    names.SUFFIX_LOOP: suffix_alone,
    names.CHARGED: partial(served, learns=True, is_charged=True),
    **{name: partial(served, learns=True, max_rounds=num) for name, num in names.STOPPED.items()},
    names.OURS_STUDENT: partial(ours, sampling="student"),
    names.OURS_MIXED: partial(ours, sampling="mixed"),
}
"""By the names the report gives them."""
