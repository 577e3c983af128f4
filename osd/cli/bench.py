"""`osd bench`: the benches of a checkout, or the reason why there are none."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from osd.errors import ConfigError

CHECKOUT = Path(__file__).parents[2]


def add_benches(app: typer.Typer, checkout: Path = CHECKOUT) -> None:
    """Add the commands of benchmarks/ to `app`. An installation does not contain that directory."""
    if (checkout / "pyproject.toml").exists() and (checkout / "benchmarks").is_dir():
        sys.path.insert(0, str(checkout))
        from benchmarks.cli import app as benches

        app.add_typer(benches, name="bench")
    else:
        app.command(
            "bench",
            hidden=True,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(refuse)


def refuse() -> None:
    raise ConfigError(
        "osd bench: the benches stand in a checkout of the project, not in an installation"
    )
