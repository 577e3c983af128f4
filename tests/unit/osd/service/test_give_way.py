"""The trainer's process goes first where memory runs out, and comes again."""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import ROOT

GIVE_WAY = """
import os
from osd.config.schema import TrainerConfig
from osd.service.give_way import give_way
give_way(TrainerConfig(num_gpus={num_gpus}))
print(open("/proc/self/oom_score_adj").read().strip(), os.nice(0))
"""
START = """
from osd.service.give_way import started_again_when_out
with started_again_when_out(pause_s=0.0):
    raise {error}
print("goes on")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_it_gives_way_in_time_on_a_cpu_and_in_memory_everywhere() -> None:
    score, nice = run(GIVE_WAY.format(num_gpus=0)).stdout.split()
    assert score == "1000"
    _, on_a_gpu = run(GIVE_WAY.format(num_gpus=1)).stdout.split()
    assert int(nice) == min(19, int(on_a_gpu) + 10)


def test_one_without_the_memory_to_start_ends_so_that_it_is_started_again() -> None:
    """Ray never starts an actor again whose constructor raises."""
    done = run(START.format(error='MemoryError("no room")'))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == "no memory to start in (no room); trying again in 0 s"
    assert "ValueError: other" in run(START.format(error='ValueError("other")')).stderr
