"""A model as a Hugging Face directory: which files belong to it, and how they are copied."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from osd.common.files import fsync, sha256
from osd.errors import ReleaseError

WEIGHTS = "model.safetensors"
REQUIRED = ("config.json", WEIGHTS)
RELEASE_RECORD = "release.json"
"""Stands beside the model in a release store, and is not part of it."""
FOREIGN_WEIGHTS = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"}
"""Weights in other formats. Many Hugging Face directories hold them as well."""


def model_files(directory: Path) -> Iterator[Path]:
    """The files that belong to a model: no hidden ones, no weights in other formats."""
    for path in directory.iterdir():
        is_ours = path.name.startswith(".") or path.name == RELEASE_RECORD
        if path.is_file() and not is_ours and path.suffix not in FOREIGN_WEIGHTS:
            yield path


def digests(directory: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Name -> sha256 of the model's files; of those in `known`, what is said there."""
    known = known or {}
    names = sorted(path.name for path in model_files(directory))
    return {name: known.get(name) or sha256(directory / name) for name in names}


def copy_model(source: Path, aside: Path) -> None:
    """Copy the files of a model and bring them to the disk. Links become files.

    Raises `ReleaseError` when a required file is missing.
    """
    missing = [name for name in REQUIRED if not (source / name).is_file()]
    if missing:
        raise ReleaseError(
            f"{source}: no {missing[0]}; a draft is a Hugging Face directory with {WEIGHTS}"
        )
    for path in model_files(source):
        shutil.copyfile(path, aside / path.name)
        fsync(aside / path.name)
