"""Start, measure, demonstrate and end a service: serve, profile, stop, demo."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from osd.cli.options import (
    ConfigOption,
    DeploymentOption,
    DraftOption,
    NoHeadOption,
    split_arguments,
)

app = typer.Typer()


@app.command(
    epilog="Examples:  osd serve ./llama-8b --draft ./llama-160m    "
    "osd serve ./llama-8b --draft ./llama-8b-eagle3    "
    "osd serve --config configs/tiny-cpu.yaml serving.port=9000"
)
def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TARGET] [SECTION.KEY=VALUE]...", help="Target model; overrides."),
    ] = None,
    draft: DraftOption = None,
    head: NoHeadOption = False,
    config: ConfigOption = None,
    port: Annotated[int | None, typer.Option(help="Service port.")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="A Redis or Valkey to use instead of a private one.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster: local, auto, or an address.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when ready; the service runs on.")
    ] = False,
) -> None:
    """Serve TARGET through the OpenAI API, with a draft that keeps learning. Ctrl-C ends
    everything."""
    target, overrides = split_arguments(arguments or [])
    flags = {
        "serving.target": target,
        "serving.draft": draft,
        "serving.port": port,
        "buffer.redis_url": redis_url,
        "ray.address": address,
    }
    from osd.config import reading

    resolved = reading.load(config, overrides, flags)
    if detach:
        from osd.service.detach import serve_detached

        serve_detached(resolved.config, sys.argv, typer.echo)
        return
    from osd.service import launch

    launch.serve(resolved.config, typer.echo)


@app.command(
    epilog="Examples:  osd profile ./llama-8b --draft ./llama-160m    "
    "osd profile --config configs/tiny-cpu.yaml --again"
)
def profile(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TARGET] [SECTION.KEY=VALUE]...", help="Target model; overrides."),
    ] = None,
    draft: DraftOption = None,
    head: NoHeadOption = False,
    config: ConfigOption = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure even if a stored profile fits.")
    ] = False,
) -> None:
    """Measure what steps take on this hardware with these models, keep it for `osd serve`, and
    print it."""
    target, overrides = split_arguments(arguments or [])
    from osd.config import reading

    flags = {"serving.target": target, "serving.draft": draft}
    resolved = reading.load(config, overrides, flags)
    from osd.service.profile import run

    run(resolved.config, again=again, say=typer.echo)


@app.command(epilog="Example:  osd stop")
def stop(deployment: DeploymentOption = None) -> None:
    """End a running service of this user."""
    from osd.service.detach import stop_service

    typer.echo(f"{stop_service(deployment)} has stopped")


class DemoDraft(StrEnum):
    """What learns in `osd demo`."""

    MODEL = "model"
    EAGLE3 = "eagle3"


@app.command(epilog="Example:  osd demo --html report.html")
def demo(
    report: Annotated[
        Path | None, typer.Option(help="Write the figures to this JSON file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with charts to this file.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the run's data directory and say where it is.")
    ] = False,
    draft: Annotated[
        DemoDraft,
        typer.Option(help="What learns: a draft model, or an EAGLE-3 head on a deeper target."),
    ] = DemoDraft.MODEL,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Tiny models, real vLLM, drifting traffic: acceptance and speed fall, and recover as the draft
    learns."""
    from osd.demo.run import LEARNERS, run

    sys.exit(
        run(
            report_path=report,
            html_path=html,
            keep=keep,
            learner=LEARNERS[draft.value],
            overrides=overrides or [],
        )
    )
