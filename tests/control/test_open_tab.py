"""A tab that stays open for days: what it shows stays true, and nothing moves under the reader."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from osd.client.http import SECONDS_TO_CHANGE
from osd.observe.history import History
from osd.observe.status import describe_replica
from osd.records import Event, ServiceStatus, SwapReport
from tests.support.browser import Open, until
from tests.support.dashboards import TOKEN, Scene, heartbeat, served, window

DAY_S = 86_400.0
A_DAY = r"\d{1,2} (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)"


@pytest.fixture
def scene() -> Scene:
    return Scene(History())


@pytest.fixture
def url(scene: Scene) -> Iterator[str]:
    scene.history.add(window(time.time(), 0.8))
    with served(scene) as url:
        yield url


def swap(ago: float, version: int) -> SwapReport:
    return SwapReport(
        at=time.time() - ago,
        replica="replica-0",
        version=version,
        previous=version - 1,
        ok=True,
        stage_s=0.1,
        pause_s=0.006,
    )


def pass_a_day(page: Any) -> None:
    """Set the clock of the browser to this time tomorrow."""
    page.evaluate(
        """() => {
            const Usual = Date;
            window.Date = class extends Usual {
                constructor(...given) { super(...(given.length ? given : [Usual.now() + 864e5])); }
                static now() { return Usual.now() + 864e5; }
            };
        }"""
    )


def drawn_texts(page: Any) -> set[str]:
    """What is written into the charts from now on, for as long as a few answers take."""
    page.evaluate(
        """() => {
            window.written = [];
            const draw = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
                window.written.push(text);
                return draw.call(this, text, ...place);
            };
            window.dispatchEvent(new Event("resize"));
        }"""
    )
    until(lambda: page.evaluate("window.written.length") > 0, "the charts are drawn again")
    page.wait_for_timeout(300)
    return set(page.evaluate("window.written"))


def test_days_are_told_apart_on_the_axis(url: str, visit: Open) -> None:
    page = visit(f"{url}/dashboard#range=7d", viewport={"width": 1360, "height": 900})
    page.set_viewport_size({"width": 1300, "height": 900})
    days = {text for text in drawn_texts(page) if re.fullmatch(A_DAY, text)}
    assert len(days) == 7


def test_a_mark_of_another_day_says_which(scene: Scene, url: str, visit: Open) -> None:
    scene.history.add(swap(3 * DAY_S, 2))
    page = visit(f"{url}/dashboard#range=7d")
    page.locator(".mark").focus()
    assert re.search(rf"^v2, {A_DAY} \d\d:\d\d", page.locator("#mark-bubble").inner_text())
    assert re.search(rf"^v2, {A_DAY} \d\d:\d\d", page.get_attribute(".mark", "aria-label"))


def test_what_happened_yesterday_says_so_once_it_is_yesterday(
    scene: Scene, url: str, visit: Open
) -> None:
    scene.history.add(Event(at=time.time(), kind="published", text="v3", version=3))
    page = visit(f"{url}/dashboard")
    page.wait_for_selector("#events li time")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", page.locator("#events li time").inner_text())
    pass_a_day(page)
    until(
        lambda: bool(
            re.fullmatch(rf"{A_DAY} \d\d:\d\d", page.locator("#events li time").inner_text())
        ),
        "the day of the event",
    )


def test_the_answer_to_an_earlier_choice_that_comes_late_is_not_shown(
    scene: Scene, url: str, visit: Open
) -> None:
    scene.history.add(swap(3 * DAY_S, 2))
    page = visit(f"{url}/dashboard#range=1h")
    held: list[Any] = []
    page.route("**/osd/history?since=-604800*", lambda route: held.append(route))
    page.locator(".ranges span", has_text="7 d").click()
    until(lambda: (page.wait_for_timeout(50), bool(held))[1], "the question")
    with page.expect_response(lambda response: "since=-86400" in response.url):
        page.locator(".ranges span", has_text="24 h").click()
    with page.expect_response(lambda response: "since=-604800" in response.url):
        held[0].continue_()
    page.wait_for_timeout(1500)
    assert page.locator(".mark").count() == 0, "a mark of the week, in a chart of the day"
    assert "since=-86400" in page.get_attribute("#twin-history", "href")


def test_answers_of_another_version_are_no_missing_answers(
    scene: Scene, url: str, visit: Open
) -> None:
    """The service was upgraded meanwhile: the page that is open is of the version before."""
    page = visit(f"{url}/dashboard")
    page.route("**/osd/status", lambda route: route.fulfill(json={"now": time.time()}))
    page.wait_for_selector("#live[data-state=down]")
    said = page.locator("#banner").inner_text()
    assert "unreachable" not in said and "load it again" in said
    assert page.locator("#live-text").inner_text() == "error"
    page.unroute("**/osd/status")
    page.wait_for_selector("#live[data-state=live]")
    assert page.locator("#banner").is_hidden()


def test_what_is_no_json_is_no_missing_answer(scene: Scene, url: str, visit: Open) -> None:
    """A proxy asks to log in again."""
    page = visit(f"{url}/dashboard")
    page.route("**/osd/status", lambda route: route.fulfill(body="<h1>Log in</h1>"))
    page.wait_for_selector("#live[data-state=down]")
    assert "load it again" in page.locator("#banner").inner_text()


def test_a_list_of_drafts_that_is_open_stays_until_there_is_another_draft(
    scene: Scene, url: str, visit: Open
) -> None:
    """What each has served changes with every request; whoever chooses is not disturbed."""
    page = visit(f"{url}/dashboard")
    page.wait_for_selector("#admin-version option", state="attached")
    page.get_by_text("Compare two").click()
    lists = "['admin-version', 'compare-first', 'compare-second']"
    page.evaluate(f"window.before = {lists}.map((id) => document.getElementById(id).firstChild)")
    page.wait_for_timeout(3000)
    assert page.evaluate("window.before.map((option) => option.isConnected)") == [True] * 3
    page.select_option("#compare-first", "2")
    page.wait_for_timeout(1500)
    assert page.input_value("#compare-first") == "2" and "compare=2-3" in page.url
    page.evaluate("location.hash = '#compare=1-2'")
    until(lambda: page.input_value("#compare-second") == "2", "what the address says")
    assert page.input_value("#compare-first") == "1"


def test_a_change_that_takes_a_minute_is_waited_for(scene: Scene, url: str, visit: Open) -> None:
    """As where a large draft is being published. Given up, it would come all the same."""
    page = visit(f"{url}/dashboard")
    page.on("dialog", lambda dialog: dialog.accept())
    page.evaluate(
        """() => {
            window.waits = [];
            const usual = AbortSignal.timeout;
            AbortSignal.timeout = (ms) => (window.waits.push(ms), usual.call(AbortSignal, ms));
        }"""
    )
    page.get_by_text("Change what serves").click()
    page.fill("#admin-token", TOKEN)
    page.get_by_role("button", name="Unpin", exact=True).click()
    page.wait_for_selector("#admin-answer:has-text('Done: unpin.')")
    assert max(page.evaluate("window.waits")) >= 1000 * SECONDS_TO_CHANGE


class Elsewhere(Scene):
    """Replicas on machines whose clocks are behind."""

    def __init__(self, behind_s: float) -> None:
        super().__init__(History())
        self.behind_s = behind_s
        self.ended_at = math.inf
        """When they were heard of last."""

    def status(self) -> ServiceStatus:
        at = min(time.time(), self.ended_at) - self.behind_s
        views = tuple(describe_replica(heartbeat(i, 3, at), 3, False) for i in (0, 1))
        return replace(super().status(), replicas=views)


def test_a_replica_whose_clock_is_behind_is_not_silent(visit: Open) -> None:
    scene = Elsewhere(60.0)
    scene.history.add(window(time.time(), 0.8))
    with served(scene) as url:
        page = visit(f"{url}/dashboard")
        page.wait_for_timeout(2500)
        assert page.get_attribute("#live", "data-state") == "live"
        assert page.locator("#banner").is_hidden()
        scene.ended_at = time.time()
        page.wait_for_selector("#banner:has-text('no replica has reported')", timeout=30_000)


def test_an_event_that_comes_moves_nobody_to_the_event_of_the_address(
    scene: Scene, url: str, visit: Open
) -> None:
    first = Event(at=time.time() - 9, kind="published", text="v3", version=3)
    scene.history.add(first)
    page = visit(f"{url}/dashboard#event={first.at}", viewport={"width": 1360, "height": 700})
    until(lambda: page.evaluate("scrollY") > 0, "the event of the address is shown")
    page.evaluate("scrollTo(0, 0)")
    scene.history.add(Event(at=time.time(), kind="refused", text="no gain"))
    page.wait_for_selector("#events li:has-text('no gain')")
    page.wait_for_timeout(300)
    assert page.evaluate("scrollY") == 0
    page.locator("#events a").first.click()
    until(lambda: page.evaluate("scrollY") > 0, "a new choice is shown")
