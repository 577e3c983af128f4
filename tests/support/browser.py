"""A real browser for tests of the page: Debian's chromium, driven by playwright."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import path_of

PATIENCE_MS = 60_000
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright import sync_api  # where it is needed: every run of tests reads this file

    program = path_of("chromium", package="chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """Opens a page and waits until it is live.

    Fails at the end if a console showed an error or a page asked another host.
    """
    problems: list[str] = []
    contexts: list[Any] = []

    def open_page(address: str, *, expect_errors: bool = False, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        host = address.split("/")[2]
        page.on(
            "request",
            lambda request: (
                problems.append(request.url) if request.url.split("/")[2] != host else None
            ),
        )
        page.on("pageerror", lambda error: problems.append(str(error)))

        def hear(said: Any) -> None:
            is_expected = expect_errors and said.text.startswith("Failed to load resource")
            if said.type in ("error", "warning") and not is_expected:
                problems.append(said.text)

        page.on("console", hear)
        page.goto(address, wait_until="domcontentloaded")
        page.wait_for_selector("#live[data-state=live]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def smoothed(page: Any) -> float:
    """The newest value of the smoothed line, in per cent, as the legend says it."""
    text = page.locator("#legend-acceptance .key").last.inner_text()
    return float(found[1]) if (found := re.search(r"([\d.]+) %", text)) else -1.0


def open_report(page: Any, file: Path) -> tuple[list[str], list[str]]:
    """Open a report and wait for its charts. What the page says on its console or throws, and the
    addresses it asks for, are added to the lists that this returns for as long as it is open."""
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector(".report-chart canvas")
    page.wait_for_timeout(300)
    return said, asked
