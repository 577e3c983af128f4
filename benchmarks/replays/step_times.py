"""The time of a decode step of the cost-shaped target, by the number of draft tokens it verifies,
and the time that a draft model adds.

These times turn a replayed run into a speed, because the time of a step does not depend on how many
draft tokens are accepted. Engines that verify arbitrary tokens (0, 4, 24 per step) and one with the
tiny draft take turns on the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.record import Row
from benchmarks.replays.curve import Curve
from osd.evaluate.bound import published as prices

STREAMS = 4
WIDTHS = (0, 4, 24)
"""Draft tokens verified per request and step."""
DRAFT = "draft model, 4"
CYCLES = 12
KV_BYTES = 64 << 20
"""For `STREAMS` requests."""
NUM_TOKENS = 32
PROPOSER = "benchmarks.replays.step_times.Proposer"


class Proposer:
    """As many tokens as it is asked for, at no cost: vLLM's `custom_class`."""

    def __init__(self, vllm_config: Any) -> None:
        self._k = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any) -> None: ...

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[7] * self._k if sampled else [] for sampled in sampled_token_ids]


def measure(num_cycles: int, batch: int = STREAMS, num_tokens: int = NUM_TOKENS) -> list[Row]:
    """Seconds of a step with `batch` requests, median of each burst of `num_tokens` steps: rows
    {"batch", "arm", "step_s"}. For a fresh process."""
    from benchmarks.engines import engine, models

    engine.prepare()
    from osd.tiny.models import ensure, ensure_cost_shaped

    target, draft = ensure_cost_shaped(), models.release(ensure().draft, 1)
    room = KV_BYTES * -(-batch // STREAMS)
    plain: dict[str, Any] = {"worker_extension_cls": "", "kv_cache_memory_bytes": room}
    engines: dict[str, Any] = {}
    for width in WIDTHS:
        proposer = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": width}
        settings = plain | {"speculative_config": proposer if width else None}
        engines[str(width)] = engine.Engine(target, draft, k=width, batch=batch, **settings)
    engines[DRAFT] = engine.Engine(target, draft, k=4, batch=batch, **plain)
    prompts = np.random.default_rng(0).integers(8, 200, (batch, 16)).tolist()
    for one in engines.values():
        one.burst(prompts, 8)
    rows = []
    for cycle in range(num_cycles):
        for arm in list(engines)[:: 1 if cycle % 2 else -1]:
            steps = dict(
                engines[arm].burst(prompts, num_tokens).gaps
            )  # all streams wait for the same steps
            rows.append({"batch": batch, "arm": arm, "step_s": median(steps.values())})
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelledStepTimes:
    """Seconds of a step of so many requests.

    Example:
        ModelledStepTimes(verify_s=(0.034, 0.04, 0.07), draft_s=0.004)
        4 tokens are verified in 40 ms and drafted in 4 ms.
    """

    verify_s: tuple[float, ...]
    """By `WIDTHS`."""
    draft_s: float
    """What a draft model of k = 4 adds."""
    batch: int = STREAMS
    """Requests that share a step."""

    @classmethod
    def of(cls, rows: Sequence[Row], batch: int = STREAMS) -> ModelledStepTimes:
        """Of what `measure` found of such a batch."""
        mine = [row for row in rows if row.get("batch", STREAMS) == batch]
        by_arm = {
            arm: [row["step_s"] for row in mine if row["arm"] == arm]
            for arm in (*map(str, WIDTHS), DRAFT)
        }
        verify_s = tuple(median(by_arm[str(width)]) for width in WIDTHS)
        pairs = zip(by_arm[DRAFT], by_arm["4"], strict=True)
        return cls(
            batch=batch,
            verify_s=verify_s,
            draft_s=max(0.0, median(drafting - verifying for drafting, verifying in pairs)),
        )

    def step(self, width: float, *, drafts: bool) -> float:
        """A step that verifies `width` draft tokens a request in the mean. The time grows linearly
        between the widths that were measured. Drafts of fewer than 4 tokens are charged as much as
        those of 4, which is too much."""
        return float(np.interp(width, WIDTHS, self.verify_s)) + drafts * self.draft_s

    def seconds(self, curve: Curve, *, has_draft_model: bool) -> np.ndarray:
        """float [requests]: decode time of each request, `batch` of them sharing every step; what
        the run says itself where it kept time. A proposer that is no model proposes at no cost,
        which flatters it.
        """
        if curve.seconds is not None:
            return curve.seconds
        drafts, steps = curve.counts["drafts"], curve.counts["steps"]
        width = curve.counts["drafted"] / np.maximum(drafts, 1)
        with_draft = np.interp(width, WIDTHS, self.verify_s) + (
            self.draft_s if has_draft_model else 0.0
        )
        return np.asarray((drafts * with_draft + (steps - drafts) * self.verify_s[0]) / self.batch)

    def tokens_per_second_without(self) -> float:
        """No speculation: a token a step."""
        return self.batch / self.verify_s[0]


def published(num_kv_tokens: int = 1024 * STREAMS, batch: int = STREAMS) -> ModelledStepTimes:
    """Of Llama-3.1-8B with EAGLE on an H100. `num_kv_tokens`: of all requests."""
    return ModelledStepTimes(
        batch=batch,
        verify_s=tuple(published_step_s(num_kv_tokens, batch * (1 + width)) for width in WIDTHS),
        draft_s=published_draft_s(num_kv_tokens, batch),
    )


def published_step_s(num_kv_tokens: int, num_tokens: int) -> float:
    """Seconds of a step of Llama-3.1-8B on an H100, as fitted by the public simulator
    (`osd/evaluate/bound/published.py`), with what is around it. `num_tokens`: of the step;
    `num_kv_tokens`: in the KV cache; of all requests."""
    passes = prices.PER_CONTEXT_S * num_kv_tokens + prices.PER_TOKEN_S * num_tokens
    return passes + prices.FIXED_S + prices.OVERHEAD_S


def published_draft_s(num_kv_tokens: int, num_tokens: int) -> float:
    """What EAGLE adds to it (same source), however long the drafts of a step are."""
    drafts = prices.DRAFT_PER_CONTEXT_S * num_kv_tokens + prices.DRAFT_PER_TOKEN_S * num_tokens
    return drafts + prices.DRAFT_FIXED_S
