"""What a memory proposes."""

from __future__ import annotations

from typing import Any

NUM = 4


def proposed_by(memory: Any, prompt: list[int], answer: list[int], scope: str) -> list[int]:
    """To a request with this prompt, which was served this answer so far."""
    memory.begin("asked", prompt, scope=scope)
    try:
        memory.advance("asked", answer)
        return list(memory.propose("asked", NUM).tokens)
    finally:
        memory.end("asked")
