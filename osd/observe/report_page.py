"""A report as one HTML file that asks the network for nothing: text, tables, and charts drawn by
the dashboard's uPlot.

Text is escaped, and charts are JSON in which no tag can begin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Literal

STATIC = Path(__file__).parent / "dashboard" / "static"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""For the browser: nothing may be loaded, whatever stands in the page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of a chart."""

    label: str
    values: tuple[float | None, ...]
    """One for each x; None = nothing was measured."""
    color: str = ""
    """A variable of the style sheet (`--alpha`); "" = one of its own."""
    unit: str = ""
    digits: int = 2
    right: bool = False
    """Drawn on the right axis."""
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A vertical line through a chart, with its name."""

    at: float
    label: str
    kind: Literal["swap", "shift"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines over one x axis.

    Example:
        Chart(title="Acceptance", x_label="s", x=(1.0, 2.0),
              lines=(Line(label="rate", values=(0.8, 0.1)),),
              marks=(Mark(at=1.5, label="v2", kind="swap"),))
    """

    title: str
    x_label: str
    x: tuple[float, ...]
    """Ascending."""
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    """In order."""
    notes: tuple[str, ...] = ()
    """What else is said of each x under the cursor."""
    y_label: str = ""
    height: int = 230
    from_zero: bool = True
    span_gaps: bool = False
    group: str = ""
    """Charts of one group share the cursor."""


def page(title: str, lead: str, parts: Iterable[str]) -> str:
    """The whole file; `parts` are sections."""
    style = "".join(map(_static, ("uPlot.min.css", "style.css", "report.css")))
    licence = f"<pre>{escape(_static('uPlot.LICENSE.txt'))}</pre>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light '
        f'dark"><title>{escape(title)}</title><style>{style}</style></head>\n'
        f'<body><header class="top"><div class="brand"><h1>{escape(title)}</h1>'
        f'<p class="muted">{escape(lead)}</p></div></header>\n<main>{"".join(parts)}'
        '<details class="card"><summary>Charts drawn by uPlot (MIT '
        f"License)</summary>{licence}</details></main>\n"
        f"<script>{_static('uPlot.iife.min.js')}</script>\n<script>{_static('report.js')}</script></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A card of the page."""
    return f'<section class="card"><h2>{escape(title)}</h2>{"".join(parts)}</section>\n'


def text(words: str) -> str:
    """A paragraph."""
    return f"<p>{escape(words)}</p>"


def preformatted(words: str) -> str:
    """Text in columns."""
    return f"<pre>{escape(words)}</pre>"


def table(rows: Mapping[str, object]) -> str:
    """A table of two columns: names and values."""
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table><tbody>{body}</tbody></table>"


def columns(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table with a row of names, which scrolls where the page is too narrow."""
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        '<div class="columns"><table>'
        f"<thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def draw(chart: Chart) -> str:
    """A chart with its legend, and in words for those who cannot see it."""
    return (
        f'<figure class="report-chart"><figcaption class="legend"></figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(_in_words(chart))}"></div>'
        f'<script type="application/json">{_embedded(asdict(chart))}</script></figure>'
    )


def _in_words(chart: Chart) -> str:
    parts = []
    for line in chart.lines:
        seen = [f"{value:.{line.digits}f}{line.unit}" for value in line.values if value is not None]
        parts.append(
            f"{line.label}: {seen[0]} at first, {seen[-1]} at last"
            if seen
            else f"{line.label}: no data"
        )
    marks = ", ".join(f"{mark.label} at {mark.at:.0f} {chart.x_label}" for mark in chart.marks)
    return f"{chart.title}: {'; '.join(parts)}{f'; marks: {marks}' if marks else ''}"


def _embedded(data: object) -> str:
    """JSON that ends no script element, whatever text is in it."""
    plain = json.dumps(data, allow_nan=False)
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
