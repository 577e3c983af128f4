"""A cache of directories. One process builds each aside, once, and renames it when complete."""

from __future__ import annotations

import fcntl
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from osd.common.files import cache_root
from osd.errors import ConfigError

logger = logging.getLogger(__name__)


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The directory `name` in the cache. When it is missing, `build` fills an empty directory.

    Processes that ask meanwhile wait for the one that builds. Raises `ConfigError` when the cache
    is not writable.
    """
    final = cache_root() / name
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_name(f".{final.name}.lock")):
            if not final.is_dir():
                _build_aside(final, build)
    except OSError as error:
        raise ConfigError(
            f"cache directory {cache_root()}: cannot be used ({error.strerror or error}); set "
            "OSD_CACHE_DIR to a directory you can write to"
        ) from error
    return final


def _build_aside(final: Path, build: Callable[[Path], None]) -> None:
    """Build beside `final`, then rename. Remove first what a killed build left; we hold the
    lock."""
    for left_over in final.parent.glob(f".{final.name}.*/"):
        shutil.rmtree(left_over, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        build(aside)
        aside.chmod(0o755)
        aside.rename(final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The kernel releases it when the process ends in any
    way."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning(
                "another process builds %s: waiting for it",
                path.with_suffix("").name.removeprefix("."),
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
