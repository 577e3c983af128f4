"""`POST /osd/admin/...`: everything that changes the running service, behind the admin token."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from osd.errors import OSDError
from osd.observe.dashboard.answers import maybe, one_line
from osd.records import DraftRelease

MAX_BODY_BYTES = 4096
MAX_DOMAIN = 1024
"""Characters of a label as a client sent it: it is looked for by the name it is stored under."""
MISSING = 'version is missing; give ?version=3 or the body {"version": 3}'
WITHOUT_VERSION = {
    "pause": "No training and no publishing until resumed; serving goes on.",
    "resume": "Train and publish again.",
    "rollback": "Serve the parent of the draft that serves now. Answers with its version.",
    "unpin": "Let the gate choose the serving draft again.",
}
WITH_VERSION = {
    "promote": "Serve this version.",
    "pin": "Serve this version until unpinned.",
    "keep": "Never prune this version.",
}
PURGE = (
    "Delete stored traces: all, those of one domain, or those that ended before a time (seconds "
    "since 1970). Answers "
    "with how many, and with the drafts that may have learnt from them."
)


STEPS = (
    "Switch on these steps and no others in attached engines: any of observe, capture, swap and "
    "control, with commas between them; none of them leaves the engines to vLLM."
)


class VersionBody(BaseModel):
    """The body of what chooses a version."""

    model_config = ConfigDict(strict=True)

    version: int = Field(ge=1)


def admin_routes(controller: Any, token: str) -> APIRouter:
    """The routes of administration. Raises `ValueError` for an empty token."""
    if not token:
        raise ValueError("the control port needs a non-empty admin token")
    router = APIRouter(
        prefix="/osd/admin", tags=["admin"], dependencies=[Depends(require_token(token))]
    )
    for action, summary in WITHOUT_VERSION.items():
        router.post(f"/{action}", summary=summary, name=action)(_plain(controller, action))
    schema = {"schema": VersionBody.model_json_schema(), "example": {"version": 3}}
    body = {"requestBody": {"content": {"application/json": schema}}}
    for action, summary in WITH_VERSION.items():
        router.post(f"/{action}", summary=summary, name=action, openapi_extra=body)(
            _versioned(controller, action)
        )
    router.post("/purge", summary=PURGE, name="purge")(_purge(controller))
    router.post("/steps", summary=STEPS, name="steps")(_steps(controller))
    return router


def require_token(token: str) -> Any:
    """What a route depends on to let in only who sends the admin token."""
    expected = token.encode()
    bearer = HTTPBearer(
        auto_error=False, description="The admin token, generated when the service starts."
    )

    async def check(
        request: Request,
        given: HTTPAuthorizationCredentials | None = Depends(bearer),  # noqa: B008
    ) -> None:
        if given is not None and secrets.compare_digest(given.credentials.encode(), expected):
            return
        what = "wrong token" if given else "no token"
        raise HTTPException(
            401,
            f"{request.method} {request.url.path}: {what}; send `Authorization: Bearer TOKEN`",
            {"WWW-Authenticate": "Bearer"},
        )

    return check


def _plain(controller: Any, action: str) -> Any:
    async def act() -> dict[str, Any]:
        return await _perform(controller, action)

    return act


def _versioned(controller: Any, action: str) -> Any:
    async def act(request: Request, version: int | None = Query(None, ge=1)) -> dict[str, Any]:
        try:
            chosen = version if version is not None else await _version_in_body(request)
        except ValueError as error:
            raise HTTPException(400, f"{action}: {error}") from None
        return await _perform(controller, action, chosen) | {"version": chosen}

    return act


def _steps(controller: Any) -> Any:
    async def act(steps: str = Query(description="observe,capture")) -> dict[str, Any]:
        named = tuple(step for step in steps.split(",") if step)
        await maybe(controller.set_steps(named))
        return {"ok": True, "action": "steps", "steps": named}

    return act


def _purge(controller: Any) -> Any:
    async def act(
        request: Request,
        every: bool = Query(False, alias="all", description="Every stored trace."),
        domain: str | None = Query(None, max_length=MAX_DOMAIN),
        before: float | None = Query(None, ge=0, allow_inf_nan=False),
    ) -> dict[str, Any]:
        if unknown := sorted(set(request.query_params) - {"all", "domain", "before"}):
            raise HTTPException(
                400, f"purge: {unknown[0]!r} is unknown; give ?all=true, or ?domain= and ?before="
            )
        if every == (domain is not None or before is not None):
            raise HTTPException(400, "purge: say which traces: ?all=true, or ?domain= and ?before=")
        found: dict[str, Any] = await maybe(controller.purge(domain, before))
        return {"ok": True, "action": "purge"} | found

    return act


async def _perform(controller: Any, action: str, *version: int) -> dict[str, Any]:
    try:
        found = await maybe(getattr(controller, action)(*version))
    except OSDError:
        raise
    except ValueError as error:
        raise HTTPException(400, one_line(error)) from None
    told = {"version": found.version} if isinstance(found, DraftRelease) else {}
    return {"ok": True, "action": action} | told


async def _version_in_body(request: Request) -> int:
    """`version` of a JSON body. Raises `ValueError` with one line when there is none."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"the body is longer than {MAX_BODY_BYTES} bytes")
    if not body:
        raise ValueError(MISSING)
    try:
        return VersionBody.model_validate_json(body).version
    except ValidationError as error:
        raise ValueError(_problem_with_version(error)) from None


def _problem_with_version(error: ValidationError) -> str:
    problem = error.errors()[0]
    given = problem["input"]
    if problem["loc"] != ("version",):
        return f'the body must be JSON like {{"version": 3}} ({one_line(problem["msg"])})'
    if problem["type"] == "missing" or given is None:
        return MISSING
    return f"version={given!r} must be a whole number of at least 1"
