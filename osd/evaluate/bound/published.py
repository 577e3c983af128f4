"""Published prices of a step: Llama-3.1-8B with EAGLE on an H100, as the public simulator of
"Speculative Decoding: Performance or Illusion?" (arXiv 2601.11580) has fitted them."""

from __future__ import annotations

from osd.evaluate.bound.costs import DraftCosts, StepCosts

EAGLE, NGRAM = "EAGLE", "n-gram"
PER_CONTEXT_S, PER_TOKEN_S, FIXED_S = 3.92645679e-8, 2.10103129e-5, 5.88590713e-3
"""Of a pass of the target: for each token in the KV cache, for each token of the step, and once."""
OVERHEAD_S = 1.20683946e-3
DRAFT_PER_CONTEXT_S, DRAFT_PER_TOKEN_S, DRAFT_FIXED_S = 2.37768493e-9, 8.41429603e-7, 2.13526175e-3
"""Of the drafts of a step: for each token in the KV cache, for each token that one request then
verifies, and once, however long they are."""
NGRAM_SHARE = 0.005875
"""Of the pass that verifies."""
WIDEST = 20
"""Draft tokens at which its traces end."""


def published(batch: int, *, is_charged_empty: bool = False) -> StepCosts:
    """`is_charged_empty`: a proposer is paid for where it has nothing to propose, as the simulator
    has it."""
    eagle = DraftCosts(
        per_step_s=DRAFT_FIXED_S + DRAFT_PER_TOKEN_S,  # the target's own token is counted too
        per_pass_s=DRAFT_PER_TOKEN_S,
        per_context_s=DRAFT_PER_CONTEXT_S,
        is_charged_empty=is_charged_empty,
    )
    ngram = DraftCosts(share_of_verify=NGRAM_SHARE, is_charged_empty=is_charged_empty)
    return StepCosts(
        batch=batch,
        widths=(0, WIDEST),
        verify_s=(_verify(batch, 0), _verify(batch, WIDEST)),
        per_context_s=PER_CONTEXT_S,
        overhead_s=OVERHEAD_S,
        prefill_s=FIXED_S + OVERHEAD_S,
        prefill_token_s=PER_TOKEN_S,
        drafts={NGRAM: ngram, EAGLE: eagle},
    )


def _verify(batch: int, width: int) -> float:
    return PER_TOKEN_S * batch * (1 + width) + FIXED_S
