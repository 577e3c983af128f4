"""The demo's page of a made-up run: it holds the figures, loads nothing, and shows data as data."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from osd.client.load import Answer
from osd.demo.findings import token_shares
from osd.demo.report import POINT_EVERY, course, html, summary
from osd.demo.run import run
from osd.demo.screen import Screen
from osd.errors import ConfigError
from osd.observe.report_page import STATIC
from tests.support.reports import BEGAN, answers, report, swap, windows

HOSTILE = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>&\"'"


class Page(HTMLParser):
    """What a browser would make of a page: tags with attributes, text that is shown, data of the
    charts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.shown: list[str] = []
        self.charts: list[dict[str, Any]] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._inside = "data" if dict(attributes).get("type") == "application/json" else tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.charts.append(json.loads(data))
        elif self._inside not in ("script", "style"):
            self.shown.append(data)


def test_the_page_holds_what_was_found_on_what() -> None:
    made = report()
    page = Page(html(made))
    shown = " ".join(page.shown)
    for name, found in summary(made).items():
        assert name in shown and found in shown
    for fact in (
        "0.877",
        "172.8",
        "18.91 ms",
        "2.08x",
        "v2 0.91 and 0.89",
        "77 M",
        "cost-shaped",
        "632, failed 0",
    ):
        assert fact.lower() in shown.lower(), fact
    for fact in ("Some CPU 9000", "3.11.7", "0.32.0", "2026-01-02"):
        assert fact in shown, fact
    assert "hidden" not in shown
    assert "Leon Sorokin" in shown, "the licence of uPlot"


def test_the_charts_hold_the_run_point_by_point() -> None:
    acceptance, speed, k, sources = Page(html(report())).charts
    assert [
        line["label"] for chart in (acceptance, speed, k, sources) for line in chart["lines"]
    ] == [
        "acceptance rate",
        "tokens/s",
        "TPOT",
        "k",
        "target, tokens per step",
        "draft, tokens per step",
        "memory, tokens per step",
    ]
    by_source = [line["values"] for line in sources["lines"]]
    assert by_source == [12 * [1.0], 4 * [1.2] + 8 * [0.8], 4 * [0.0] + 8 * [0.6]]
    assert acceptance["x"] == [POINT_EVERY * (i + 0.5) for i in range(144 // POINT_EVERY)]
    assert acceptance["lines"][0]["values"] == pytest.approx(4 * [0.9] + 4 * [0.1] + 4 * [0.8])
    assert speed["lines"][0]["values"] == pytest.approx(12 * [21.0]), "a second each, of 21 tokens"
    assert speed["lines"][1]["values"] == pytest.approx(12 * [1000 * 0.8 / 20])
    assert k["lines"][0]["values"][4] == pytest.approx(10 / 20), "10 draft tokens in 20 steps"
    marks = [(mark["at"], mark["label"], mark["kind"]) for mark in acceptance["marks"]]
    assert marks == [(48.0, "traffic: sql", "shift"), (70.0, "v2", "swap"), (100.0, "v3", "swap")]
    assert speed["marks"] == k["marks"] == acceptance["marks"]


def test_a_memory_that_brought_nothing_has_no_line() -> None:
    *_, sources = Page(html(report(from_memory=0))).charts
    assert [line["label"].partition(",")[0] for line in sources["lines"]] == ["target", "draft"]


def test_who_brought_the_tokens_is_one_line_of_the_summary() -> None:
    assert summary(report())["tokens by source"] == (
        "at home target 42 %, draft 58 %   after the shift target 83 %, draft 17 %   "
        "recovered target 42 %, draft 33 %, memory 25 %"
    )
    none = dict.fromkeys(report()["token_shares"])
    assert summary(report(token_shares=none))["tokens by source"].endswith("recovered not counted")


def test_shares_are_of_the_tokens_served_during_the_runs() -> None:
    """Not of those before, between and after: windows count where their middle lies."""
    runs = [answers(10, BEGAN + 1, 0.5), answers(10, BEGAN + 61, 0.5)]
    counted = [
        *windows(1, BEGAN, 40, 40),
        *windows(10, BEGAN + 1, 12, 3),
        *windows(50, BEGAN + 11, 40, 40),
        *windows(10, BEGAN + 61, 8, 7),
        *windows(9, BEGAN + 71, 40, 40),
    ]
    assert token_shares(counted, runs) == {"target": 0.4, "draft": 0.4, "memory": 0.2}
    assert sum((token_shares(counted, runs[:1]) or {}).values()) == pytest.approx(1, abs=0.002)
    assert token_shares(counted, [[]]) is None


def test_requests_that_overlap_count_where_they_end() -> None:
    """Four at a time: each point has the tokens that came since the point before it."""
    four = [a for _ in range(4) for a in answers(12, BEGAN, 0.5)]
    found = course([("home", four)], [swap(BEGAN - 1, 2)])
    assert found["tokens_per_second"] == pytest.approx(4 * [4 * 21])
    assert found["requests"] == [12, 24, 36, 48]
    assert found["marks"] == []


def test_failed_requests_leave_a_gap() -> None:
    failed = [Answer(index=i, ok=False, error="no", started=BEGAN + 12 + i) for i in range(12)]
    found = course([("home", answers(12, BEGAN, 0.5) + failed)], [])
    assert found["acceptance_rate"] == [pytest.approx(0.5), None]
    assert None in Page(html(report(course=found))).charts[0]["lines"][0]["values"]


def test_the_page_asks_for_nothing() -> None:
    text = html(report())
    for tag, attributes in Page(text).tags:
        assert not {"src", "href", "srcset", "data", "action"} & set(attributes), (tag, attributes)
        assert tag not in ("link", "iframe", "img", "object", "embed")
    assert "default-src 'none'" in text
    style = re.search(r"<style>(.*?)</style>", text, re.S)
    assert style and "url(" not in style[1] and "@import" not in style[1]
    assert "prefers-color-scheme: dark" in style[1]
    for file in ("uPlot.iife.min.js", "report.js"):
        script = (STATIC / file).read_text()
        assert script in text
        assert "</script" not in script.lower()
        assert not re.search(r"\bfetch\(|XMLHttpRequest|\bimport\b", script)


def test_text_from_elsewhere_stays_text() -> None:
    made = report(machine={"cpu": HOSTILE, HOSTILE: 1}, versions={"engine": HOSTILE})
    made["course"]["marks"].append({"at": 120.0, "label": HOSTILE, "kind": "shift"})
    text = html(made)
    page, plain = Page(text), Page(html(report()))
    for parsed in (page, plain):
        assert len([tag for tag, _ in parsed.tags if tag == "script"]) == 6
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in page.tags)
    assert page.charts[0]["marks"][-1]["label"] == HOSTILE
    assert "".join(page.shown).count("<img") == 3
    assert "alert(1)</script>" not in text


def test_the_screen_prints_the_same_table() -> None:
    out = io.StringIO()
    Screen(out, 0.0).summary(report())
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert lines[2].startswith("acceptance rate   at home 0.877   after the shift 0.149")
    assert len(lines) == 2 + len(summary(report()))


@pytest.mark.parametrize("flag", ["report_path", "html_path"])
@pytest.mark.parametrize(
    "name, why",
    [("none/x.html", "no such directory"), ("", "Is a directory"), ("file/x", "no such directory")],
)
def test_a_path_that_cannot_be_written_is_refused_before_anything_begins(
    tmp_path: Path, flag: str, name: str, why: str
) -> None:
    (tmp_path / "file").write_text("")
    out = io.StringIO()
    paths: dict[str, Any] = {"report_path": None, flag: tmp_path / name}
    with pytest.raises(ConfigError, match=why) as raised:
        run(**paths, keep=False, overrides=["trainer.no_such_key=1"], out=out)
    assert str(raised.value).startswith("--report" if flag == "report_path" else "--html")
    assert "\n" not in str(raised.value)
    assert out.getvalue() == ""


def test_a_path_that_can_be_written_is_left_alone_until_the_end(tmp_path: Path) -> None:
    (tmp_path / "old.html").write_text("old")
    for name in ("old.html", "new.html"):
        with pytest.raises(ConfigError, match="no_such_key"):
            run(
                report_path=None,
                html_path=tmp_path / name,
                keep=False,
                overrides=["trainer.no_such_key=1"],
            )
    assert [file.name for file in tmp_path.iterdir()] == ["old.html"]
    assert (tmp_path / "old.html").read_text() == "old"
