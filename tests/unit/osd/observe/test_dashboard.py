"""The control port over hand-written fakes.

Every endpoint, administration, errors, and what browsers are told.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

import osd.observe.dashboard
from osd.errors import ConfigError, OSDError, ReleaseError, ReplayBufferError
from osd.observe.dashboard import ControlServer, build_app
from osd.observe.dashboard.app import MAX_POINTS, MAX_SPAN, resolve_span
from osd.observe.dashboard.guard import Guard, is_loopback
from osd.observe.dashboard.stream import event_stream
from osd.observe.history import History
from osd.observe.status import describe_replica
from osd.records import (
    BufferStats,
    DraftRelease,
    Event,
    Member,
    Place,
    ReplicaStatus,
    ReplicaView,
    ServiceStatus,
    SpeculationFigures,
    SpeculationReport,
    SpecWindow,
    SwapReport,
)
from tests.unit.osd.observe.test_history import REPORT

TOKEN = "correct-horse"
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
HOSTILE = "</script><img src=x onerror=alert(1)>"
STATIC = Path(osd.observe.dashboard.__file__).parent / "static"
ACTIONS = ["pause", "resume", "promote", "rollback", "pin", "unpin", "keep", "purge", "steps"]


class Logs:
    """Of one part."""

    def __init__(self, taken: list[str]) -> None:
        self._taken = taken

    def places(self) -> list[Place]:
        self._taken.append("places")
        return [Place(part="trainer", host="gpu-2", node="5f", log="/t.log")]

    def tail(self, part: str, num_lines: int) -> str:
        self._taken.append(part)
        if part != "trainer":
            raise OSDError(f"{part}: no part of this service")
        return f"{num_lines} lines of {part}"


class FakeController:
    """Remembers what it was told; half of it async, as the port takes both."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None
        self.replicas: list[ReplicaView] = []
        self.members: tuple[Member, ...] = ()

    def _note(self, *call: Any) -> None:
        if self.error:
            raise self.error
        self.calls.append(call)

    def status(self) -> ServiceStatus:
        self._note("status")
        buffer = BufferStats(num_traces=9, num_holdout=1, num_bytes=80, num_put=10, oldest_at=1.0)
        return ServiceStatus(
            deployment=HOSTILE,
            target="target",
            draft="draft",
            version=2,
            k=5,
            replicas=tuple(self.replicas),
            members=self.members,
            buffer=buffer,
            num_rounds=np.int64(3),  # type: ignore[arg-type]
        )

    async def drafts(self) -> list[dict[str, Any]]:
        return [{"version": 2, "parent": 1, "created_at": 5.0, "serving": True, "text": HOSTILE}]

    async def pause(self) -> None:
        self._note("pause")

    def resume(self) -> None:
        self._note("resume")

    async def promote(self, version: int) -> None:
        self._note("promote", version)

    async def rollback(self) -> DraftRelease:
        self._note("rollback")
        return DraftRelease(version=4, parent=3, path="", sha256="", target_id="", created_at=0.0)

    async def pin(self, version: int) -> None:
        self._note("pin", version)

    async def unpin(self) -> None:
        self._note("unpin")

    def keep(self, version: int) -> None:
        self._note("keep", version)

    async def purge(self, domain: str | None = None, before: float | None = None) -> dict[str, Any]:
        self._note("purge", domain, before)
        return {"purged": 17, "trained_on": [2, 3]}

    async def set_steps(self, steps: tuple[str, ...]) -> None:
        self._note("steps", steps)


class FakeHistory:
    """Two points of acceptance, two marks, and a list of events a test may add to."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, float]] = []
        self.log = [
            Event(at=100.0, kind="published", text="v2: " + HOSTILE, version=2),
            Event(at=50.0, kind="refused", text="no gain"),
        ]
        self.error: Exception | None = None

    async def series(self, since: float, bucket_s: float, by: str = "") -> dict[str, Any]:
        if self.error:
            raise self.error
        self.asked.append((since, bucket_s))
        now = time.time()
        return {
            "at": [now - 20, now - 5],
            "alpha": [0.5, math.nan],
            "k": [4, 2],
            "tpot_ms": [None, 8.0],
        }

    def marks(self) -> list[dict[str, Any]]:
        return [{"at": 10.0, "version": 1}, {"at": time.time() - 30, "version": 2}]

    def changes(self) -> list[dict[str, Any]]:
        return [
            {
                "at": 7.0,
                "replica": "r",
                "from": "off",
                "to": "draft 2",
                "batch": 1,
                "reason": HOSTILE,
            }
        ]

    async def events(self, limit: int) -> list[Event]:
        return sorted(self.log, key=lambda event: -event.at)[:limit]

    def prometheus(self) -> str:
        return "# TYPE osd_swap_total counter\nosd_swap_total 3\n"


@pytest.fixture
def controller() -> FakeController:
    return FakeController()


@pytest.fixture
def history() -> FakeHistory:
    return FakeHistory()


@pytest.fixture
async def client(
    controller: FakeController, history: FakeHistory
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(
        build_app(controller, history, TOKEN), raise_app_exceptions=False
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001") as client:
        yield client


def error_of(response: httpx.Response) -> str:
    """The one line of an error answer."""
    body = response.json()
    assert list(body) == ["error"]
    assert body["error"] and "\n" not in body["error"]
    return body["error"]


async def test_root_leads_to_the_page(client: httpx.AsyncClient) -> None:
    response = await client.get("/")
    assert response.status_code in (302, 307)
    page = await client.get(response.headers["location"])
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]


async def test_page_loads_only_files_that_exist_here(client: httpx.AsyncClient) -> None:
    page = (await client.get("/dashboard")).text
    names = re.findall(r'(?:src|href)="(dashboard/static/[^"]+)"', page)
    assert len(names) == 5
    for name in [*names, *(f"dashboard/static/{file.name}" for file in STATIC.glob("*.js"))]:
        assert (await client.get(f"/{name}")).status_code == 200, name
    for name in re.findall(r'href="((?:osd/|metrics|openapi)[^"]*)"', page):
        assert (await client.get(f"/{name}")).status_code == 200, name


def test_static_files_refer_to_no_other_host() -> None:
    for file in STATIC.iterdir():
        if file.name == "uPlot.LICENSE.txt":
            continue
        text = re.sub(r"/\*.*?\*/", "", file.read_text(), flags=re.S).replace(
            "http://www.w3.org/2000/svg", ""
        )
        assert not re.search(
            r"(https?:)?//[a-z0-9-]+\.[a-z]", re.sub(r"^ *//.*$", "", text, flags=re.M)
        ), file.name


def test_page_never_makes_html_or_code_from_data() -> None:
    own = [file for file in STATIC.glob("*.js") if not file.name.startswith("uPlot")]
    assert len(own) == 12
    for file in own:
        forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write"
        forbidden += r"|\beval\(|new Function|DOMParser"
        assert not re.search(forbidden, file.read_text()), file.name


def test_page_has_no_inline_script_or_style() -> None:
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=", page)


def test_page_explains_each_acceptance_as_the_records_do() -> None:
    page = re.sub(r"<[^>]+>", "", (STATIC / "index.html").read_text())
    for formula in [
        "accepted / drafted tokens",
        "1 + accepted / drafts",
        "accepted / tested tokens",
    ]:
        assert formula in page
    records = (Path(osd.__file__).parent / "records" / "acceptance.py").read_text()
    for words in [
        "falls when k grows, so for display only",
        "tokens a verification step yields on average",
    ]:
        assert words in page and words in records


SECURITY_HEADERS = {
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}


@pytest.mark.parametrize(
    ("path", "cache"),
    [
        ("/dashboard", "no-cache"),
        ("/dashboard/static/app.js", "no-cache"),
        ("/osd/status", "no-store"),
        ("/metrics", "no-store"),
        ("/nothing", "no-store"),
        ("/osd/admin/pause", "no-store"),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "evil.example"])
async def test_every_answer_carries_the_security_headers(
    client: httpx.AsyncClient, path: str, cache: str, host: str
) -> None:
    response = await client.get(path, headers={"Host": host})
    headers = response.headers
    assert {name: headers.get(name) for name in SECURITY_HEADERS} == SECURITY_HEADERS
    parts = headers["content-security-policy"].split("; ")
    assert dict(part.split(" ", 1) for part in parts) == POLICY
    assert headers["cache-control"] == (cache if host == "127.0.0.1" else "no-store")
    assert "access-control-allow-origin" not in headers


async def test_status_is_the_controllers_plus_the_figures_of_now(client: httpx.AsyncClient) -> None:
    response = await client.get("/osd/status")
    status = response.json()
    assert status["version"] == 2 and status["num_rounds"] == 3
    assert status["buffer"]["num_traces"] == 9
    assert abs(status["now"] - time.time()) < 5
    figures = status["figures"]
    assert (figures["alpha"], figures["k"], figures["tpot_ms"]) == (0.5, 2, 8.0)
    assert (figures["seconds"], status["recent"]["seconds"], status["recent"]["alpha"]) == (
        15.0,
        300.0,
        0.5,
    )
    assert response.headers["content-type"] == "application/json"
    assert status["deployment"] == HOSTILE, "hostile text passes as data"


async def test_history_is_valid_json_with_marks_inside_the_span(
    client: httpx.AsyncClient, history: FakeHistory
) -> None:
    answer = json.loads(
        (await client.get("/osd/history?since=-300&bucket=2")).text, parse_constant=pytest.fail
    )
    assert answer["series"]["alpha"] == [0.5, None]
    assert [mark["version"] for mark in answer["marks"]] == [2]
    assert [(change["to"], change["reason"]) for change in answer["changes"]] == [
        ("draft 2", HOSTILE)
    ]
    assert answer["bucket"] == 2
    assert history.asked == [(answer["since"], 2.0)]
    assert 298 <= answer["now"] - answer["since"] <= 303


@pytest.mark.parametrize("span", [1, 300, 3600, 86400, 30 * 86400])
@pytest.mark.parametrize("bucket", [0.0, 0.001, 7.0, 600.0])
def test_no_span_asks_for_too_many_points(span: float, bucket: float) -> None:
    now = 1.7e9
    start, width = resolve_span(now, -span, bucket)
    assert width >= bucket and now - width - span <= start <= now - span
    assert (now - start) / width <= MAX_POINTS + 1


def test_spans_are_bounded_and_never_in_the_future() -> None:
    assert resolve_span(1.7e9, 0.0, 1.0)[0] >= 1.7e9 - 1.01 * MAX_SPAN
    assert resolve_span(1.7e9, 2e9, 1.0)[0] <= 1.7e9


@pytest.mark.parametrize("query", ["since=nan", "since=inf", "bucket=-1", "bucket=x", "since="])
async def test_bad_history_query_names_the_parameter(client: httpx.AsyncClient, query: str) -> None:
    response = await client.get(f"/osd/history?{query}")
    assert response.status_code == 400
    assert query.partition("=")[0] in error_of(response)


async def test_real_history_gives_the_figures_the_page_shows(controller: FakeController) -> None:
    history, now = History(), time.time()
    counts = {
        "num_drafts": 10,
        "num_draft_tokens": 40,
        "num_accepted_tokens": 20,
        "num_output_tokens": 34,
    }
    brought = {
        "num_steps": 12,
        "num_cut_draft_tokens": 2,
        "num_memory_tokens": 9,
        "num_accepted_memory_tokens": 6,
        "num_cut_memory_tokens": 1,
    }
    positions = {"num_accepted_tokens_per_pos": (8, 6, 4, 2), "num_tested_per_pos": (10, 8, 6, 4)}
    decode = {"num_finished": 2, "decode_seconds": 0.5, "num_decode_tokens": 25}
    history.add(
        SpecWindow(
            at=now - 1,
            replica="replica-0",
            version=3,
            seconds=1.0,
            k=4,
            **counts,
            **positions,
            **decode,
            **brought,
        )
    )
    history.add(
        SwapReport(
            at=now - 2,
            replica="replica-0",
            version=3,
            previous=2,
            ok=True,
            stage_s=0.1,
            pause_s=0.01,
        )
    )
    transport = httpx.ASGITransport(build_app(controller, history, TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        figures = (await client.get("/osd/status")).json()["figures"]
        answer = (await client.get("/osd/history")).json()
        assert "osd_spec_drafts_total" in (await client.get("/metrics")).text
        assert (await client.get("/osd/events")).json()[0]["kind"] == "swapped"
    expected = {
        "alpha": 0.714286,
        "tested": 28,
        "acceptance_rate": 0.5,
        "acceptance_length": 3.0,
        "tokens_per_second": 34.0,
    }
    assert figures == {
        **expected,
        "tpot_ms": 20.0,
        "version": 3,
        "k": 3.33,
        "requests": 2,
        "seconds": 15.0,
        "steps": 12,
        "verified_draft": 40,
        "verified_memory": 9,
        "tokens_target": 11,
        "tokens_draft": 18,
        "tokens_memory": 5,
    }
    assert answer["series"]["alpha"] == [0.714286]
    assert [mark["version"] for mark in answer["marks"]] == [3]


def heartbeat(report: dict[str, Any] | None) -> ReplicaStatus:
    fixed: dict[str, Any] = {
        "url": "http://x",
        "version": 2,
        "target_id": "9f2c",
        "k": 5,
        "pid": 1,
        "engine": "fake",
    }
    said = msgspec.convert(report, SpeculationReport | None)
    return ReplicaStatus(at=9.0, replica="replica-0", started_at=1.0, speculation=said, **fixed)


async def test_status_carries_what_replicas_say_of_speculation(
    client: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.replicas = [
        describe_replica(heartbeat(report), 2, False) for report in (REPORT, None)
    ]
    one, other = (await client.get("/osd/status")).json()["replicas"]
    assert one["speculation"].items() >= REPORT.items() and other["speculation"] is None
    figures = one["speculation_figures"]
    assert (figures["measured_tokens_per_second"], figures["predicted_tokens_per_second"]) == (
        790.0,
        812.5,
    )
    assert (figures["off_share"], figures["net_ratio"], figures["num_net_windows"]) == (
        0.12,
        1.31,
        6,
    )
    assert figures["seconds_per_part"] == {"draft": 0.4, "verify": 1.2, "sample": 0.2, "other": 0.2}
    assert figures["positions"] == [[88, 70], [70, 49], [49, 30]]
    assert figures["contexts"] == {"<64": [200, 149], ">=64": [7, 0]}
    assert figures["outputs"] == {"<16": [150, 120]}
    assert other["speculation_figures"] is None


async def test_changes_of_plan_reach_the_page(controller: FakeController) -> None:
    history = History()
    change = {"at": 8.0, "from": "off", "to": "draft 3", "batch": 8, "reason": "load"}
    history.observe([heartbeat(REPORT | {"changes": [change]})], None)
    transport = httpx.ASGITransport(build_app(controller, history, TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.get("/osd/history")).json()["changes"] == [
            change | {"replica": "replica-0"}
        ]


def test_page_explains_every_figure_of_speculation() -> None:
    page = (STATIC / "index.html").read_text()
    panel = page[page.index('id="speculation-title"') : page.index('id="drafts-title"')]
    heads = re.findall(r"<(?:th|h3)\b([^>]*)>([^<]+)", panel)
    assert len(heads) == 16
    assert [name for attributes, name in heads if "title=" not in attributes] == ["Replica"]
    assert re.search(r'Net speed-up <span class="tag good">measured<', panel)
    assert re.search(
        r'expected tokens of a step / expected seconds.*Goodput <span class="tag info">estimated<',
        panel,
    )
    script = (STATIC / "speculation.js").read_text()
    for place in re.findall(
        r'id="(speculation(?:-count)?|breakdown|places|sources|contexts|outputs|spread|changes)"',
        panel,
    ):
        assert f'"{place}"' in script, place
    for figure in fields(SpeculationFigures):
        assert re.search(rf"\b{figure.name}\b", script), figure.name


async def test_status_names_what_is_wrong_worst_first(
    client: httpx.AsyncClient, history: FakeHistory
) -> None:
    assert (await client.get("/osd/status")).json()["problems"] == [
        "no replica is alive, so no request can be answered: its log in `logs` of the data "
        "directory says why; end it "
        "with `osd stop` and serve again"
    ]
    for at in (200.0, 300.0):
        history.log.append(Event(at=at, kind="discarded", text="non-finite loss"))
    problems = (await client.get("/osd/status")).json()["problems"]
    assert len(problems) == 2 and "non-finite loss" in problems[1]


async def test_a_problem_is_found_however_much_happened_since(
    client: httpx.AsyncClient, history: FakeHistory
) -> None:
    """As where each of many replicas swaps."""
    history.log.append(Event(at=200.0, kind="publish_failed", text="no space left"))
    history.log += [Event(at=300.0 + i, kind="swapped", text=f"replica-{i}") for i in range(150)]
    assert "no space left" in (await client.get("/osd/status")).json()["problems"][1]


async def test_a_problem_is_as_old_as_it_is(
    client: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.replicas = [describe_replica(heartbeat(None), 2, False)]
    since = time.time() - 7200 - 120
    controller.members = (Member(replica="replica-1", state="starting", since=since, is_lost=True),)
    (problem,) = (await client.get("/osd/status")).json()["problems"]
    assert problem.startswith("replica-1 was lost 2 h 2 min ago, and is started again")


async def test_history_by_class_has_lines_and_nothing_else_may_be_asked(
    controller: FakeController,
) -> None:
    history, now = History(), time.time()
    positions = {"num_accepted_tokens_per_pos": (8, 6), "num_tested_per_pos": (10, 8)}
    counts = {
        "num_drafts": 10,
        "num_draft_tokens": 20,
        "num_accepted_tokens": 14,
        "k": 2,
        "seconds": 1.0,
    }
    history.add(
        SpecWindow(at=now - 1, replica="r", version=3, domain=HOSTILE, **counts, **positions)
    )
    transport = httpx.ASGITransport(build_app(controller, history, TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answers = {
            by: (await client.get(f"/osd/history?by={by}")).json()
            for by in ("", "class", "replica", "position")
        }
        assert (await client.get("/osd/history?by=weather")).status_code == 400
    names = {by: list(answer["lines"]) for by, answer in answers.items()}
    assert names == {"": [], "class": [HOSTILE], "replica": ["r"], "position": ["1", "2"]}
    assert answers["position"]["lines"]["2"]["alpha"] == [0.75]
    assert all("lines" not in answer["series"] for answer in answers.values())


async def test_a_second_viewer_of_long_history_costs_nothing(
    client: httpx.AsyncClient, history: FakeHistory
) -> None:
    for _ in range(10):
        answer = await client.get("/osd/history?since=-604800&bucket=1200")
        assert answer.json()["series"]["alpha"] == [0.5, None]
    assert len(history.asked) <= 2, "a second answer where a bucket began in between"


async def test_an_idle_service_has_no_figures(controller: FakeController) -> None:
    transport = httpx.ASGITransport(build_app(controller, History(), TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        status = (await client.get("/osd/status")).json()
        assert status["figures"] == status["recent"] == {}
        assert (await client.get("/osd/history?since=-86400")).json()["series"]["at"] == []


async def test_drafts_and_events(client: httpx.AsyncClient) -> None:
    assert (await client.get("/osd/drafts")).json()[0]["version"] == 2
    events = (await client.get("/osd/events")).json()
    assert [event["at"] for event in events] == [100.0, 50.0], "newest first"
    assert events[0] == {"at": 100.0, "kind": "published", "text": "v2: " + HOSTILE, "version": 2}
    assert len((await client.get("/osd/events?limit=1")).json()) == 1
    assert (await client.get("/osd/events?limit=0")).status_code == 400


async def test_metrics_health_and_openapi(client: httpx.AsyncClient) -> None:
    metrics = await client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "osd_swap_total 3" in metrics.text
    assert (await client.get("/health")).json() == {"status": "ok"}
    paths = (await client.get("/openapi.json")).json()["paths"]
    readers = {
        "/osd/status",
        "/osd/history",
        "/osd/drafts",
        "/osd/events",
        "/osd/stream",
        "/metrics",
        "/health",
    }
    assert set(paths) == readers | {f"/osd/admin/{action}" for action in ACTIONS}
    assert all(paths[f"/osd/admin/{action}"]["post"]["security"] for action in ACTIONS)


WRONG = [
    None,
    TOKEN,
    f"Basic {TOKEN}",
    "Bearer",
    "Bearer ",
    "Bearer wrong",
    f"Bearer {TOKEN[:-1]}",
    f"Bearer {TOKEN[0]}",
    f"Bearer {TOKEN[1:]}",
    f"Bearer {TOKEN}x",
    f"Bearer {TOKEN}{TOKEN}",
    f"Bearer {TOKEN},{TOKEN}",
    f"Bearer {TOKEN.upper()}",
    f"Bearer {TOKEN.title()}",
    f"Bearer {TOKEN}é",
    "Bearer schlüssel",
]
"""Not the token: nothing, another scheme, another word, a part of it, more than it, its letters in
another case."""


@pytest.mark.parametrize("given", WRONG)
async def test_nothing_that_needs_the_token_is_done_without_the_whole_of_it(
    controller: FakeController, history: FakeHistory, given: str | None
) -> None:
    taken: list[str] = []
    app = build_app(
        controller,
        history,
        TOKEN,
        traces=lambda: iter([taken.append("trace") or b""]),
        logs=Logs(taken),
    )
    headers = {} if given is None else {"Authorization": given.encode()}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        routes = [("POST", f"/osd/admin/{action}?version=3&token={TOKEN}") for action in ACTIONS]
        routes += [("GET", path) for path in ("/osd/traces", "/osd/logs", "/osd/logs/trainer")]
        for method, path in routes:
            response = await client.request(method, path, headers=headers, content=b"{not json")
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            has_word = given is not None and given.startswith("Bearer ") and given != "Bearer "
            what = "wrong token" if has_word else "no token"
            where = path.partition("?")[0]
            remedy = "send `Authorization: Bearer TOKEN`"
            assert error_of(response) == f"{method} {where}: {what}; {remedy}"
    assert controller.calls == [] and taken == []


def test_all_that_changes_anything_is_behind_the_token(
    controller: FakeController, history: FakeHistory
) -> None:
    app = build_app(controller, history, TOKEN, traces=lambda: iter([b""]), logs=Logs([]))
    guarded, open_to_all = set[str](), set[str]()
    for path, methods in app.openapi()["paths"].items():
        for method, route in methods.items():
            (guarded if route.get("security") == [{"HTTPBearer": []}] else open_to_all).add(
                f"{method} {path}"
            )
    reading = {"get /osd/traces", "get /osd/logs", "get /osd/logs/{part}"}
    assert guarded == {*reading, *(f"post /osd/admin/{action}" for action in ACTIONS)}
    assert open_to_all and all(route.startswith("get ") for route in open_to_all)


async def test_logs_are_read_part_by_part(controller: FakeController, history: FakeHistory) -> None:
    app = build_app(controller, history, TOKEN, logs=Logs([]))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        (place,) = (await client.get("/osd/logs", headers=RIGHT)).json()
        assert place == {"part": "trainer", "host": "gpu-2", "node": "5f", "log": "/t.log"}
        answer = await client.get("/osd/logs/trainer?lines=7", headers=RIGHT)
        assert answer.json() == {"part": "trainer", "text": "7 lines of trainer"}
        answer = await client.get("/osd/logs/cook", headers=RIGHT)
        assert (answer.status_code, error_of(answer)) == (409, "cook: no part of this service")
        answer = await client.get("/osd/logs/trainer?lines=0", headers=RIGHT)
        assert (answer.status_code, error_of(answer)[:8]) == (400, "lines='0")


async def test_the_scheme_is_written_in_any_case(client: httpx.AsyncClient) -> None:
    response = await client.post("/osd/admin/pause", headers={"Authorization": f"bearer {TOKEN}"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("action", "told"),
    [("pause", {}), ("resume", {}), ("rollback", {"version": 4}), ("unpin", {})],
)
async def test_plain_actions(
    client: httpx.AsyncClient, controller: FakeController, action: str, told: dict[str, int]
) -> None:
    response = await client.post(f"/osd/admin/{action}", headers=RIGHT)
    assert response.json() == {"ok": True, "action": action} | told
    assert controller.calls == [(action,)]


@pytest.mark.parametrize(
    ("asked", "steps"), [("observe,capture", ("observe", "capture")), ("", ()), (",", ())]
)
async def test_steps_of_attached_engines(
    client: httpx.AsyncClient, controller: FakeController, asked: str, steps: tuple[str, ...]
) -> None:
    response = await client.post(f"/osd/admin/steps?steps={asked}", headers=RIGHT)
    assert response.json() == {"ok": True, "action": "steps", "steps": list(steps)}
    assert controller.calls == [("steps", steps)]
    controller.error = ConfigError("sing: no step")
    response = await client.post("/osd/admin/steps?steps=sing", headers=RIGHT)
    assert (response.status_code, error_of(response)) == (400, "sing: no step")


async def test_a_part_of_a_release_is_behind_a_token_of_its_own(
    controller: FakeController, history: FakeHistory
) -> None:
    def read(version: int, name: str, offset: int, size: int) -> bytes:
        if version != 3:
            raise ReleaseError(f"draft v{version}: no such release")
        return f"{name} {offset} {size}".encode()

    app = build_app(controller, history, TOKEN, releases=(read, "engines"))
    transport = httpx.ASGITransport(app)
    theirs = {"Authorization": "Bearer engines"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        where = "/osd/releases/3/config.json?offset=5&size=7"
        answer = await client.get(where, headers=theirs)
        assert (answer.status_code, answer.content) == (200, b"config.json 5 7")
        assert (await client.get(where, headers=RIGHT)).status_code == 401
        assert (await client.post("/osd/admin/pause", headers=theirs)).status_code == 401
        answer = await client.get("/osd/releases/4/x?offset=0&size=1", headers=theirs)
        assert (answer.status_code, error_of(answer)) == (409, "draft v4: no such release")
        answer = await client.get("/osd/releases/3/x?offset=-1&size=1", headers=theirs)
        assert answer.status_code == 400


async def test_purge_says_how_many_traces_went_and_who_learnt_from_them(
    client: httpx.AsyncClient, controller: FakeController
) -> None:
    response = await client.post("/osd/admin/purge?all=true", headers=RIGHT)
    assert response.json() == {"ok": True, "action": "purge", "purged": 17, "trained_on": [2, 3]}
    await client.post("/osd/admin/purge?domain=sql&before=1.5e9", headers=RIGHT)
    await client.post("/osd/admin/purge?domain=", headers=RIGHT)
    assert controller.calls == [("purge", None, None), ("purge", "sql", 1.5e9), ("purge", "", None)]


@pytest.mark.parametrize(
    "query",
    [
        "",
        "before=nan",
        "before=-1",
        "before=soon",
        "domain=" + "x" * 1025,
        "domian=sql",
        "all=true&domain=sql",
        "all=no",
    ],
)
async def test_a_purge_that_makes_no_sense_deletes_nothing(
    client: httpx.AsyncClient, controller: FakeController, query: str
) -> None:
    assert (await client.post(f"/osd/admin/purge?{query}", headers=RIGHT)).status_code == 400
    assert controller.calls == []


@pytest.mark.parametrize("action", ["promote", "pin", "keep"])
async def test_version_in_query_or_body(
    client: httpx.AsyncClient, controller: FakeController, action: str
) -> None:
    answer = await client.post(f"/osd/admin/{action}?version=3", headers=RIGHT)
    assert answer.json()["version"] == 3
    answer = await client.post(f"/osd/admin/{action}", json={"version": 4}, headers=RIGHT)
    assert answer.status_code == 200
    assert controller.calls == [(action, 3), (action, 4)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[3]",
        b"{not json",
        b'{"version": "3"}',
        b'{"version": 0}',
        b'{"version": true}',
        b"\xff",
    ],
)
async def test_bad_version_is_one_line(
    client: httpx.AsyncClient, controller: FakeController, body: bytes
) -> None:
    response = await client.post("/osd/admin/pin", content=body, headers=RIGHT)
    assert response.status_code == 400
    assert error_of(response).startswith("pin: ")
    assert controller.calls == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "version is missing"),
        (b"{}", "version is missing"),
        (b'{"version": null}', "version is missing"),
        (b'{"version": 0}', "version=0 must be a whole number of at least 1"),
        (b'{"version": true}', "version=True must be a whole number of at least 1"),
        (b"{not json", 'the body must be JSON like {"version": 3} ('),
    ],
)
async def test_what_is_wrong_with_a_version_is_said(
    client: httpx.AsyncClient, body: bytes, says: str
) -> None:
    response = await client.post("/osd/admin/pin", content=body, headers=RIGHT)
    assert error_of(response).startswith(f"pin: {says}")


@pytest.mark.parametrize(("num_bytes", "status"), [(4096, 200), (4097, 400), (50_000, 400)])
async def test_a_long_body_is_not_read_to_its_end(
    client: httpx.AsyncClient, controller: FakeController, num_bytes: int, status: int
) -> None:
    sent: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        whole = b'{"version": 3}'.ljust(num_bytes)
        for start in range(0, num_bytes, 1000):
            sent.append(start)
            yield whole[start : start + 1000]

    response = await client.post("/osd/admin/pin", content=body(), headers=RIGHT)
    assert response.status_code == status
    if status == 200:
        assert controller.calls == [("pin", 3)]
    else:
        assert error_of(response) == "pin: the body is longer than 4096 bytes"
        assert controller.calls == [] and len(sent) <= 6


async def test_the_query_goes_before_the_body(
    client: httpx.AsyncClient, controller: FakeController
) -> None:
    await client.post("/osd/admin/pin?version=1", json={"version": 4}, headers=RIGHT)
    await client.post("/osd/admin/pin", json={"version": 1}, headers=RIGHT)
    assert controller.calls == [("pin", 1), ("pin", 1)], "1 is the first there is"


@pytest.mark.parametrize("query", ["version=0", "version=-1", "version=x", "version=1.5"])
async def test_bad_version_in_the_query(client: httpx.AsyncClient, query: str) -> None:
    response = await client.post(f"/osd/admin/keep?{query}", headers=RIGHT)
    assert response.status_code == 400 and "version" in error_of(response)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ReleaseError("v9: no such\nrelease; `osd drafts list` shows them"), 409),
        (ConfigError("version=9: pruned"), 400),
        (ValueError("version 9 is not in the store"), 400),
        (ReplayBufferError("Redis is away"), 503),
    ],
)
async def test_refusals_are_passed_on_as_one_line(
    client: httpx.AsyncClient, controller: FakeController, error: Exception, status: int
) -> None:
    controller.error = error
    response = await client.post("/osd/admin/promote?version=9", headers=RIGHT)
    assert response.status_code == status
    assert error_of(response) == " ".join(str(error).split())


async def test_buffer_away_and_unexpected_errors(
    client: httpx.AsyncClient, history: FakeHistory
) -> None:
    history.error = ReplayBufferError("Redis at host cannot be used")
    assert (await client.get("/osd/history")).status_code == 503
    history.error = ValueError("secret detail")
    response = await client.get("/osd/history")
    assert response.status_code == 500
    assert "secret" not in error_of(response)
    assert "content-security-policy" in response.headers


async def test_unknown_path_and_wrong_method(client: httpx.AsyncClient) -> None:
    assert "/openapi.json" in error_of(await client.get("/osd/nothing"))
    response = await client.get("/osd/admin/pause")
    assert response.status_code == 405 and "GET /osd/admin/pause" in error_of(response)


@pytest.mark.parametrize("path", ["../app.py", "%2e%2e/app.py", "..%2fapp.py"])
async def test_static_serves_nothing_above_itself(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(f"/dashboard/static/{path}")).status_code == 404


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1:8001",
            "127.0.0.1",
            "127.8.9.10",
            "[::1]:8001",
            "[::1]",
            "[0:0:0:0:0:0:0:1]:1",
        ),
        *(
            "localhost",
            "LOCALHOST:1",
            "localhost.",
            "LocalHost.:8001",
            "a.localhost",
            "A.LOCALHOST:8001",
        ),
    ],
)
async def test_local_names_are_answered(client: httpx.AsyncClient, host: str) -> None:
    assert (await client.get("/osd/status", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "127.0.0.1.evil.example:8001",
            "localhost.evil.example",
            "evillocalhost",
            "localhost-1",
        ),
        *(
            "",
            ":8001",
            "10.0.0.1",
            "0.0.0.0:8001",
            "[::]:8001",
            "[fe80::1]",
            "[::1",
            "[::1].evil.example:80",
        ),
        *(
            "2130706433",
            "localhostlocalhost",
            "localhost:80@evil.example",
            "evil.example:80@localhost:80",
        ),
    ],
)
async def test_foreign_names_are_refused_on_a_local_port(
    client: httpx.AsyncClient, controller: FakeController, host: str
) -> None:
    for method, path in (("GET", "/osd/status"), ("POST", "/osd/admin/pause")):
        response = await client.request(method, path, headers={**RIGHT, "Host": host})
        assert response.status_code == 421
        assert error_of(response).startswith(f"Host {host!r}: ") and "control.host" in error_of(
            response
        )
    assert controller.calls == []


async def test_a_long_foreign_name_is_not_said_in_full(client: httpx.AsyncClient) -> None:
    line = error_of(await client.get("/osd/status", headers={"Host": "e" * 300}))
    assert "e" * 100 in line and "e" * 101 not in line


async def test_what_is_no_request_passes_as_it_is() -> None:
    """The server's own start and end."""
    passed: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(send)

    send = object()
    await Guard(app, host="127.0.0.1")({"type": "lifespan"}, None, send)  # type: ignore[arg-type]
    assert passed == [send]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
async def test_a_port_of_this_machine_alone_looks_at_the_name(
    controller: FakeController, history: FakeHistory, host: str
) -> None:
    transport = httpx.ASGITransport(build_app(controller, history, TOKEN, host=host))
    async with httpx.AsyncClient(transport=transport, base_url="http://node-7:8001") as client:
        assert (await client.get("/osd/status")).status_code == 421


async def test_a_port_open_to_the_network_answers_to_any_name(
    controller: FakeController, history: FakeHistory
) -> None:
    transport = httpx.ASGITransport(build_app(controller, history, TOKEN, host="0.0.0.0"))
    async with httpx.AsyncClient(transport=transport, base_url="http://node-7:8001") as client:
        assert (await client.get("/osd/status")).status_code == 200
    assert not is_loopback("0.0.0.0")


def test_an_empty_token_is_refused(controller: FakeController, history: FakeHistory) -> None:
    with pytest.raises(ValueError, match="token"):
        build_app(controller, history, "")


async def test_stream_sends_each_new_event_once_and_never_holds_up_a_stop(
    controller: FakeController, history: FakeHistory
) -> None:
    server = ControlServer.of(build_app(controller, history, TOKEN), host="127.0.0.1", port=0)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    got: list[dict[str, Any]] = []

    async def listen() -> None:
        url = f"http://127.0.0.1:{server.port}/osd/stream?since=60"
        async with httpx.AsyncClient() as client, client.stream("GET", url) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    got.append(json.loads(line.removeprefix("data: ")))

    listening = asyncio.create_task(listen())
    while len(got) < 1:
        await asyncio.sleep(0.01)
    history.log.append(Event(at=100.0, kind="swap_failed", text="same\ntime"))
    history.log.append(Event(at=200.0, kind="rollback", text="later", version=1))
    while len(got) < 3:
        await asyncio.sleep(0.01)
    await asyncio.sleep(1.2)
    server.should_exit = True
    await asyncio.wait_for(asyncio.gather(serving, listening), 4)
    assert [event["kind"] for event in got] == ["published", "swap_failed", "rollback"]


async def test_stream_sends_an_event_that_comes_after_a_later_one() -> None:
    """Parts tell theirs through Redis, and their clocks differ."""
    stopping, later = asyncio.Event(), Event(at=10.5, kind="published", text="")
    lists = [[later], [Event(at=10.0, kind="scaled", text=""), later]]

    async def fetch() -> list[Event]:
        if len(lists) == 1:
            stopping.set()
        return lists.pop(0)

    chunks = [chunk async for chunk in event_stream(fetch, 1.0, stopping)]
    told = [chunk for chunk in chunks if chunk.startswith(b"id")]
    assert [b"published" in chunk for chunk in told] == [True, False]
    assert [chunk.split(b"\n")[0] for chunk in told] == [b"id: 10.5"] * 2, "never backwards"
