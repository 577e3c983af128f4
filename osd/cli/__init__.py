"""The command line.

Importing it loads neither torch nor vllm nor ray, so that `osd --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import Annotated

import typer

import osd
from osd.cli import bench, cluster, drafts, evaluating, serving, settings, training, watching
from osd.errors import OSDError

app = typer.Typer(
    name="osd",
    help="Serve a large model with a draft model that keeps learning from live traffic.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _part in (serving, watching, drafts, training, evaluating, settings):
    app.add_typer(_part.app)
app.add_typer(drafts.drafts_app, name="drafts")
app.add_typer(training.traces_app, name="traces")
app.add_typer(settings.config_app, name="config")
app.add_typer(cluster.cluster_app, name="cluster")
bench.add_benches(app)


def main() -> None:
    """Entry point. An error that a user can cause becomes one line; with `OSD_DEBUG=1` it keeps its
    traceback."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what its encoding lacks ends no command
    try:
        app()
    except OSDError as error:
        if os.environ.get("OSD_DEBUG"):
            raise
        print(f"osd: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_status)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"osd {osd.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None: ...
