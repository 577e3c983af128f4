"""`GET /osd/traces`: every stored trace as one stream, behind the admin token, since traces hold
what users wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from fastapi import APIRouter, Depends
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from osd.observe.dashboard.admin import require_token

TracesOf = Callable[[], Iterator[bytes]]
"""Begins a stream of all traces. It blocks, so it is drawn from in a thread."""


def trace_routes(traces: TracesOf, token: str) -> APIRouter:
    """The route. An error before the first byte is an error answer; a later one cuts the body
    short."""
    router = APIRouter(tags=["admin"], dependencies=[Depends(require_token(token))])

    @router.get("/osd/traces", summary="Every stored trace, as a file of traces.")
    async def stored_traces() -> Response:
        frames = traces()
        first = await run_in_threadpool(next, frames)
        return StreamingResponse(chain([first], frames), media_type="application/octet-stream")

    return router
