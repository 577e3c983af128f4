"""A wrapper around all answers of the control port: the Host check and security headers.

Plain ASGI, so that an event stream passes unbuffered.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
"""Own files only, no inline script or style, no HTML made from strings, no framing."""

HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, without port) means this machine only."""
    if host.rstrip(".").lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_without_port(host: str) -> str:
    """`127.0.0.1:8001` -> `127.0.0.1`, `[::1]:8001` -> `[::1]`."""
    return re.sub(r":[0-9]*$", "", host)


class Guard:
    """Adds `HEADERS` to every answer; on a port bound to this machine only, refuses foreign Host
    headers.

    Without that check a page of any web site could read the port by pointing its own name at
    127.0.0.1 (DNS rebinding). A port opened to the network is reached under names nobody here can
    know: no check there.
    """

    def __init__(self, app: ASGIApp, *, host: str) -> None:
        self.app = app
        self.is_local = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        app: Any = self.app
        host = Headers(scope=scope).get("host", "")
        if self.is_local and not is_loopback(host_without_port(host)):
            line = (
                "this control port answers to localhost only; open http://127.0.0.1:PORT, or set "
                "control.host"
            )
            app = JSONResponse({"error": f"Host {host[:100]!r}: {line}"}, status_code=421)
        await app(scope, receive, send_with_headers)
