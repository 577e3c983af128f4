"""Entry point of `vllm.endpoint_plugins`, which vLLM loads in its API process if `VLLM_PLUGINS`
names it: heartbeat and pull loop beside the server, and our headers in front of it.

Without `OSD_ATTACH` in the environment it does nothing. vLLM does not guard these calls, so nothing
may be raised here, and nothing may be waited for long: an engine's start depends on no service of
ours.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Any

from osd.attach.plugin import VARIABLE

logger = logging.getLogger(__name__)

SECONDS_TO_BEGIN = 40.0
"""How long vLLM's start waits for what is installed, and measured, before the first request."""
NOT_ATTACHED = "this engine is not attached; it serves as without"


class AttachedEndpoint:
    """What vLLM asks of such a plugin."""

    name = "osd"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._activity: Any = None

    def attach_router(self, app: Any) -> None:
        """Put our middleware around vLLM's application."""
        if os.environ.get(VARIABLE):
            try:
                from serving.activity import Activity
                from serving.headers import HeadersToXargs

                self._activity = Activity()
                app.add_middleware(HeadersToXargs)
                app.add_middleware(Watched, activity=self._activity)
            except Exception:
                logger.exception(NOT_ATTACHED)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Begin the loop beside the engine. Whatever fails, the engine serves."""
        url = os.environ.get(VARIABLE)
        if not url or engine_client is None or self._activity is None:
            return
        try:
            loop = attached_loop(engine_client, args, url, self._activity)
        except Exception:
            logger.exception(NOT_ATTACHED)
            return
        if loop is not None:
            state.osd_task = asyncio.create_task(run(engine_client, loop), name="osd")
            await asyncio.wait({state.osd_task, loop.begun_task()}, timeout=SECONDS_TO_BEGIN,
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            loop.is_serving = True


async def run(engine: Any, loop: Any) -> None:
    """Until the engine dies, which vLLM says itself."""
    from serving.engine_loop import look_after

    try:
        await look_after(engine, loop)
    except RuntimeError as error:
        logger.info("%s", error)


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
    from osd.attach.loop import AttachedLoop, Models
    from osd.common.addresses import join
    from osd.exchange.registry import Registry
    from serving.vllm import attached, parts
    from serving.vllm.undrafted import refuse_undrafted

    config = engine.vllm_config
    built = (config.additional_config or {}).get(ATTACHED_KEY)
    if built is None:
        return None
    parts.start(built["off"], "requests", refuse_undrafted)
    rank, num_processes = attached.api_process(engine)
    if rank > 0:
        return None
    if num_processes > 1:
        activity.is_always = True  # requests of the other processes are not seen
    deployment = os.environ.get("OSD_DEPLOYMENT", "default")
    host = args.host if args.host not in (None, "", "0.0.0.0", "::") else socket.gethostname()
    scheme = "https" if args.ssl_certfile else "http"
    return AttachedLoop(
        engine,
        Registry(url, deployment),
        redis_url=url,
        deployment=deployment,
        name=os.environ.get("OSD_REPLICA") or f"{socket.gethostname()}-{args.port}",
        url=f"{scheme}://{join(host, args.port)}",
        models=Models(*attached.models(engine)),
        built=built,
        activity=activity,
        permits=num_processes == 1,
    )
