"""The whole configuration as one strict typed tree: every key, its default and its limits.

The text under a field is its documentation (`docs/configuration.md` is made from it). How a configuration is read
stands in `osd/config/reading.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

OWNED_VLLM_KEYS = {
    "model": "serving.target",
    "speculative_config": "serving.draft and the section speculation",
    "served_model_name": "serving.served_model_name",
    "host": "serving.host",
    "port": "serving.port",
    "worker_extension_cls": "nothing: the service sets it",
    "worker_cls": "nothing: the service relies on vLLM's own worker",
    "scheduler_cls": "speculation.mode: the service controls vLLM's own scheduler",
    "middleware": "nothing: the service sets it",
    "enable_ssl_refresh": "a restart to load new certificates",
    "root_path": "nothing: the service does not sit behind a path",
    "data_parallel_size": "nothing: one engine per service",
    "tensor_parallel_size": "nothing: an engine is one worker for now",
    "pipeline_parallel_size": "nothing: an engine is one worker for now",
    "api_server_count": "nothing: one API process per engine",
}
"""vLLM arguments that belong to us, and what to use instead."""

SWITCHES = {"on": True, "yes": True, "off": False, "no": False}
"""What vLLM, whose arguments are handed through as they are, would take for text, and so for true."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would make 1 of `true`."""
        wanted = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and wanted in (int, float, int | None, float | None):
            raise ValueError("a number is wanted")
        return value


class ServingConfig(_Section):
    """The target, its draft, and the OpenAI API they are served on."""

    target: str = ""
    """Directory or hub name of the target model. "tiny" = the small model the project builds itself."""
    draft: str = ""
    """Directory or hub name of the draft to start with. "tiny" = the small draft the project builds itself."""
    served_model_name: str = ""
    """Name clients use for the model; empty = the target as given."""
    host: str = "127.0.0.1"
    """Address of the service port. 0.0.0.0 opens it to the network."""
    port: int = Field(8000, ge=0, le=65535)
    """Service port: vLLM's OpenAI API. 0 = any free one."""
    seconds_between_polls: float = Field(0.25, gt=0)
    """How often a replica looks for a newer draft and reports its counters."""
    num_gpus: float = Field(0, ge=0)
    """GPUs reserved for the engine with Ray (0.7 of one leaves room for the trainer). 0 = none is reserved; a
    vLLM built for GPUs still uses those it sees."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the engine's processes (`OMP_NUM_THREADS: "1"`)."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments handed to vLLM verbatim, under vLLM's own names (`dtype: bfloat16`)."""

    @property
    def api_key(self) -> str:
        """What vLLM wants of clients as a bearer token, "" = nothing; of several keys, the first."""
        keys = self.vllm.get("api_key") or self.env.get("VLLM_API_KEY") or os.environ.get("VLLM_API_KEY", "")
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
        return {key: SWITCHES.get(v.lower(), v) if isinstance(v, str) else v for key, v in value.items()}


class SpeculationConfig(_Section):
    """How many tokens are proposed per step, and by whom."""

    mode: Literal["auto", "fixed", "off"] = "auto"
    """auto = whatever delivers most tokens per second now: k, the proposer, or no speculation at all. fixed = always
    `speculation.k_max` tokens of the first of `speculation.proposers`. off = nothing is proposed; the draft still
    learns from what the target writes."""
    k_max: int = Field(5, ge=1, le=16)
    """Most draft tokens proposed per step (k). The engine keeps room for so many."""
    proposers: list[Literal["draft", "ngram"]] = Field(["draft", "ngram"], min_length=1)
    """Who may propose: the draft model, and n-grams looked up in the request itself. n-grams need an engine without
    asynchronous scheduling."""
    calibration_seconds: float = Field(20, ge=0, le=60)
    """Longest time an engine's start may take to measure its steps. 0 = learn from traffic alone. What was measured is
    kept for the next start on the same hardware with the same models and versions (`osd profile`)."""
    net_interval_seconds: float = Field(600, ge=0)
    """Mean time between two measurements of what speculation gains: the whole engine does without it for a moment.
    0 = never."""
    net_window_seconds: float = Field(2, gt=0)
    """How long that moment is."""

    @field_validator("proposers")
    @classmethod
    def _each_once(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("names a proposer twice")
        return value


class CaptureConfig(_Section):
    """What is kept of the target's verification, and what that may cost."""

    enabled: bool = True
    """Whether traces are captured at all. Off = a plain server with a frozen draft."""
    request_fraction: float = Field(1.0, ge=0, le=1)
    """Share of requests of which anything is kept; which ones, follows from their ids."""
    top_k: int = Field(64, ge=1, le=1024)
    """Target log-probabilities kept per row; the rest of the mass is one number."""
    accepted_fraction: float = Field(0.5, ge=0, le=1)
    """Probability with which a row whose draft token was accepted is kept. They anchor the draft to what it knows."""
    plain_fraction: float = Field(0.5, ge=0, le=1)
    """Probability with which a row without a proposal (first token, bonus token) is kept."""
    max_context: int = Field(2048, ge=16)
    """Prompt tokens kept per trace, counted from the end."""
    max_repeated_context: int = Field(512, ge=16)
    """Of the leading prompt tokens that earlier traces of the same worker have already stored (the turns of a chat so
    far, a common system prompt), so many are kept, counted from their end. With `max_context` or more, all of them."""
    max_output: int = Field(2048, ge=16)
    """A request's trace is closed after so many output tokens."""
    max_bytes_per_second: int = Field(8 << 20, ge=0)
    """Budget for traces leaving one worker; what exceeds it is dropped and counted."""
    queue_size: int = Field(512, ge=1)
    """Engine steps waiting for the capture thread; when full, steps are dropped and counted."""


class BufferConfig(_Section):
    """The replay buffer between serving and training."""

    redis_url: str = ""
    """A Redis (7 or later) or Valkey to use. Empty = a private Valkey server, started and stopped with the service."""
    max_traces: int = Field(20_000, ge=16)
    """Traces kept per draft and domain; the oldest leave first."""
    max_age_seconds: float | None = Field(None, gt=0)
    """Traces are deleted when they are so old, anchors too. None = only newer ones push them out."""
    max_domains: int = Field(16, ge=1)
    """Traffic labels told apart; traces of further ones count as unlabelled."""
    max_memory: int = Field(512 << 20, ge=16 << 20)
    """Memory limit of the private Valkey server in bytes."""


class TrainerConfig(_Section):
    """How the draft is distilled."""

    enabled: bool = True
    """Off = serve and capture, but never train."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the draft is trained; auto = a GPU where one is visible."""
    num_gpus: float = Field(0, ge=0)
    """GPUs reserved for the trainer with Ray. 0 = none is reserved; `trainer.device` says what it runs on."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision of the trainer. The draft's own weights stay float32 while training."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of the trainer."""
    duty_cycle: float = Field(1.0, gt=0, le=1)
    """Share of the time the trainer spends on training steps while requests run; when none do, it never rests. On a CPU
    it also runs at low priority."""
    gpu_memory_fraction: float = Field(0.2, gt=0, le=1)
    """Share of the memory the trainer may take of a GPU that is not its own (`trainer.num_gpus` below 1). Leave it free
    with `serving.vllm.gpu_memory_utilization`."""
    method: Literal["full", "lora"] = "full"
    """full = every weight of the draft is trained; lora = low-rank adapters beside its linear layers, merged into them
    before anything leaves the trainer. LoRA needs less memory for gradients and moments, and a higher learning rate."""
    lora_rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    lora_alpha: int = Field(32, ge=1)
    """The adapters count lora_alpha / lora_rank times."""
    loss: Literal[
        "forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "negative_log_acceptance", "lk_hybrid"
    ] = "forward_kl"
    """What the draft minimises at the captured rows; the formulas stand in `trainer/loss.py`."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate of AdamW. A round that made things worse halves it; later rounds let it recover."""
    warmup_steps: int = Field(8, ge=0)
    """Steps over which each round's learning rate rises from zero."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm clip."""
    batch_size: int = Field(8, ge=1)
    """Traces per step."""
    max_length: int = Field(1024, ge=16)
    """Tokens per trace in training; longer ones lose the start of their prompt."""
    min_new_traces: int = Field(32, ge=1)
    """A round starts when so many traces have arrived since the last one."""
    max_wait_seconds: float = Field(600, gt=0)
    """A round starts, too, when the first new trace is so old and at least `trainer.batch_size` have arrived: where
    requests are few, the draft learns all the same."""
    patience_rounds: int = Field(6, ge=0)
    """After so many rounds in a row that brought no gain, training rests until acceptance falls. 0 = it never rests."""
    drift_margin: float = Field(0.05, gt=0, lt=1)
    """Fall of the recent α under the usual one, beyond chance, that ends the rest."""
    max_idle_seconds: float = Field(3600, gt=0)
    """At rest, a round runs all the same when the last one is so long ago: what can be learnt need not show as a
    fall."""
    max_new_traces: int = Field(512, ge=1)
    """New traces used in one round; of more, only the newest."""
    replay_batches: int = Field(8, ge=0)
    """Older batches replayed for every batch of new traces. Replay keeps the draft from forgetting."""
    recent_fraction: float = Field(0.5, ge=0, le=1)
    """Share of the replayed traces that comes from the last eight rounds; the others come from the whole buffer, each
    domain alike."""
    num_anchors: int = Field(256, ge=0)
    """Traces kept as anchors: a uniform sample of all there ever were, also when the buffer has long let go of them.
    One replayed trace in eight is an anchor. 0 = none."""
    seed: int = 0
    """Seed of sampling in the trainer."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Where curves of training go, a point per round: TensorBoard, Weights & Biases. Each needs its package installed.
    wandb sends them to its servers unless `WANDB_MODE=offline` is set."""
    tracker_dir: str = ""
    """Where trackers write, on the trainer's machine; empty = `curves` beside the trainer's checkpoints. For
    `osd train` and `osd distil` empty = `OUT.curves`."""


class GateConfig(_Section):
    """What a candidate must show before it serves, and what makes a serving draft go back."""

    min_holdout_traces: int = Field(8, ge=2)
    """Held-out traces needed to judge at all; at most `gate.max_holdout_traces`."""
    max_holdout_traces: int = Field(64, ge=2, validate_default=True)
    """Newest held-out traces a candidate is judged on."""
    confidence: float = Field(0.9, gt=0.5, lt=1)
    """The candidate must be better with this (one-sided) confidence, by paired bootstrap over requests."""
    min_gain: float = Field(0.0, ge=0, lt=1)
    """Gain in α that the lower bound must exceed."""
    max_class_loss: float = Field(0.05, ge=0, lt=1)
    """Loss in α, beyond chance, that one class of traffic may suffer for a gain of the whole. A class is a label, or a
    cluster of unlabelled prompts."""
    min_class_traces: int = Field(8, ge=2)
    """Held-out traces of a class needed to judge it on its own."""
    num_bootstrap: int = Field(500, ge=100)
    """Bootstrap resamples."""
    rollback_margin: float = Field(0.1, gt=0, lt=1)
    """A new draft is rolled back when the α it serves with stays this far under what the gate measured, and the draft
    before it does better on the same recent requests."""
    rollback_min_tested: int = Field(24, ge=1)
    """Draft tokens tested live before a new draft is judged on them. Few will do, for a replay of both drafts follows;
    and there may be no more, for a draft that disappoints is soon hardly used."""

    @field_validator("max_holdout_traces")
    @classmethod
    def _some_can_be_judged(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("min_holdout_traces", 2):
            raise ValueError(f"must be at least gate.min_holdout_traces={info.data['min_holdout_traces']}")
        return value


class ControlConfig(_Section):
    """The control port: dashboard, status, metrics, administration."""

    host: str = "127.0.0.1"
    """Address of the control port."""
    port: int = Field(8001, ge=0, le=65535)
    """Control port. 0 = any free one."""
    seconds_between_looks: float = Field(0.5, gt=0)
    """Pause between two looks of the watch loop."""
    history_seconds: int = Field(7 * 24 * 3600, ge=60)
    """How much history the dashboard keeps, in memory and in `history.db` under the data directory: seconds for the
    last two hours, minutes before."""


class ReleasesConfig(_Section):
    """The store of drafts on disk."""

    dir: str = ""
    """Where releases are kept; empty = `releases` under the data directory."""
    keep: int = Field(8, ge=2)
    """Newest releases kept; pinned, serving and first ones are never pruned."""


class RayConfig(_Section):
    """The Ray cluster the service runs on."""

    address: str = "local"
    """"local" = a private one, started and stopped with the service; "auto" or an address = an existing cluster."""
    trainer_resource: str = ""
    """Custom Ray resource of the machine the trainer runs on; empty = the machine the service was started on. Another
    machine needs the data directory on a shared file system and a `buffer.redis_url` both reach."""


class Config(_Section):
    """Everything the service can be told."""

    deployment: str = Field("default", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    """Name of this deployment: keeps its data, Redis keys and actors apart from others."""
    data_dir: str = ""
    """Where releases, checkpoints and the private Valkey's file live; empty = `osd/DEPLOYMENT` under
    `$XDG_DATA_HOME`, or `~/.local/share` where that is not set."""
    serving: ServingConfig = ServingConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    capture: CaptureConfig = CaptureConfig()
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig = TrainerConfig()
    gate: GateConfig = GateConfig()
    control: ControlConfig = ControlConfig()
    releases: ReleasesConfig = ReleasesConfig()
    ray: RayConfig = RayConfig()

    @property
    def data_path(self) -> Path:
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return Path(self.data_dir or f"{base}/osd/{self.deployment}").expanduser().resolve()

    @property
    def releases_path(self) -> Path:
        return Path(self.releases.dir).expanduser().resolve() if self.releases.dir else self.data_path / "releases"

    @property
    def history_path(self) -> Path:
        return self.data_path / "history.db"

    @property
    def checkpoint_path(self) -> Path:
        return self.data_path / "trainer"
