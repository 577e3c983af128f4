"""A progress bar on standard error; plain lines, one for each quarter, where that is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Advance = Callable[..., None]
"""`advance(num, text="")`: so many more are done; `text` says what there is to see of them."""


@contextmanager
def progress(what: str, total: int | None, unit: str) -> Iterator[Advance]:
    """Show how much of `total` is done (None: nobody knows how much there is).

    Example:
        with progress("answering", 200, "prompts") as advance:
            advance(1, "3 failed")
    """
    if sys.stderr.isatty():
        yield from _bar(what, total, unit)
    else:
        yield _lines(what, total, unit)


def _bar(what: str, total: int | None, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit + "  {task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, text="")
        yield lambda num, text="": bar.update(task, advance=num, text=text)


def _lines(what: str, total: int | None, unit: str) -> Advance:
    started, done = time.monotonic(), 0
    print(f"{what}: {total if total is not None else ''} {unit}".replace("  ", " "), file=sys.stderr, flush=True)  # noqa: T201

    def advance(num: int, text: str = "") -> None:
        nonlocal done
        before, done = done, done + num
        if total and 4 * done // total > 4 * before // total:
            line = f"{what}: {done} of {total} {unit} after {time.monotonic() - started:.0f} s  {text}".rstrip()
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    return advance
