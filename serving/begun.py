"""An answer begins with its first word, and a dead engine begins none.

vLLM sends the head of a stream as soon as it has accepted the request, long before the first token,
and what it says when its engine dies is an answer like any other. Behind a front door that would be
a pity: a request whose answer has begun can go to no other replica.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

DEAD = json.dumps(
    {"error": {"message": "the engine died", "type": "ServiceUnavailableError", "code": 503}}
).encode()


class HeadWithFirstWord:
    """ASGI middleware that holds back the head of an answer until something of its body comes. Once
    `is_dead`, what was not begun is answered with 503, which the front door takes elsewhere."""

    def __init__(self, app: Any, is_dead: Callable[[], bool]) -> None:
        self._app, self._is_dead = app, is_dead

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        head: Any = None
        is_over = False

        async def send_later(message: Any) -> None:
            nonlocal head, is_over
            if is_over:
                return
            if message["type"] == "http.response.start":
                head = message
                return
            is_empty = message["type"] == "http.response.body" and not message.get("body")
            if is_empty and message.get("more_body", False):
                return
            if head is not None and self._is_dead():
                is_over = True
                return await _refuse(send)
            if head is not None:
                held, head = head, None
                await send(held)
            await send(message)

        await self._app(scope, receive, send_later)


async def _refuse(send: Any) -> None:
    length = str(len(DEAD)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": DEAD})
