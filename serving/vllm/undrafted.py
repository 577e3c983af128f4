"""Requests that are never drafted for, so that an engine which speculates can serve them too.

vLLM refuses them beside a draft: its rejection sampler does not apply `logit_bias` and `min_p`, and
does not return the log-probabilities of `logprob_token_ids`. A request without draft tokens has one
row of logits in every step, and vLLM's plain sampler samples that row, as in an engine without
speculation. Three places work together, each in its own process or class:

    scheduler   `Undrafted` takes the draft tokens of such requests away before each step
    worker      `sample_undrafted` gives the samplers what vLLM leaves out beside a draft
                (`undrafted_sampling.py`)
    front end   `permit_undrafted` lets such requests pass once both have said that they are ready;
                until then, and where one is not, they are refused as vLLM does

None of it depends on the control of speculation, which may have ended.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any

from serving.vllm import parts

REFUSED = ("logit_bias", "min_p", "logprob_token_ids")
REASONS = (*REFUSED, "thinking_token_budget")
"""Parameters of a request because of which it is not drafted for. vLLM accepts the last beside a
draft, but then may force the end of thinking into the row of another request."""


def why_undrafted(params: Any) -> str:
    """The first of `REASONS` that these `SamplingParams` give; "" for a request that is drafted
    for."""
    if params is None:
        return ""
    if params.logit_bias:
        return "logit_bias"
    if params.min_p > 0:
        return "min_p"
    if params.logprob_token_ids is not None:
        return "logprob_token_ids"
    return "thinking_token_budget" if params.thinking_token_budget is not None else ""


# -- scheduler ------------------------------------------------------------------------------------


class Undrafted:
    """Mixed into vLLM's scheduler. No draft token of such a request is ever scheduled, whatever
    proposed it.

    Draft tokens reach a step only by `Request.spec_token_ids`, or where `dynamic_sd_lookup` is
    None, which the mixing class rules out.
    """

    IS_ASYNC = False
    use_v2_model_runner: bool
    running: list[Any]
    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.osd_undrafted: Counter[str] = Counter()
        """Reason -> requests that came and are not drafted for."""
        self.osd_undrafted_problem = parts.problem_with(
            "undrafted_v2" if self.use_v2_model_runner else "undrafted"
        )
        """Why such requests cannot be told apart; "" when they can."""

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        is_new = request.request_id not in self.requests
        added = super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        if is_new and (reason := self._osd_why_undrafted(request)):
            self.osd_undrafted[reason] += 1
        return added

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        for request in () if self.osd_undrafted_problem else self.running:
            if request.spec_token_ids:
                most = self._osd_most_drafts(request)
                if most < len(request.spec_token_ids):
                    request.spec_token_ids = request.spec_token_ids[:most]
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _osd_most_drafts(self, request: Any) -> int:
        """Draft tokens with which the next step is sampled as without them.

        Until `min_tokens` are written, vLLM keeps stop tokens out of the row behind the last draft
        token, even if that one lies behind them. Under asynchronous scheduling it does not know
        how many tokens there are.
        """
        params, all_of_them = request.sampling_params, len(request.spec_token_ids)
        if self._osd_why_undrafted(request):
            return 0
        if params is None or not params.min_tokens or not params.all_stop_token_ids:
            return all_of_them
        missing = params.min_tokens - request.num_output_tokens
        if missing <= 0:
            return all_of_them
        return 0 if self.IS_ASYNC else missing - 1

    def _osd_why_undrafted(self, request: Any) -> str:
        """vLLM takes draft tokens that were accepted behind the end of a session's turn for a part
        of its text: the next turn would follow what nobody said, or end the engine."""
        if self.osd_undrafted_problem:
            return ""
        is_session = bool(getattr(request, "resumable", False))
        return "session" if is_session else why_undrafted(request.sampling_params)


# -- front end ------------------------------------------------------------------------------------

_PERMITTED: list[Any] = []
"""`speculative_config` of the engines of this process that serve such requests."""


def refuse_undrafted() -> None:
    """Answer such requests with an error, as vLLM does, in engines that were not permitted to
    serve them. That includes `logprob_token_ids`, which vLLM lets pass although it ends an engine
    that speculates."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    validate = SamplingParams._validate_spec_decode
    if getattr(validate, "knows_undrafted", False):
        return

    def stricter(self: Any, speculative_config: Any) -> None:
        is_permitted = any(speculative_config is each for each in _PERMITTED)
        validate(_without_reasons(self) if is_permitted else self, speculative_config)
        is_refused = speculative_config is not None and not is_permitted
        if is_refused and self.logprob_token_ids is not None:
            raise VLLMValidationError(
                "logprob_token_ids is not supported with speculative decoding: ask for logprobs "
                "without it",
                parameter="logprob_token_ids",
            )

    stricter.knows_undrafted = True  # type: ignore[attr-defined]
    SamplingParams._validate_spec_decode = stricter  # type: ignore[method-assign]


def _without_reasons(params: Any) -> Any:
    """What vLLM refuses besides, it refuses still."""
    if not why_undrafted(params):
        return params
    rest = copy.copy(params)
    rest.logit_bias, rest.min_p, rest.logprob_token_ids = None, 0.0, None
    return rest


def permit(speculative_config: Any, problems: Iterable[str]) -> str:
    """Let such requests pass in the engine with this configuration, unless its scheduler or one of
    its workers has a problem with them: that is returned, "" otherwise."""
    if not (problem := next(filter(None, problems), "")):
        _PERMITTED.append(speculative_config)
    return problem


async def permit_undrafted(engine: Any) -> str:
    """Ask the scheduler and the workers of an `AsyncLLM` whether they can serve such requests, and
    let them pass; else return why not."""
    try:
        problems = await engine.collective_rpc("osd_undrafted")
        problems.append(await engine.engine_core.call_utility_async("osd_undrafted"))
    except Exception as error:  # noqa: BLE001  a scheduler that is not ours has no such method
        problems = [f"{type(error).__name__}: {error}"]
    return permit(engine.vllm_config.speculative_config, problems)
