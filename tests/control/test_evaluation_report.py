"""The report of an evaluation in a real browser: its charts are drawn, its tables filled, and
nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from osd.evaluate.figures import figures_of
from osd.evaluate.report import html
from tests.support.browser import open_report
from tests.support.evaluations import REQUESTS, run_of, served, step

HOSTILE = "</script><img src=http://evil.example/x>"


def evaluated() -> str:
    plain = [served(index, [0] * 5, 0) for index in range(2)]
    none = run_of("none", 0, plain, steps=(step(1, 1, verify=0.001),) * 3)
    arms = [
        run_of(
            "draft",
            k,
            [served(0, [k, 0], k), served(1, [0, k], k)],
            steps=(step(1, 1 + k, verify=0.002),) * 3,
            seconds=0.5,
        )
        for k in (1, 3)
    ]
    return html(figures_of([none, *arms], REQUESTS), [], [], {"target": HOSTILE})


def test_the_page_says_what_was_found(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(evaluated(), encoding="utf-8")
    page = browser.new_page()
    said, asked = open_report(page, file)
    assert page.locator(".report-chart canvas").count() == 3
    legends = page.locator(".legend").all_inner_texts()
    assert "draft" in legends[0] and "draft 3" in legends[1] and "draft 1" in legends[2]
    found = page.locator("main").inner_text()
    assert "batch 2, temperature 0: draft 3, 4.00 times as fast as none" in found
    cells = page.locator("table tbody tr").nth(1).locator("td")
    assert cells.all_inner_texts()[:4] == ["draft", "1", "16.0", "2.67"]
    heights = page.eval_on_selector_all(
        ".columns tbody td", "cells => cells.map((cell) => cell.clientHeight)"
    )
    assert max(heights) < 1.5 * min(heights), "no figure is broken over two lines"
    assert HOSTILE in found
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_timeout(300)
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert (said, asked) == ([], [file.as_uri()])
