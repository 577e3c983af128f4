"""Memory that runs out: how it is told, and who has to go first."""

from __future__ import annotations

import errno
import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from osd.errors import OSDError

SIGNS = (
    "out of memory",
    "alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
)
"""In errors of a device's memory and its libraries', of the host's, and of files mapped into it."""
FIRST = "1000"
"""The most that a process can add to how gladly the kernel ends it."""


def has_run_out(error: BaseException) -> bool:
    """Whether an error says that there is no memory, the host's or a device's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower() if isinstance(error, (RuntimeError, ImportError)) else ""
    return isinstance(error, MemoryError) or any(sign in text for sign in SIGNS)


@contextmanager
def told_when_out(remedy: str) -> Iterator[None]:
    """Where memory runs out inside, raise an `OSDError` of one line with this remedy."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        if not has_run_out(error):
            raise
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        let_go(error)
        raise OSDError(f"memory runs out ({why}); {remedy}") from None


def let_go(error: BaseException | None) -> None:
    """Of what the frames hold that raised it, and those that it came of: weights half loaded, a
    batch. What a device keeps for tensors to come goes back to whoever shares it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def end_me_first(file: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Let the kernel end this process before larger ones where the host's memory runs out."""
    with suppress(OSError):  # not on every system
        file.write_text(FIRST)
