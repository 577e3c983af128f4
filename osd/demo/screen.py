"""The lines of text that `osd demo` prints. They read the same in a terminal and in a log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TextIO

from osd.client.load import Answer, figures
from osd.demo.report import summary
from osd.records import SwapReport


class Screen:
    """Prints lines, each with the seconds since `started`."""

    WIDTH = 30

    def __init__(self, out: TextIO, started: float) -> None:
        self._out = out
        self._started = started
        self._shown_swaps = 0

    def say(self, text: str) -> None:
        print(f"[{time.time() - self._started:4.0f} s] {text}", file=self._out, flush=True)

    def title(self, text: str) -> None:
        self.say("")
        self.say(text)

    def line(self, count: int, answers: Sequence[Answer], swaps: Sequence[SwapReport]) -> None:
        """Acceptance as a bar, speed beside it, and a mark for each swap since the last line."""
        shown = figures(answers)
        rate = shown.acceptance_rate or 0.0
        bar = "█" * round(rate * self.WIDTH)
        marks = "".join(f"  ◆ v{s.version}" for s in swaps[self._shown_swaps :] if s.ok)
        self._shown_swaps = len(swaps)
        self.say(
            f"{count:4d}  acceptance {rate:4.2f} {bar:<{self.WIDTH}} k {shown.k or 0:3.1f} "
            f"{shown.tokens_per_second:5.0f} tok/s"
            f"{marks}{'  FAILED ' + str(shown.num_failed) if shown.num_failed else ''}"
        )

    def summary(self, report: dict[str, Any]) -> None:
        self.title("summary")
        for name, found in summary(report).items():
            self.say(f"{name:<18}{found}")
