"""The loop of `osd top`, and the terminal it borrows.

consumes: readings, keys
waits for: a key, or half a second
unblocked by: q, Ctrl-C, SIGTERM, the terminal's end
"""

from __future__ import annotations

import locale
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from osd.observe.top.layout import View, frame
from osd.observe.top.reading import Reader, Readings, read, window_seconds

FRAME_S = 0.5
LEAVING = b"qQ\x03"
"""q, and Ctrl-C."""
BRAILLE_SAMPLE = "⣿┤◆"


def run(connect: Callable[[], Reader], window: str, *, once: bool) -> None:
    """Show frames until the user leaves; a single one with `once`, or where no terminal is."""
    window_s = window_seconds(window)
    console = Console(force_terminal=sys.stdout.isatty(), highlight=False)
    is_plain = not can_show_braille(
        sys.stdout.encoding, locale.getencoding(), os.environ.get("TERM", "")
    )
    if once or not console.is_terminal or console.is_dumb_terminal:
        view = View(read(connect(), window_s), window, is_plain=is_plain)
        for line in frame(view, console.width, console.height - 1):  # the prompt follows
            line.rstrip()
            console.print(line, soft_wrap=True)
        return
    _show(console, Readings(connect, window_s), window, is_plain)


def can_show_braille(output: str, system: str, terminal: str) -> bool:
    """Whether a terminal can, by the encodings of the output and of the locale; Linux' own console
    has no such font."""
    try:
        return (
            bool(BRAILLE_SAMPLE.encode(output) and BRAILLE_SAMPLE.encode(system))
            and terminal != "linux"
        )
    except (UnicodeEncodeError, LookupError):
        return False


def _show(console: Console, readings: Readings, window: str, is_plain: bool) -> None:
    def picture() -> Group:
        answers, away = readings.latest()
        view = View(answers, window, away, is_live=True, is_plain=is_plain)
        return Group(*map(_uncut, frame(view, *console.size)))

    with (
        _keys() as wants_to_leave,
        Live(picture(), console=console, screen=True, auto_refresh=False) as live,
    ):
        while not wants_to_leave(FRAME_S):
            live.update(picture(), refresh=True)
    readings.close()


def _uncut(line: Text) -> Text:
    """Rich is not to fold what changes its width while it is drawn."""
    line.no_wrap, line.overflow = True, "crop"
    return line


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Gives a function that waits for some seconds and tells whether the user left meanwhile.
    Signals raise nothing inside, so a frame is always drawn whole. The terminal is restored at the
    end."""
    fd, signals = sys.stdin.fileno(), list[int]()
    before = termios.tcgetattr(fd) if os.isatty(fd) else None
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [
        signal.signal(number, lambda number, _: signals.append(number)) for number in numbers
    ]
    try:
        if before is not None:
            _hear_single_keys(fd)
        yield lambda seconds: _is_left(fd if before is not None else None, seconds) or bool(signals)
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        if before is not None:
            termios.tcsetattr(fd, termios.TCSAFLUSH, before)


def _hear_single_keys(fd: int) -> None:
    tty.setcbreak(fd)
    mode = termios.tcgetattr(fd)
    for key in (termios.VINTR, termios.VSUSP):  # Ctrl-Z would leave the shell on our screen
        mode[6][key] = b"\0"
    termios.tcsetattr(fd, termios.TCSADRAIN, mode)


def _is_left(fd: int | None, seconds: float) -> bool:
    if not select.select([] if fd is None else [fd], [], [], seconds)[0]:
        return False
    keys = os.read(fd or 0, 64)
    return not keys or any(key in LEAVING for key in keys)
