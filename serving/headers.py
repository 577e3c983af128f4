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
ROUTES_THAT_CAN_BE_TOLD = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Where vLLM hands `vllm_xargs` on to the engine. Elsewhere, and in beam search, it drops them."""


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
        changed = _with_xargs(body, wanted) if scope["path"] in ROUTES_THAT_CAN_BE_TOLD else None
        if changed is None:
            if "osd_capture" in wanted:
                return await _refuse(send)
            changed = body
        headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
        headers.append((b"content-length", str(len(changed)).encode()))
        await self._app({**scope, "headers": headers}, _replay(changed, receive), send)


def _wanted(scope: Any) -> dict[str, str]:
    wanted = {}
    for name, value in scope["headers"]:
        text = value.decode("latin-1").strip()
        if name == CAPTURE_HEADER and text.lower() != "on":
            wanted["osd_capture"] = "off"
        if name == DOMAIN_HEADER:
            wanted["osd_domain"] = text
    return wanted


async def _read_body(receive: Any) -> bytes | None:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _with_xargs(body: bytes, wanted: dict[str, str]) -> bytes | None:
    """The body with our arguments added; what the body itself says of the domain stays, "off" always wins."""
    try:
        request = json.loads(body)
    except ValueError:
        return None
    if not isinstance(request, dict) or ("osd_capture" in wanted and request.get("use_beam_search")):
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
    message = (
        "X-OSD-Capture: off cannot be kept for this request: the engine can be told on "
        + ", ".join(ROUTES_THAT_CAN_BE_TOLD)
        + " only, with a JSON object as body and without beam search"
    )
    body = json.dumps({"error": {"message": message, "type": "BadRequestError", "code": 400}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
