"""The checks: what each shows, what it needs, how long it may take, what its verdicts mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
SYNC_CHECK = "VLLM_GPU_SYNC_CHECK"
INVARIANT = "VLLM_BATCH_INVARIANT"
_CHECKS = "benchmarks.gpu.checks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """Which of vLLM's model runners, and how it schedules.

    Example:
        Mode(is_v2=False, is_async=True)
    """

    is_v2: bool = False
    is_async: bool = False

    @property
    def name(self) -> str:
        return f"{'V2' if self.is_v2 else 'V1'} {'async' if self.is_async else 'sync'}"

    @property
    def is_for_cpu(self) -> bool:
        """vLLM's CPU build has neither."""
        return not (self.is_v2 or self.is_async)


V1, V1_ASYNC = Mode(), Mode(is_async=True)
V2, V2_ASYNC = Mode(is_v2=True), Mode(is_v2=True, is_async=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check, run in a process of its own.

    Example:
        Check(name="swap", module="benchmarks.gpu.checks.swap", shows="...", means="...", seconds=9)
    """

    name: str
    module: str
    """With a `measure(run)`."""
    shows: str
    means: str
    """What the verdict tells a reader."""
    seconds: float
    """The most it may take."""
    mode: Mode = V1
    """Of its engines on a GPU."""
    needs_gpu: bool = True
    """Whether its verdict says anything only with a GPU. Without one its code runs all the same."""
    is_timed: bool = True
    """Whether it measures time, and so runs alone."""
    has_dry_run: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    """Of its process, where there is a GPU."""
    again_with: Mapping[str, str] = field(default_factory=dict)
    """Where it failed with a GPU, it runs once more with this environment, to say more."""


def _of_mode(mode: Mode) -> tuple[Check, Check]:
    """The checks that each way of running the engine must pass."""
    slug = _slug(mode)
    syncs = Check(
        name=f"syncs-{slug}",
        module=f"{_CHECKS}.syncs",
        shows=f"{mode.name}: capture, control and the swap never make the engine wait for the GPU",
        means="vLLM raises at each wait between host and device in a step. Passed: there is none, "
        "the hooks never failed, and a wait planted on purpose was noticed.",
        seconds=100,
        mode=mode,
        is_timed=False,
        has_dry_run=mode.is_for_cpu,
        environ={SYNC_CHECK: "error"},
        again_with={SYNC_CHECK: "warn"},
    )
    exactness = Check(
        name=f"exact-{slug}",
        module=f"{_CHECKS}.exactness",
        shows=f"{mode.name}: captured rows are the target's own; tokens at temperature 1 follow it",
        means="Passed: rows that were picked and sent from the device are those that transformers "
        "computes, at the right positions, and no drafted token is off the target's distribution.",
        seconds=120,
        mode=mode,
        needs_gpu=False,
        is_timed=False,
        has_dry_run=mode.is_for_cpu,
    )
    return syncs, exactness


def _precision(is_invariant: bool) -> Check:
    with_or_without = "with" if is_invariant else "without"
    return Check(
        name="bf16-invariant" if is_invariant else "bf16",
        module=f"{_CHECKS}.precision",
        shows=f"bfloat16 {with_or_without} {INVARIANT}=1: tokens at temperature 0 against an "
        "engine without a draft",
        means="Passed: each answer is identical at every k, and to the same prompt alone."
        if is_invariant
        else "Near-ties may flip with the batch's shape in any engine: the shares tell how often. "
        "Passed: captured rows are those of transformers.",
        seconds=110,
        mode=V1_ASYNC,
        is_timed=False,
        has_dry_run=not is_invariant,
        environ={INVARIANT: "1" if is_invariant else "0"},
    )


def _swap(mode: Mode) -> Check:
    return Check(
        name="swap" if mode is V1_ASYNC else f"swap-{_slug(mode)}",
        module=f"{_CHECKS}.swap",
        shows=f"{mode.name}: another draft under CUDA-graph replay: proof, acceptance, pause",
        means="Passed: each swap was proved, acceptance follows the draft at once, so that "
        "replayed graphs read the new weights, and the target's weights are untouched.",
        seconds=150,
        mode=mode,
        has_dry_run=mode is V1_ASYNC,
    )


def _varying_k(mode: Mode) -> Check:
    return Check(
        name="varying-k" if mode is V1_ASYNC else f"varying-k-{_slug(mode)}",
        module=f"{_CHECKS}.varying_k",
        shows=f"{mode.name}: time of a step and CUDA-graph mode at each k; off against an engine "
        "without a draft",
        means="Passed: the k asked for is the k verified. A ratio above 1 at `off` is what having "
        "a draft costs while it is not used.",
        seconds=130,
        mode=mode,
        has_dry_run=mode is V1_ASYNC,
    )


def _slug(mode: Mode) -> str:
    return mode.name.lower().replace(" ", "-")


CHECKS: tuple[Check, ...] = (
    *_of_mode(V1_ASYNC),
    *_of_mode(V2_ASYNC),
    _swap(V1_ASYNC),
    Check(
        name="capture",
        module=f"{_CHECKS}.capture",
        shows="inter-token latency with capture on and off, batch 1, 16, 64",
        means="What capture costs users. Passed: rows were stored, none was lost, hooks never "
        "failed.",
        seconds=130,
        mode=V1_ASYNC,
    ),
    _varying_k(V1_ASYNC),
    _varying_k(V2_ASYNC),
    _swap(V2_ASYNC),
    Check(
        name="shared",
        module=f"{_CHECKS}.shared",
        shows="one GPU for engine and trainer: inter-token latency and memory",
        means="What training beside the engine costs. Passed: the trainer learnt within its share "
        "of the memory, and no answer failed.",
        seconds=110,
        mode=V1_ASYNC,
    ),
    _precision(True),
    _precision(False),
    *_of_mode(V1),
    *_of_mode(V2),
    _varying_k(V1),
)
"""In the order in which they run: asynchronous scheduling, vLLM's default on a GPU, comes first."""


def find(name: str) -> Check:
    """The check of this name. Raises `KeyError`."""
    return {check.name: check for check in CHECKS}[name]
