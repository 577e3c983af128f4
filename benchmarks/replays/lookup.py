"""Drafts without a model, replayed: vLLM's n-gram proposer (prompt lookup), suffix decoding, and
the service's memory.

They search the earlier text for the last tokens, and propose the tokens that followed there. When a
step has nothing to propose, the target makes one token, as without speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.replays.curve import Curve, StepCounts
from benchmarks.replays.recording import Recorded
from serving.speculation.memory.remembers import Remembers

VLLM_NGRAM = 5
"""vLLM's `prompt_lookup_min` and `prompt_lookup_max` where neither is given."""
SUFFIX_TREE_DEPTH, SUFFIX_CACHED_REQUESTS, SUFFIX_FACTOR, SUFFIX_MIN_PROBABILITY = (
    24,
    10_000,
    1.0,
    0.1,
)
"""vLLM's `suffix_decoding_*` defaults. Its default k is the depth of the tree."""

Propose = Callable[[int], Sequence[int]]
"""Number of output tokens so far -> draft tokens, none at all where nothing is found."""


def ngram(
    requests: Sequence[Recorded], k: int, *, shortest: int = VLLM_NGRAM, longest: int = VLLM_NGRAM
) -> Curve:
    """What vLLM's `method: ngram` would have been accepted; each request looks at its own tokens
    alone."""
    counts = []
    for request in requests:
        tokens, num_prompt = (
            np.concatenate([request.prompt_ids, request.output_ids]),
            len(request.prompt_ids),
        )

        def propose(
            at: int, tokens: np.ndarray = tokens, num_prompt: int = num_prompt
        ) -> Sequence[int]:
            return prompt_lookup(tokens[: num_prompt + at], k, shortest, longest)

        counts.append(walk(request.output_ids, propose))
    return Curve.of(counts)


def prompt_lookup(tokens: np.ndarray, k: int, shortest: int, longest: int) -> list[int]:
    """The at most k tokens that followed the earliest occurrence of the longest suffix of `longest`
    to `shortest` tokens that occurs before (vllm/v1/spec_decode/ngram_proposer.py)."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        found = np.flatnonzero((windows == tokens[-size:]).all(1))
        if len(found):
            start = int(found[0]) + size
            return [int(token) for token in tokens[start : start + k]]
    return []


def suffix(requests: Sequence[Recorded], k: int) -> Curve:
    """What vLLM's `method: suffix` would have been accepted: it remembers the answers to earlier
    requests.

    Raises `ImportError` where the package that has it is not installed.
    """
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(SUFFIX_TREE_DEPTH, SUFFIX_CACHED_REQUESTS)
    counts = []
    for request in requests:
        cache.start_request(request.name, [int(token) for token in request.prompt_ids])
        counts.append(walk(request.output_ids, _Suffix(cache, request, k)))
        cache.stop_request(request.name)
    return Curve.of(counts)


class _Suffix:
    """One request's view of the cache, which learns the output as it comes
    (vllm/v1/spec_decode/suffix_decoding.py)."""

    def __init__(self, cache: object, request: Recorded, k: int) -> None:
        self._cache, self._request, self._k = cache, request, k
        self._tokens = np.concatenate([request.prompt_ids, request.output_ids]).tolist()
        self._num_known = 0

    def __call__(self, at: int) -> Sequence[int]:
        new = [int(token) for token in self._request.output_ids[self._num_known : at]]
        self._cache.add_active_response(self._request.name, new)  # type: ignore[attr-defined]
        self._num_known = at
        end = len(self._request.prompt_ids) + at
        found = self._cache.speculate(  # type: ignore[attr-defined]
            self._request.name,
            self._tokens[max(0, end - SUFFIX_TREE_DEPTH) : end],
            max_spec_tokens=self._k,
            max_spec_factor=SUFFIX_FACTOR,
            min_token_prob=SUFFIX_MIN_PROBABILITY,
        )
        return list(found.token_ids)


def remembered(requests: Sequence[Recorded], memory: Remembers, k: int, least: float) -> Curve:
    """What a memory alone would have been accepted, one request after the other: up to k tokens a
    step, cut where one is accepted with a probability below `least`."""
    counts = []
    for request in requests:
        memory.begin(request.name, [int(token) for token in request.prompt_ids])
        view = _Remembered(memory, request, k, least)
        counts.append(walk(request.output_ids, view))
        view.tell(len(request.output_ids))
        memory.end(request.name)
        memory.work()
    return Curve.of(counts)


class _Remembered:
    """One request's view of the memory, which is told the output as it comes."""

    def __init__(self, memory: Remembers, request: Recorded, k: int, least: float) -> None:
        self._memory, self._request, self._k, self._least = memory, request, k, least
        self._num_known = 0

    def tell(self, at: int) -> None:
        """The answer has so many tokens."""
        new = [int(token) for token in self._request.output_ids[self._num_known : at]]
        self._memory.advance_all([(self._request.name, new)])
        self._num_known = at

    def __call__(self, at: int) -> Sequence[int]:
        self.tell(at)
        return self._memory.propose(self._request.name, self._k, self._least).tokens


def walk(output_ids: np.ndarray, propose: Propose) -> StepCounts:
    """Verification steps over a served output, from its second token on.

    A draft is tested up to its first wrong token, or up to the end of the answer; the target adds
    one token.
    """
    steps = drafts = drafted = tested = accepted = 0
    at = 1
    while at < len(output_ids):
        draft = propose(at)
        served = output_ids[at : at + len(draft)]
        num_right = 0
        while num_right < len(served) and draft[num_right] == served[num_right]:
            num_right += 1
        steps += 1
        drafts += bool(draft)
        drafted += len(draft)
        tested += min(num_right + 1, len(served))
        accepted += num_right
        at += num_right + 1
    return StepCounts(
        tokens=max(len(output_ids) - 1, 0),
        steps=steps,
        drafts=drafts,
        drafted=drafted,
        tested=tested,
        accepted=accepted,
    )
