"""`osd bench`: the benches of a checkout, or the reason why there are none."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models of a bench, and what they are asked."""

    target: Path
    draft: Path
    """A draft model or an EAGLE-3 head."""
    traffic: Mapping[str, Sequence[str]]
    """Kind of traffic -> prompts."""


FAMILY_PROMPTS = 128
"""Of each kind of traffic."""


def family(name: str) -> Family:
    """The target of a family, at the cost of a far larger model, with its draft: built first where
    they are missing. Raises `ConfigError` where there is none of this name."""
    try:
        from benchmarks.traffic.family import FAMILIES, FIRST_SERVED
    except ImportError:
        raise ConfigError("--family: the families stand in a checkout of the project") from None
    if name not in FAMILIES:
        raise ConfigError(f"--family: {name!r} is none of {', '.join(FAMILIES)}")
    found = FAMILIES[name]
    prompts = {
        domain: tuple(found.prompts(domain, FIRST_SERVED, FAMILY_PROMPTS))
        for domain in found.domains()
    }
    target, draft = found.costly_models()
    return Family(target=target, draft=draft, traffic=prompts)


def refuse() -> None:
    raise ConfigError(
        "osd bench: the benches stand in a checkout of the project, not in an installation"
    )
