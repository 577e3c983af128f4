"""Finds models on disk, and tells targets apart."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

from osd.errors import ConfigError, first_line
from osd.models import built_in
from osd.models.compatibility import read_config
from osd.models.eagle3 import is_eagle3

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
"""What is fetched of a model from the hub."""
SAMPLE_BYTES = 1 << 16
SAMPLES_PER_FILE = 64


def resolve(name: str, key: str) -> Path:
    """The directory of a model given as directory, hub name or built-in name.

    key: configuration key of `name`, for errors

    Raises `ConfigError` with key and remedy.
    """
    check_name(name, key)
    if name in built_in.NAMES:
        return built_in.directory_of(name, key)
    path = Path(os.path.expanduser(name))  # pathlib raises where there is no such home
    return path.resolve() if os.path.isdir(path) else _download(name, key)


def check_name(name: str, key: str) -> None:
    """Raise `ConfigError`, as `resolve` does, for a name that can be of no model. Nothing is
    fetched or built."""
    if not name:
        raise ConfigError(
            f"{key} is not set: give models, as in `osd serve ./target --draft ./draft`"
        )
    if name in built_in.NAMES:
        return built_in.check_kind(name, key)
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):  # pathlib raises for a name that is too long
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{key}={name}: no config.json there; give a model in Hugging Face format"
            )
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ConfigError(
            f"{key}={name}: no such directory; give a model directory or a hub name (owner/model)"
        )


def cached(name: str, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """The directory of a model that was loaded on this machine before. Nothing is downloaded.
    Raises `ConfigError`."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser().resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True)
        )
    except Exception as error:  # noqa: BLE001  the hub's client raises many types
        raise ConfigError(
            f"{name}: no directory, and not in the hub's cache ({type(error).__name__}); give "
            "models by their directories"
        ) from None


def _download(name: str, key: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(name, allow_patterns=PATTERNS))
        if _is_pickled_head(found):
            snapshot_download(name, allow_patterns=[*PATTERNS, "pytorch_model*.bin"])
        return found
    except Exception as error:  # noqa: BLE001  the hub's client raises many types
        raise ConfigError(
            f"{key}={name}: no such directory, and the hub does not give it ({first_line(error)}); "
            "correct the name, set HF_TOKEN where the model is gated, or give a directory"
        ) from None


def _is_pickled_head(directory: Path) -> bool:
    """Whether a head was fetched without weights: some have them in torch's format alone."""
    try:
        return not any(directory.glob("*.safetensors")) and is_eagle3(read_config(directory))
    except ConfigError:
        return False


def fingerprint(directory: Path) -> str:
    """Identity of a target: 16 hex digits over its configuration, tokenizer and weights.

    Of each weight file the size and samples spread over the data are hashed. Reading all of a large
    model would take minutes at every start.
    """
    digest = hashlib.sha256()
    for name in ("config.json", *TOKENIZER_FILES):
        file = directory / name
        digest.update(name.encode() + (file.read_bytes() if file.is_file() else b"-"))
    weights = [*directory.glob("*.safetensors")] or [*directory.glob("pytorch_model*.bin")]
    for file in sorted(weights):
        digest.update(file.name.encode() + struct.pack("<q", file.stat().st_size))
        with file.open("rb") as data:
            step = max(file.stat().st_size // SAMPLES_PER_FILE, SAMPLE_BYTES)
            for offset in range(0, file.stat().st_size, step):
                data.seek(offset)
                digest.update(data.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
