"""vLLM's engine in this process, stepped by hand, so that it can be measured step by step and asked
between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SPECULATION = "vllm:spec_decode_num_"


class Brought(NamedTuple):
    """What a step brought a request."""

    token_ids: list[int]
    has_ended: bool


class EngineInProcess:
    """vLLM's `LLM` without a tokenizer. With `VLLM_ENABLE_V1_MULTIPROCESSING=0` its scheduler is in
    this process too."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        from vllm import LLM

        given = {"skip_tokenizer_init": True, "use_tqdm_on_load": False} | dict(options)
        self.llm: Any = LLM(model=model, **given)

    def add(
        self,
        req_id: str,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Queue a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            stop_token_ids=list(stop_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.llm.llm_engine.add_request(req_id, {"prompt_token_ids": list(prompt_ids)}, params)

    def step(self) -> dict[str, Brought]:
        """One step. Without requests it tells the worker who has ended."""
        return {
            output.request_id: Brought(list(output.outputs[0].token_ids), output.finished)
            for output in self.llm.llm_engine.step()
        }

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def rpc(self, method: str) -> Any:
        """What the first worker answers."""
        return self.llm.collective_rpc(method)[0]

    def speculation(self) -> dict[str, Any]:
        """vLLM's own counters so far: {"drafts", "draft_tokens", "accepted_tokens": int,
        "accepted_tokens_per_pos": list}; {} where nothing speculates."""
        found: dict[str, Any] = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith(SPECULATION):
                value = getattr(metric, "values", None) or getattr(metric, "value", 0)
                found[metric.name.removeprefix(SPECULATION)] = value
        return found
