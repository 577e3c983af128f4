"""`GET /osd/logs`: the last lines that each part of the service logged, on whichever machine it
runs. Behind the admin token, since logs may hold what users wrote."""

from __future__ import annotations

from typing import Protocol

from fastapi import APIRouter, Depends, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from osd.observe.dashboard.admin import require_token
from osd.observe.dashboard.answers import as_json
from osd.records import Place

MAX_LOG_LINES = 10_000


class Logs(Protocol):
    """Blocking. Both raise `OSDError`."""

    def places(self) -> list[Place]: ...
    def tail(self, part: str, num_lines: int) -> str: ...


def log_routes(logs: Logs, token: str) -> APIRouter:
    """The routes, behind the admin token."""
    router = APIRouter(tags=["admin"], dependencies=[Depends(require_token(token))])

    @router.get("/osd/logs", summary="The parts of the service: machine and log of each.")
    async def parts() -> Response:
        return as_json(await run_in_threadpool(logs.places))

    @router.get("/osd/logs/{part}", summary="The last lines of a part's log.")
    async def log(part: str, lines: int = Query(200, ge=1, le=MAX_LOG_LINES)) -> Response:
        text = await run_in_threadpool(logs.tail, part, lines)
        return as_json({"part": part, "text": text})

    return router
