"""Choose what a running service does: pause, resume, steps, drafts."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from osd.cli.answers import tell
from osd.cli.options import DeploymentOption, JsonOption, UrlOption, client_of, show

app = typer.Typer()
drafts_app = typer.Typer(
    help="The drafts a running service has: list them, choose one.", no_args_is_help=True
)


@app.command(epilog="Example:  osd pause")
def pause(
    url: UrlOption = None, deployment: DeploymentOption = None, as_json: JsonOption = False
) -> None:
    """No training, no publishing; serving goes on."""
    tell(client_of(url, deployment).admin("pause"), as_json)


@app.command(epilog="Example:  osd resume")
def resume(
    url: UrlOption = None, deployment: DeploymentOption = None, as_json: JsonOption = False
) -> None:
    """End a pause."""
    tell(client_of(url, deployment).admin("resume"), as_json)


@drafts_app.command("list", epilog="Examples:  osd drafts list    osd drafts list --json")
def drafts_list(
    url: UrlOption = None, deployment: DeploymentOption = None, as_json: JsonOption = False
) -> None:
    """Every draft there is: where it came from, how it was judged, what it is doing."""
    client = client_of(url, deployment)
    drafts = client.get("/osd/drafts")
    if as_json:
        return show(drafts)
    from osd.observe.status_text import drafts_table
    from osd.records import DraftView

    typer.echo(drafts_table(client.parsed(drafts, list[DraftView]), time.time()))


@drafts_app.command(epilog="Example:  osd drafts promote 3")
def promote(
    version: int,
    url: UrlOption = None,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve VERSION now; training goes on from it."""
    tell(client_of(url, deployment).admin("promote", version=version), as_json)


@drafts_app.command(epilog="Example:  osd drafts rollback")
def rollback(
    url: UrlOption = None, deployment: DeploymentOption = None, as_json: JsonOption = False
) -> None:
    """Serve the draft before the current one, and train on from it. The current one can be promoted
    again."""
    tell(client_of(url, deployment).admin("rollback"), as_json)


@drafts_app.command(epilog="Example:  osd drafts pin 3")
def pin(
    version: int,
    url: UrlOption = None,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve VERSION until unpinned, whatever training finds."""
    tell(client_of(url, deployment).admin("pin", version=version), as_json)


@drafts_app.command(epilog="Example:  osd drafts unpin")
def unpin(
    url: UrlOption = None, deployment: DeploymentOption = None, as_json: JsonOption = False
) -> None:
    """End a pin: what is trained from now on may serve again."""
    tell(client_of(url, deployment).admin("unpin"), as_json)


@drafts_app.command(epilog="Example:  osd drafts keep 3")
def keep(
    version: int,
    url: UrlOption = None,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Never prune VERSION."""
    tell(client_of(url, deployment).admin("keep", version=version), as_json)


@app.command(epilog="Examples:  osd steps observe capture    osd steps none")
def steps(
    names: Annotated[
        list[str], typer.Argument(help="Of observe, capture, swap, control; or none.")
    ],
    url: UrlOption = None,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Switch on these steps, and no others, in attached engines. Without a restart of theirs."""
    wanted = [] if names == ["none"] else names
    tell(client_of(url, deployment).set_steps(wanted), as_json)
