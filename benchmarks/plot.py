"""A bench's report as one self-contained HTML page: lines drawn as in the demo's charts, spreads as
hand-made SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from benchmarks.result import Drawing, Lines, Result, Spread, number, table
from osd.observe import report_page
from osd.observe.report_page import Chart, Line, preformatted, section, text

WIDTH = 760
LEFT, RIGHT = 230, 24
ROW_HEIGHT = 30
NUM_COLOURS = 8
"""Colours of lines in the style sheet."""


def page(result: Result, machine: dict[str, object]) -> str:
    """The whole report: question, table, drawings, machine."""
    protocol = result.protocol
    return report_page.page(
        f"osd bench {protocol.bench}",
        protocol.question,
        [
            section(
                "Found",
                text(f"Arms: {', '.join(protocol.arms)}. {protocol.order}"),
                preformatted(table(result)),
            ),
            *(section(drawing.title, draw(drawing)) for drawing in result.drawings),
            section("Measured on", report_page.table({**machine, **protocol.sizes})),
        ],
    )


def draw(drawing: Drawing) -> str:
    """One drawing."""
    return _spread(drawing) if isinstance(drawing, Spread) else report_page.draw(_chart(drawing))


def _chart(drawing: Lines) -> Chart:
    x = sorted({at for points in drawing.lines.values() for at, _ in points})
    lines = tuple(
        Line(label=label, values=tuple(map(dict(points).get, x)), digits=3)
        for label, points in drawing.lines.items()
    )
    return Chart(
        title=drawing.title,
        x_label=drawing.x_label,
        y_label=drawing.y_label,
        x=tuple(x),
        lines=lines,
        height=320,
        from_zero=False,
        span_gaps=True,
    )


def _spread(drawing: Spread) -> str:
    reference = [] if drawing.reference is None else [drawing.reference]
    seen = [x for _, e, observed in drawing.rows for x in (e.low, e.high, *observed)] + reference
    x = _Scale(seen, LEFT, WIDTH - RIGHT)
    bottom = ROW_HEIGHT * len(drawing.rows) + 10
    parts = [_x_axis(x, bottom, drawing.unit)]
    if drawing.reference is not None:
        at = x(drawing.reference)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{bottom}" stroke="var(--muted)" '
            'stroke-dasharray="4 3"/>'
        )
    for i, (label, found, observed) in enumerate(drawing.rows):
        y, colour = ROW_HEIGHT * (i + 0.5) + 5, f"var(--line-{i % NUM_COLOURS + 1})"
        parts.append(_text(LEFT - 8, y + 4, label, "end"))
        parts += [
            f'<circle cx="{x(v):.1f}" cy="{y}" r="3" fill="{colour}" opacity="0.25"/>'
            for v in observed
        ]
        parts.append(
            f'<line x1="{x(found.low):.1f}" x2="{x(found.high):.1f}" y1="{y}" y2="{y}" '
            f'stroke="{colour}" '
            f'stroke-width="3"/><circle cx="{x(found.value):.1f}" cy="{y}" r="5" fill="{colour}"/>'
        )
    return _svg(bottom + 40, parts)


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
        f'<line x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{y}" y2="{y + 4}" stroke="var(--muted)"/>'
        + _text(x(t), y + 17, number(t), "middle")
        for t in x.ticks()
    )
    line = (
        f'<line x1="{x(x.low):.1f}" x2="{x(x.high):.1f}" y1="{y}" y2="{y}" stroke="var(--muted)"/>'
    )
    return line + ticks + _text(WIDTH - RIGHT, y + 34, label, "end")


def _text(x: float, y: float, text: str, anchor: str, colour: str = "var(--ink)") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}">{"".join(parts)}</svg>'
