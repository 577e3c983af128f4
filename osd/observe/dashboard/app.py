"""The control port's FastAPI application: the live page and the JSON, SSE and Prometheus twins of
what it shows.

Reading is open to whoever reaches the port; changing (`/osd/admin/...`), taking traces out
(`/osd/traces`) and logs (`/osd/logs`) need the admin token. It runs in a process of its own: nobody
watching costs the engine anything.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.staticfiles import StaticFiles
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse

import osd
from osd.observe.dashboard.admin import admin_routes
from osd.observe.dashboard.answers import add_error_answers, as_json, maybe, to_builtins
from osd.observe.dashboard.guard import Guard
from osd.observe.dashboard.logs import Logs, log_routes
from osd.observe.dashboard.releases import ReadRelease, release_routes
from osd.observe.dashboard.stream import event_stream
from osd.observe.dashboard.traces import TracesOf, trace_routes
from osd.observe.problems import problems_of
from osd.records import Event

STATIC = Path(__file__).parent / "static"
MAX_POINTS = 600
"""Points of one history answer; a smaller bucket than that allows is widened."""
MAX_SPAN = 31 * 24 * 3600.0
"""Seconds of history one answer may reach back."""
NOW_SECONDS = (15.0, 60.0)
"""The headline figures are taken over so many seconds; the longer span when the shorter one saw no
traffic."""
RECENT_SECONDS = (300.0,)
"""What `osd status` shows is taken over so many seconds."""
ALL_IN_ONE = 1e9
"""A bucket wide enough to take any span as one row."""
MAX_EVENTS = 1000
"""Of one answer. Among so many the last training round's end is sought: each of many replicas may
have swapped since."""
MAX_KEPT_S = 30.0
"""Seconds for which an answer of long points is given again."""


def build_app(
    controller: Any,
    history: Any,
    token: str,
    *,
    host: str = "127.0.0.1",
    traces: TracesOf | None = None,
    logs: Logs | None = None,
    releases: tuple[ReadRelease, str] | None = None,
) -> FastAPI:
    """The control port over `osd.control.controller` and `osd.observe.history`' history (their
    methods may be async or not).

    `host` is the address the port is bound to (`control.host`): on a loopback address, requests
    that name another host are refused. `traces` begins a stream of all stored traces; without it
    there is no route for them, as without `logs`, and without `releases`: how a part of a release
    is read, and the token for that. Raises `ValueError` for an empty token.
    """
    app = FastAPI(
        title="Online speculative distillation",
        version=osd.__version__,
        docs_url=None,
        redoc_url=None,
    )
    app.state.stopping = asyncio.Event()
    add_error_answers(app)
    _add_page(app)
    _add_readers(app, controller, history)
    _add_stream(app, history)
    app.include_router(admin_routes(controller, token))
    if traces is not None:
        app.include_router(trace_routes(traces, token))
    if logs is not None:
        app.include_router(log_routes(logs, token))
    if releases is not None:
        app.include_router(release_routes(*releases))
    app.add_middleware(Guard, host=host)
    return app


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("dashboard")

    @app.get("/dashboard", include_in_schema=False)
    async def dashboard() -> Response:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    @app.get("/health", tags=["status"], summary="Whether the control port answers.")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    app.mount("/dashboard/static", _Static(directory=STATIC))


class _Static(StaticFiles):
    """The page's files. Browsers ask each time whether one changed, so an upgrade shows at once."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def _add_readers(app: FastAPI, controller: Any, history: Any) -> None:
    @app.get(
        "/osd/status",
        tags=["status"],
        summary="Training, replicas, buffer, and the figures of this moment.",
    )
    async def status() -> Response:
        state = replace(await maybe(controller.status()), now=time.time())
        events = (await _events(history, MAX_EVENTS))[::-1]
        return as_json(
            {
                **to_builtins(state),
                "figures": await _figures(history, NOW_SECONDS),
                "recent": await _figures(history, RECENT_SECONDS),
                "problems": problems_of(state, events),
            }
        )

    recently = Recently()

    @app.get(
        "/osd/history",
        tags=["status"],
        summary="Acceptance and speed over time, as columns; changes of plan.",
    )
    async def series(
        since: float = Query(
            -300.0, allow_inf_nan=False, description="Unix time; negative = seconds before now"
        ),
        bucket: float = Query(
            0.0, ge=0, allow_inf_nan=False, description="seconds per point; 0 = by the span"
        ),
        by: Literal["", "class", "replica", "position"] = Query(
            "", description="also a line for each of these"
        ),
    ) -> Response:
        now = time.time()
        since, bucket = resolve_span(now, since, bucket)
        columns = await recently.get(
            (since, bucket, by), bucket, lambda: maybe(history.series(since, bucket, by))
        )
        marks = to_builtins(await maybe(history.marks()))
        marks = [mark for mark in marks if mark["at"] >= since]
        changes = to_builtins(await maybe(history.changes()))
        return as_json(
            {"now": now, "since": since, "bucket": bucket, "by": by, "series": columns}
            | {"lines": columns.pop("lines", {}), "marks": marks, "changes": changes}
        )

    @app.get(
        "/osd/drafts",
        tags=["status"],
        summary="Every draft release in the store, with how it was judged.",
    )
    async def drafts() -> Response:
        return as_json(await maybe(controller.drafts()))

    @app.get(
        "/osd/events",
        tags=["status"],
        summary="Releases, refusals, rollbacks, swaps, lost replicas; newest first.",
    )
    async def events(limit: int = Query(100, ge=1, le=MAX_EVENTS)) -> Response:
        return as_json((await _events(history, limit))[::-1])

    @app.get("/metrics", tags=["status"], summary="The whole deployment as Prometheus text.")
    async def metrics() -> Response:
        return Response(await maybe(history.prometheus()), media_type="text/plain; version=0.0.4")


def _add_stream(app: FastAPI, history: Any) -> None:
    @app.get("/osd/stream", tags=["status"], summary="Events as they happen (server-sent events).")
    async def stream(
        request: Request,
        since: float | None = Query(
            None, allow_inf_nan=False, description="Unix time; default: from now on"
        ),
    ) -> Response:
        start = _last_event_id(request)
        if start is None:
            start = time.time() if since is None else since
        events = event_stream(lambda: _events(history, MAX_EVENTS), start, app.state.stopping)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )


class Recently:
    """Keeps answers for a part of the time that one of their points spans: a second viewer of a
    long history costs nothing."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[float, Any]] = {}

    async def get(self, key: Any, bucket_s: float, make: Callable[[], Awaitable[Any]]) -> Any:
        """A shallow copy of the answer kept under this key; without one, `make` makes it."""
        now = time.monotonic()
        self._kept = {k: kept for k, kept in self._kept.items() if kept[0] > now}
        if key not in self._kept:
            self._kept[key] = now + min(bucket_s / 10, MAX_KEPT_S), await make()
        return dict(self._kept[key][1])


def resolve_span(now: float, since: float, bucket: float) -> tuple[float, float]:
    """(start as Unix time on a bucket's edge, seconds per bucket) for at most `MAX_POINTS` points.

    Example:
        resolve_span(now=1000.0, since=-300.0, bucket=0.0) == (700.0, 1.0)
    """
    start = min(max(now + since if since < 0 else since, now - MAX_SPAN), now)
    span = max(now - start, 1.0)
    bucket = max(bucket, float(math.ceil(span / MAX_POINTS)))
    return math.floor(start / bucket) * bucket, bucket


async def _figures(history: Any, spans: tuple[float, ...]) -> dict[str, Any]:
    """The columns of `series` as single values over the last `seconds`: the first of `spans` in
    which there was traffic; empty without."""
    for seconds in spans:
        columns = to_builtins(await maybe(history.series(time.time() - seconds, ALL_IN_ONE)))
        figures = {name: _last_number(values) for name, values in columns.items() if name != "at"}
        figures = {name: value for name, value in figures.items() if value is not None}
        if figures:
            return {"seconds": seconds, **figures}
    return {}


def _last_number(values: list[float | None]) -> float | None:
    return next(
        (value for value in reversed(values) if value is not None and not math.isnan(value)), None
    )


async def _events(history: Any, limit: int) -> list[Event]:
    """The last `limit` events, oldest first."""
    return sorted(await maybe(history.events(limit)), key=lambda event: event.at)


def _last_event_id(request: Request) -> float | None:
    try:
        return float(request.headers.get("last-event-id", ""))
    except ValueError:
        return None
