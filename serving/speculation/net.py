"""Measures what speculation gains: the whole engine runs without it for a short window, between two
windows with it.

    ... with ──► before (with) ──► off (without) ──► after (with) ──► ...

    ratio = rate(before + after) / rate(off)

Windows come at random times, so that they follow no rhythm of the traffic. They are discarded when
their batches differ too much, since then they would compare loads.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import stdev

from msgspec.structs import replace
from scipy.special import stdtrit

from osd.records import NetGain

SETTLING_STEPS = 3
"""First steps of each window, which do not count: they verify drafts of the window before, and
under asynchronous scheduling the draft falls asleep in them."""
MIN_STEPS = 10
MAX_DIFFERENCE = 0.25
"""Share of the largest mean batch by which the mean batches may differ."""
MAX_KEPT = 200
MIN_FOR_INTERVAL = 3


@dataclass(slots=True, eq=False)
class Window:
    """Steps of one way of working, as they are counted."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    batch: int = 0

    @property
    def counted(self) -> int:
        return self.steps - SETTLING_STEPS

    def add(self, seconds: float, tokens: int, batch: int) -> None:
        self.steps += 1
        if self.steps > SETTLING_STEPS:
            self.seconds += seconds
            self.tokens += tokens
            self.batch += batch


class NetWindows:
    """Counts steps, and says through `is_off` whether the engine must not speculate now. With
    interval 0 there are no windows."""

    def __init__(
        self, interval_s: float, window_s: float, seed: int, clock: Callable[[], float]
    ) -> None:
        self._interval_s, self._window_s, self._clock = interval_s, window_s, clock
        self._random = random.Random(seed)
        self._windows: list[Window] = []
        self._ratios: deque[float] = deque(maxlen=MAX_KEPT)
        self._num_discarded = 0
        self._next_at = clock() + self._wait()

    def is_off(self) -> bool:
        return len(self._windows) == 2

    @property
    def newest(self) -> Window | None:
        """The window to which the step about to be scheduled belongs."""
        return self._windows[-1] if self._windows else None

    def add_step(self, window: Window | None, seconds: float, tokens: int, batch: int) -> None:
        """A step of a window was taken. It counts while the window is the newest."""
        if not self._interval_s:
            return
        if not self._windows:
            if self._clock() >= self._next_at:
                self._windows = [Window()]
            return
        if window is not self._windows[-1]:
            return
        window.add(seconds, tokens, batch)
        if window.seconds < self._window_s:
            return
        if len(self._windows) < 3:
            self._windows.append(Window())
            return
        self._judge(*self._windows)
        self._windows = []
        self._next_at = self._clock() + self._wait()

    def stop(self) -> None:
        """Give up the windows under way: what comes after is not to be held against them."""
        if self._windows:
            self._windows, self._next_at = [], self._clock() + self._wait()

    def report(self) -> NetGain:
        """What speculation has gained so far."""
        logs = [math.log(ratio) for ratio in self._ratios]
        counted = NetGain(windows=len(logs), discarded=self._num_discarded)
        if not logs:
            return counted
        mean, half = sum(logs) / len(logs), _half_interval(logs)
        return replace(
            counted,
            ratio=math.exp(mean),
            low=None if half is None else math.exp(mean - half),
            high=None if half is None else math.exp(mean + half),
        )

    def _judge(self, before: Window, off: Window, after: Window) -> None:
        with_s = before.seconds + after.seconds
        batches = [w.batch / max(w.counted, 1) for w in (before, off, after)]
        differs = max(batches) - min(batches) > MAX_DIFFERENCE * max(batches)
        if differs or min(w.counted for w in (before, off, after)) < MIN_STEPS or not off.tokens:
            self._num_discarded += 1
            return
        self._ratios.append((before.tokens + after.tokens) / with_s / (off.tokens / off.seconds))

    def _wait(self) -> float:
        return self._random.expovariate(1 / self._interval_s) if self._interval_s else math.inf


def _half_interval(values: Sequence[float]) -> float | None:
    """Half the 95 % interval of the mean (Student's t); None for too few values."""
    num = len(values)
    if num < MIN_FOR_INTERVAL:
        return None
    return float(stdtrit(num - 1, 0.975)) * stdev(values) / math.sqrt(num)
