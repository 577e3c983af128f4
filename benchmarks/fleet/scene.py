"""One fleet on the stage: it starts, is measured span by span, and ends.

The server tells its own CPU time, that of its main thread, and that of the children it rewrites its
file with; the controller and the replicas tell theirs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.fleet import records
from benchmarks.fleet.parts import Part
from benchmarks.fleet.report import FAN_OUT, HISTORY, QUIET, REST, TRACES, title
from benchmarks.record import Notebook, Options, Protocol, Row
from osd.errors import OSDError

DEPLOYMENT = "fleet"
REPLICAS_OF_A_PROCESS = 128
SECONDS_TO_COME, SECONDS_TO_FAN_OUT = 60.0, 30.0
LOOK_SECONDS = 0.2


class Scene:
    """A server, a controller and so many replicas."""

    def __init__(self, num: int, plan: Protocol, directory: Path, stack: ExitStack) -> None:
        import redis

        from buffers.embedded import EmbeddedValkey

        self.num, self._sizes, self._directory, self._stack = num, plan.sizes, directory, stack
        self._scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="osd-bench-")))
        server = EmbeddedValkey(self._scratch / "valkey", plan.sizes["max_memory"])
        self.url = stack.enter_context(server).url
        self._redis: Any = stack.enter_context(redis.Redis.from_url(self.url, protocol=2))
        self.controller, begun = self.start_controller(0)
        self.version = int(begun["version"])
        self.replicas = [
            self._start_replicas(first) for first in range(0, num, REPLICAS_OF_A_PROCESS)
        ]
        for part in self.replicas:
            part.wait_ready()
        self._wait_until(lambda: self._redis.scard(f"osd:{DEPLOYMENT}:replicas") == num)

    def start_controller(self, history_seconds: int) -> tuple[Part, Row]:
        """A controller that knows what so many seconds have brought, and what it says of it."""
        settings = {
            "url": self.url,
            "deployment": DEPLOYMENT,
            "data_dir": str(self._scratch / "data"),
            "num_replicas": self.num,
            "history_seconds": history_seconds,
        }
        part = self._start("controller", settings)
        return part, part.wait_ready()

    def _start_replicas(self, first: int) -> Part:
        chosen = ("seconds_between_polls", "max_traces", "trace_tokens")
        settings = {
            "url": self.url,
            "deployment": DEPLOYMENT,
            "first": first,
            "num": min(REPLICAS_OF_A_PROCESS, self.num - first),
            **{name: self._sizes[name] for name in chosen},
        }
        return self._start("replicas", settings)

    def _start(self, name: str, settings: Row) -> Part:
        log = self._scratch / f"{name}.log"
        return self._stack.enter_context(Part(f"benchmarks.fleet.{name}", settings, log))

    def set_pace(self, traces_per_second: float, *, polls: bool) -> None:
        """Traces put by all replicas together, and whether the replicas poll and report."""
        for part in self.replicas:
            rate = traces_per_second / len(self.replicas)
            part.ask("pace", traces_per_second=rate, polls=polls)

    def span(self, controller: Part) -> Row:
        """What was spent and done in the next span."""
        before, started = self._totals(controller), time.perf_counter()
        time.sleep(self._sizes["span_seconds"])
        after, seconds = self._totals(controller), time.perf_counter() - started
        looks = after.pop("look_seconds")
        spent = {name: after[name] - before[name] for name in after}
        return {"seconds": seconds, "look_seconds": looks, **spent}

    def _totals(self, controller: Part) -> Row:
        info = self._redis.info("everything")
        told, replicas = controller.ask("report"), [part.ask("report") for part in self.replicas]
        kinds = ("user", "sys", "user_children", "sys_children")
        return {
            "look_seconds": told["look_seconds"],
            "controller_cpu_s": told["cpu_seconds"],
            "replicas_cpu_s": sum(each["cpu_seconds"] for each in replicas),
            "num_traces": sum(each["num_put"] for each in replicas),
            "redis_cpu_s": sum(info[f"used_cpu_{kind}"] for kind in kinds),
            "redis_main_cpu_s": sum(info[f"used_cpu_{k}_main_thread"] for k in kinds[:2]),
            "bytes_in": info["total_net_input_bytes"],
            "bytes_out": info["total_net_output_bytes"],
            "num_polls": sum(each["num_polls"] for each in replicas),
            # Of what is sent here, only a heartbeat adds to a set.
            "num_heartbeats": info["cmdstat_sadd"]["calls"],
            "num_records": self._redis.xinfo_stream(f"osd:{DEPLOYMENT}:feed")["entries-added"],
        }

    def stored(self) -> Row:
        """What lies in the server now."""
        from buffers.redis_stream import RedisTraceBuffer

        feed = f"osd:{DEPLOYMENT}:feed"
        buffer = RedisTraceBuffer(self.url, deployment=DEPLOYMENT, target_id=records.TARGET_ID)
        stats = buffer.stats()
        buffer.close()
        return {
            "feed_bytes": self._redis.memory_usage(feed, samples=0),
            "feed_records": self._redis.xlen(feed),
            "traces_bytes": stats.num_bytes,
            "traces_stored": stats.num_traces + stats.num_holdout,
        }

    def fan_out(self) -> Row:
        """The other draft is wanted: seconds until each replica has been told."""
        self.version = 5 - self.version  # the two that the controller published
        told_at = self.controller.ask("promote", version=self.version)["at"]
        found: list[float] = []

        def is_seen() -> bool:
            found[:] = [
                at
                for part in self.replicas
                for at in part.ask("seen", version=self.version)["at"]
                if at >= told_at
            ]
            return len(found) == self.num

        self._wait_until(is_seen, SECONDS_TO_FAN_OUT)
        return {"seconds": sorted(at - told_at for at in found)}

    def _wait_until(self, holds: Callable[[], bool], seconds: float = SECONDS_TO_COME) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                logs = "\n".join(log.read_text()[-2000:] for log in self._scratch.glob("*.log"))
                raise OSDError(f"the {self.num} replicas were not heard within {seconds} s: {logs}")
            time.sleep(LOOK_SECONDS)


def measure(num: int, notebook: Notebook, plan: Protocol, options: Options) -> None:
    """All arms of one fleet."""
    sizes, group = plan.sizes, title(num)
    with ExitStack() as stack:
        options.say(f"{group}: starting")
        scene = Scene(num, plan, options.directory, stack)

        def add(arm: str, i: int, row: Row) -> None:
            notebook.add(group=group, arm=arm, num_replicas=num, span=i, **row)

        for arm, rate in ((QUIET, 0), (REST, 0), (TRACES, sizes["traces_per_second"])):
            options.say(f"{group}: {arm}")
            scene.set_pace(rate, polls=arm == QUIET)
            scene.span(scene.controller)  # warms up
            for i in range(sizes["spans"]):
                add(arm, i, scene.span(scene.controller) | {"stored": scene.stored()})
        scene.set_pace(0.0, polls=True)
        options.say(f"{group}: {FAN_OUT}")
        for i in range(sizes["fan_outs"]):
            add(FAN_OUT, i, scene.fan_out())
        options.say(f"{group}: {HISTORY}")
        scene.controller.close()
        controller, begun = scene.start_controller(sizes["history_seconds"])
        scene.span(controller)
        for i in range(sizes["spans"]):
            add(HISTORY, i, scene.span(controller) | {"history_bytes": begun["history_bytes"]})
