"""What `osd bench languages` measures of one domain, in a process of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drift import jobs
from benchmarks.record import Row
from benchmarks.replays.curve import Curve
from benchmarks.replays.recording import Recorded
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED

PERPLEXITY_CHARS = 40_000
"""Of served pages."""


def measure(family: str, domain: str, sizes: dict[str, Any]) -> Row:
    """The target's figures in a domain, and what each arm would have been accepted. The draft is
    trained offline where it was not before: off home."""
    from benchmarks.learning import languages
    from benchmarks.traffic.recordings import take

    target, frozen = FAMILIES[family].models()
    drafts = {languages.FROZEN: frozen}
    if domain != sizes["home"]:
        drafts[languages.OFFLINE] = jobs.ceiling(family, [domain], sizes["offline_requests"])
    requests = take(family, domain, FIRST_SERVED, sizes["requests"])
    curves = {arm: of_draft(draft, requests, sizes["k"]) for arm, draft in drafts.items()}
    warm = len(requests) // 2
    lookups = of_lookups(requests, sizes)
    return {
        "family": family,
        "domain": domain,
        **of_target(target, family, domain, requests, sizes["greedy_requests"]),
        "alpha": {arm: curve.alpha() for arm, curve in curves.items()},
        "tokens_per_step": {arm: curve.tokens_per_step() for arm, curve in curves.items()}
        | {arm: curve.tokens_per_step(warm) for arm, curve in lookups.items()},
    }


def of_draft(draft: Path, requests: Sequence[Recorded], k: int) -> Curve:
    """A draft that proposes k tokens in every step."""
    from benchmarks.replays.served import counts_of, matches_of
    from trainer.draft import load_draft

    model = load_draft(draft)
    return Curve.of([counts_of(matches_of(model, request), k) for request in requests])


def of_lookups(requests: Sequence[Recorded], sizes: dict[str, Any]) -> dict[str, Curve]:
    """The memory and, where it is installed, suffix decoding under the same rule: as many tokens,
    cut at the same price, from the same bytes. They begin empty."""
    import numpy as np

    from benchmarks.learning import languages
    from benchmarks.replays.lookup import remembered
    from benchmarks.replays.suffix_memory import SuffixMemory
    from serving.speculation.memory.compiled import best
    from serving.speculation.memory.memory import Memory

    k, price = sizes["memory_k"], sizes["verify_price"]
    num_bytes = jobs.base_config().speculation.memory_bytes
    memory = Memory(num_bytes, k, best(is_alone=True))
    curves = {languages.MEMORY: remembered(requests, memory, k, price)}
    if languages.SUFFIX not in sizes["left_out"]:
        tokens = [len(one.prompt_ids) + len(one.output_ids) for one in requests]
        suffix = SuffixMemory(num_bytes, k, float(np.mean(tokens)))
        curves[languages.SUFFIX] = remembered(requests, suffix, k, price)
    return curves


def of_target(
    target: Path, family: str, domain: str, requests: Sequence[Recorded], num_greedy: int
) -> Row:
    """Perplexity per token on served pages, the mean probability of the likeliest token, and the
    shares of answers that run in circles."""
    import numpy as np

    from benchmarks.natural.report import is_loop, share_of_loops
    from benchmarks.natural.sampling import sampled_answers
    from benchmarks.natural.training import nats_per_token
    from benchmarks.prose.corpus import split
    from benchmarks.prose.draft import load
    from benchmarks.prose.recipe import TargetRecipe
    from osd.tiny.tokenizer import chat_prompt

    model, tokenizer = load(target)
    pages, num_chars = [], 0
    for page in split(domain).serve:
        if num_chars < PERPLEXITY_CHARS:
            pages.append(page)
            num_chars += len(page.text)
    nats = nats_per_token(model, tokenizer, pages, TargetRecipe().window_tokens)
    prompts = FAMILIES[family].prompts(domain, FIRST_SERVED, num_greedy)
    ids = [chat_prompt(tokenizer, prompt) for prompt in prompts]
    likeliest = np.concatenate([one.target_logprobs[:, 0] for one in requests])
    return {
        "perplexity": math.exp(nats),
        "top_probability": float(np.exp(likeliest.astype(np.float32)).mean()),
        "loops_greedy": share_of_loops(sampled_answers(model, ids, 0.0, 0)),
        "loops_sampled": float(np.mean([is_loop(one.output_ids.tolist()) for one in requests])),
    }
