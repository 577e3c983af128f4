"""Files of prompts: text with a prompt on each line, or JSON lines with one request each.

{"prompt": "How many singers are there?", "domain": "sql", "max_tokens": 64}
{"messages": [{"role": "user", "content": "2 + 2 ="}]}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from osd.errors import ConfigError


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat, as in the OpenAI API. Its content may have several parts."""

    role: str
    content: str | list[dict[str, Any]]


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """One request: `prompt` or `messages`.

    Example:
        Prompt(prompt="How many singers are there?", domain="sql", max_tokens=64)
    """

    prompt: str = ""
    messages: list[Message] = []
    domain: str = ""
    """Traffic class of the trace."""
    max_tokens: int = 0
    """Longest answer; 0 = `Asking.max_tokens`."""

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("must have either a prompt or messages")
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """How prompts are put to a target.

    Example:
        Asking(max_tokens=256, temperature=0.0, streams=16)
    """

    max_tokens: int
    """Longest answer, where a prompt has none of its own."""
    temperature: float
    streams: int


def read_prompts(path: Path) -> list[Prompt]:
    """The requests of a `.txt` or `.jsonl` file. Empty lines are skipped. Raises `ConfigError` with
    the line."""
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(
            f"--prompts: {path}: must end in .txt (a prompt on each line) or .jsonl (a request on "
            "each)"
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"--prompts: {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"--prompts: {path} line {line}: not UTF-8 text") from None
    read = _from_json if path.suffix == ".jsonl" else _from_text
    prompts = [read(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts: {path}: holds no prompt")
    return prompts


def _from_text(path: Path, number: int, line: str) -> Prompt:
    return Prompt(prompt=line.strip())


def _from_json(path: Path, number: int, line: str) -> Prompt:
    try:
        return msgspec.json.decode(line, type=Prompt)
    except (msgspec.MsgspecError, RecursionError) as error:  # also those of `__post_init__`
        form = '{"prompt": "..."} or {"messages": [...]}, with "domain" and "max_tokens" if wanted'
        raise ConfigError(f"--prompts: {path} line {number}: {error}; a line is {form}") from None
