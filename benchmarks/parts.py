"""A part of a bench, and a run that goes on where it was left: for benches that take hours.

    osd bench online --only schedules=home-and-de --only seeds=0 --out DIRECTORY

`narrowed` cuts a protocol to what is asked for. `measured` makes the rows that a notebook lacks,
each written as soon as it is there: the same command over the same directory goes on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import active_children
from typing import Any

from benchmarks import IN_PARTS
from benchmarks.record import Notebook, Options, Protocol, Row
from osd.errors import ConfigError

ARMS = "arms"


def narrowed(plan: Protocol, options: Options) -> Protocol:
    """The protocol, with those of its lists and tables cut that `options.only` names. Raises
    `ConfigError` for what is not there."""
    asked: dict[str, list[str]] = {}
    for given in options.only:
        name, sign, value = given.partition("=")
        if not sign or name not in IN_PARTS[plan.bench]:
            raise ConfigError(
                f"--only {given}: must be NAME=VALUE, where NAME is "
                + " or ".join(IN_PARTS[plan.bench])
            )
        asked.setdefault(name, []).append(value)
    arms = _cut(ARMS, plan.arms, asked.pop(ARMS)) if ARMS in asked else plan.arms
    sizes = {name: _cut(name, plan.sizes[name], values) for name, values in asked.items()}
    return replace(plan, arms=arms, sizes={**plan.sizes, **sizes})


def _cut(name: str, offered: Any, values: Sequence[str]) -> Any:
    known = [str(value) for value in offered]
    for value in values:
        if value not in known:
            raise ConfigError(f"--only {name}={value}: must be one of {'; '.join(known)}")
    if isinstance(offered, Mapping):
        return {key: value for key, value in offered.items() if str(key) in values}
    return type(offered)(value for value in offered if str(value) in values)


@dataclass(frozen=True, slots=True)
class Asked:
    """A row to be measured."""

    key: Row
    """What tells it from all others; it becomes part of the row."""
    measure: Callable[[], Row]
    """Called in another process."""


def measured(
    pool: Executor,
    notebook: Notebook,
    asked: Sequence[Asked],
    say: Callable[[str], None],
    *,
    at_once: int,
) -> list[Row]:
    """The rows asked for, in that order: those that the notebook lacks are made now, `at_once` at a
    time, as many as the pool has processes. Where one fails, no other is begun, and those that were
    are kept. A run that is told to end does not wait for them. Raises `ConfigError` where nothing
    is asked for."""
    if not asked:
        raise ConfigError("--only: leaves nothing to be measured; ask for more")
    found = {i: row for i, one in enumerate(asked) if (row := notebook.find(one.key))}
    if found:
        say(f"{len(found)} of {len(asked)} are there already")
    lacking = [i for i in range(len(asked)) if i not in found]
    running: dict[Future[Row], int] = {}
    failed: BaseException | None = None
    with _ended_together():
        while lacking or running:
            while lacking and len(running) < at_once:
                number = lacking.pop(0)
                running[pool.submit(asked[number].measure)] = number
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                key = asked[number := running.pop(done)].key
                if error := done.exception():
                    failed, lacking = failed or error, []
                else:
                    found[number] = notebook.add(**{**done.result(), **key})
                    say(f"{len(found)} of {len(asked)}: {', '.join(map(str, key.values()))}")
    if failed:
        raise failed
    return [found[i] for i in range(len(asked))]


@contextmanager
def _ended_together() -> Iterator[None]:
    """SIGTERM, which ends this process, is handed on to those of its pool, which would go on for
    minutes; Ctrl-C reaches them by itself, and those that a shell started behind it ignore that."""
    try:
        yield
    except SystemExit:
        for pid in filter(None, (process.pid for process in active_children())):
            os.kill(pid, signal.SIGTERM)
        raise
