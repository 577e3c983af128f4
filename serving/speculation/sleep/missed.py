"""What a sleeping draft misses: per request the first position, and per cache block whether the
draft wrote it.

    k = 0   sleep()   request -> first position missed; the step's blocks are marked
    k > 0   wake()    the spans to catch up; their blocks, and the step's, are unmarked

Blocks are marked because the prefix cache may hand them to another request, whose draft would read
cache entries that were never written. Everything here is known to the host and the same on every
rank of a tensor parallel group, so that all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np

Span = tuple[int, int, int]
"""(row in the batch, first position, end)"""
BlocksOf = Callable[[int], np.ndarray]
"""row in the batch -> ids of the request's cache blocks, in order"""


class Missed:
    """`slack`: by how many positions the host may believe a request further than it is. So many are
    caught up twice, which changes nothing."""

    def __init__(self, block_size: int, slack: int = 0) -> None:
        self._block_size, self._slack = block_size, slack
        self._first: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        """request -> tokens computed before its last step; fewer of them now = it starts again"""
        self._marked: dict[str, tuple[int, int]] = {}
        """sleeping request -> how many of its first blocks need no more marking, and the last"""
        self._is_stale_block: np.ndarray | None = None

    def meet(
        self,
        req_ids: Collection[str],
        start_B: np.ndarray,
        blocks: BlocksOf,
        anew: Collection[str] = (),
    ) -> list[str]:
        """Note where new requests, and those that start again after preemption, begin with blocks
        the draft never wrote. Returns these requests.

        Args:
            anew: Requests known to start again.
        """
        met: list[str] = []
        for b, (req_id, start) in enumerate(zip(req_ids, start_B.tolist(), strict=True)):
            last = self._computed.get(req_id)
            if last is None or start < last - self._slack or req_id in anew:
                met.append(req_id)
                self._first.pop(req_id, None)
                self._marked.pop(req_id, None)
                if (first := self._first_stale(blocks(b), start)) is not None:
                    self._first[req_id] = first
            self._computed[req_id] = start
        return met

    def sleep(
        self,
        req_ids: Collection[str],
        start_B: np.ndarray,
        end_B: np.ndarray,
        blocks: BlocksOf,
    ) -> None:
        """The draft is left out of a step that computes positions [start, end)."""
        spans = zip(req_ids, start_B.tolist(), end_B.tolist(), strict=True)
        for b, (req_id, start, end) in enumerate(spans):
            first, num_blocks = max(0, start - self._slack), -(-end // self._block_size)
            self._first.setdefault(req_id, first)
            held = blocks(b)[:num_blocks]  # where the host is ahead, some are not there yet
            last = len(held), int(held[-1]) if len(held) else -1
            if self._marked.get(req_id) != last:  # a new block, or another one after preemption
                self._mark(blocks(b), first, end, is_stale=True)
                self._marked[req_id] = last

    def wake(
        self,
        req_ids: Collection[str],
        start_B: np.ndarray,
        end_B: np.ndarray,
        blocks: BlocksOf,
    ) -> list[Span]:
        """What the draft must run over before a step that computes positions [start, end)."""
        spans: list[Span] = []
        for b, (req_id, start) in enumerate(zip(req_ids, start_B.tolist(), strict=True)):
            self._marked.pop(req_id, None)
            if (first := self._first.pop(req_id, start)) < start:
                spans.append((b, first, start))
        if self._is_stale_block is not None:
            for b, first, end in spans:
                self._mark(blocks(b), first, end, is_stale=False)
            for b, (start, end) in enumerate(zip(start_B.tolist(), end_B.tolist(), strict=True)):
                self._mark(blocks(b), start, end, is_stale=False)
        return spans

    def forget_all_but(self, running: Collection[str]) -> None:
        """Those that wait while others run may be forgotten: they are met anew by their blocks."""
        self._computed = {r: n for r, n in self._computed.items() if r in running}
        self._first = {r: n for r, n in self._first.items() if r in running}
        self._marked = {r: n for r, n in self._marked.items() if r in running}

    @property
    def num_requests(self) -> int:
        return len(self._computed)

    def _first_stale(self, blocks: np.ndarray, start: int) -> int | None:
        if not start or self._is_stale_block is None:
            return None
        known = blocks[: -(-start // self._block_size)]
        stale = np.nonzero(self._is_stale_block[known[known < len(self._is_stale_block)]])[0]
        return int(stale[0]) * self._block_size if len(stale) else None

    def _mark(self, blocks: np.ndarray, first: int, end: int, *, is_stale: bool) -> None:
        if self._is_stale_block is None:
            self._is_stale_block = np.zeros(1024, bool)
        touched = blocks[first // self._block_size : -(-end // self._block_size)]
        if len(touched) and (newest := int(touched.max())) >= len(self._is_stale_block):
            grown = np.zeros(2 * newest + 1, bool)
            grown[: len(self._is_stale_block)] = self._is_stale_block
            self._is_stale_block = grown
        self._is_stale_block[touched] = is_stale


def parts(spans: Iterable[Span], room: int) -> Iterator[list[Span]]:
    """The spans, cut into parts of at most `room` positions."""
    part: list[Span] = []
    free = room
    for b, first, end in spans:
        while first < end:
            stop = min(end, first + free)
            part.append((b, first, stop))
            free -= stop - first
            first = stop
            if not free:
                yield part
                part, free = [], room
    if part:
        yield part
