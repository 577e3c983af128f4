"""The three acceptances, and the counters they are ratios of.

    acceptance rate            accepted / drafted tokens. vLLM's counters;
                               falls when k grows, so for display only
    acceptance length          1 + accepted / drafts:
                               tokens a verification step yields on average
    conditional acceptance α   accepted / tested tokens, where a draft token is *tested* if all
                               before it in the same draft were accepted. Independent of k:
                               every decision uses this one

Times are seconds, counts are of tokens unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import msgspec

SOURCES = ("target", "draft", "memory")
"""Who brings an output token: the target itself, the draft model, the memory of what was served."""


def acceptance_rate(num_accepted_tokens: int, num_draft_tokens: int) -> float | None:
    """accepted / drafted, None when nothing was drafted."""
    return num_accepted_tokens / num_draft_tokens if num_draft_tokens else None


def acceptance_length(num_accepted_tokens: int, num_drafts: int) -> float | None:
    """1 + accepted / drafts, None when nothing was drafted."""
    return 1 + num_accepted_tokens / num_drafts if num_drafts else None


def conditional_acceptance(num_accepted_tokens: float, num_tested_tokens: float) -> float | None:
    """α = accepted / tested, None when nothing was tested."""
    return num_accepted_tokens / num_tested_tokens if num_tested_tokens else None


class Counters(msgspec.Struct, array_like=True):
    """What speculation did over some time. Sums of counters are counters of the whole time.

    Files hold these as arrays: new fields come last.

    Example:
        Counters(seconds=1.0, num_steps=110, num_drafts=100, num_draft_tokens=400,
                 num_accepted_tokens=250, num_output_tokens=408,
                 num_accepted_tokens_per_pos=[90, 70, 50, 40], num_tested_per_pos=[100, 90, 70, 50],
                 num_memory_tokens=80, num_accepted_memory_tokens=48)
    """

    seconds: float = 0.0
    num_steps: int = 0
    """Times a request was in a step, with tokens to verify or without. `num_draft_tokens /
    num_steps` is the k that was really used."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_output_tokens: int = 0
    """Tokens emitted by the engine, bonus and undrafted ones included."""
    num_finished: int = 0
    """Requests that ended."""
    num_captured: int = 0
    """Of these, requests of which a trace was kept: the others cannot be replayed."""
    num_decode_tokens: int = 0
    decode_seconds: float = 0.0
    """Over the finished requests: tokens after the first, and seconds from the first to the last.
    TPOT is their ratio."""
    num_accepted_tokens_per_pos: list[int] = []
    """[G]"""
    num_tested_per_pos: list[int] = []
    """[G]: drafts whose first g tokens were all accepted, and that had a token g + 1 to test."""
    num_memory_tokens: int = 0
    """Tokens of the memory that were verified. `num_drafts`, `num_draft_tokens`,
    `num_accepted_tokens` and the counts per position are of the draft model alone."""
    num_accepted_memory_tokens: int = 0
    num_cut_draft_tokens: int = 0
    """Of the draft model's accepted tokens, those beyond a request's end: they were not served."""
    num_cut_memory_tokens: int = 0
    """The same of the memory's."""

    def add(self, other: Counters) -> None:
        self.seconds += other.seconds
        self.num_steps += other.num_steps
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_output_tokens += other.num_output_tokens
        self.num_finished += other.num_finished
        self.num_captured += other.num_captured
        self.num_decode_tokens += other.num_decode_tokens
        self.decode_seconds += other.decode_seconds
        self.num_accepted_tokens_per_pos = _sum(
            self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        )
        self.num_tested_per_pos = _sum(self.num_tested_per_pos, other.num_tested_per_pos)
        self.num_memory_tokens += other.num_memory_tokens
        self.num_accepted_memory_tokens += other.num_accepted_memory_tokens
        self.num_cut_draft_tokens += other.num_cut_draft_tokens
        self.num_cut_memory_tokens += other.num_cut_memory_tokens

    def parts(self, num: int) -> list[Counters]:
        """As many counters, as even as whole numbers can be, whose sum is this."""
        if num == 1:
            return [self]
        fields = self.__struct_fields__
        split = {name: _split(getattr(self, name), num) for name in fields}
        return [Counters(**{name: split[name][i] for name in fields}) for i in range(num)]

    def by_source(self) -> dict[str, int]:
        """Output tokens by who brought them (`SOURCES`). What neither draft model nor memory
        proposed is the target's own."""
        draft = self.num_accepted_tokens - self.num_cut_draft_tokens
        memory = self.num_accepted_memory_tokens - self.num_cut_memory_tokens
        # Parts of a window are rounded each by itself.
        own = max(0, self.num_output_tokens - draft - memory)
        return dict(zip(SOURCES, (own, draft, memory), strict=True))

    def shares(self) -> dict[str, float]:
        """`by_source` as shares of all output tokens; {} without any."""
        return shares_of(self.by_source())

    def acceptance(self) -> dict[str, float | None]:
        """The three acceptances by their names; None where nothing was tested or drafted."""
        return {
            "alpha": conditional_acceptance(
                sum(self.num_accepted_tokens_per_pos), sum(self.num_tested_per_pos)
            ),
            "acceptance_rate": acceptance_rate(self.num_accepted_tokens, self.num_draft_tokens),
            "acceptance_length": acceptance_length(self.num_accepted_tokens, self.num_drafts),
        }


def shares_of(tokens: Mapping[str, float]) -> dict[str, float]:
    """Each one's share of the sum; {} where that is nothing."""
    whole = sum(tokens.values())
    return {name: num / whole for name, num in tokens.items()} if whole else {}


def _split(value: Any, num: int) -> list[Any]:
    if isinstance(value, list):
        columns = [_split(each, num) for each in value]
        return [[column[i] for column in columns] for i in range(num)]
    if isinstance(value, float):
        return [value / num] * num
    return [value * (i + 1) // num - value * i // num for i in range(num)]


def _sum(first: Iterable[int], second: Iterable[int]) -> list[int]:
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
