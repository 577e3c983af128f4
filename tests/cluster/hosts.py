"""Hosts on one machine: each has processes, an address, a home, /tmp and ssh server of its own.

    laptop ──┐
    head ────┼── a bridge          10.77.0.0/24, which exists nowhere else
    worker ──┘

They see the machine's file system, but for their homes and what they keep in memory, and share no
folder in which they write. Python and the project's environment are mounted into each home, so that
`make setup` has nothing left to do there.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.paths import ROOT

NAMES = ("head", "worker", "laptop")
CHECKOUT = "osd-checkout"
"""Where the cluster's file puts the project, in a host's home."""
PROGRAMS = ("ip", "unshare", "sshd", "ssh", "ssh-keygen", "rsync")


def missing() -> str:
    """Why there can be no such hosts here; "" when there can."""
    if os.geteuid() != 0:
        return "hosts are namespaces, which only root may make"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    gone = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"not installed: {', '.join(gone)}" if gone else ""


@dataclass
class Host:
    """One of them. Commands run in it by ssh, as a person would run them."""

    name: str
    address: str
    folder: Path
    network: str
    key: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        """Its home as this machine sees it."""
        return self.folder / "home"

    def run(self, command: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._ssh(command), capture_output=True, text=True, timeout=timeout, check=False
        )

    def begin(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._ssh(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self) -> dict[int, str]:
        """Command lines by process id, but for the ssh server's own and those of this question."""
        lines = self.run("ps -eo pid=,args=").stdout.splitlines()
        found = dict(line.strip().split(None, 1) for line in lines)
        ours = ("sshd", "/usr/sbin/sshd", "ps -eo", "bash -c")
        return {int(pid): args for pid, args in found.items() if not args.startswith(ours)}

    def named(self, *parts: str) -> dict[int, str]:
        """Processes with one of these texts in their command lines."""
        return {p: args for p, args in self.processes().items() if any(x in args for x in parts)}

    def _ssh(self, command: str) -> list[str]:
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "BatchMode=yes"]
        named = [word for option in options for word in ("-o", option)]
        inside = ["ip", "netns", "exec", self.network]
        return [*inside, "ssh", "-q", "-i", str(self.key), *named, f"root@{self.address}", command]


@dataclass
class Hosts:
    folder: Path
    run: str = field(default_factory=lambda: f"osd{secrets.token_hex(2)}")
    hosts: dict[str, Host] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def cut_off(self, name: str) -> None:
        """Take the host's cable out."""
        self._ip("netns", "exec", self._net("bridge"), "ip", "link", "set", f"b-{name}", "down")

    def plug_in(self, name: str) -> None:
        self._ip("netns", "exec", self._net("bridge"), "ip", "link", "set", f"b-{name}", "up")

    def start(self, stack: ExitStack) -> None:
        self.folder.mkdir(parents=True)
        key = self.folder / "key"
        make_key(key)
        self._add_network("bridge", stack)
        bridge = self._net("bridge")
        self._ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", bridge, "link", "set", "bridge", "up")
        for number, name in enumerate(NAMES, 1):
            host = Host(name, f"10.77.0.{number}", self.folder / name, self._net(name), key)
            self.hosts[name] = host
            self._plug(host, stack)
            self._boot(host, stack)

    def _plug(self, host: Host, stack: ExitStack) -> None:
        self._add_network(host.name, stack)
        bridge, cable = self._net("bridge"), f"b-{host.name}"
        self._ip(
            "-n", bridge, "link", "add", cable, "type", "veth",
            "peer", "name", "eth0", "netns", host.network,
        )  # fmt: skip
        self._ip("-n", bridge, "link", "set", cable, "master", "bridge", "up")
        self._ip("-n", host.network, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            self._ip("-n", host.network, "link", "set", device, "up")

    def _boot(self, host: Host, stack: ExitStack) -> None:
        ssh = host.home / ".ssh"
        ssh.mkdir(parents=True)
        (host.folder / "tmp").mkdir()
        for path in (host.home, ssh):
            path.chmod(0o700)
        shutil.copy(f"{host.key}.pub", ssh / "authorized_keys")
        shutil.copy(host.key, ssh / "key")
        make_key(ssh / "host-key")
        (host.home / ".bashrc").touch()
        with open(self.folder / f"{host.name}.log", "wb") as log:
            host.process = subprocess.Popen(
                ["ip", "netns", "exec", host.network, "unshare", "--pid", "--mount", "--uts",
                 "--ipc", "--fork", "--mount-proc", "--kill-child", "sh", "-euc",
                 "\n".join(self._boot_commands(host))],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        stack.callback(_end, host.process)
        deadline = time.monotonic() + 20
        while host.run("true").returncode:
            assert host.process.poll() is None, (self.folder / f"{host.name}.log").read_text()
            assert time.monotonic() < deadline, f"{host.name} does not let anybody in"
            time.sleep(0.1)

    def _boot_commands(self, host: Host) -> Iterator[str]:
        home = Path("~").expanduser()
        yield f"hostname {host.name}"
        yield "mount --make-rprivate /"
        yield "mount -t tmpfs -o size=2g tmpfs /dev/shm"
        hidden = {home: host.home, Path("/tmp"): host.folder / "tmp"}
        for path in (Path(sys.base_prefix).resolve(), ROOT.resolve()):
            for folder, instead in hidden.items():
                if path.is_relative_to(folder):
                    inside = instead / path.relative_to(folder)
                    yield f"mkdir -p {inside} && mount --bind {path} {inside}"
        venv = host.home / CHECKOUT / ".venv"
        yield f"mkdir -p {venv} && mount --bind {ROOT / '.venv'} {venv}"
        yield f"mount --rbind {host.home} {home}"
        yield f"mkdir -p /run/sshd && mount --rbind {host.folder / 'tmp'} /tmp"
        yield (
            f"exec /usr/sbin/sshd -D -e -f /dev/null -h {home}/.ssh/host-key "
            "-o PermitRootLogin=yes -o StrictModes=no -o UsePAM=no -o PidFile=none"
        )

    def _add_network(self, name: str, stack: ExitStack) -> None:
        self._ip("netns", "add", self._net(name))
        stack.callback(self._ip, "netns", "del", self._net(name))

    def _net(self, name: str) -> str:
        return f"{self.run}-{name}"

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)


def make_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With the first process of a host, all others end."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def hosts_in(folder: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        found = Hosts(folder)
        found.start(stack)
        yield found
