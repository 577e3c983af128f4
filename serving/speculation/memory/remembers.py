"""What is asked of a memory, whoever asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from serving.speculation.memory.memory import Found


class Remembers(Protocol):
    """As `serving/speculation/memory/memory.py` has it."""

    k: int

    def begin(
        self, req_id: str, prompt: Sequence[int], *, scope: str = "", is_kept: bool = True
    ) -> None: ...
    def advance_all(
        self,
        served: Iterable[tuple[str, Sequence[int]]],
        k: int = 0,
        least: float = 0.0,
        num: int | None = None,
    ) -> None: ...
    def propose(
        self, req_id: str, k: int, least: float = 0.0, *, ahead: Sequence[int] = ()
    ) -> Found: ...
    def end(self, req_id: str) -> None: ...
    def work(self) -> None: ...
    def clear(self) -> None: ...
