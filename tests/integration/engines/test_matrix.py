"""What docs/engines.md ticks is what runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.integration.engines import matrix
from tests.support.ways import WAYS


def test_the_page_lists_the_tests_of_this_folder_and_the_ways_they_run_in() -> None:
    listed = {
        (test, way.name) for test in matrix.all_tests() for way in WAYS if matrix.is_run(test, way)
    }
    assert collected() == listed


def collected() -> set[tuple[str, str]]:
    """(test, way) of all tests of this folder, as pytest finds them."""
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-2000:]
    names = "|".join(way.name for way in WAYS)
    found = re.findall(rf"::(test_\w+)\[.*?\b({names})\b.*\]", done.stdout)
    assert found
    return set(found)
