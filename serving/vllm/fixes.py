"""What vLLM does wrong and is repaired in the process that loads it: the fewer entries the better.

fix_cpu_sampling                   outputs at temperature > 0 follow the target's distribution on a CPU too
refuse_what_would_end_the_engine   a request that vLLM cannot serve is answered with an error
"""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


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
