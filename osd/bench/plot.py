"""Drawings as one self-contained HTML page: SVG by hand, no script, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from osd.bench.result import Drawing, Lines, Result, Spread, number, table

WIDTH = 760
LEFT, RIGHT = 230, 24
ROW_HEIGHT = 30
CHART_HEIGHT = 260
COLOURS = (
    *("#1b6ca8", "#c8553d", "#3a7d44", "#8e5aa8", "#a67c00", "#555555"),
    *("#d4498b", "#2aa1a1", "#7a4b26", "#9bb30f", "#000000"),
)


def page(result: Result, machine: dict[str, object]) -> str:
    """The whole report: question, table, drawings, machine."""
    protocol = result.protocol
    facts = "\n".join(f"{key}: {value}" for key, value in {**machine, **protocol.sizes}.items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>osd bench {escape(protocol.bench)}</title>"
        "<style>body{font:15px/1.5 sans-serif;max-width:820px;margin:2em auto;padding:0 1em}"
        "pre{font-size:12px;overflow:auto;background:#f4f4f4;padding:1em}svg{max-width:100%;height:auto}</style>"
        f"<h1>osd bench {escape(protocol.bench)}</h1><p>{escape(protocol.question)}</p>"
        f"<p>Arms: {escape(', '.join(protocol.arms))}. {escape(protocol.order)}</p>"
        f"<pre>{escape(table(result))}</pre>"
        f"{''.join(map(draw, result.drawings))}<h2>Measured on</h2><pre>{escape(facts)}</pre></html>\n"
    )


def draw(drawing: Drawing) -> str:
    """One drawing with its title."""
    body = _spread(drawing) if isinstance(drawing, Spread) else _lines(drawing)
    return f"<h2>{escape(drawing.title)}</h2>{body}"


def _spread(drawing: Spread) -> str:
    reference = [] if drawing.reference is None else [drawing.reference]
    seen = [x for _, e, observed in drawing.rows for x in (e.low, e.high, *observed)] + reference
    x = _Scale(seen, LEFT, WIDTH - RIGHT)
    bottom = ROW_HEIGHT * len(drawing.rows) + 10
    parts = [_x_axis(x, bottom, drawing.unit)]
    if drawing.reference is not None:
        at = x(drawing.reference)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{bottom}" stroke="#999" stroke-dasharray="4 3"/>')
    for i, (label, found, observed) in enumerate(drawing.rows):
        y, colour = ROW_HEIGHT * (i + 0.5) + 5, COLOURS[i % len(COLOURS)]
        parts.append(_text(LEFT - 8, y + 4, label, "end"))
        parts += [f'<circle cx="{x(v):.1f}" cy="{y}" r="3" fill="{colour}" opacity="0.25"/>' for v in observed]
        parts.append(
            f'<line x1="{x(found.low):.1f}" x2="{x(found.high):.1f}" y1="{y}" y2="{y}" stroke="{colour}" '
            f'stroke-width="3"/><circle cx="{x(found.value):.1f}" cy="{y}" r="5" fill="{colour}"/>'
        )
    return _svg(bottom + 40, parts)


def _lines(drawing: Lines) -> str:
    points = [point for line in drawing.lines.values() for point in line]
    x = _Scale([p[0] for p in points], 60, WIDTH - RIGHT)
    y = _Scale([p[1] for p in points], CHART_HEIGHT, 24)
    parts = [_x_axis(x, CHART_HEIGHT, drawing.x_label), _text(4, 10, drawing.y_label, "start")]
    parts += [_text(54, y(tick) + 4, number(tick), "end") for tick in y.ticks()]
    for i, (label, line) in enumerate(drawing.lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(60, CHART_HEIGHT + 34 + 16 * i, label, "start", colour))
    return _svg(CHART_HEIGHT + 40 + 16 * len(drawing.lines), parts)


class _Scale:
    """Numbers to places between `start` and `end`, with a margin."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values, default=0.0), max(values, default=1.0)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        self.low, self.high, self._start, self._end = low - margin, high + margin, start, end

    def __call__(self, value: float) -> float:
        return self._start + (value - self.low) / (self.high - self.low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """About five round numbers."""
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]


def _x_axis(x: _Scale, y: float, label: str) -> str:
    ticks = "".join(
        f'<line x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{y}" y2="{y + 4}" stroke="#333"/>'
        + _text(x(t), y + 17, number(t), "middle")
        for t in x.ticks()
    )
    line = f'<line x1="{x(x.low):.1f}" x2="{x(x.high):.1f}" y1="{y}" y2="{y}" stroke="#333"/>'
    return line + ticks + _text(WIDTH - RIGHT, y + 34, label, "end")


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" fill="{colour}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'font-family="sans-serif">{"".join(parts)}</svg>'
    )
