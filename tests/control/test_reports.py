"""Reports in a real browser: charts are drawn in light and dark, and nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot
from benchmarks.record import Protocol
from benchmarks.result import Lines, Result, Spread
from benchmarks.stats import Estimate
from osd.demo.report import html
from tests.support.browser import open_report
from tests.support.reports import report

COLOURS = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] === 255) seen.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
  }
  return [...seen];
}"""
ALPHA = {"light": "29,78,216", "dark": "123,166,255"}
"""--alpha and --line-1 of the style sheet."""


def bench_page() -> str:
    lines = {f"arm {i}": ((0.0, 1.0 + i), (float(i + 1), 2.0 + i)) for i in range(11)}
    protocol = Protocol(
        bench="some", question="Is it?", arms=("a", "b"), order="in turns", sizes={"k": 4}
    )
    spread = Spread(
        title="spread",
        unit="ms",
        rows=(("a", Estimate(value=1, low=0.5, high=2, n=3), (0.5, 1.0, 2.0)),),
    )
    drawings = Lines(title="lines", x_label="request", y_label="rate", lines=lines), spread
    return plot.page(Result(protocol=protocol, figures=(), drawings=drawings), {"cpu": "some"})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name, num_charts", [("demo", 4), ("bench", 1)])
def test_the_charts_are_drawn(
    browser: Any, tmp_path: Path, name: str, num_charts: int, scheme: str
) -> None:
    file = tmp_path / "report.html"
    file.write_text(html(report()) if name == "demo" else bench_page(), encoding="utf-8")
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    said, asked = open_report(page, file)
    canvases = page.locator(".report-chart canvas")
    assert canvases.count() == num_charts
    assert ALPHA[scheme] in canvases.first.evaluate(COLOURS)
    if name == "demo":
        assert page.locator(".legend").first.inner_text().split() == ["acceptance", "rate", "0.80"]
        page.hover(".report-chart >> nth=0 >> .u-over", position={"x": 2, "y": 50})
        for chart, value in enumerate(("0.90", "21.0", "0.83")):
            assert value in page.locator(".legend").nth(chart).inner_text(), (
                "one cursor for all charts"
            )
        assert "6 seconds, 12 requests" in page.locator(".legend").first.inner_text()
        page.set_viewport_size({"width": 400, "height": 800})
        page.wait_for_timeout(300)
        assert canvases.first.evaluate("canvas => canvas.clientWidth") < 400
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    page.wait_for_timeout(300)
    assert ALPHA["dark" if scheme == "light" else "light"] in canvases.first.evaluate(COLOURS)
    context.close()
    assert said == []
    assert asked == [file.as_uri()]
