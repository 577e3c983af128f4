"""Numbers as people read them: bytes, spans of time, shares."""

from __future__ import annotations

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
    """`percent(1, 8) == "12 %"`; what is not nothing is never shown as 0 %."""
    share = 100 * part / whole if whole else 0.0
    return "under 1 %" if 0 < share < 1 else f"{share:.0f} %"


def counted(num: int, noun: str) -> str:
    """`counted(1, "trace") == "1 trace"`, `counted(2, "trace") == "2 traces"`."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"
