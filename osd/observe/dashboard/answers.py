"""How the control port answers: strict JSON of records, and every error as one line with a fitting
status."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from osd.errors import ConfigError, OSDError, ReplayBufferError
from osd.observe.dashboard.guard import HEADERS

log = logging.getLogger(__name__)


async def maybe(value: Any) -> Any:
    """`value`, awaited when it has to be."""
    return await value if inspect.isawaitable(value) else value


def one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def as_json(
    content: Any, status_code: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """JSON of builtins, records and numpy values; NaN and infinities become null, as JSON has
    none."""
    body = msgspec.json.encode(content, enc_hook=_plain)
    return Response(body, status_code, headers, media_type="application/json")


def to_builtins(records: Any) -> Any:
    """dicts and lists of records, as they will stand in JSON."""
    return msgspec.to_builtins(records, enc_hook=_plain)


def add_error_answers(app: FastAPI) -> None:
    """Every error is `{"error": "one line"}`: 400 wrong value, 409 cannot be done now, 503 the
    buffer is away."""

    async def bad_value(_: Request, error: Exception) -> Response:
        return _error(400, one_line(error))

    async def bad_parameter(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problem = error.errors()[0]
        return _error(400, f"{problem['loc'][-1]}={problem.get('input')!r}: {problem['msg']}")

    async def refused(_: Request, error: Exception) -> Response:
        return _error(503 if isinstance(error, ReplayBufferError) else 409, one_line(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = one_line(error.detail)
        if error.status_code in (404, 405):
            asked = f"{request.method} {request.url.path}"
            text = f"{asked}: {text.lower()}; /openapi.json lists what there is"
        return _error(error.status_code, text, error.headers)

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _error(
            500, f"{type(error).__name__} in the control port; its log has the details", HEADERS
        )

    app.add_exception_handler(ConfigError, bad_value)
    app.add_exception_handler(RequestValidationError, bad_parameter)
    app.add_exception_handler(OSDError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


def _error(status_code: int, text: str, headers: Any = None) -> Response:
    return as_json({"error": text[:500]}, status_code, dict(headers or {}))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"cannot be shown as JSON: {type(value).__name__}")
