"""What is left of a private Ray is removed, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from osd.service import reaper


def reap(directory: Path) -> subprocess.CompletedProcess[str]:
    """As after a service that has ended."""
    return subprocess.run(
        [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), str(directory)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_the_directory_of_a_ray_is_removed(tmp_path: Path) -> None:
    (inside := tmp_path / f"{reaper.PREFIX}abc" / "r").mkdir(parents=True)
    assert reap(inside.parent).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_no_service_made_stays(tmp_path: Path) -> None:
    (inside := tmp_path / f"{reaper.PREFIX}abc" / "r").mkdir(parents=True)
    for directory in (tmp_path, inside):
        found = reap(directory)
        assert found.returncode == 1 and "is no directory that a service has made" in found.stderr
    assert inside.is_dir()
