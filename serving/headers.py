"""Passes a request's wishes on capture from our headers to the engine, as vLLM's own `vllm_xargs`.

    X-OSD-Capture: off      nothing of this request is kept (counts remain)
    X-OSD-Domain: NAME      the request's traffic class

The body can say the same: `"vllm_xargs": {"osd_capture": "off", "osd_domain": "NAME"}`. All of it
is optional. A request that says nothing passes through byte for byte, at the cost of a search for a
few bytes.
"""

from __future__ import annotations

import json
from typing import Any

from serving.capture.skips import wants_out
from serving.speculation.requests import whole_number

CAPTURE_HEADER = b"x-osd-capture"
DOMAIN_HEADER = b"x-osd-domain"
ROUTES_THAT_CAN_BE_TOLD: dict[str, dict[str, Any]] = {
    "/v1/completions": {},
    "/v1/chat/completions": {},
    # If it were stored, a later request could continue this one, and would be captured.
    "/v1/responses": {"store": False},
    "/v1/messages": {},
}
"""Routes on which vLLM passes `vllm_xargs` on to the engine, and what else is set for a request
that is kept out. On other routes, and in beam search, vLLM drops them."""
XARGS = ("osd_capture", "osd_domain", "osd_spec_k")
METHODS_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
REFUSAL = (
    "X-OSD-Capture: off (or vllm_xargs.osd_capture) cannot be kept for this request: the engine "
    "can be told on "
    + ", ".join(ROUTES_THAT_CAN_BE_TOLD)
    + " only, with a JSON object as body and without beam search"
)


class HeadersToXargs:
    """ASGI middleware. It answers with 400 where a request asks not to be captured but the engine
    cannot be told, where a name of ours is misspelt or misplaced, and where the limit of draft
    tokens is malformed. Other bodies that are no JSON object are left to vLLM."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket" and "osd_capture" in _wanted(scope):
            return await _refuse_socket(scope, receive, send)
        if scope["type"] != "http" or scope["method"] in METHODS_WITHOUT_BODY:
            return await self._app(scope, receive, send)
        body = await _read_body(receive)
        if body is None:
            return  # the client went away
        try:
            told = _told(scope["path"], body, _wanted(scope))
        except _Refused as refused:
            return await _refuse(send, str(refused))
        if told is not body:
            headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
            scope = {**scope, "headers": [*headers, (b"content-length", str(len(told)).encode())]}
        await self._app(scope, _replay(told, receive), send)


class _Refused(Exception):
    """Its text is the answer to the client."""


def _wanted(scope: Any) -> dict[str, str]:
    wanted = {}
    for name, value in scope["headers"]:
        text = value.decode("latin-1").strip()
        if name == CAPTURE_HEADER and wants_out(text):
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


def _told(path: str, body: bytes, wanted: dict[str, str]) -> bytes:
    """The body for the engine: the same object when nothing has to be told. Raises `_Refused`."""
    if not wanted and not _may_say_something(body):
        return body
    request = _object(body)
    if request is not None:
        _check_names(request)
        _check_limit(request)
        is_out = _keeps_out("vllm_xargs", request.get("vllm_xargs"))
    else:
        is_out = b"osd_capture" in body
    is_out = is_out or "osd_capture" in wanted
    can_be_told = request is not None and path in ROUTES_THAT_CAN_BE_TOLD
    if request is None or not can_be_told or (is_out and request.get("use_beam_search")):
        if is_out:
            raise _Refused(REFUSAL)
        return body
    if not wanted and not is_out:
        return body
    xargs = request.get("vllm_xargs")
    # A domain in the body overrules the one in the header.
    request["vllm_xargs"] = {**wanted, **(xargs if isinstance(xargs, dict) else {})}
    if is_out:
        request["vllm_xargs"]["osd_capture"] = "off"
        request |= ROUTES_THAT_CAN_BE_TOLD[path]
    return json.dumps(request).encode()


def _may_say_something(body: bytes) -> bool:
    """Whether it may hold a key of ours: in plain text, with escaped letters, or in UTF-16 or
    UTF-32, which show a zero byte at once."""
    return b"osd_" in body or b"\\u00" in body or 0 in body[:4]


def _object(body: bytes) -> dict[str, Any] | None:
    """The JSON object that vLLM will read; None where the body is none. Of members with one name
    the last counts, unless an earlier one keeps the request out."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(pairs) | {name: value for name, value in pairs if _keeps_out(name, value)}

    try:
        request = json.loads(body, object_pairs_hook=members)
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def _keeps_out(name: str, value: Any) -> bool:
    """Whether this member of the body, or of its `vllm_xargs`, asks to be kept out."""
    if name == "vllm_xargs" and not isinstance(value, dict):
        return "osd_capture" in str(value)  # vLLM would ignore it
    if name == "vllm_xargs":
        return any(_keeps_out(*member) for member in value.items())
    return name == "osd_capture" and wants_out(value)


def _check_names(request: dict[str, Any]) -> None:
    """Refuse unknown names of ours. vLLM would ignore them, and one may mean to opt out."""
    if misplaced := [name for name in request if name.startswith("osd_")]:
        raise _Refused(
            f'{misplaced[0][:40]} belongs in "vllm_xargs": {{...}}, which may say '
            f"{', '.join(XARGS)}"
        )
    xargs = request.get("vllm_xargs")
    names = xargs if isinstance(xargs, dict) else {}
    if unknown := [name for name in names if name.startswith("osd_") and name not in XARGS]:
        raise _Refused(f"vllm_xargs.{unknown[0][:40]}: there is {', '.join(XARGS)} only")


def _check_limit(request: dict[str, Any]) -> None:
    """Refuse a malformed limit here, since vLLM turns `true` into 1."""
    xargs = request.get("vllm_xargs")
    if not isinstance(xargs, dict) or "osd_spec_k" not in xargs:
        return
    if whole_number(xargs["osd_spec_k"]) is None:
        said = json.dumps(xargs["osd_spec_k"])[:40]
        raise _Refused(
            "vllm_xargs.osd_spec_k is a whole number of draft tokens, such as 2, and 0 for none; "
            f"not {said}"
        )


def _replay(body: bytes, receive: Any) -> Any:
    sent = False

    async def replay() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(send: Any, message: str, kind: str = "http") -> None:
    error = {"message": message, "type": "BadRequestError", "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": f"{kind}.response.start", "status": 400, "headers": headers})
    await send({"type": f"{kind}.response.body", "body": body})


async def _refuse_socket(scope: Any, receive: Any, send: Any) -> None:
    """Refuse a web socket before it is accepted: nothing that comes over it could be kept out."""
    await receive()
    if "websocket.http.response" in scope.get("extensions", {}):
        await _refuse(send, REFUSAL, "websocket.http")
    else:
        reason = "X-OSD-Capture: off cannot be kept here"
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
