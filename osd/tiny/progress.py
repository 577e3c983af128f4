"""A progress bar on standard error; plain lines where that is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int], None]
Begin = Callable[[str, int], Report]
"""`begin(what, num_steps)` ends the stage before and returns what to call with the steps done since the last call."""


@contextmanager
def progress_bar(enabled: bool) -> Iterator[Begin]:
    """Show the stages of the building of the tiny models.

    Example:
        with progress_bar(True) as begin:
            report = begin("target", 300)
            report(1)
    """
    if not enabled:
        yield lambda what, num_steps: lambda done: None
    elif sys.stderr.isatty():
        yield from _bar()
    else:
        yield _lines


def _bar() -> Iterator[Begin]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("tiny models: {task.description:<20}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def begin(what: str, num_steps: int) -> Report:
            for before in bar.tasks:
                bar.update(before.id, completed=before.total)
            task = bar.add_task(what, total=num_steps)
            return lambda done: bar.advance(task, done)

        yield begin
        for task in bar.tasks:
            bar.update(task.id, completed=task.total)


def _lines(what: str, num_steps: int) -> Report:
    """One line when a stage begins, and one for each quarter of a long stage."""
    started, done_before = time.monotonic(), 0
    print(f"tiny models: {what}", file=sys.stderr, flush=True)  # noqa: T201

    def report(done: int) -> None:
        nonlocal done_before
        before, done_before = done_before, done_before + done
        if num_steps > 1 and 4 * done_before // num_steps > 4 * before // num_steps:
            percent = 100 * done_before // num_steps
            line = f"tiny models: {what} {percent} % after {time.monotonic() - started:.0f} s"
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    return report
