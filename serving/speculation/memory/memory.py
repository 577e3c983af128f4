"""A proposer without a model: what followed the last tokens before, in this request or in answers
to earlier ones.

    served tokens ──► judged: what would either table have said? ──► chances (`Cells`)
                 └──► remembered: in the request's own table, and in the one that all share

Both tables hold counts of next tokens after the last 1 to 14 tokens, within a fixed number of
bytes; what was longest not seen goes first. A proposal ends where the chance that all of it is
accepted falls below what is asked for. How likely a token is, was learnt from every token that was
served, whether anything was proposed or not.

What one request was served, another one is proposed. So who shares what is told by `scope`, and a
request that is not to be kept leaves nothing: its entries are taken out at its end.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from serving.speculation.memory.compiled import PLAIN, Kernels
from serving.speculation.memory.kernels import (
    KEY_BITS,
    LONGEST,
    NUM_CELLS,
    NUM_NEXT,
    WAYS,
    Cells,
    Table,
)

BYTES_PER_ENTRY = 8 + 8 + NUM_NEXT * (4 + 2)
OWN_SHARE = 0.25
"""Share of the bytes for running requests."""
MAX_PROMPT = 1 << 15
"""Last tokens of a prompt that are remembered."""
TOKENS_PER_STEP = {True: 4096, False: 64}
"""Tokens of a prompt, and of earlier answers, that are remembered in one step, compiled or not."""
MAX_WAITING = 1 << 20
"""Tokens of earlier answers that may wait; the oldest are left out."""


class Found(NamedTuple):
    """What may follow."""

    tokens: list[int]
    survival_K: np.ndarray
    """float: probability that the tokens up to each are accepted"""


NOTHING = Found([], np.zeros(0))


class _Request:
    """Tokens of a running request, and how far they are remembered."""

    __slots__ = ("is_kept", "num_own", "num_tokens", "own", "shared", "token_T")

    def __init__(self, prompt: Sequence[int], room: int, shared: int, own: int, is_kept: bool):
        prompt = prompt[-MAX_PROMPT:]
        self.num_tokens = len(prompt)
        self.num_own = 0
        """Tokens that its own table knows."""
        self.token_T = np.zeros(len(prompt) + 256 + room, np.int32)
        self.token_T[: len(prompt)] = prompt
        self.shared, self.own, self.is_kept = shared, own, is_kept

    def append(self, tokens: Sequence[int], room: int) -> None:
        end = self.num_tokens + len(tokens)
        if end + room > len(self.token_T):
            longer_T = np.zeros(2 * end + room, np.int32)
            longer_T[: self.num_tokens] = self.token_T[: self.num_tokens]
            self.token_T = longer_T
        self.token_T[self.num_tokens : end] = tokens
        self.num_tokens = end


class Memory:
    """One per engine, in the scheduler's thread. `k`: most tokens of a proposal."""

    def __init__(self, max_bytes: int, k: int, kernels: Kernels = PLAIN) -> None:
        self.k = k
        self._max_bytes, self._kernels = max_bytes, kernels
        self._num_per_step = TOKENS_PER_STEP[kernels is not PLAIN]
        self._secret = secrets.token_bytes(16)
        self._num_begun = self._now = 0
        self._found_K, self._survival_K = np.zeros(k, np.int64), np.zeros(k)
        self._requests: dict[str, _Request] = {}
        self.clear()
        if kernels is not PLAIN:
            self._compile()

    def clear(self) -> None:
        """Forget everything but the tokens of running requests, and those to come of them."""
        num_own = int(OWN_SHARE * self._max_bytes) // BYTES_PER_ENTRY
        self._own = _table(num_own)
        self._shared = _table(self._max_bytes // BYTES_PER_ENTRY - num_own)
        self._cells = Cells(np.zeros(NUM_CELLS), np.zeros(NUM_CELLS))
        self._waiting: deque[tuple[np.ndarray, int, int]] = deque()
        """(tokens, how many are remembered, scope) of earlier answers"""
        self._num_waiting = 0
        for request in self._requests.values():
            request.num_own = request.num_tokens

    # -- requests ---------------------------------------------------------------------------------

    def begin(
        self, req_id: str, prompt: Sequence[int], *, scope: str = "", is_kept: bool = True
    ) -> None:
        """A request has come. It is proposed what requests of the same scope were served; and if it
        `is_kept`, they what it is."""
        if req_id not in self._requests:
            self._num_begun += 1
            shared, own = self._scope(f"shared {scope}"), self._scope(f"own {self._num_begun}")
            self._requests[req_id] = _Request(prompt, self.k, shared, own, is_kept)

    def advance(self, req_id: str, tokens: Sequence[int]) -> None:
        """The request was served these tokens."""
        request = self._requests.get(req_id)
        if request is None or not len(tokens):
            return
        self._now += 1
        first = request.num_tokens
        request.append(tokens, self.k)
        if request.num_own < first:  # its prompt is still being remembered
            self._remember_own(request, first)
        if request.num_own == first:
            scopes = request.shared, request.own
            self._kernels.learn(
                self._shared, self._own, self._cells, request.token_T, first, request.num_tokens,
                scopes, self._now,
            )  # fmt: skip
            request.num_own = request.num_tokens
        if request.is_kept:
            self._kernels.remember(
                self._shared, request.token_T, first, request.num_tokens, request.shared, self._now
            )

    def propose(self, req_id: str, k: int, least: float = 0.0) -> Found:
        """Up to k tokens that may follow, as long as they are accepted with a probability of at
        least `least`."""
        request, k = self._requests.get(req_id), min(k, self.k)
        if request is None or k <= 0:
            return NOTHING
        found_K, survival_K = self._found_K[:k], self._survival_K[:k]
        num = self._kernels.propose(
            self._shared, self._own, self._cells, request.token_T, request.num_tokens,
            (request.shared, request.own), least, found_K, survival_K,
        )  # fmt: skip
        return Found(found_K[:num].tolist(), survival_K[:num].copy()) if num else NOTHING

    def end(self, req_id: str) -> None:
        """The request has gone."""
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        if not request.is_kept:
            self._kernels.forget(self._own, request.token_T, request.num_own, request.own)

    def remember(
        self, answers: Iterable[tuple[Sequence[int], Sequence[int]]], scope: str = ""
    ) -> None:
        """Answers to earlier requests: (prompt, answer), the oldest first."""
        for prompt, answer in answers:
            token_T = np.array([*prompt[-LONGEST:], *answer], np.int32)
            first = len(token_T) - len(answer)
            self._await(token_T, first, len(token_T), self._scope(f"shared {scope}"))

    def work(self) -> None:
        """Remember some of the earlier answers: to be called once a step."""
        left = self._num_per_step
        while self._waiting and left > 0:
            token_T, done, scope = self._waiting.popleft()
            end = min(done + left, len(token_T))
            self._now += 1
            self._kernels.remember(self._shared, token_T, done, end, scope, self._now)
            left -= end - done
            self._num_waiting -= end - done
            if end < len(token_T):
                self._waiting.appendleft((token_T, end, scope))

    @property
    def num_waiting(self) -> int:
        """Tokens of earlier answers that are not remembered yet."""
        return self._num_waiting

    # -- inside -----------------------------------------------------------------------------------

    def _compile(self) -> None:
        """Each kernel is compiled when it is first called, which may take seconds: not while
        somebody waits for an answer."""
        for is_kept in (True, False):
            self.begin("", [1, 2, 1], is_kept=is_kept)
            self.advance("", [2, 1, 2])
            self.propose("", 1)
            self.end("")
        self.work()
        self.clear()

    def _remember_own(self, request: _Request, end: int) -> None:
        end = min(end, request.num_own + self._num_per_step)
        self._kernels.remember(
            self._own, request.token_T, request.num_own, end, request.own, self._now
        )
        request.num_own = end

    def _await(self, token_T: np.ndarray, first: int, end: int, scope: int) -> None:
        start = max(0, first - LONGEST)
        self._waiting.append((token_T[start:end].copy(), first - start, scope))
        self._num_waiting += end - first
        while self._num_waiting > MAX_WAITING:
            left_out, done, _ = self._waiting.popleft()
            self._num_waiting -= len(left_out) - done

    def _scope(self, name: str) -> int:
        """What the keys of a scope begin with. Nobody outside can find two names with the same."""
        digest = blake2b(name.encode(), key=self._secret, digest_size=KEY_BITS // 8)
        return int.from_bytes(digest.digest())


def _table(num: int) -> Table:
    num = max(num // WAYS, 1) * WAYS
    return Table(
        np.full(num, -1, np.int64),
        np.full(num, -1, np.int64),
        np.zeros((num, NUM_NEXT), np.int32),
        np.zeros((num, NUM_NEXT), np.uint16),
    )
