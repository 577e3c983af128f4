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
    NUM_ORDERS,
    Cells,
)
from serving.speculation.memory.running import Running
from serving.speculation.memory.step import Proposed, Windows
from serving.speculation.memory.tables import table_of

BYTES_PER_ENTRY = 8 + 8 + NUM_NEXT * (4 + 2)
OWN_SHARE = 0.25
"""Share of the bytes for running requests."""
TOKENS_PER_STEP = {True: 1024, False: 64}
"""Tokens of prompts that are remembered in one step, and as many of earlier answers, or that are
taken out again, compiled or not: some 2 ms."""
IDLE = 16
"""So many times as much is taken out where no request runs. Little is asked of an idle engine: what
is left then would stay for as long as nobody comes."""
SLOTS = 16
"""Running requests that there is room for at first."""
MOST_SERVED = 64
"""So many tokens more than are proposed came while the engine was held, or are what a session's
client said."""
MAX_WAITING = 1 << 20
"""Tokens of earlier answers that may wait; the oldest are left out."""


class Found(NamedTuple):
    """What may follow."""

    tokens: list[int]
    survival_K: np.ndarray
    """float: probability that the tokens up to each are accepted"""


NOTHING = Found([], np.zeros(0))


class Memory:
    """One per engine, in the scheduler's thread. `k`: most tokens of a proposal."""

    def __init__(self, max_bytes: int, k: int, kernels: Kernels = PLAIN) -> None:
        self.k = k
        self._max_bytes, self._kernels = max_bytes, kernels
        self._num_per_step = self._left = TOKENS_PER_STEP[kernels is not PLAIN]
        """Tokens of prompts that may still be remembered in this step: `_left`."""
        self._secret = secrets.token_bytes(16)
        self._num_begun = self._now = 0
        self._found_K, self._survival_K = np.zeros(k, np.int64), np.zeros(k)
        self._requests: dict[str, Running] = {}
        self._windows, self._free_slots = Windows.empty(SLOTS, k), list(range(SLOTS))
        self._num_proposed = 0
        self.clear()
        if kernels is not PLAIN:
            self._compile()

    def clear(self) -> None:
        """Forget everything but the tokens of running requests, and those to come of them."""
        num_own = int(OWN_SHARE * self._max_bytes) // BYTES_PER_ENTRY
        self._own = table_of(num_own)
        self._shared = table_of(self._max_bytes // BYTES_PER_ENTRY - num_own)
        self._cells = Cells(np.zeros(NUM_CELLS), np.zeros(NUM_CELLS))
        self._waiting: deque[tuple[np.ndarray, int, int]] = deque()
        """(tokens, how many are remembered, scope) of earlier answers"""
        self._num_waiting = 0
        self._leaving: deque[tuple[Running, int]] = deque()
        """Requests that have gone and leave nothing, and how many of their tokens are taken out"""
        self._num_to_leave = 0
        """Tokens remembered since the last `work` of requests that leave nothing."""
        self._num_proposed += 1
        self._proposed, self._asked = Proposed(*(np.zeros(0),) * 3), (0, 0.0)
        """The newest proposals for many, and the (k, least) they were made for."""
        self._found_K[:] = 0
        for request in self._requests.values():
            request.num_own = request.num_tokens
            request.token_T[request.num_tokens :] = 0  # what was proposed to it
            slot, windows = request.slot, self._windows
            windows.token_SW[slot, windows.num_S[slot] :] = 0

    # -- requests ---------------------------------------------------------------------------------

    def begin(
        self, req_id: str, prompt: Sequence[int], *, scope: str = "", is_kept: bool = True
    ) -> None:
        """A request has come. It is proposed what requests of the same scope were served; and if it
        `is_kept`, they what it is."""
        if req_id not in self._requests:
            self._num_begun += 1
            shared, own = self._scope(f"shared {scope}"), self._scope(f"own {self._num_begun}")
            self._requests[req_id] = request = Running(prompt, self.k, shared, own, is_kept)
            self._open_window(request)

    def advance(self, req_id: str, tokens: Sequence[int]) -> None:
        """The request was served these tokens."""
        self.advance_all([(req_id, tokens)])

    def advance_all(
        self,
        served: Iterable[tuple[str, Sequence[int]]],
        k: int = 0,
        least: float = 0.0,
        num: int | None = None,
    ) -> None:
        """Requests were served these tokens. With k, what may follow now is looked up as well, for
        the first `num` of them at once (None = all), and `propose` has it ready."""
        step: list[tuple[Running, Sequence[int]]] = []
        self._left = self._num_per_step
        for req_id, tokens in served:
            if (request := self._requests.get(req_id)) is not None and len(tokens):
                if len(tokens) > MOST_SERVED + self.k:
                    tokens = self._read(request, tokens)
                while len(tokens) > self.k + 1:  # more than its window has room for
                    self._advance([(request, tokens[: self.k + 1])])
                    tokens = tokens[self.k + 1 :]
                step.append((request, tokens))
        slot_B = self._advance(step)
        if k := min(k, self.k):
            self._propose([request for request, _ in step[:num]], slot_B[:num], k, least)

    def propose(
        self, req_id: str, k: int, least: float = 0.0, *, ahead: Sequence[int] = ()
    ) -> Found:
        """Up to k tokens that may follow, as long as they are accepted with a probability of at
        least `least`. `ahead`: tokens that were sampled since it was last told of any; they are not
        remembered."""
        request, k = self._requests.get(req_id), min(k, self.k)
        if request is None or k <= 0:
            return NOTHING
        number, at, b = request.proposal
        is_ready = (number, at) == (self._num_proposed, request.num_tokens)
        if is_ready and not len(ahead) and self._asked == (k, least):
            num_B, found_BK, survival_BK = self._proposed
            if not (num := int(num_B[b])):
                return NOTHING
            return Found(found_BK[b, :num].tolist(), survival_BK[b, :num])
        end = request.write(ahead, self.k)
        found_K, survival_K = self._found_K[:k], self._survival_K[:k]
        num = self._kernels.propose(
            self._shared, self._own, self._cells, request.token_T, end,
            (request.shared, request.own), least, found_K, survival_K,
        )  # fmt: skip
        return Found(found_K[:num].tolist(), survival_K[:num].copy()) if num else NOTHING

    def end(self, req_id: str) -> None:
        """The request has gone."""
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        self._windows.token_SW[request.slot] = 0
        self._free_slots.append(request.slot)
        self._found_K[:] = 0
        number, _, b = request.proposal
        if number == self._num_proposed:
            self._proposed.found_BK[b] = 0
        if not request.is_kept:
            self._leaving.append((request, 0))
            self._left -= self._take_out(self._left)

    def remember(
        self, answers: Iterable[tuple[Sequence[int], Sequence[int]]], scope: str = ""
    ) -> None:
        """Answers to earlier requests: (prompt, answer), the oldest first."""
        for prompt, answer in answers:
            token_T = np.array([*prompt[-LONGEST:], *answer], np.int32)
            first = len(token_T) - len(answer)
            self._await(token_T, first, len(token_T), self._scope(f"shared {scope}"))

    def work(self) -> None:
        """Take out what is left of requests that have gone, and remember some of the earlier
        answers: to be called once a step, and now and then between steps."""
        most = self._num_per_step * (1 if self._requests else IDLE)
        # No less than has come meanwhile, or there would be ever more of them.
        left = self._num_per_step - self._take_out(max(most, self._num_to_leave))
        self._num_to_leave = 0
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

    def _advance(self, step: Sequence[tuple[Running, Sequence[int]]]) -> np.ndarray:
        """Returns the slots of the requests."""
        self._now += 1
        slots, ends, learns = list[int](), list[int](), list[bool]()
        all_tokens = list[int]()
        for request, tokens in step:
            first = request.num_tokens
            request.append(tokens, self.k)
            done = request.num_own
            if done < first:  # its prompt is still being remembered
                self._remember_own(request, first)
            learns.append(request.num_own == first)
            if learns[-1]:
                request.num_own = request.num_tokens
            if not request.is_kept:
                self._num_to_leave += request.num_own - done
            all_tokens += tokens
            slots.append(request.slot)
            ends.append(len(all_tokens))
        slot_B = np.array(slots, np.int64)
        if slots:
            self._kernels.advance(
                self._shared, self._own, self._cells, self._windows, slot_B,
                np.array(ends, np.int64), np.array(all_tokens, np.int32),
                np.array(learns, np.bool_), self._now,
            )  # fmt: skip
        return slot_B

    def _propose(
        self, requests: Sequence[Running], slot_B: np.ndarray, k: int, least: float
    ) -> None:
        num = len(requests)
        self._proposed = Proposed(
            np.zeros(num, np.int64), np.zeros((num, k), np.int64), np.zeros((num, k))
        )
        self._num_proposed += 1
        self._asked = k, least
        for b, request in enumerate(requests):
            request.proposal = self._num_proposed, request.num_tokens, b
        if num:
            self._kernels.propose_all(
                self._shared, self._own, self._cells, self._windows, slot_B, least, self._proposed
            )

    def _open_window(self, request: Running) -> None:
        if not self._free_slots:
            num = len(self._windows.num_S)
            more = Windows.empty(num, self.k)
            self._windows = Windows(*map(np.concatenate, zip(self._windows, more, strict=True)))
            self._free_slots += range(num, 2 * num)
        request.slot = slot = self._free_slots.pop()
        self._windows.scope_S2[slot] = request.shared, request.own
        self._windows.is_kept_S[slot] = request.is_kept
        self._fill_window(request)

    def _fill_window(self, request: Running) -> None:
        last_W = request.token_T[max(0, request.num_tokens - LONGEST) : request.num_tokens]
        self._windows.token_SW[request.slot, : len(last_W)] = last_W
        self._windows.num_S[request.slot] = len(last_W)

    def _read(self, request: Running, tokens: Sequence[int]) -> Sequence[int]:
        """All but the last token is remembered in steps, as a prompt is: the engine's steps would
        wait for it. Returns the last one."""
        request.append(tokens[:-1], self.k)
        self._fill_window(request)
        return tokens[-1:]

    def _compile(self) -> None:
        """Each kernel is compiled when it is first called, which may take seconds: not while
        somebody waits for an answer."""
        for is_kept in (True, False):
            self.begin("", [1, 2, 1], is_kept=is_kept)
            self.advance_all([("", [2, 1, 2])], 1)
            self.advance("", [1])
            self.propose("", 1)
            self.end("")
        self.work()
        self.clear()

    def _take_out(self, most: int) -> int:
        """Of requests that have gone. Nobody finds these entries, by whose keys they stand. Returns
        how many tokens were taken out, at most so many."""
        num = 0
        while self._leaving and num < most:
            request, done = self._leaving.popleft()
            end = min(done + most - num, request.num_own)
            self._kernels.forget(self._own, request.token_T, done, end, request.own)
            num += end - done
            if end < request.num_own:
                self._leaving.appendleft((request, end))
        return num

    def _remember_own(self, request: Running, end: int) -> None:
        end = min(end, request.num_own + self._left)
        self._left -= end - request.num_own
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


def num_tokens_of(max_bytes: int) -> int:
    """How many tokens of answers fill what a memory of this size has for them."""
    return int((1 - OWN_SHARE) * max_bytes) // BYTES_PER_ENTRY // NUM_ORDERS
