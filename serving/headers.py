"""What a request says of capture, in our two headers or in its body, told to the engine as vLLM's own `vllm_xargs`.

    X-OSD-Capture: off      nothing of this request is kept (counts remain)
    X-OSD-Domain: NAME      the request's traffic class

The same can be said in the body: `"vllm_xargs": {"osd_capture": "off", "osd_domain": "NAME"}`. All of it is optional: a
request that says nothing passes through untouched, byte for byte, and costs a search for a few bytes.
"""

from __future__ import annotations

import json
from typing import Any

from serving.capture.skips import wants_out
from serving.speculation.scheduler import whole_number

CAPTURE_HEADER = b"x-osd-capture"
DOMAIN_HEADER = b"x-osd-domain"
ROUTES_THAT_CAN_BE_TOLD: dict[str, dict[str, Any]] = {
    "/v1/completions": {},
    "/v1/chat/completions": {},
    "/v1/responses": {"store": False},  # else a later request could go on from this one, and would be captured
    "/v1/messages": {},
}
"""Where vLLM hands `vllm_xargs` on to the engine, and what else is set for a request that is kept out. Elsewhere, and
in beam search, it drops them."""
XARGS = ("osd_capture", "osd_domain", "osd_spec_k")
METHODS_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
REFUSAL = (
    "X-OSD-Capture: off (or vllm_xargs.osd_capture) cannot be kept for this request: the engine can be told on "
    + ", ".join(ROUTES_THAT_CAN_BE_TOLD)
    + " only, with a JSON object as body and without beam search"
)


class HeadersToXargs:
    """ASGI middleware. A body that is not a JSON object is left for vLLM to complain about; but a request that asks not
    to be captured and cannot be told so is answered with 400, since serving it would break the promise; so is one that
    says something of ours by another name, at another place, or a limit of draft tokens that is none."""

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
    """What the client is told."""


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
    """The body as the engine is to read it: itself where nothing has to be told."""
    if not wanted and not _may_say_something(body):
        return body
    request = _object(body)
    if request is not None:
        _check_names(request)
        _check_limit(request)
    said = b"osd_capture" in body if request is None else _keeps_out("vllm_xargs", request.get("vllm_xargs"))
    is_out = said or "osd_capture" in wanted
    if request is None or path not in ROUTES_THAT_CAN_BE_TOLD or (is_out and request.get("use_beam_search")):
        if is_out:
            raise _Refused(REFUSAL)
        return body
    if not wanted and not is_out:
        return body
    xargs = request.get("vllm_xargs")
    request["vllm_xargs"] = {**wanted, **(xargs if isinstance(xargs, dict) else {})}  # a domain in the body stays
    if is_out:
        request["vllm_xargs"]["osd_capture"] = "off"
        request |= ROUTES_THAT_CAN_BE_TOLD[path]
    return json.dumps(request).encode()


def _may_say_something(body: bytes) -> bool:
    """Whether a key of ours may be in it: as it is, with letters escaped, or (a zero byte at once) in UTF-16 or so."""
    return b"osd_" in body or b"\\u00" in body or 0 in body[:4]


def _object(body: bytes) -> dict[str, Any] | None:
    """The JSON object that vLLM will read; None where it is none. Of members of one name the last counts, but none of
    ours overrules one that keeps the request out."""

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
        return "osd_capture" in str(value)  # whatever it says there, vLLM would not hear it
    if name == "vllm_xargs":
        return any(_keeps_out(*member) for member in value.items())
    return name == "osd_capture" and wants_out(value)


def _check_names(request: dict[str, Any]) -> None:
    """What vLLM would pass over may be a wish to be kept out."""
    if misplaced := [name for name in request if name.startswith("osd_")]:
        raise _Refused(f'{misplaced[0][:40]} belongs in "vllm_xargs": {{...}}, which may say {", ".join(XARGS)}')
    xargs = request.get("vllm_xargs")
    names = xargs if isinstance(xargs, dict) else {}
    if unknown := [name for name in names if name.startswith("osd_") and name not in XARGS]:
        raise _Refused(f"vllm_xargs.{unknown[0][:40]}: there is {', '.join(XARGS)} only")


def _check_limit(request: dict[str, Any]) -> None:
    """vLLM makes 1 of `true`, so that here alone it can be told from a number."""
    xargs = request.get("vllm_xargs")
    if isinstance(xargs, dict) and "osd_spec_k" in xargs and whole_number(xargs["osd_spec_k"]) is None:
        said = json.dumps(xargs["osd_spec_k"])[:40]
        raise _Refused(
            f"vllm_xargs.osd_spec_k is a whole number of draft tokens, such as 2, and 0 for none; not {said}"
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
    body = json.dumps({"error": {"message": message, "type": "BadRequestError", "code": 400}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": f"{kind}.response.start", "status": 400, "headers": headers})
    await send({"type": f"{kind}.response.body", "body": body})


async def _refuse_socket(scope: Any, receive: Any, send: Any) -> None:
    """Before it is accepted: what comes over it the engine could not be told about."""
    await receive()
    if "websocket.http.response" in scope.get("extensions", {}):
        await _refuse(send, REFUSAL, "websocket.http")
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": "X-OSD-Capture: off cannot be kept here"})
