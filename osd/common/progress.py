"""Progress bars on standard error, one for each stage; plain lines where that is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Advance = Callable[..., None]
"""`advance(num, text="")`: `num` more units are done; `text` stands behind their count."""
Begin = Callable[..., Advance]
"""`begin(what, total=None, unit="")` ends the stage before and shows a new one. Without a unit
nothing is counted."""


@contextmanager
def progress(what: str, total: int | None, unit: str) -> Iterator[Advance]:
    """Show how much of `total` is done; None = the total is unknown.

    Example:
        with progress("answering", 200, "prompts") as advance:
            advance(1, "3 failed")
    """
    with stages() as begin:
        yield begin(what, total, unit)


@contextmanager
def stages(enabled: bool = True) -> Iterator[Begin]:
    """Show one stage after the other.

    Example:
        with stages() as begin:
            begin("tiny models: tokenizer")
            advance = begin("tiny models: target", 340, "steps")
            advance(1)
    """
    if not enabled:
        yield lambda what, total=None, unit="": lambda num, text="": None
    elif sys.stderr.isatty():
        yield from _bars()
    else:
        yield _lines


def _bars() -> Iterator[Begin]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def end_stage() -> None:
            """Stop its clock. A stage that counts nothing is complete when it ends."""
            for task in bars.tasks[-1:]:
                if not task.fields["unit"]:
                    bars.update(task.id, total=1, completed=1)
                bars.stop_task(task.id)

        def begin(what: str, total: int | None = None, unit: str = "") -> Advance:
            end_stage()
            done = 0
            of_how_many = "?" if total is None else total

            def count(text: str) -> str:
                return f"{done}/{of_how_many} {unit}  {text}" if unit else ""

            def advance(num: int, text: str = "") -> None:
                nonlocal done
                done += num
                bars.update(task, completed=done, count=count(text))

            task = bars.add_task(what, total=total, unit=unit, count=count(""))
            return advance

        yield begin
        end_stage()


def _lines(what: str, total: int | None = None, unit: str = "") -> Advance:
    """One line when a stage begins, and one for each quarter of its total."""
    started, done = time.monotonic(), 0
    of_how_many = "" if total is None else f" {total}"
    _print(f"{what}:{of_how_many} {unit}" if unit else what)

    def advance(num: int, text: str = "") -> None:
        nonlocal done
        before, done = done, done + num
        if total and 4 * done // total > 4 * before // total:
            seconds = time.monotonic() - started
            _print(f"{what}: {done} of {total} {unit} after {seconds:.0f} s  {text}".rstrip())

    return advance


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201
