"""The machines of a Ray cluster: cluster check, cluster head, cluster worker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from osd.cli.options import ConfigOption

cluster_app = typer.Typer(
    help="The machines of a Ray cluster, as `ray up` starts them.", no_args_is_help=True
)

AddressArgument = Annotated[
    str,
    typer.Argument(
        help="Address by which the others reach this machine; here = the one by which it reaches "
        "the network."
    ),
]


ResourceOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Custom resource of this machine: NAME, or NAME=N for N parts that ask for it. May "
        "stand several times."
    ),
]


@cluster_app.command(
    "check",
    epilog="Examples:  osd cluster check configs/cluster-local.yaml    "
    "osd cluster check cluster.yaml --offline    "
    "osd cluster check configs/kuberay.yaml --crds ./crds",
)
def check(
    file: Annotated[Path, typer.Argument(help="A file for `ray up`, or a manifest for KubeRay.")],
    offline: Annotated[
        bool, typer.Option("--offline", help="Look at the file alone, and ask no machine.")
    ] = False,
    crds: Annotated[
        Path | None,
        typer.Option(
            help="Folder with KubeRay's CRDs: the fields of a manifest are checked against them."
        ),
    ] = None,
) -> None:
    """What in FILE, or on its machines, would keep `ray up` or KubeRay from making a service of
    them."""
    from osd.doctor.cluster import run

    sys.exit(run(file, is_offline=offline, crds=crds, say=typer.echo))


@cluster_app.command(
    "head",
    epilog="Examples:  osd cluster head 10.0.0.1 --config osd.yaml serving.host=0.0.0.0    "
    "osd cluster head here --config osd.yaml --resource serve serving.replicas=2 "
    "ray.replica_resource=serve",
)
def head(
    address: AddressArgument,
    config: ConfigOption = None,
    resource: ResourceOption = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Run Ray's head and the service on this machine, unless they run like that already."""
    from osd.service.host import start_head

    start_head(address, config, overrides or [], resource or [], typer.echo)


@cluster_app.command(
    "worker",
    epilog="Examples:  osd cluster worker 10.0.0.1 10.0.0.2 --resource train    "
    "osd cluster worker 10.0.0.1 here --resource train --resource serve=2",
)
def worker(
    head: Annotated[str, typer.Argument(help="Address of the head.")],
    address: AddressArgument,
    resource: ResourceOption = None,
) -> None:
    """Run Ray on this machine, joined to the head, unless it runs like that already."""
    from osd.service.host import start_worker

    start_worker(head, address, resource or [], typer.echo)
