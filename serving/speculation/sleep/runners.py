"""The draft model sleeps in steps without speculation, and catches up when it is needed again.

vLLM runs the draft in every step, even at k = 0, so that its KV cache keeps up. Here the draft is
left out at k = 0, and the positions it misses are noted per request. The first step that wants
drafts again runs the draft once over them. Its proposals are the same as if it had never slept. On
the V1 runner, a step without draft tokens is sampled as in an engine without speculation, which
gives the same result as vLLM's rejection sampler in less time. On the V2 runner, the draft makes
as many passes as k says.

    k = 0   note the first position each request's draft has not seen; mark the blocks of this step
    k > 0   one forward pass over what each request missed, then vLLM's own `propose`

Only draft models can sleep. An EAGLE-3 head reads hidden states of the target that are gone by
then: at k = 0 it makes one pass over the step's tokens, which keeps its KV cache whole, and no
more. What else keeps a draft awake is said in `why_not` of `v1.py` and `v2.py`. There vLLM's way is
kept.
"""

from __future__ import annotations

from typing import Any

from serving.speculation.sleep import v1, v2
from serving.speculation.sleep.lazy import LazyDraft
from serving.vllm.hooks import is_v2

__all__ = ["LazyDraft", "can_sleep", "lazy_draft", "why_awake"]


def why_awake(runner: Any) -> str:
    """Why the drafter of this model runner cannot be left out of a step; "" when it can."""
    return (v2 if is_v2(runner) else v1).why_not(runner)


def can_sleep(runner: Any) -> bool:
    """Whether the drafter of this model runner can be left out of a step."""
    return not why_awake(runner)


def lazy_draft(runner: Any) -> LazyDraft:
    """Let the draft of this model runner sleep at k = 0."""
    return v2.LazyDraftV2(runner) if is_v2(runner) else v1.LazyDraftV1(runner)
