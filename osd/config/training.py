"""The configuration of training: what is stored, how a draft learns, when it may serve."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from osd.config.section import Section, check_home


class BufferConfig(Section):
    """The replay buffer between serving and training."""

    redis_url: str = ""
    """A Redis (7 or later) or Valkey to use. Empty = a private Valkey server, started and stopped
    with the service."""
    host: str = "127.0.0.1"
    """Address the private Valkey listens on, always with a password drawn at each start. A trainer
    on another machine needs one that it reaches: `osd cluster head` takes the head's."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the private Valkey. 0 = any free one."""
    max_traces: int = Field(20_000, ge=16)
    """Traces kept per draft and domain; the oldest leave first."""
    max_age_seconds: float | None = Field(None, gt=0)
    """Traces are deleted when they are so old, anchors too. None = only newer ones push them
    out."""
    max_domains: int = Field(16, ge=1)
    """Traffic labels told apart, the first to come; traces of further ones count as unlabelled.
    `osd traces purge --all` makes room for others."""
    max_memory: int = Field(512 << 20, ge=64 << 20)
    """Memory limit of the private Valkey server in bytes. What replicas and controller tell each
    other takes up to 30 MiB of it."""


class TrainerConfig(Section):
    """How the draft is distilled."""

    enabled: bool = True
    """Off = serve and capture, but never train."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the draft is trained; auto = a GPU where one is visible."""
    num_gpus: float = Field(0, ge=0)
    """GPUs reserved for the trainer with Ray. 0 = none is reserved; `trainer.device` says what it
    runs on."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision of the trainer. The draft's own weights stay float32 while training."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of the trainer."""
    duty_cycle: float = Field(1.0, gt=0, le=1)
    """Share of the time the trainer spends on training steps while requests run; when none do, it
    never rests. On a CPU it also runs at low priority."""
    gpu_memory_fraction: float = Field(0.2, gt=0, le=1)
    """Share of the memory the trainer may take of a GPU that is not its own (`trainer.num_gpus`
    below 1). Leave it free with `serving.vllm.gpu_memory_utilization`."""
    method: Literal["full", "lora"] = "full"
    """full = every weight of the draft is trained; lora = low-rank adapters beside its linear
    layers, merged into them before anything leaves the trainer. LoRA needs less memory for
    gradients and moments, and a higher learning rate."""
    lora_rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    lora_alpha: int = Field(32, ge=1)
    """The adapters count lora_alpha / lora_rank times."""
    loss: Literal[
        "forward_kl",
        "reverse_kl",
        "jensen_shannon",
        "total_variation",
        "negative_log_acceptance",
        "lk_hybrid",
    ] = "forward_kl"
    """What the draft minimises at the captured rows; the formulas stand in `trainer/loss.py`."""
    sampling: Literal["teacher", "student", "mixed"] = "teacher"
    """Who wrote the answers that the draft learns from. teacher = the target: what was served.
    student = the draft, which answers the stored prompts anew at their temperature. mixed = both.
    For the last two the trainer loads the target beside the draft, to ask what it thinks of text
    that was never served: memory for its weights, and time in every round. After a sharp shift they
    cost more and taught less ([measured](benchmarks-learning.md#osd-bench-sampling)). An EAGLE-3
    head learns from teacher's alone, and needs the target in the trainer, too."""
    student_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of a round's traces whose answer is the draft's, with `trainer.sampling=mixed`."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate of AdamW. A round that made things worse halves it; later rounds let it
    recover."""
    warmup_steps: int = Field(8, ge=0)
    """Steps over which each round's learning rate rises from zero."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm clip."""
    batch_size: int = Field(8, ge=1)
    """Traces per step."""
    feature_cache_bytes: int = Field(1 << 30, ge=0)
    """For EAGLE-3 heads: memory for the target's hidden states of texts that come again, as
    replayed ones do. Others are computed anew in every round."""
    target_memory_bytes: int | None = Field(None, gt=0)
    """Where the trainer needs the target, for an EAGLE-3 head or by `trainer.sampling`: memory for
    its weights on the trainer's device, at least its embedding and the larger of a layer and an
    output layer that is not the embedding. Layers that do not fit stay in the target's files and
    are read anew whenever it is asked, which is slow. None = all are loaded."""
    max_length: int = Field(1024, ge=16)
    """Tokens per trace in training; longer ones lose the start of their prompt."""
    min_new_traces: int = Field(32, ge=1)
    """A round starts when so many traces have arrived since the last one. While the acceptance of
    the last few requests is lower than of late, half as many are enough, and as many requests must
    have come since it fell."""
    max_wait_seconds: float = Field(600, gt=0)
    """A round starts, too, when the first new trace is so old and at least `trainer.batch_size`
    have arrived: where requests are few, the draft learns all the same."""
    patience_rounds: int = Field(6, ge=0)
    """After so many rounds in a row that were not published, training rests until acceptance falls.
    0 = it never rests."""
    drift_margin: float = Field(0.05, gt=0, lt=1)
    """Fall of the recent α under the usual one, beyond chance, that ends the rest."""
    payback_seconds: float = Field(600, ge=0)
    """Training rests, too, while what a round takes from the engines, as measured, exceeds what its
    draft is expected to save them within so long. Where the trainer takes nothing from them, it
    never rests for that. 0 = train whatever it takes."""
    max_idle_seconds: float = Field(3600, gt=0)
    """While training rests, one round runs all the same after so long. There may be something to
    learn although acceptance did not fall. No round waits longer, either, where others on other
    traffic brought too little."""
    max_new_traces: int = Field(512, ge=1)
    """New traces used in one round; of more, only the newest. The first round after a rest uses
    at most twice `trainer.min_new_traces`."""
    replay_batches: int = Field(8, ge=0)
    """Older batches replayed for every batch of new traces, at least. Replay keeps the draft from
    forgetting, and new traffic is learnt by many passes over little data."""
    max_replay_growth: float = Field(4.0, ge=1, le=64)
    """Up to so many times `trainer.replay_batches` are replayed where the trainer has time, and
    rounds take little from the engines beside what they save ([when](operations.md#tuning)). More
    passes learn more of noise and of poison, too: with `trainer.averaging_rate` below 1 it is
    always the least. 1 = never more."""
    recent_fraction: float = Field(0.5, ge=0, le=1)
    """Share of the replayed traces, anchors aside, that comes from the last eight rounds. The
    others come from the whole buffer, each domain alike."""
    num_anchors: int = Field(256, ge=0)
    """Traces kept as anchors: a uniform sample of all there ever were, also when the buffer has
    long let go of them. One replayed trace in eight is an anchor. 0 = none."""
    averaging_rate: float = Field(1.0, gt=0, le=1)
    """Below 1, a candidate is not what one round learnt: its weights are the last candidate's,
    moved by this share towards the trained ones. Less of what was learnt from noise or from poison
    is served then, and less is forgotten; new traffic is learnt a round or two later. 0.25 is for a
    service whose clients are not trusted ([what it brings](benchmarks.md)). 1 = the trained weights
    themselves, as always with `osd train` and `osd distil`."""
    seed: int = 0
    """Seed of sampling in the trainer."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Where curves of training go, a point per round: TensorBoard, Weights & Biases. Each needs its
    package installed. wandb sends them to its servers unless `WANDB_MODE=offline` is set."""
    tracker_dir: str = ""
    """Where trackers write, on the trainer's machine; empty = `curves` beside the trainer's
    checkpoints. For `osd train` and `osd distil` empty = `OUT.curves`."""

    _check_tracker_dir = field_validator("tracker_dir")(check_home)


class GateConfig(Section):
    """What a candidate must show before it serves, and what makes a serving draft go back."""

    min_holdout_traces: int = Field(8, ge=2)
    """Held-out traces needed to judge at all; at most `gate.max_holdout_traces`."""
    max_holdout_traces: int = Field(64, ge=2, validate_default=True)
    """Newest held-out traces a candidate is judged on."""
    judge_since_change: bool = True
    """Where the serving draft is clearly worse on the newest of them than on those before, judge on
    those alone, if there are `gate.min_holdout_traces` of each, and 8: the traffic has changed, and
    else a candidate would be refused for what it lost of the old. Where held-out ones since then,
    or since the start, are too few, some of the round's own traces judge it and teach nothing in
    it. Never with `osd train` and `osd distil`."""
    confidence: float = Field(0.9, gt=0.5, lt=1)
    """The candidate must be better with this (one-sided) confidence, by paired bootstrap over
    requests."""
    min_gain: float = Field(0.0, ge=0, lt=1)
    """Gain in α that the lower bound must exceed."""
    max_class_loss: float = Field(0.05, ge=0, lt=1)
    """Loss in α, beyond chance, that one class of traffic may suffer for a gain of the whole. A
    class is a label, or a cluster of unlabelled prompts."""
    min_class_traces: int = Field(8, ge=2)
    """Held-out traces of a class needed to judge it on its own."""
    num_bootstrap: int = Field(500, ge=100)
    """Bootstrap resamples."""
    rollback_margin: float = Field(0.1, gt=0, lt=1)
    """A new draft is rolled back when the α it serves with stays this far under what the gate
    measured, and the draft before it does better on the same recent requests."""
    rollback_min_tested: int = Field(24, ge=1)
    """Draft tokens tested live before a new draft is judged on them. Few are
    enough, because a replay of both drafts follows. A draft that disappoints is soon hardly used,
    so more may never come."""

    recall_traces: int = Field(16, ge=0, le=4096)
    """Newest requests on which earlier drafts are compared with the serving one, each time that so
    many have come (half as many where α falls, more while training rests and α does not move); at
    least `gate.min_holdout_traces` must be there. One that is clearly better serves again. 0 =
    never."""
    canary_seconds: float = Field(60.0, ge=0)
    """Of several replicas, one serves a new draft first. The others follow when it serves as the
    gate measured, or when nothing was found against it for so long. 0 = all at once."""

    @field_validator("max_holdout_traces")
    @classmethod
    def _some_can_be_judged(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("min_holdout_traces", 2):
            raise ValueError(
                f"must be at least gate.min_holdout_traces={info.data['min_holdout_traces']}"
            )
        return value
