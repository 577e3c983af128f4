"""`GET /osd/releases/VERSION/FILE`: parts of a release's files, for machines that do not see the
store. Behind a token of its own, which attached engines find in Redis."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Depends, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from osd.observe.dashboard.admin import require_token

ReadRelease = Callable[[int, str, int, int], bytes]
"""`read(version, name, offset, size)`. Blocking. Raises `OSDError`."""


def release_routes(read: ReadRelease, token: str) -> APIRouter:
    """The route, behind this token."""
    router = APIRouter(tags=["engines"], dependencies=[Depends(require_token(token))])

    @router.get("/osd/releases/{version}/{name}", summary="A part of a file of a release.")
    async def part(
        version: int, name: str, offset: int = Query(ge=0), size: int = Query(ge=1)
    ) -> Response:
        found = await run_in_threadpool(read, version, name, offset, size)
        return Response(found, media_type="application/octet-stream")

    return router
