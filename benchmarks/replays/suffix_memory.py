"""Suffix decoding in the place of the service's memory: the rival under equal conditions.

vLLM's `method: suffix` proposes what a suffix tree of earlier answers says, and trusts its counts.
Here its chances are learnt as the memory's are, from what was served behind each proposal, verified
or not; it proposes as many tokens, ends where they are not worth their verification, and has as
many bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.replays.lookup import SUFFIX_CACHED_REQUESTS, SUFFIX_TREE_DEPTH
from serving.speculation.memory.kernels import KEEP, LONGEST, PRIOR_WEIGHT
from serving.speculation.memory.memory import NOTHING, Found

BYTES_PER_TOKEN = 320
"""Of its trees, as measured."""
NUM_CHANCES = 20
"""Kinds of tokens by what the tree says of their chance."""
MATCHES = (1, 2, 3, 4, 6, 9, 14, SUFFIX_TREE_DEPTH)
"""Kinds by the length of the text that was found."""


class SuffixMemory:
    """What `serving.speculation.requests.Remembers` asks, of arctic-inference's cache.

    Raises `ImportError` where that is not installed.
    """

    def __init__(self, max_bytes: int, k: int, tokens_per_request: float) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        most = int(max_bytes / (BYTES_PER_TOKEN * tokens_per_request))
        self.k = k
        self._cache: Any = SuffixDecodingCache(
            SUFFIX_TREE_DEPTH, min(max(most, 1), SUFFIX_CACHED_REQUESTS)
        )
        self._tokens: dict[str, list[int]] = {}
        self._looks: dict[str, list[tuple[int, tuple[int, int]]]] = {}
        """The newest proposal of each request, with its kinds."""
        shape = NUM_CHANCES + 1, len(MATCHES) + 1
        self._right, self._tried = np.zeros(shape), np.zeros(shape)

    def begin(
        self, req_id: str, prompt: Sequence[int], *, scope: str = "", is_kept: bool = True
    ) -> None:
        self._tokens[req_id] = list(prompt)
        self._cache.start_request(req_id, self._tokens[req_id])

    def advance_all(
        self,
        served: Iterable[tuple[str, Sequence[int]]],
        k: int = 0,
        least: float = 0.0,
        num: int | None = None,
    ) -> None:
        for req_id, tokens in served:
            self._advance(req_id, tokens)

    def _advance(self, req_id: str, tokens: Sequence[int]) -> None:
        for (proposed, kind), token in zip(self._looks.pop(req_id, []), tokens, strict=False):
            self._tried[kind] = self._tried[kind] * KEEP + 1.0
            self._right[kind] = self._right[kind] * KEEP + (proposed == token)
            if proposed != token:
                break
        self._cache.add_active_response(req_id, list(tokens))
        self._tokens[req_id] += tokens

    def propose(
        self, req_id: str, k: int, least: float = 0.0, *, ahead: Sequence[int] = ()
    ) -> Found:
        assert not ahead, "its loop is told of all tokens before it proposes"
        found, survival, before = [], [], 1.0
        self._looks[req_id] = self._look(req_id, min(k, self.k))
        for token, kind in self._looks[req_id]:
            stated = (kind[0] + 0.5) / NUM_CHANCES
            weight = self._tried[kind] + PRIOR_WEIGHT
            before *= float((self._right[kind] + PRIOR_WEIGHT * min(stated, 1.0)) / weight)
            if before < least:
                break
            found.append(token)
            survival.append(before)
        return Found(found, np.array(survival)) if found else NOTHING

    def end(self, req_id: str) -> None:
        self._cache.stop_request(req_id)
        del self._tokens[req_id]

    def work(self) -> None: ...

    def clear(self) -> None:
        raise NotImplementedError("a rival forgets nothing")

    def _look(self, req_id: str, k: int) -> list[tuple[int, tuple[int, int]]]:
        """Tokens that may follow, and their kinds. The tree says how likely all up to each are."""
        context = self._tokens[req_id][-max(SUFFIX_TREE_DEPTH, LONGEST) :]
        draft = self._cache.speculate(
            req_id, context, max_spec_tokens=k, max_spec_factor=float(k), min_token_prob=0.001
        )
        found, before = [], 1.0
        for place, (token, until) in enumerate(zip(draft.token_ids, draft.probs, strict=True)):
            chance = min(until / before, 1.0) if before > 0 else 0.0
            before = until
            match = int(np.searchsorted(MATCHES, draft.match_len + place, "right"))
            found.append((int(token), (int(chance * NUM_CHANCES), match)))
        return found
