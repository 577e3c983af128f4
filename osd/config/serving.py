"""The configuration of the engine: what it serves, how it speculates, what is captured of it."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from osd.config.section import Section

OWNED_VLLM_KEYS = {
    "model": "serving.target",
    "speculative_config": "serving.draft and the section speculation",
    "spec_method": "serving.draft and the section speculation",
    "spec_model": "serving.draft",
    "spec_tokens": "speculation.k_max",
    "served_model_name": "serving.served_model_name",
    "host": "serving.host",
    "port": "serving.port",
    "worker_extension_cls": "nothing: the service sets it",
    "worker_cls": "nothing: the service relies on vLLM's own worker",
    "scheduler_cls": "speculation.mode: the service controls vLLM's own scheduler",
    "middleware": "nothing: the service sets it",
    "enable_ssl_refresh": "a restart to load new certificates",
    "root_path": "nothing: the service does not sit behind a path",
    "data_parallel_size": "a service per engine: ranks must not differ in k and draft version",
    "pipeline_parallel_size": "tensor_parallel_size: the stages of a pipeline do not all draft",
    "prefill_context_parallel_size": "tensor_parallel_size: contexts are not split between ranks",
    "decode_context_parallel_size": "tensor_parallel_size: contexts are not split between ranks",
    "nnodes": "nothing: all ranks of an engine run on one machine",
    "api_server_count": "nothing: one API process per engine",
}
"""vLLM arguments that belong to us, and what to use instead."""

SWITCHES = {"on": True, "yes": True, "off": False, "no": False}
"""Words of `serving.vllm` that become booleans. vLLM would read them as text, and text as true."""

EXECUTORS = ("mp", "uni")
"""Values of vLLM's `distributed_executor_backend` under which the ranks are processes of this
machine."""


class ReplicasConfig(Section):
    """How many engines serve. A plain number (`serving.replicas=2`) is both `min` and `max`."""

    min: int = Field(1, ge=1, le=64)
    """Engines that are started with the service, and that serve whatever comes."""
    max: int = Field(1, ge=1, le=64)
    """Engines that serve when most is asked. One has the service port for itself. Where there may
    be several, each has a port of its own, and HAProxy stands before them on the service port: a
    request goes to the one that has fewest, or, with a header `X-Session-ID`, always to the same;
    one that was not begun when its engine died goes to another."""
    requests_each: float = Field(32, gt=0)
    """Requests in flight, waiting ones too, that an engine is to have: beyond that another is
    started, up to `max`."""
    up_seconds: float = Field(30, ge=0)
    """How long there are more requests before another engine is started."""
    down_seconds: float = Field(300, ge=0)
    """How long fewer engines would do before one is drained: it gets no new requests, and ends when
    it has answered those it has, or after an hour."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_number(cls, value: Any) -> Any:
        if isinstance(value, dict | cls):
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("must be a whole number, or have min and max")
        return {"min": value, "max": value}

    @model_validator(mode="after")
    def _refuse_min_above_max(self) -> ReplicasConfig:
        if self.min > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}; raise max or lower min")
        return self


class ServingConfig(Section):
    """The target, its draft, and the OpenAI API they are served on."""

    engines: Literal["own", "attached"] = "own"
    """"own" = the service starts its engine. "attached" = engines that others start (`vllm serve`
    with `OSD_ATTACH` in its environment) are the replicas; the service is trainer and control port
    alone."""
    steps: tuple[Literal["observe", "capture", "swap", "control"], ...] = (
        "observe",
        "capture",
        "swap",
        "control",
    )
    """What is switched on in attached engines: counting, capture, new drafts, k decided step by
    step. `osd steps` changes it while they run."""
    target: str = ""
    """Directory or hub name of the target model, or one of the small models the project builds
    itself: tiny (two layers), tiny-deep (eight), or either at the cost of a real model:
    tiny-cost-shaped, tiny-deep-cost-shaped."""
    draft: str = ""
    """Directory or hub name of the draft to start with: a draft model, or an
    [EAGLE-3 head](support.md#eagle-3-heads). Or one of the small drafts the project builds itself:
    tiny, tiny-deep, or, as heads of the deep targets, tiny-eagle3, tiny-eagle3-cost-shaped."""
    served_model_name: str = ""
    """Name clients use for the model; empty = the target as given."""
    host: str = "127.0.0.1"
    """Address of the service port. 0.0.0.0 opens it to the network."""
    port: int = Field(8000, ge=0, le=65535)
    """Service port: vLLM's OpenAI API. 0 = any free one."""
    replicas: ReplicasConfig = ReplicasConfig()
    seconds_between_polls: float = Field(0.25, gt=0)
    """How often a replica looks for a newer draft and reports its counters."""
    num_gpus: float = Field(0, ge=0)
    """GPUs reserved for each engine with Ray (0.7 of one leaves room for the trainer). 0 = none is
    reserved; a vLLM built for GPUs still uses those it sees. With
    `serving.vllm.tensor_parallel_size`, as many as there are ranks."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the engine's processes (`OMP_NUM_THREADS: "1"`)."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments handed to vLLM verbatim, under vLLM's own names (`dtype: bfloat16`). With
    `tensor_parallel_size: N` target and draft are split over N processes of this machine."""

    @property
    def num_ranks(self) -> int:
        """Processes that target and draft are split over."""
        return int(argument(self.vllm, "tensor_parallel_size") or 1)

    @property
    def api_key(self) -> str:
        """The bearer token that vLLM asks of clients; "" = none. Of several keys, the first."""
        keys = (
            self.vllm.get("api_key")
            or self.env.get("VLLM_API_KEY")
            or os.environ.get("VLLM_API_KEY", "")
        )
        return str(keys[0] if isinstance(keys, list) else keys)

    @field_validator("env", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {str(k): str(v).lower() if isinstance(v, bool) else str(v) for k, v in value.items()}

    @field_validator("vllm")
    @classmethod
    def _refuse_owned_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            name = key.replace("-", "_")
            if name in OWNED_VLLM_KEYS:
                raise ValueError(f"{key} is not yours to set here; use {OWNED_VLLM_KEYS[name]}")
        return {
            key: SWITCHES.get(v.lower(), v) if isinstance(v, str) else v for key, v in value.items()
        }

    @field_validator("vllm")
    @classmethod
    def _refuse_ranks_that_do_not_fit(
        cls, value: dict[str, Any], info: ValidationInfo
    ) -> dict[str, Any]:
        num_ranks = argument(value, "tensor_parallel_size")
        if num_ranks is not None and (type(num_ranks) is not int or num_ranks < 1):
            raise ValueError(f"tensor_parallel_size={num_ranks!r}: use a whole number from 1 on")
        executor = argument(value, "distributed_executor_backend")
        if executor not in (None, *EXECUTORS):
            raise ValueError(
                f"distributed_executor_backend={executor!r}: the ranks of an engine are processes "
                "of one machine; leave it out, or use mp"
            )
        num_gpus = info.data.get("num_gpus", 0)
        if num_ranks is not None and num_ranks > 1 and 0 < num_gpus < num_ranks:
            raise ValueError(
                f"tensor_parallel_size={num_ranks}: each rank has a GPU of its own, and "
                f"serving.num_gpus={num_gpus:g}; set serving.num_gpus={num_ranks}, or 0"
            )
        return value


def argument(vllm: dict[str, Any], name: str) -> Any:
    """An argument of `serving.vllm`, which may be written with dashes; None when it is not
    given."""
    return next((v for key, v in vllm.items() if key.replace("-", "_") == name), None)


class SpeculationConfig(Section):
    """How many tokens are proposed per step, and by whom."""

    mode: Literal["auto", "fixed", "off"] = "auto"
    """auto = whatever delivers most tokens per second now: k, the proposer, or no speculation at
    all. fixed = always `speculation.k_max` tokens of the first of `speculation.proposers`. off =
    nothing is proposed; the draft still learns from what the target writes."""
    k_max: int = Field(5, ge=1, le=16)
    """Most draft tokens of the draft model per step (k). The engine keeps room for so many, or for
    `speculation.memory_k_max`."""
    proposers: list[Literal["draft", "memory"]] = Field(["draft", "memory"], min_length=1)
    """Who may propose: the draft model, and the memory: what followed the same words in this
    request, or in answers to earlier ones."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """vLLM's: how the draft picks its tokens in requests above temperature 0. greedy = the most
    likely one. probabilistic = [drawn](control.md#sampled-drafts) from its distribution at the
    request's temperature. Attached engines must be started with the same."""
    memory_k_max: int = Field(8, ge=1, le=32)
    """Most draft tokens of the memory per step."""
    memory_bytes: int = Field(64 << 20, ge=1 << 20)
    """Size of the memory in each engine; what was longest not seen goes first. A request is
    remembered beyond its end if it may be captured, and proposed only to requests with the same
    `cache_salt`. An engine over several ranks that schedules asynchronously or runs the V2 model
    runner has two of this size."""
    memory_by_domain: bool = False
    """Whether an answer is proposed only to requests with the same label (`X-OSD-Domain`)."""
    calibration_seconds: float = Field(20, ge=0, le=60)
    """Longest time an engine's start may take to measure its steps. 0 = learn from traffic alone.
    What was measured is kept for the next start on the same hardware with the same models and
    versions (`osd profile`)."""
    net_interval_seconds: float = Field(600, ge=0)
    """Mean time between two measurements of what speculation gains: the whole engine does without
    it for a moment. 0 = never."""
    net_window_seconds: float = Field(2, gt=0)
    """How long that moment is."""

    @property
    def is_sampled(self) -> bool:
        """Whether draft tokens are drawn from the draft's distribution."""
        return self.draft_sample_method == "probabilistic"

    @field_validator("proposers", mode="before")
    @classmethod
    def _ngram_is_the_memory(cls, value: Any) -> Any:
        if isinstance(value, list) and "ngram" in value:
            raise ValueError("has 'ngram', which is a part of 'memory' now; use 'memory'")
        return value

    @field_validator("proposers")
    @classmethod
    def _each_once(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("names a proposer twice")
        return value


class CaptureConfig(Section):
    """What is kept of the target's verification, and what that may cost."""

    enabled: bool = True
    """Whether traces are captured at all. Off = a plain server with a frozen draft."""
    request_fraction: float = Field(1.0, ge=0, le=1)
    """Share of requests of which anything is kept; which ones, follows from their ids."""
    top_k: int = Field(64, ge=1, le=1024)
    """Target log-probabilities kept per row; the rest of the mass is one number."""
    accepted_fraction: float = Field(0.5, ge=0, le=1)
    """Probability with which a row whose draft token was accepted is kept. They anchor the draft to
    what it knows."""
    plain_fraction: float = Field(0.5, ge=0, le=1)
    """Probability with which a row without a proposal (first token, bonus token) is kept."""
    max_context: int = Field(2048, ge=16)
    """Prompt tokens kept per trace, counted from the end."""
    max_repeated_context: int = Field(512, ge=16)
    """Of the leading prompt tokens that earlier traces of the same worker have already stored (the
    turns of a chat so far, a common system prompt), so many are kept, counted from their end. With
    `max_context` or more, all of them."""
    max_output: int = Field(2048, ge=16)
    """A request's trace is closed after so many output tokens."""
    max_bytes_per_second: int = Field(8 << 20, ge=0)
    """Budget for traces leaving one worker; what exceeds it is dropped and counted."""
    queue_size: int = Field(512, ge=1)
    """Engine steps waiting for the capture thread; when full, steps are dropped and counted."""
