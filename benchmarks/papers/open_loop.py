"""A replay in which requests come when they come: an open loop in modelled time.

    Poisson arrivals ──► as many at once as there is room ──► steps of whoever is there, as in
                                               `benchmarks/replays/closed_loop.py`

The service's own control decides, or is forced to follow one plan. A step takes what it takes
Llama-3.1-8B on an H100 by the public simulator's fit (`benchmarks/replays/step_times.py`), for as
many requests and as much context as there are. Prompts are read in the first step that the request
takes part in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import Row
from benchmarks.replays.closed_loop import ClosedLoop
from benchmarks.replays.recording import Recorded
from benchmarks.replays.served import Served, matches_of
from benchmarks.replays.step_times import (
    ModelledStepTimes,
    published,
    published_draft_s,
    published_step_s,
)
from osd.config.schema import Config
from osd.evaluate.bound import published as prices
from serving.speculation.goodput import OFF, Plan
from serving.speculation.step_times import CELL_SIZE, Shape

CALIBRATED = (1, 4, 16, 64)
"""Batches that an engine measures before its port answers (`serving/speculation/client.py`)."""
CONTEXT = 64
"""Tokens of each request then."""
WARM_UP = 0.25
"""Share of the requests that come first and do not count: the engine begins empty, and the control
without any knowledge of the draft."""
MAX_SEQS = 256
"""Requests at once, as vLLM has it by default."""
MIN_REQUESTS = 128
AUTO = "auto"


class OpenLoop(ClosedLoop):
    """Serves each request from when it comes, at most `times.batch` at once."""

    def __init__(
        self,
        requests: Sequence[Recorded],
        matches: Sequence[np.ndarray],
        arrivals: Sequence[float],
        config: Config,
        times: ModelledStepTimes,
        *,
        seed: int,
    ) -> None:
        """`matches`: where the draft is right, by request (`matches_of`); `arrivals`: seconds, in
        order."""
        self._known, self._arrivals = matches, arrivals
        self._num_read = 0  # tokens of prompts in the next step
        super().__init__(requests, config, times, seed=seed)

    def serve(self) -> Iterator[Served]:
        next_ = 0
        while next_ < len(self._arrivals) or self._running:
            if not self._running:
                self.clock = max(self.clock, self._arrivals[next_])
            while self._has_room() and self._has_come(next_):
                self._admit(next_)
                self._num_read += len(self._requests[next_].prompt_ids)
                next_ += 1
            yield from self._leave()
            if self._running:
                self._only_decodes = not self._num_read
                self._step()
                self._num_read = 0
                yield from self._leave()

    def _has_room(self) -> bool:
        return len(self._running) < self._times.batch

    def _has_come(self, index: int) -> bool:
        return index < len(self._arrivals) and self._arrivals[index] <= self.clock

    def _matches(self, index: int) -> np.ndarray:
        return self._known[index]

    def _price(self, drafted: Sequence[int], passes: int) -> tuple[float, float]:
        context, batch = sum(one.num_tokens for one in self._running), len(drafted)
        verifying = published_step_s(context, batch + sum(drafted) + self._num_read)
        return verifying, self._num_drafts(passes) * published_draft_s(context, batch)

    def _measure_beforehand(self) -> None:
        rows = [
            {**Shape(batch, batch * (1 + k), batch * CONTEXT, k)._asdict(), "steps": CELL_SIZE}
            for batch in CALIBRATED
            if batch <= self._times.batch
            for k in (0, 1, self._k_max)
        ]
        for row in rows:
            drafting = published_draft_s(row["context"], row["batch"]) if row["drafted"] else 0.0
            row["seconds"] = published_step_s(row["context"], row["tokens"]) + drafting
        self.speculation.times.load_rows(rows)


def capacity(requests: Sequence[Recorded], batch: int) -> float:
    """Requests per second that the engine serves without speculation, always full."""
    prompt, output = (
        float(np.mean([len(getattr(one, name)) for one in requests]))
        for name in ("prompt_ids", "output_ids")
    )
    step = published_step_s(round(batch * (prompt + output / 2)), batch)
    return 1 / ((output - 1) * step / batch + prompt * prices.PER_TOKEN_S)


def poisson(rate: float, num: int, seed: int) -> list[float]:
    """Times of arrival, so many per second in the mean."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, num)
    return [float(at) for at in np.cumsum(gaps)]


def simulate(noise: float, draft: str, seed: int, sizes: dict[str, Any]) -> list[Row]:
    """Every arm at every load, with one draft and one draw of traffic: rows {"draft", "share",
    "draw", "arm", "latency_s", "k", "in_flight"}. For a process of its own."""
    from benchmarks.drift import jobs
    from benchmarks.engines import models
    from benchmarks.traffic.family import FAMILIES, FIRST_SERVED
    from benchmarks.traffic.recordings import take
    from osd.tiny.traffic import HOME
    from trainer.draft import load_draft

    jobs.one_thread()
    recorded = take("tiny", HOME, FIRST_SERVED, sizes["num_recorded"])
    with tempfile.TemporaryDirectory(prefix="osd-bench-") as directory:
        source = FAMILIES["tiny"].models()[1]
        model = load_draft(models.copy_with_noise(source, Path(directory), noise))
        matches = [matches_of(model, one) for one in recorded]
    rows = []
    for share in sizes["loads"]:
        rate = share * capacity(recorded, MAX_SEQS)
        num = max(MIN_REQUESTS, round(rate * sizes["seconds"]))
        chosen = np.random.default_rng(seed).integers(0, len(recorded), num)
        coming = poisson(rate, num, seed)
        traffic = [recorded[i] for i in chosen], [matches[i] for i in chosen], coming
        for arm in (*sizes["fixed"], AUTO):
            found = run_arm(arm, *traffic, seed=seed)
            rows.append({"draft": draft, "share": share, "draw": seed, "arm": arm} | found)
    return rows


def run_arm(
    arm: int | str,
    requests: Sequence[Recorded],
    matches: Sequence[np.ndarray],
    arrivals: Sequence[float],
    *,
    seed: int,
) -> Row:
    """One arm over one draw of traffic: {"latency_s", "k", "in_flight"}, means. `arm`: a fixed
    number of draft tokens, 0 = none, or `AUTO`."""
    from benchmarks.drift.contenders import with_proposers
    from benchmarks.drift.jobs import base_config

    config = with_proposers(base_config(), ["draft"])
    times = published(batch=MAX_SEQS)
    loop = OpenLoop(requests, matches, arrivals, config, times, seed=seed)
    if isinstance(arm, int):
        loop.speculation.force(Plan("draft", arm) if arm else OFF)
        loop.speculation.plan((), 0)  # of the proposals at the end of the first prefill
    ended = np.zeros(len(arrivals))
    drafted = steps = 0
    for served in loop.serve():
        ended[served.index] = loop.clock
        drafted += served.counts.drafted
        steps += served.counts.steps
    latency = ended - np.asarray(arrivals)
    return {
        "latency_s": float(latency[round(WARM_UP * len(latency)) :].mean()),
        "k": drafted / steps,
        "in_flight": float(latency.sum() / loop.clock),
    }
