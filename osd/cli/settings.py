"""Look at a configuration and at what it runs on: config show, doctor."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from osd.cli.options import ConfigOption, split_arguments

app = typer.Typer()
config_app = typer.Typer(
    help="The configuration: what it is and where each value comes from.", no_args_is_help=True
)


@config_app.command(
    "show", epilog="Example:  osd config show configs/tiny-cpu.yaml serving.port=9000"
)
def config_show(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE] [SECTION.KEY=VALUE]...")
    ] = None,
) -> None:
    """The resolved configuration, each value with its origin. Keys and passwords are not shown."""
    from osd.config import reading
    from osd.config.secrets import without_secrets
    from osd.exchange.redis_url import mask_url

    file, overrides = split_arguments(arguments or [])
    resolved = reading.load(file, overrides)
    leaves = reading.leaves(resolved.config)
    url = resolved.config.buffer.redis_url
    for key, value in (leaves | ({"buffer.redis_url": mask_url(url)} if url else {})).items():
        origin = resolved.origins.get(key) or next(
            (o for k, o in resolved.origins.items() if k.startswith(key + ".")), "default"
        )
        typer.echo(f"{key} = {json.dumps(without_secrets(value))}    # {origin}")


@app.command(
    epilog="Examples:  osd doctor    osd doctor --config configs/tiny-cpu.yaml    "
    "osd doctor serving.target=./llama-8b serving.draft=./llama-160m"
)
def doctor(
    config: ConfigOption = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """What is installed, which engine runs and why, whether the models fit, what the draft costs,
    what is broken."""
    from osd.config import reading
    from osd.doctor.ladder import run

    sys.exit(run(reading.load(config, overrides or []).config, typer.echo))
