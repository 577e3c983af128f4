"""`osd profile` as a user runs it measures an engine, and the result is there the next time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import services
from tests.support.pairs import Pair
from tests.support.paths import ROOT


def profile(cache: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, with a cache of its own."""
    command = [sys.executable, "-m", "osd", "profile", *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OSD_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_what_was_measured_is_kept_and_found_again(pair: Pair, tmp_path: Path) -> None:
    """The times printed are those kept; a second run measures nothing, so that they stay to the
    last digit."""
    arguments = services.settings("profile", tmp_path / "data", pair.target, pair.draft)
    first = profile(tmp_path, *arguments, "speculation.calibration_seconds=60")
    assert first.returncode == 0, first.stderr[-3000:]
    rows = re.findall(
        r"^ *batch (\d+)((?: +[\d.]+){5}) +([\d.]+) \(k = 4\)$", first.stdout, re.MULTILINE
    )
    assert [int(batch) for batch, *_ in rows] == [1, 4, 16], "up to max_num_seqs"
    for _, times, efficiency in rows:
        assert all(float(ms) > 0 for ms in times.split()) and float(efficiency) > 0
    kept = re.search(r"^kept in (\S+)$", first.stdout, re.MULTILINE)
    assert kept and Path(kept[1]).parent == tmp_path / "profiles"
    before = Path(kept[1]).read_bytes()
    assert json.loads(before)

    second = profile(tmp_path, *arguments, "speculation.calibration_seconds=60")
    assert second.returncode == 0, second.stderr[-3000:]
    assert Path(kept[1]).read_bytes() == before
    assert table(second.stdout) == table(first.stdout)


def table(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if "batch" in line or "step, ms" in line]


@pytest.mark.parametrize("missing", ["target", "draft"])
def test_a_model_that_is_not_there_is_one_line(pair: Pair, tmp_path: Path, missing: str) -> None:
    arguments = services.settings("profile", tmp_path / "data", pair.target, pair.draft)
    done = profile(tmp_path, *arguments, f"serving.{missing}={tmp_path / 'nowhere'}")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "nowhere" in done.stderr.strip().splitlines()[-1]
