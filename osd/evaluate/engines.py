"""How the engine of each method is started, and how an arm is put into force in it.

An arm is a plan that the control of speculation is forced to follow in every step: k draft tokens,
the memory's, or none. So one engine serves all lengths, and `none` beside them. `auto` is the
control left to itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from osd.evaluate.plan import AUTO, DRAFT, EAGLE3, MEMORY, NGRAM, NONE, SUFFIX, Arm, Models
from serving.speculation.control import Settings
from serving.speculation.goodput import OFF, Plan

LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
"""Of n-gram lookup. With vLLM's own 5 and 5 hardly any answer repeats itself."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a process with one engine is told."""

    engine: str
    directory: str
    """Of the runs."""
    options: dict[str, Any]
    """Of vLLM's `LLM`."""
    stop_token_ids: tuple[int, ...]
    runs: tuple[dict[str, Any], ...]
    """`Planned`, as plain JSON."""


def options_of(
    engine: str,
    models: Models,
    k: int,
    num_seqs: int,
    given: Mapping[str, Any],
    draft_sample_method: str = "greedy",
) -> dict[str, Any]:
    """Arguments of vLLM's `LLM` but for the model. `k`: the longest draft; `num_seqs`: most
    requests at once; `given`: what the user says (`serving.vllm`); `draft_sample_method`: of those
    that draft (`speculation.draft_sample_method`)."""
    settings = Settings(
        mode={NONE: "off", AUTO: "auto"}.get(engine, "fixed"),
        k_max=max(k, 1),
        memory_k_max=max(k, 1),
        is_alone=True,
    )
    has_draft = models.draft is not None or models.head is not None
    proposers = {MEMORY: ["memory"], AUTO: ["draft"] * has_draft + ["memory"]}.get(
        engine, ["draft"]
    )
    additional = dict(given.get("additional_config") or {})
    return {
        "max_num_seqs": num_seqs,
        "enable_prefix_caching": False,  # each arm is sent the same prompts
        "disable_log_stats": False,
        "async_scheduling": False,  # else no drafted token is seen, and parts of steps overlap
        "seed": 0,
        **given,
        "speculative_config": _speculation(engine, models, k, draft_sample_method),
        "worker_extension_cls": "osd.evaluate.worker.MeasuredWorker",
        "scheduler_cls": "osd.evaluate.recorder.recording_scheduler",
        "additional_config": additional | {"osd": asdict(settings) | {"proposers": proposers}},
    }


def _speculation(
    engine: str, models: Models, k: int, draft_sample_method: str
) -> dict[str, Any] | None:
    if engine == NONE:
        return None
    drafts: dict[str, tuple[str, Path | None]] = {
        DRAFT: ("draft_model", models.draft),
        EAGLE3: ("eagle3", models.head),
        MEMORY: ("draft_model", models.draft),
        AUTO: ("eagle3", models.head) if models.draft is None else ("draft_model", models.draft),
    }
    method, directory = drafts.get(engine, (engine, None))
    if directory is not None:
        drafting = {"method": method, "model": str(directory), "num_speculative_tokens": k}
        if draft_sample_method != "greedy" and engine != MEMORY:
            drafting["draft_sample_method"] = draft_sample_method
        return drafting
    # The memory needs room for draft tokens, whoever has asked vLLM for it.
    method = SUFFIX if engine == SUFFIX else NGRAM
    return {"method": method, "num_speculative_tokens": k} | (LOOKUP if method == NGRAM else {})


def plan_of(arm: Arm) -> Plan | None:
    """What the control is forced to follow; None = it decides."""
    if arm.method == AUTO:
        return None
    if arm.method == NONE:
        return OFF
    return Plan("memory" if arm.method == MEMORY else "draft", arm.k)
