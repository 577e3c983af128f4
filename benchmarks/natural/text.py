"""The source of the Python standard library as text: written by people, and present wherever Python
runs.

Traffic classes are groups of its packages. A file is used either for training or for serving, never
for both.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from osd.errors import ConfigError

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "email": (
        "email/**/*.py",
        "mailbox.py",
        "imaplib.py",
        "smtplib.py",
        "poplib.py",
        "mimetypes.py",
    ),
    "asyncio": (
        "asyncio/**/*.py",
        "concurrent/**/*.py",
        "multiprocessing/**/*.py",
        "threading.py",
        "subprocess.py",
    ),
    "unittest": (
        "unittest/*.py",
        "doctest.py",
        "pdb.py",
        "bdb.py",
        "trace.py",
        "pstats.py",
        "profile.py",
    ),
    "xml": ("xml/**/*.py", "html/__init__.py", "html/parser.py", "xmlrpc/**/*.py", "plistlib.py"),
    "decimal": (
        "_pydecimal.py",
        "fractions.py",
        "statistics.py",
        "numbers.py",
        "random.py",
        "*datetime.py",
    ),
}
"""The classes of traffic: files of the standard library by pattern, as far as this version of
Python has them."""

HOME = "email"
"""The one class the natural draft is trained on."""

MIN_FILE_BYTES = 1000
"""Files below it are left out: next to nothing but imports and a licence."""

SERVED_EVERY, SERVED_FIRST = 3, 1
"""Of a class's files from the largest to the smallest, each third from the second on is served."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the standard library.

    Example:
        SourceFile(name="email/header.py", text="# Copyright (C) 2002-2007 Python ...\\n...")
    """

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Split:
    """The files of one class, from the largest to the smallest."""

    train: tuple[SourceFile, ...]
    serve: tuple[SourceFile, ...]


def stdlib() -> Path:
    """Where this Python keeps its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def split(package: str, root: Path | None = None) -> Split:
    """The files of a class, apart. `root`: where the library lies, this Python's own by default.

    Raises `ValueError` for an unknown class and `ConfigError` where there are too few files to set
    any apart.
    """
    if package not in PACKAGES:
        raise ValueError(f"package {package!r}: must be one of {', '.join(PACKAGES)}")
    root = root or stdlib()
    files = _read(root, PACKAGES[package])
    if len(files) < SERVED_EVERY:
        raise ConfigError(
            f"{root}: has {len(files)} source files for {package!r}, needed are {SERVED_EVERY}; "
            "use a Python that "
            "comes with the source of its standard library"
        )
    is_served = [i % SERVED_EVERY == SERVED_FIRST for i in range(len(files))]
    return Split(
        train=tuple(file for file, served in zip(files, is_served, strict=True) if not served),
        serve=tuple(file for file, served in zip(files, is_served, strict=True) if served),
    )


def _read(root: Path, patterns: Sequence[str]) -> list[SourceFile]:
    """Files that match, from the largest to the smallest, by name where equal. No two have the same
    text."""
    paths = {
        path
        for pattern in patterns
        for path in root.glob(pattern)
        if path.stat().st_size >= MIN_FILE_BYTES
    }
    texts: dict[str, str] = {}
    for path in sorted(paths):
        texts.setdefault(
            path.read_bytes().decode("utf-8", "replace"), path.relative_to(root).as_posix()
        )
    return sorted(
        (SourceFile(name, text) for text, name in texts.items()),
        key=lambda f: (-len(f.text), f.name),
    )


def text_hash(root: Path | None = None) -> str:
    """16 hex digits that change with any name or byte of the text of any class."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        parts = split(package, root)
        for role, files in (("train", parts.train), ("serve", parts.serve)):
            for file in files:
                digest.update(
                    f"{package}\0{role}\0{file.name}\0{len(file.text)}\0{file.text}".encode()
                )
    return digest.hexdigest()[:16]
