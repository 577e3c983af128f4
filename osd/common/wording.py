"""Formats bytes, spans of time and shares for people, and parses the times they write."""

from __future__ import annotations

import re
import time
from datetime import datetime

from osd.errors import ConfigError

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def size(num_bytes: float) -> str:
    """`size(9_752_576) == "9.3 MiB"`."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {UNITS[unit]}" if unit == 0 else f"{value:.1f} {UNITS[unit]}"


def span(seconds: float) -> str:
    """The two largest units: `span(11_540) == "3 h 12 min"`."""
    left, parts = max(0, round(seconds)), []
    for width, name in SPANS:
        if left >= width:
            parts.append(f"{left // width} {name}")
            left %= width
        elif parts:
            break
    return " ".join(parts[:2]) or "0 s"


def percent(part: float, whole: float) -> str:
    """`percent(1, 8) == "12 %"`. A share above 0 is never shown as 0 %."""
    share = 100 * part / whole if whole else 0.0
    return "under 1 %" if 0 < share < 1 else f"{share:.0f} %"


def counted(num: int, noun: str) -> str:
    """`counted(1, "trace") == "1 trace"`, `counted(2, "trace") == "2 traces"`."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def moment(text: str, now: float | None = None) -> float:
    """Seconds since 1970 of a date ("2026-11-02", "2026-11-02T08:30") or of an age ("7d", "12h",
    "30min").

    A date without a zone is local time. Raises `ConfigError`.
    """
    units = {"d": 86_400, "h": 3_600, "min": 60}
    if found := re.fullmatch(r"(\d{1,6})\s*(d|h|min)", text.strip()):
        return (time.time() if now is None else now) - int(found[1]) * units[found[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"{text!r} is no time: give a date like 2026-11-02, or an age like 7d, 12h, 30min"
        ) from None
