"""`osd cluster check FILE`: the file for `ray up`, then the machines it names; or a manifest for
KubeRay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from osd.doctor import cluster_file, cluster_hosts, kuberay
from osd.doctor.checks import Check, tell
from osd.doctor.documents import documents_of
from osd.service.host import PORT


def run(path: Path, *, is_offline: bool, crds: Path | None, say: Callable[[str], None]) -> int:
    """Print every check. The exit status is 1 when one is broken. Raises `ConfigError` where the
    file is no YAML.

    crds: a folder with the definitions of KubeRay's kinds
    """
    documents = documents_of(path)
    if any("apiVersion" in document.content for document in documents):
        return tell(kuberay.checks(documents, crds), say)
    return tell(checks(cluster_file.read(path), is_offline), say)


def checks(
    file: cluster_file.ClusterFile, is_offline: bool, ask: cluster_hosts.Ask | None = None
) -> Iterator[Check]:
    """Machines are asked only where the file is right."""
    of_file = [*cluster_file.check_file(file), *cluster_file.check_commands(file)]
    yield from of_file
    if is_offline or any(check.ok is False for check in of_file):
        return
    if not file.is_local:
        yield Check("machines", None, "not asked: the cloud starts them")
        return
    yield cluster_hosts.check_here()
    config = cluster_file.head_configuration(file)
    ports = {file.hosts[0]: [PORT, config.serving.port, config.control.port]}
    yield from cluster_hosts.check_hosts(file, ports, config, ask or cluster_hosts.ssh(file))
