"""Hooks on one worker's model runner, V1 or V2, which tell capture what the engine verifies.

    execute_model(scheduler_output) ─► on_proposed(number of the step, drafts nobody verified)
                                    ─► on_schedule(new requests, finished)
    rejection sampler(logits, ...)  ─► verification_v1 or _v2 ─► on_verify(Verification)

Before vLLM 0.32, the V1 runner's steps without draft tokens pass by its rejection sampler: they are
heard where it chooses between its samplers (`_sample`).

Nothing here reads a value from the device. Tensors are passed on, and indexing is queued behind the
engine's own work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from osd.errors import CaptureError
from serving.capture.skips import unfit


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as the worker first meets it."""

    req_id: str
    prompt_ids: list[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int | None
    stop_ids: frozenset[int]
    """Tokens that end the output; empty under `ignore_eos` without stop tokens."""
    extra_args: Mapping[str, Any]
    skip_reason: str
    """Why its logits must not be captured, as in `SKIP_REASONS`; "" when they may."""
    is_shared: bool = False
    """Whether the scheduler says that its answer may be proposed to requests of others."""


@dataclass(frozen=True, slots=True)
class Verification:
    """One verification step, in batch order. B requests, G draft tokens at most, V vocabulary."""

    req_ids: list[str]
    num_draft_tokens_B: np.ndarray
    is_partial_B: np.ndarray
    """True for an unfinished prefill, whose sample is discarded."""
    draft_ids: torch.Tensor
    """[sum of num_draft_tokens], flat"""
    first_position_B: torch.Tensor
    """Absolute index of the first token this step samples for the request."""
    sampled_BG: torch.Tensor
    """[B, G + 1], -1 after the last emitted token"""
    logits: torch.Tensor
    """[sum of (num_draft_tokens + 1), V]: raw target logits; row j of a request follows j accepted
    drafts"""
    from_memory: Collection[str] = ()
    """Requests whose draft tokens are the memory's, not the draft model's."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """What the scheduler says of drafts with a step (`serving/speculation/proposals.py`)."""

    step: int
    """Number of the step, at whose end the draft model proposes."""
    judged: Sequence[tuple[str, int, int, int]]
    """Drafts that nobody verified: (request, the step they were proposed in, drafted, accepted)."""


class Listener(Protocol):
    """Is told of steps and verifications."""

    def on_proposed(self, proposed: Proposed) -> None: ...
    def on_schedule(self, new: list[NewRequest], finished: set[str]) -> None: ...
    def on_verify(self, step: Verification) -> None: ...
    def on_failure(self, error: Exception) -> None: ...


class VerificationHook:
    """Tells a listener what one worker's model runner does, until `remove()`.

    `on_schedule` is called before each step that begins or ends requests, `on_verify` within each
    step, after sampling and before drafting. Only live instances are changed, never vLLM's classes.
    A request never fails because of the hook: the first error ends it and is passed to
    `on_failure`, as is the reason why a runner cannot be hooked.
    """

    def __init__(self, model_runner: Any, listener: Listener) -> None:
        self._runner = model_runner
        self._listener = listener
        self.is_listening = True
        self.from_memory: Collection[str] = ()
        """Requests whose draft tokens are the memory's in this step."""
        self.problem = ""
        """The error that ended it."""
        self._detach: Callable[[], None] = lambda: None
        with self._guard():
            self._detach = _listen_v2(self) if is_v2(model_runner) else self._listen_v1()
            self._execute_model = model_runner.execute_model
            model_runner.execute_model = self._execute_and_listen

    def remove(self) -> None:
        vars(self._runner).pop("execute_model", None)
        self._detach()

    def listen(self, wanted: bool) -> None:
        """Go on or stop telling. An error that ended it stands."""
        self.is_listening = wanted and not self.problem

    def _execute_and_listen(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with self._guard():
            self.from_memory = getattr(scheduler_output, "osd_from_memory", ())
            step = getattr(scheduler_output, "osd_step", None)
            if self.is_listening and step is not None:
                self._listener.on_proposed(Proposed(step, scheduler_output.osd_judged))
            new, finished = scheduler_output.scheduled_new_reqs, scheduler_output.finished_req_ids
            if self.is_listening and (new or finished):
                shared = getattr(scheduler_output, "osd_shared", ())
                requests = [new_request(r, r.req_id in shared) for r in new]
                self._listener.on_schedule(requests, set(finished))
        return self._execute_model(scheduler_output, *args, **kwargs)

    def _listen_v1(self) -> Callable[[], None]:
        runner = self._runner
        self._sample = runner._sample
        hook = runner.rejection_sampler.register_forward_hook(self._after_verification)
        runner._sample = self._sample_and_listen

        def detach() -> None:
            hook.remove()
            vars(runner).pop("_sample", None)

        return detach

    def _after_verification(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self.tell(lambda: verification_v1(self._runner, args, output))

    def _sample_and_listen(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """As vLLM's. Without `spec_decode_metadata` the plain sampler samples, which may change
        the logits: a copy of them is passed on."""
        copied = None
        with self._guard():
            if spec_decode_metadata is None and self.is_listening:
                copied = logits.clone()
        output = self._sample(logits, spec_decode_metadata)
        if copied is not None:
            self.tell(lambda: sampling_v1(self._runner, copied, output))
        return output

    def tell(self, read: Callable[[], Verification]) -> None:
        """Pass on the step that `read` makes."""
        with self._guard():
            if self.is_listening:
                step = read()
                self._listener.on_verify(
                    replace(step, from_memory=self.from_memory) if self.from_memory else step
                )

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  a request must never fail because of capture
            self.is_listening = False
            self.problem = str(error) or type(error).__name__
            self._listener.on_failure(error)


def is_v2(model_runner: Any) -> bool:
    """Whether this is vLLM's V2 model runner, the default on CUDA. `VLLM_USE_V2_MODEL_RUNNER=0`
    selects V1."""
    classes = type(model_runner).__mro__  # on a CPU, a subclass from another package
    return any(each.__module__.startswith("vllm.v1.worker.gpu.") for each in classes)


def verification_v1(runner: Any, args: tuple[Any, ...], output: Any) -> Verification:
    """The step in the arguments and the result of V1's `RejectionSampler.forward`."""
    metadata, _draft_probs, logits, _sampling = args
    num_drafts_B = np.asarray(metadata.num_draft_tokens, dtype=np.int64)
    num_reqs = len(num_drafts_B)
    ends_B = metadata.cu_num_sampled_tokens
    first_rows = metadata.logits_indices[torch.cat([ends_B.new_zeros(1), ends_B[:-1]]).long()]
    return Verification(
        req_ids=list(runner.input_batch.req_ids[:num_reqs]),
        num_draft_tokens_B=num_drafts_B,
        is_partial_B=runner.discard_request_mask.np[:num_reqs].copy(),
        draft_ids=metadata.draft_token_ids,
        first_position_B=runner.positions[first_rows.long()] + 1,
        sampled_BG=output.sampled_token_ids,
        logits=logits,
    )


def sampling_v1(runner: Any, logits: torch.Tensor, output: Any) -> Verification:
    """A step of the V1 runner without draft tokens. `logits`: one row for each request."""
    num_reqs = runner.input_batch.num_reqs
    last_row_B = runner.query_start_loc.gpu[1 : num_reqs + 1].long() - 1
    return Verification(
        req_ids=list(runner.input_batch.req_ids[:num_reqs]),
        num_draft_tokens_B=np.zeros(num_reqs, np.int64),
        is_partial_B=runner.discard_request_mask.np[:num_reqs].copy(),
        draft_ids=torch.empty(0, dtype=torch.int64, device=logits.device),
        first_position_B=runner.positions[last_row_B] + 1,
        sampled_BG=output.sampled_token_ids,
        logits=logits,
    )


def _listen_v2(hook: VerificationHook) -> Callable[[], None]:
    """V2's samplers are plain callables. On this runner, each is replaced by one that also tells
    the hook."""
    runner = hook._runner
    if problem := _problem_with_v2(runner):
        raise CaptureError(
            f"vLLM's V2 model runner {problem}; VLLM_USE_V2_MODEL_RUNNER=0 asks for the V1 runner"
        )
    own = {name: getattr(runner, name) for name in ("sampler", "rejection_sampler")}
    for name, sampler in own.items():
        setattr(runner, name, _Overheard(sampler, hook))

    def detach() -> None:
        for name, sampler in own.items():
            setattr(runner, name, sampler)

    return detach


def _problem_with_v2(runner: Any) -> str:
    """Why `verification_v2` cannot read this V2 runner's batches; "" when it can."""
    for name, expected in _V2_CLASSES.items():
        found = type(getattr(runner, name))
        if f"{found.__module__}.{found.__name__}" != f"vllm.v1.worker.gpu.{expected}":
            return f"has a {name} that capture does not know ({found.__name__})"
    for name in ("batch_sharder", "pcp_manager", "adaptive_verification"):
        if getattr(runner, name, None) is not None:
            return f"uses {name}, with which capture does not work"
    return ""


_V2_CLASSES = {
    "sampler": "sample.sampler.Sampler",
    "rejection_sampler": "spec_decode.rejection_sampler.RejectionSampler",
}


class _Overheard:
    """A sampler of the V2 runner that tells the hook of its calls."""

    def __init__(self, sampler: Any, hook: VerificationHook) -> None:
        self._sampler = sampler
        self._hook = hook

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = self._sampler(logits, input_batch, *args, **kwargs)
        self._hook.tell(lambda: verification_v2(logits, input_batch, output))
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def verification_v2(logits: torch.Tensor, batch: Any, output: Any) -> Verification:
    """The step in V2's `InputBatch` and `SamplerOutput`, from a call to either of its samplers.

    Request b owns the rows of `logits` and `logits_indices` from `cu_num_logits[b]` on: its last
    token, then its draft tokens. Sampled tokens beyond `num_sampled` are uninitialised memory.
    """
    num_drafts = batch.num_draft_tokens_per_req
    num_drafts_B = (
        np.zeros(batch.num_reqs, np.int64) if num_drafts is None else num_drafts.astype(np.int64)
    )
    is_draft = np.ones(int(num_drafts_B.sum()) + batch.num_reqs, bool)
    is_draft[np.cumsum(num_drafts_B + 1) - (num_drafts_B + 1)] = False
    draft_rows = to_device(np.nonzero(is_draft)[0], logits.device)
    sampled_BG = output.sampled_token_ids
    offset_G = torch.arange(sampled_BG.shape[1], device=sampled_BG.device)
    is_emitted_BG = offset_G < output.num_sampled[:, None]
    last_token_B = batch.logits_indices[batch.cu_num_logits[:-1].long()]
    return Verification(
        req_ids=list(batch.req_ids),
        num_draft_tokens_B=num_drafts_B,
        is_partial_B=batch.num_computed_tokens_np + batch.num_scheduled_tokens
        < batch.prefill_len_np,
        draft_ids=batch.input_ids[batch.logits_indices[draft_rows].long()],
        first_position_B=batch.positions[last_token_B.long()] + 1,
        sampled_BG=torch.where(is_emitted_BG, sampled_BG, -1),
        logits=logits,
    )


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, for which the host does not wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from pageable memory would wait
    return tensor.to(device, non_blocking=True)


def new_request(data: Any, is_shared: bool = False) -> NewRequest:
    """A request as the scheduler announces it (`NewRequestData`)."""
    params = data.sampling_params
    if params is None:
        return NewRequest(data.req_id, [], 0.0, 1.0, 0, None, frozenset(), {}, "pooling")
    stop_ids = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        stop_ids |= set(params.all_stop_token_ids)
    return NewRequest(
        req_id=data.req_id,
        prompt_ids=list(data.prompt_token_ids or ()),  # vLLM extends its own, of a session
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        max_tokens=params.max_tokens,
        stop_ids=frozenset(stop_ids),
        extra_args=params.extra_args or {},
        skip_reason=unfit(data),
        is_shared=is_shared,
    )
