"""A vLLM engine in this process, stepped by hand, and vLLM's own weight updates from a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


def engine_in_process(model: str, extra: Mapping[str, Any]) -> Any:
    """vLLM's `LLM` with engine core and worker in this process, to be stepped by hand:
    `add`, `step`."""
    from vllm import LLM

    return LLM(model=model, distributed_executor_backend="uni", skip_tokenizer_init=True, **extra)


@contextmanager
def scheduling(is_async: bool) -> Iterator[None]:
    """Engines made here schedule so. On a CPU vLLM would schedule synchronously, whatever it is
    asked."""
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    own = vars(CpuPlatform)["check_and_update_config"]

    def settle(cls: type, config: Any) -> None:
        own.__func__(cls, config)
        config.scheduler_config.async_scheduling = is_async

    platform.check_and_update_config = classmethod(settle)
    try:
        yield
    finally:
        platform.check_and_update_config = own


def add(
    llm: Any, req_id: str, prompt_ids: list[int], num_tokens: int, temperature: float = 0.0
) -> None:
    """Queue a request for exactly `num_tokens` tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=temperature,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    llm.llm_engine.add_request(req_id, {"prompt_token_ids": prompt_ids}, params)


def sample(
    llm: Any, prompts: Sequence[list[int]], *, num_samples: int, num_tokens: int, temperature: float
) -> list[list[list[int]]]:
    """Per prompt `num_samples` continuations of exactly `num_tokens` tokens, all in flight
    together."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            n=num_samples,
            temperature=temperature,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    done: dict[str, list[list[int]]] = {}
    while has_unfinished(llm):
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = [list(one.token_ids) for one in output.outputs]
    llm.llm_engine.step()  # tells the worker that they have finished
    return [done[str(index)] for index in range(len(prompts))]


def step(llm: Any) -> dict[str, list[int]]:
    """One engine step: request id -> tokens it brought. A step without requests tells the worker
    who has finished."""
    return {
        output.request_id: list(output.outputs[0].token_ids) for output in llm.llm_engine.step()
    }


def abort(llm: Any, req_ids: list[str]) -> None:
    """End requests where they are."""
    llm.llm_engine.abort_request(req_ids)


def has_unfinished(llm: Any) -> bool:
    """Whether any request is still waiting or running."""
    return bool(llm.llm_engine.has_unfinished_requests())


def file_weight_updates() -> dict[str, str]:
    """`weight_transfer_config` under which vLLM's own weight updates read a safetensors file.

    vLLM has the calls (`start_draft_weight_update`, `update_weights`, `finish_weight_update`) but
    no backend that works without a GPU. This one does what its built-in ones do in each call, with
    a file in the place of a transport.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

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
