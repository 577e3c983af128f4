"""Debian's packages with the same books and manual pages in many languages, fetched once into the
cache.

    apt-get download ─► dpkg-deb --fsys-tarfile ─► the files of five languages ─► the cache

Nothing is installed, and nothing needs the rights of an administrator.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from osd.common.files import cache_root
from osd.errors import ConfigError
from osd.tiny.cache import build_once

LANGUAGES = ("en", "de", "fr", "es", "ru")
PACKAGES = (
    "debian-handbook",
    "installation-guide-amd64",
    "manpages",
    "manpages-de",
    "manpages-es",
    "manpages-fr",
    "manpages-ru",
)
HANDBOOK, GUIDE, MANUAL = "handbook", "guide", "manual"
_HANDBOOK_NAMES = {"en": "en-US", "de": "de-DE", "fr": "fr-FR", "es": "es-ES", "ru": "ru-RU"}
VERSIONS = "versions"
"""File with a line `name_version` for each package."""


def places(language: str) -> Mapping[str, str]:
    """Source -> pattern of its files in that language, below the root of the unpacked packages."""
    own = "" if language == "en" else f"{language}/"
    return {
        HANDBOOK: f"usr/share/doc/debian-handbook/html/{_HANDBOOK_NAMES[language]}/*.html",
        GUIDE: f"usr/share/doc/installation-guide-amd64/{language}/*.html",
        MANUAL: f"usr/share/man/{own}man[1-8]/*.gz",
    }


def cache_name() -> str:
    """Of the unpacked files in the cache; it follows what is fetched of which packages."""
    wanted = json.dumps([PACKAGES, [places(language) for language in LANGUAGES]])
    return f"prose-packages-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"


def fetched() -> Path:
    """Where the files lie, fetched first where they are missing (60 MB).

    Raises `ConfigError` where apt or the network is missing.
    """
    return build_once(cache_name(), _fetch)


def versions(root: Path) -> str:
    """What was fetched: a line for each package."""
    return (root / VERSIONS).read_text()


def _fetch(directory: Path) -> None:
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise _cannot(f"{program} is not on this machine")
    with tempfile.TemporaryDirectory(prefix="osd-packages-") as folder:
        done = subprocess.run(
            ["apt-get", "download", "-o", "APT::Sandbox::User=root", *PACKAGES],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        archives = sorted(Path(folder).glob("*.deb"))
        if done.returncode or len(archives) < len(PACKAGES):
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            raise _cannot(f"apt-get download: {lines[-1]}")
        for archive in archives:
            unpack(archive, directory)
    names = [archive.stem.rsplit("_", 1)[0] for archive in archives]
    (directory / VERSIONS).write_text("".join(f"{name}\n" for name in names))


def _cannot(reason: str) -> ConfigError:
    return ConfigError(
        f"Debian's packages for the prose family: {reason}; call it where apt reaches Debian's "
        f"archive (after `apt-get update`), or copy {cache_root() / cache_name()} from there"
    )


def unpack(archive: Path, directory: Path, languages: Sequence[str] = LANGUAGES) -> None:
    """Write the files of these languages that a package holds below `directory`."""
    patterns = [pattern for one in languages for pattern in places(one).values()]
    with (
        subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE
        ) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as members,
    ):
        for member in members:
            path = member.name.removeprefix("./")
            is_wanted = any(
                path.count("/") == pattern.count("/") and fnmatch.fnmatch(path, pattern)
                for pattern in patterns
            )
            if member.isreg() and is_wanted:
                members.extract(member, directory, filter="data")
        assert process.stdout is not None
        process.stdout.read()  # what stands behind the archive's end, so that it ends in peace
    if process.returncode:
        raise _cannot(f"dpkg-deb could not read {archive.name}")
