"""Look at a running service: status, top, logs."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.options import DeploymentOption, JsonOption, UrlOption, client_of, show

app = typer.Typer()


@app.command(epilog="Examples:  osd status    osd status --json")
def status(
    url: UrlOption = None,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a running service is doing; the first line is what is wrong, and the remedy."""
    client = client_of(url, deployment)
    state = client.get("/osd/status")
    if as_json:
        show(state)
        return
    from osd.observe.status_text import NUM_SOUGHT, page
    from osd.records import Event, ServiceStatus

    events = client.parsed(client.get("/osd/events", limit=NUM_SOUGHT), list[Event])
    typer.echo(page(client.parsed(state, ServiceStatus), events))


@app.command(epilog="Examples:  osd top    osd top --window 24h    osd top --once")
def top(
    url: UrlOption = None,
    deployment: DeploymentOption = None,
    window: Annotated[
        str, typer.Option(help="How far the curve reaches back: 5m, 1h, 24h, 7d.")
    ] = "5m",
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame (always so without a terminal).")
    ] = False,
) -> None:
    """The dashboard at a glance, in this terminal: health, acceptance over time, the loop, events.
    q leaves."""
    from osd.observe.top.run import run

    run(lambda: client_of(url, deployment), window, once=once)


@app.command(epilog="Examples:  osd logs    osd logs trainer --lines 50")
def logs(
    part: Annotated[
        str | None, typer.Argument(help="A part of the service; without it, all are listed.")
    ] = None,
    lines: Annotated[
        int, typer.Option(min=1, max=10_000, help="How many of the last lines.")
    ] = 200,
    url: UrlOption = None,
    deployment: DeploymentOption = None,
) -> None:
    """What a part of the service logged, on whichever machine it runs."""
    client = client_of(url, deployment)
    if part is not None:
        typer.echo(client.log(part, lines))
        return
    for place in client.places():
        typer.echo(f"{place['part']:12} {place['host']}:{place['log']}")
