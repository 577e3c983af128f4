"""Why a part did not start, in one line."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError


def reason_from_log(path: Path) -> str:
    """The last line of a log that names an error; "" when there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()[-400:]
    except OSError:
        return ""
    marked = [line for line in lines if "Error: " in line and "See root cause" not in line]
    return marked[-1].split("Error: ", 1)[1].strip()[:300] if marked else ""


def refused(error: BaseException) -> str:
    """Which of vLLM's options it refuses, and why; "" where that is not what an error says."""
    if not isinstance(error, ValidationError):
        return ""
    first = error.errors()[0]
    option = ".".join(["serving.vllm", *map(str, first["loc"])])
    given = f", and is {first['input']!r:.60}" if first["loc"] else ""
    return f"{option}: {first['msg'].removeprefix('Value error, ')}{given}"


def last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def in_one_line(error: BaseException) -> str:
    """All of what an error says, where each line may be but a part of a sentence."""
    return " ".join(str(error).split())[:300] or type(error).__name__
