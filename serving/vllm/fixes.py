"""Repairs of vLLM, made in the process that loads it. The fewer the better.

fix_cpu_sampling                   outputs at temperature > 0 follow the target's distribution
                                   on a CPU too
refuse_what_would_end_the_engine   a request that vLLM cannot serve is answered with an error
"""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


def fix_cpu_sampling() -> bool:
    """Repair speculative sampling at temperature > 0 on CPU (vllm-project/vllm#55005). True where
    it is needed.

    vLLM's CPU version of the `_expand` kernel writes into a temporary copy. Temperature, top-p and
    top-k then reach the rejection sampler as uninitialised memory.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        return False
    # Replacing the module's global repairs every caller, since they look it up at call time.
    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    return True


def refuse_what_would_end_the_engine() -> None:
    """Answer `logprob_token_ids` with an error where an engine speculates, as vLLM does for
    `min_p`.

    vLLM's rejection sampler ignores them: the answer lacks log-probabilities, and in a batch with
    `logprobs` the shapes do not fit, which ends the engine.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    validate = getattr(SamplingParams, "_validate_spec_decode", None)
    if getattr(validate, "refuses_token_ids", False):
        return
    if validate is None:
        logger.warning(
            "requests with logprob_token_ids are not refused: this vLLM has no "
            "_validate_spec_decode"
        )
        return

    def stricter(self: Any, speculative_config: Any) -> None:
        validate(self, speculative_config)
        if speculative_config is not None and self.logprob_token_ids:
            raise VLLMValidationError(
                "logprob_token_ids is not supported with speculative decoding: ask for logprobs "
                "without it",
                parameter="logprob_token_ids",
            )

    stricter.refuses_token_ids = True  # type: ignore[attr-defined]
    SamplingParams._validate_spec_decode = stricter  # type: ignore[method-assign]


def _expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """[a, b, c] with cumulative counts [2, 5, 6] -> [a, a, b, b, b, c]. `replace_from` becomes
    `replace_to`."""
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(x, counts, output_size=num_tokens)
