"""Runs one server as its child, and ends it when the process that started the guardian ends in any
way.

A script, `guardian.py PARENT_PID PROGRAM ARG...`, that needs only the standard library:

    service ──pipe──► guardian ──PDEATHSIG──► server

When the service ends, the pipe closes. If a forked child holds the pipe open, the guardian notices
that its parent changed. When the guardian ends, the kernel kills the server (Linux):
PR_SET_PDEATHSIG is bound to the *thread* that started the child. The service has many threads, so
the guardian exists, which has one. It ends when the server ends.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 1.5
_LOOK_SECONDS = 0.5


def guarded(command: list[str]) -> list[str]:
    """The command that runs another one under a guardian of the calling process. It needs a pipe
    as its standard input."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End a guarded process, and what it guards; kill it when that takes longer than `seconds`."""
    assert process.stdin is not None
    process.stdin.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(argv: list[str]) -> int:
    parent_pid, command = int(argv[1]), argv[2:]
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # close_fds=False: the server holds the lock of its directory until it ends.
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, close_fds=False, preexec_fn=_die_with_us()
    )
    while server.poll() is None and not stops and os.getppid() == parent_pid:
        ready, _, _ = select.select([0, wakeup_read], [], [], _LOOK_SECONDS)
        if 0 in ready and not os.read(0, 1):
            break
        if wakeup_read in ready:
            os.read(wakeup_read, 64)
    return _end(server)


def _end(server: subprocess.Popen[bytes]) -> int:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
    code = server.wait()
    return code if code >= 0 else 128 - code


def _die_with_us() -> Callable[[], None] | None:
    """What the child runs before it executes the server. Safe, as this process has one thread."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    guardian_pid = os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian_pid:
            os._exit(1)

    return prepare


if __name__ == "__main__":
    sys.exit(main(sys.argv))
