"""Repairs of vLLM, made in the process that loads it. The fewer the better.

fix_cpu_sampling   outputs at temperature > 0 follow the target's distribution on a CPU too
"""

from __future__ import annotations

import torch

from serving.vllm import parts


def fix_cpu_sampling() -> bool:
    """Repair speculative sampling at temperature > 0 on CPU (vllm-project/vllm#55005). True where
    it is needed.

    vLLM's CPU version of the `_expand` kernel writes into a temporary copy. Temperature, top-p and
    top-k then reach the rejection sampler as uninitialised memory.
    """
    if not _is_on_cpu():
        return False
    from vllm.v1.sample import rejection_sampler

    # Replacing the module's global repairs every caller, since they look it up at call time.
    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    return True


def problem_with_sampling() -> str:
    """Why sampling on this CPU is wrong and cannot be repaired; "" where it is right."""
    return parts.problem_with("repairs") if _is_on_cpu() else ""


def _is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


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
