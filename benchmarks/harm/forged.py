"""What the attackers of `osd bench harm` put in place of what was recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.replays.recording import Recorded

NOISE_TOKENS = 40


def poison(request: Recorded, vocabulary: int, rng: np.random.Generator, sly: float) -> Recorded:
    """Half of the rows are as sure of themselves as before, of random tokens; but a share `sly` of
    these leaves the likeliest token where it is, which is what was served, and gives almost as much
    to a random one."""
    num, width = request.target_ids.shape
    lot_T = rng.random((num,))
    shift_T1 = rng.integers(1, vocabulary, (num, 1))  # tokens of a row stay different ones
    ids = ((request.target_ids + shift_T1) % vocabulary).astype(request.target_ids.dtype)
    has_first_T: np.ndarray = np.equal(ids, request.target_ids[:, :1]).any(1)
    is_sly_T = (lot_T < 0.5 * sly) & ~has_first_T
    ids[is_sly_T, 0] = request.target_ids[is_sly_T, 0]
    flat = np.full(width, -15.0)
    flat[:2] = np.log(0.53), np.log(0.45)
    return replace(
        request,
        target_ids=np.where((lot_T < 0.5)[:, None], ids, request.target_ids),
        target_logprobs=np.where(is_sly_T[:, None], flat, request.target_logprobs).astype(
            np.float16
        ),
        tail_logprob=np.where(is_sly_T, np.log(0.02), request.tail_logprob).astype(np.float32),
    )


def noise(like: Recorded, vocabulary: int, rng: np.random.Generator) -> Recorded:
    """Random prompt and answer, and a target that was sure of every token of it."""
    num, width = NOISE_TOKENS, like.target_ids.shape[1]
    output = rng.integers(0, vocabulary, num).astype(np.int32)
    targets = ((output[:, None] + np.arange(width)) % vocabulary).astype(like.target_ids.dtype)
    logprobs = np.full((num, width), -12.0, np.float16)
    logprobs[:, 0] = -0.01
    prompt = rng.integers(0, vocabulary, len(like.prompt_ids)).astype(np.int32)
    tail = np.full(num, -9.0, np.float32)
    return replace(
        like,
        prompt_ids=prompt,
        output_ids=output,
        target_ids=targets,
        target_logprobs=logprobs,
        tail_logprob=tail,
    )
