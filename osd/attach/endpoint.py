"""Entry point of `vllm.endpoint_plugins`, which vLLM loads in its API process if `VLLM_PLUGINS`
names it: heartbeat and pull loop beside the server, and our headers in front of it.

Without `OSD_ATTACH` in the environment it does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from osd.attach.plugin import VARIABLE

logger = logging.getLogger(__name__)


class AttachedEndpoint:
    """What vLLM asks of such a plugin."""

    name = "osd"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Put our middleware around vLLM's application."""
        if os.environ.get(VARIABLE):
            from serving.headers import HeadersToXargs
            from serving.pull import Activity

            self._activity = Activity()
            app.add_middleware(HeadersToXargs)
            app.add_middleware(Watched, activity=self._activity)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Begin the loop beside the engine. Whatever fails, the engine serves."""
        url = os.environ.get(VARIABLE)
        if not url or engine_client is None:
            return
        try:
            loop = attached_loop(engine_client, args, url, self._activity)
            if loop is not None:
                from serving.engine_loop import look_after

                await loop.look()
                beside = until_the_engine_ends(look_after(engine_client, loop))
                state.osd_task = asyncio.create_task(beside, name="osd")
        except Exception:
            logger.exception("this engine is not attached; it serves as without")


async def until_the_engine_ends(looking: Coroutine[Any, Any, None]) -> None:
    """vLLM says itself when its engine has died."""
    with suppress(RuntimeError):
        await looking


class Watched:
    """ASGI middleware that notes when the engine is used."""

    def __init__(self, app: Any, activity: Any) -> None:
        self._app = activity.watching(app)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


def attached_loop(engine: Any, args: Any, url: str, activity: Any) -> Any:
    """The loop of this engine; None in one that was not built to be attached, and in all API
    processes but its first."""
    from osd.attach.arguments import ATTACHED_KEY
    from osd.attach.loop import AttachedLoop
    from osd.exchange.registry import Registry
    from serving.vllm import attached, parts
    from serving.vllm.undrafted import refuse_undrafted

    config = engine.vllm_config
    built = (config.additional_config or {}).get(ATTACHED_KEY)
    if built is None:
        return None
    parts.start(built["off"], "requests", refuse_undrafted)
    if attached.api_process_rank(engine) > 0:
        return None
    deployment = os.environ.get("OSD_DEPLOYMENT", "default")
    host = args.host if args.host not in (None, "", "0.0.0.0", "::") else socket.gethostname()
    scheme = "https" if args.ssl_certfile else "http"
    return AttachedLoop(
        engine,
        Registry(url, deployment),
        redis_url=url,
        deployment=deployment,
        name=os.environ.get("OSD_REPLICA") or f"{socket.gethostname()}-{args.port}",
        url=f"{scheme}://{host}:{args.port}",
        models=(config.model_config.model, config.speculative_config.model),
        built=built,
        activity=activity,
    )
