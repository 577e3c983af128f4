"""The control port's answers, read again and again, without characters that a terminal would
obey."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from osd.errors import ConfigError, OSDError
from osd.observe.status_text import NUM_SOUGHT
from osd.records import Event, ServiceStatus

NUM_POINTS = 300
LONG_S = 600.0
"""Buckets longer than this are multiples of it, which the control port has at hand."""
PAUSE_S = 2.0
"""Between two readings."""
UNITS = {"m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
MAX_WINDOW_S = 31 * UNITS["d"]
"""What one answer of `/osd/history` may reach back."""


class Reader(Protocol):
    """`osd.client.http.Client`, as far as it is needed."""

    url: str

    def get(self, path: str, **params: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Answers:
    """What the control port said at one moment: `/osd/status`, `/osd/history` and `/osd/events`
    (newest first)."""

    url: str
    status: ServiceStatus
    history: dict[str, Any]
    events: list[Event]


def window_seconds(text: str) -> float:
    """`window_seconds("5m") == 300.0`. Raises `ConfigError`."""
    found = re.fullmatch(r"(\d{1,6})\s*(m|min|h|d)", text.strip())
    seconds = int(found[1]) * UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise ConfigError(f"--window={text}: give a span of at most 31 days, like 5m, 1h, 24h, 7d")
    return seconds


def read(reader: Reader, window_s: float) -> Answers:
    """One look. Raises `OSDError` when the service does not answer, or something else does."""
    bucket = max(2.0, math.ceil(window_s / NUM_POINTS))
    if bucket > LONG_S:
        bucket = math.ceil(bucket / LONG_S) * LONG_S
    try:
        status = msgspec.convert(clean(reader.get("/osd/status")), ServiceStatus)
        history = clean(reader.get("/osd/history", since=-window_s, bucket=bucket))
        events = msgspec.convert(clean(reader.get("/osd/events", limit=NUM_SOUGHT)), list[Event])
        if "series" not in history:
            raise ValueError("JSON of something else")
    except (ValueError, TypeError):
        raise OSDError(f"{reader.url}: what answers there is no control port") from None
    return Answers(clean(reader.url), status, history, events)


def clean(value: Any) -> Any:
    """The same JSON with each text in one line and without unprintable characters, which disarms
    escape sequences."""
    match value:
        case str():
            return "".join(c if c.isprintable() else "?" for c in " ".join(value.split()))
        case dict():
            return {clean(key): clean(part) for key, part in value.items()}
        case list():
            return [clean(part) for part in value]
    return value


class Readings:
    """Reads in a thread of its own, so that a slow service does not keep the keys waiting.

    consumes: the control port    waits for: `pause_s` between two readings    unblocked by: `close`

    Example:
        readings = Readings(lambda: Client(url), window_s=300.0)   # OSDError without a service
        answers, away = readings.latest()
    """

    def __init__(
        self, connect: Callable[[], Reader], window_s: float, pause_s: float = PAUSE_S
    ) -> None:
        self._connect, self._window_s, self._pause_s = connect, window_s, pause_s
        self._reader: Reader | None = connect()
        self._latest: tuple[Answers, str] = read(self._reader, window_s), ""
        self._read_at = time.monotonic()
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="readings", daemon=True).start()

    def latest(self) -> tuple[Answers, str]:
        """The newest answers, and why there are no newer ones; "" while there are."""
        answers, away = self._latest
        return answers, f"away for {time.monotonic() - self._read_at:.0f} s: {away}" if away else ""

    def close(self) -> None:
        """Read no more."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(self._pause_s):
            try:
                self._reader = self._reader or self._connect()
                self._latest = read(self._reader, self._window_s), ""
                self._read_at = time.monotonic()
            except OSDError as error:
                self._reader = None  # it may come back at another address
                self._latest = self._latest[0], clean(str(error))
