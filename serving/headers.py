"""Our two request headers, turned into vLLM's own `vllm_xargs` before vLLM reads the request.

    X-OSD-Capture: off      nothing of this request is kept (counts remain)
    X-OSD-Domain: NAME      the request's traffic class

Both are optional. A request without them passes through untouched, byte for byte.
"""

from __future__ import annotations

import json
from typing import Any

CAPTURE_HEADER = b"x-osd-capture"
DOMAIN_HEADER = b"x-osd-domain"
MAX_BODY = 64 << 20


class HeadersToXargs:
    """ASGI middleware. A body that is not a JSON object is left for vLLM to complain about; but one that asks not to be
    captured and cannot be told so is answered with 400, since serving it would break the promise."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        wanted = _wanted(scope) if scope["type"] == "http" and scope["method"] == "POST" else {}
        if not wanted:
            return await self._app(scope, receive, send)
        body = await _read_body(receive)
        if body is None:
            return  # the client went away
        changed = _with_xargs(body, wanted)
        if changed is None:
            if "osd_capture" in wanted:
                return await _refuse(send)
            changed = body
        headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
        headers.append((b"content-length", str(len(changed)).encode()))
        await self._app({**scope, "headers": headers}, _replay(changed, receive), send)


def _wanted(scope: Any) -> dict[str, str]:
    headers = dict(scope["headers"])
    wanted = {}
    if CAPTURE_HEADER in headers and headers[CAPTURE_HEADER].decode("latin-1").strip().lower() != "on":
        wanted["osd_capture"] = "off"
    if DOMAIN_HEADER in headers:
        wanted["osd_domain"] = headers[DOMAIN_HEADER].decode("latin-1").strip()
    return wanted


async def _read_body(receive: Any) -> bytes | None:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size <= MAX_BODY:
            parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts) if size <= MAX_BODY else b""


def _with_xargs(body: bytes, wanted: dict[str, str]) -> bytes | None:
    """The body with our arguments added; what the body itself says of the domain stays, "off" always wins."""
    try:
        request = json.loads(body)
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    xargs = request.get("vllm_xargs")
    merged = {**wanted, **(xargs if isinstance(xargs, dict) else {})}
    if "osd_capture" in wanted:
        merged["osd_capture"] = "off"
    request["vllm_xargs"] = merged
    return json.dumps(request).encode()


def _replay(body: bytes, receive: Any) -> Any:
    sent = False

    async def replay() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(send: Any) -> None:
    message = "X-OSD-Capture: off needs a JSON object as body, so that the engine can be told"
    body = json.dumps({"error": {"message": message, "type": "BadRequestError", "code": 400}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
