"""Every record that crosses a process boundary. numpy only, no torch.

Legend: P prompt tokens, T output tokens, N captured rows, K top-k, G draft tokens per step
(vLLM's `num_speculative_tokens`). Token ids are int32, times are seconds, `at` is Unix time.

Three numbers are called "acceptance". Here they are told apart:

    acceptance rate            accepted / drafted tokens. vLLM's counters; falls when k grows, so for display only.
    acceptance length          1 + accepted / drafts: tokens a verification step yields on average.
    conditional acceptance α   accepted / tested tokens, where a draft token is *tested* if all before it in the
                               same draft were accepted. Independent of k: every decision uses this one.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

REJECTED, ACCEPTED, PLAIN = 0, 1, 2
"""`Trace.kind`: the draft token was rejected, was accepted, or nothing was proposed here (k = 0, bonus token)."""

HOLDOUT_ONE_IN = 8
"""One trace in so many is held out: the gate judges drafts on it, training never sees it."""

MAX_DOMAIN_LENGTH = 48
"""Characters of a traffic class's name."""

_SAMPLE_NUMBER = re.compile(r"^\d+_")
"""vLLM names sample i of request R `i_R`."""

R = TypeVar("R")


def encode(record: Any) -> bytes:
    """JSON of any record but `Trace` (which has its own codec in `buffers/codec.py`)."""
    return msgspec.json.encode(record)


def decode(data: bytes | str, record_type: type[R]) -> R:
    """The record from its JSON. Raises `ValueError` naming the first field that does not fit."""
    return msgspec.json.decode(data, type=record_type)


def clean_domain(label: str) -> str:
    """The name of a traffic class, wherever it appears: at most 48 of A-Z a-z 0-9 . _ -, anything else becomes "_".

    Example:
        clean_domain("code/python 3") == "code_python_3"
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", label.strip()[:MAX_DOMAIN_LENGTH])


def acceptance_rate(num_accepted_tokens: int, num_draft_tokens: int) -> float | None:
    """accepted / drafted, None when nothing was drafted."""
    return num_accepted_tokens / num_draft_tokens if num_draft_tokens else None


def acceptance_length(num_accepted_tokens: int, num_drafts: int) -> float | None:
    """1 + accepted / drafts, None when nothing was drafted."""
    return 1 + num_accepted_tokens / num_drafts if num_drafts else None


def conditional_acceptance(num_accepted_tokens: int, num_tested_tokens: int) -> float | None:
    """α = accepted / tested, None when nothing was tested."""
    return num_accepted_tokens / num_tested_tokens if num_tested_tokens else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """One finished request: its tokens, and the target's distribution at the captured positions.

    Positions are absolute indices into `tokens` = prompt_ids + output_ids: row i with `position` t is the target's
    distribution for token t given tokens[:t].

    Example:
        Trace(trace_id="cmpl-1", target_id="9f2c", finished_at=1.7e9, prompt_ids=[1, 7, 9], output_ids=[4, 4, 2],
              position=[4], kind=[REJECTED], draft_ids=[8], target_ids=[[4, 2]], target_logprobs=[[-0.1, -2.5]],
              tail_logprob=[-4.1], keep_prob=[1.0], draft_version=[1], num_drafts=1, num_draft_tokens=4,
              num_accepted_tokens=0)
        At position 4 the draft proposed token 8; the target gave 0.90 to token 4, 0.08 to 2, 0.02 to all others.
    """

    trace_id: str
    draft: str = "default"
    """Name of the draft that served this request."""
    target_id: str
    """Hash of the target's weights, tokenizer and adapter."""
    domain: str = ""
    """Traffic class given by the client; "" when unlabelled."""
    finished_at: float
    prompt_ids: np.ndarray
    """int32[P], the last `capture.max_context` tokens of the prompt."""
    output_ids: np.ndarray
    """int32[T]"""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """Sampling parameters of the request; top_k 0 = off."""
    position: np.ndarray
    """int32[N], ascending, each in [1, P + T)."""
    kind: np.ndarray
    """int8[N]: REJECTED, ACCEPTED or PLAIN."""
    draft_ids: np.ndarray
    """int32[N], the proposed token; -1 where nothing was proposed."""
    target_ids: np.ndarray
    """int32[N, K], most likely first."""
    target_logprobs: np.ndarray
    """float16[N, K]: raw log-softmax, before temperature, not renormalised over the K."""
    tail_logprob: np.ndarray
    """float32[N]: log of the probability mass outside the K; -inf when there is none."""
    keep_prob: np.ndarray
    """float32[N] in (0, 1]: probability with which this row was kept; its loss weight is 1 / keep_prob."""
    draft_version: np.ndarray
    """int32[N]: version of the draft that proposed here."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __post_init__(self) -> None:
        for name, (dtype, ndim) in _TRACE_ARRAYS.items():
            array = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            if array.size == 0 and ndim == 2:
                array = array.reshape(0, array.shape[-1] if array.ndim == 2 else 0)
            if array.ndim != ndim:
                raise ValueError(f"trace {self.trace_id}: {name} has {array.ndim} dimensions, expected {ndim}")
            object.__setattr__(self, name, array)
        num_rows = len(self.position)
        for name in _TRACE_ROWS:
            if len(getattr(self, name)) != num_rows:
                raise ValueError(
                    f"trace {self.trace_id}: {name} has {len(getattr(self, name))} rows, position has {num_rows}"
                )
        if self.target_ids.shape != self.target_logprobs.shape:
            raise ValueError(
                f"trace {self.trace_id}: target_ids {self.target_ids.shape} and target_logprobs "
                f"{self.target_logprobs.shape} differ"
            )
        if num_rows:
            self._check_values()

    def _check_values(self) -> None:
        num_tokens = len(self.prompt_ids) + len(self.output_ids)
        if self.position.min() < 1 or self.position.max() >= num_tokens:
            raise ValueError(
                f"trace {self.trace_id}: position {int(self.position.min())}..{int(self.position.max())} outside "
                f"[1, {num_tokens})"
            )
        if not (self.keep_prob > 0).all() or (self.keep_prob > 1).any():
            raise ValueError(f"trace {self.trace_id}: keep_prob outside (0, 1]")
        if np.isnan(self.target_logprobs).any() or np.isnan(self.tail_logprob).any():
            raise ValueError(f"trace {self.trace_id}: target_logprobs or tail_logprob holds NaN")
        if (self.target_logprobs > 1e-2).any():
            raise ValueError(f"trace {self.trace_id}: target_logprobs above 0")

    @property
    def num_rows(self) -> int:
        return len(self.position)

    def with_rows(self, keep_N: np.ndarray) -> Trace:
        """The same request with some of its rows. keep_N: bool."""
        return self if keep_N.all() else replace(self, **{name: getattr(self, name)[keep_N] for name in _TRACE_ROWS})

    @property
    def is_holdout(self) -> bool:
        """Whether the gate may judge on this trace and the trainer must not see it (a stable hash of its id)."""
        request_id = _SAMPLE_NUMBER.sub("", self.trace_id)  # all samples of a request are on the same side
        return zlib.crc32(request_id.encode()) % HOLDOUT_ONE_IN == 0

    @property
    def num_bytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(getattr(self, name).nbytes for name in _TRACE_ARRAYS)


_TRACE_ARRAYS: dict[str, tuple[Any, int]] = {
    "prompt_ids": (np.int32, 1),
    "output_ids": (np.int32, 1),
    "position": (np.int32, 1),
    "kind": (np.int8, 1),
    "draft_ids": (np.int32, 1),
    "target_ids": (np.int32, 2),
    "target_logprobs": (np.float16, 2),
    "tail_logprob": (np.float32, 1),
    "keep_prob": (np.float32, 1),
    "draft_version": (np.int32, 1),
}
"""Array fields of `Trace`: dtype and number of dimensions. The codec writes exactly these."""
_TRACE_ROWS = tuple(name for name in _TRACE_ARRAYS if name not in ("prompt_ids", "output_ids"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassReport:
    """One class of traffic in an `EvalReport`.

    Example:
        ClassReport(num_traces=12, alpha_base=0.41, alpha_candidate=0.72, diff_high=0.36)
    """

    num_traces: int
    alpha_base: float
    alpha_candidate: float
    diff_high: float
    """Upper end of the paired bootstrap interval of candidate - base."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """A candidate draft and its base, replayed on the same held-out traces (conditional acceptance α throughout).

    Example:
        EvalReport(num_traces=40, num_tokens=1600, k=4, alpha_base=0.41, alpha_candidate=0.72,
                   alpha_base_per_pos=(0.5, 0.4, 0.3, 0.2), alpha_candidate_per_pos=(0.8, 0.7, 0.7, 0.6),
                   diff=0.31, diff_low=0.27, diff_high=0.35)
    """

    num_traces: int
    num_tokens: int
    k: int
    alpha_base: float
    alpha_candidate: float
    alpha_base_per_pos: tuple[float, ...]
    """[k]; NaN-free: positions never tested are 0."""
    alpha_candidate_per_pos: tuple[float, ...]
    diff: float
    """alpha_candidate - alpha_base."""
    diff_low: float
    diff_high: float
    """Paired bootstrap interval of `diff`, resampled by request."""
    classes: dict[str, ClassReport] = field(default_factory=dict)
    """By class of traffic: the label, or a cluster of unlabelled prompts."""


NO_TRACES = "no traces"
"""`RoundOutcome.discarded` of a round that had nothing to learn from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOutcome:
    """One training round: where the candidate lies and how it was made and judged.

    Example:
        RoundOutcome(base_version=3, path="/data/candidates/17", num_steps=24, num_tokens=3100, loss_first=2.1,
                     loss_last=0.6, seconds=2.4, trace_age_mean_s=4.0, trace_age_max_s=9.5, eval=EvalReport(...))
    """

    draft: str = "default"
    base_version: int
    target_id: str = ""
    kind: Literal["full", "lora"] = "full"
    """What was trained. The candidate is a whole, plain model either way."""
    path: str
    """Directory with the candidate in Hugging Face format; "" when the round was discarded."""
    num_steps: int
    num_tokens: int
    """Rows trained on, replayed ones included."""
    loss_first: float
    loss_last: float
    seconds: float
    trace_age_mean_s: float
    trace_age_max_s: float
    eval: EvalReport | None
    """None when there were too few held-out traces, or the round was discarded."""
    discarded: str = ""
    """Why the round produced no candidate ("non-finite loss"); "" when it did."""
    learning_rate: float = 0.0
    """Peak learning rate of this round."""
    holdout_loss_before: float | None = None
    holdout_loss_after: float | None = None
    """Mean loss over the newest held-out traces; None when there were too few."""
    padding: float = 0.0
    """Share of the tokens computed that were padding."""
    num_new_rows: int = 0
    """Rows of new traces that could be trained on."""
    num_contradicting: int = 0
    """Rows of new traces that were left out because they contradict the text that was served."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRelease:
    """An immutable draft on disk: a plain Hugging Face directory plus this record as `release.json`.

    Example:
        DraftRelease(version=4, parent=3, path="/data/releases/v000004", sha256="ab12...", target_id="9f2c",
                     created_at=1.7e9, outcome=RoundOutcome(...))
    """

    draft: str = "default"
    version: int
    parent: int
    """Version it was trained from; 0 for the first."""
    kind: Literal["full", "lora"] = "full"
    path: str
    sha256: str
    """Of `model.safetensors`."""
    target_id: str
    created_at: float
    outcome: RoundOutcome | None = None
    """How it came to be; None for the draft the service started with."""
    origin: str = ""
    """Fingerprint of the draft its line of releases began with; "" = not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapReport:
    """What one replica did with a release.

    Example:
        SwapReport(at=1.7e9, replica="replica-0", version=4, previous=3, ok=True, stage_s=0.08, pause_s=0.006)
    """

    at: float
    replica: str
    draft: str = "default"
    version: int
    previous: int
    ok: bool
    stage_s: float
    """Reading and validating, in a thread beside the engine."""
    pause_s: float
    """Time the worker's apply blocks the engine."""
    proved: bool = False
    """Whether the live draft was read back and found to be this one; False where an engine cannot be read back."""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecWindow:
    """Speculation counters of one replica, draft version and domain over a short time.

    Example:
        SpecWindow(at=1.7e9, replica="replica-0", version=4, seconds=1.0, k=4, num_drafts=100, num_draft_tokens=400,
                   num_accepted_tokens=250, num_accepted_tokens_per_pos=(90, 70, 50, 40),
                   num_tested_per_pos=(100, 90, 70, 50), num_output_tokens=350, num_finished=8,
                   decode_seconds=4.0, num_decode_tokens=320)
    """

    at: float
    """End of the window."""
    replica: str
    draft: str = "default"
    version: int
    domain: str = ""
    seconds: float
    k: int
    """Most draft tokens a step may propose."""
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    """[G]"""
    num_tested_per_pos: tuple[int, ...]
    """[G]: drafts whose first g tokens were all accepted, and that had a token g + 1 to test."""
    num_steps: int = 0
    """Times a request was in a step, with draft tokens of the draft model or without. `num_draft_tokens / num_steps` is
    the k that was really used."""
    num_output_tokens: int = 0
    """Tokens emitted by the engine, bonus and undrafted ones included."""
    num_finished: int = 0
    """Requests that ended in this window."""
    num_captured: int = 0
    """Of these, requests of which a trace was kept: the others cannot be replayed."""
    decode_seconds: float = 0.0
    num_decode_tokens: int = 0
    """Over the finished requests: seconds from first to last token, and tokens after the first. TPOT is their ratio."""

    @property
    def alpha(self) -> float | None:
        return conditional_acceptance(sum(self.num_accepted_tokens_per_pos), sum(self.num_tested_per_pos))

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStatus:
    """A replica's heartbeat: who it is, which draft it serves, what its capture did so far.

    Example:
        ReplicaStatus(at=1.7e9, replica="replica-0", url="http://127.0.0.1:8000", version=4, target_id="9f2c", k=4,
                      pid=4242, started_at=1.7e9, engine="vllm 0.32.0 (cpu)", capture_rows={"rejected": 120},
                      capture_skipped={"opted_out": 2}, buffer_dropped={"redis": 0}, num_running=3)
    """

    at: float
    replica: str
    draft: str = "default"
    url: str
    version: int
    """Version of the draft it serves now."""
    target_id: str
    k: int
    pid: int
    started_at: float
    engine: str
    capture_rows: dict[str, int] = field(default_factory=dict)
    """kind -> rows kept since it started"""
    capture_skipped: dict[str, int] = field(default_factory=dict)
    """reason -> requests, steps or traces left out since it started"""
    num_traces: int = 0
    """Requests handed to the buffer as traces since it started"""
    buffer_dropped: dict[str, int] = field(default_factory=dict)
    """reason -> traces the buffer could not take since it started"""
    num_running: int = 0
    unproved: str = ""
    """Why its swaps cannot be proved by reading the draft back; "" when they are."""
    """Requests in the engine."""
    speculation: dict[str, Any] = field(default_factory=dict)
    """What the control of speculation last said of itself (`serving/speculation/control.py`); empty = k is fixed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferStats:
    """What a replay buffer holds.

    Example:
        BufferStats(num_traces=812, num_holdout=115, num_bytes=9_300_000, num_put=1600, oldest_at=1.7e9,
                    dropped={"full": 0, "redis": 3})
    """

    num_traces: int
    """Training traces stored; held-out ones not counted."""
    num_holdout: int
    num_bytes: int
    num_put: int
    """Training traces ever stored (the highest id)."""
    oldest_at: float
    """`finished_at` of the oldest stored trace; 0 when empty."""
    dropped: dict[str, int] = field(default_factory=dict)
    """reason -> traces this client could not store, and those that nobody of the deployment could read"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Which parts of a service work, as its controller finds them.

    Example:
        Health(is_redis_up=True, is_trainer_up=True, is_alarmed=False, lagging=("replica-1",))
    """

    is_redis_up: bool
    is_trainer_up: bool
    """Also where no training is wanted."""
    is_alarmed: bool
    """An engine seems to run something else than the serving draft."""
    lagging: tuple[str, ...] = ()
    """Replicas that have served another version than the wanted one for long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricPoint:
    """One value at one time.

    Example:
        MetricPoint(at=1.7e9, name="alpha", value=0.71, labels={"draft": "default", "version": "4"})
    """

    at: float
    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened to the service: a release, a refusal, a rollback, a failed swap.

    Example:
        Event(at=1.7e9, kind="published", text="v4: held-out alpha 0.41 -> 0.72 on 40 requests", version=4)
    """

    at: float
    kind: str
    text: str
    version: int = 0


def merge_windows(windows: list[SpecWindow]) -> SpecWindow | None:
    """The sum of windows (counters added, time spans of distinct `at` added); None for an empty list."""
    if not windows:
        return None
    last = windows[-1]
    width = max(len(w.num_tested_per_pos) for w in windows)

    def total(name: str) -> tuple[int, ...]:
        padded = np.zeros((len(windows), width), np.int64)
        for row, window in zip(padded, windows, strict=True):
            values = getattr(window, name)
            row[: len(values)] = values
        return tuple(padded.sum(0).tolist())

    sums: dict[str, Any] = {
        f.name: type(getattr(last, f.name))(sum(getattr(w, f.name) for w in windows))
        for f in fields(SpecWindow)
        if f.name in _SUMMED
    }
    return SpecWindow(
        at=max(w.at for w in windows),
        replica=last.replica,
        draft=last.draft,
        version=last.version,
        domain=last.domain,
        k=last.k,
        seconds=sum({w.at: w.seconds for w in windows}.values()),
        num_accepted_tokens_per_pos=total("num_accepted_tokens_per_pos"),
        num_tested_per_pos=total("num_tested_per_pos"),
        **sums,
    )


_SUMMED = (
    "num_steps",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_output_tokens",
    "num_finished",
    "num_captured",
    "decode_seconds",
    "num_decode_tokens",
)
