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
HOLD = """
import time
import weakref
from osd.service.give_way import started_again_when_out

held = []

class Weights:
    def __init__(self):
        self.itself = self
        held.append(weakref.ref(self))

def load():
    weights = Weights()
    raise MemoryError("no room")

def start():
    weights = Weights()
    try:
        load()
    except MemoryError:
        raise RuntimeError("out of memory")

time.sleep = lambda seconds: print(len(held), sum(ref() is not None for ref in held), flush=True)
with started_again_when_out():
    start()
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


def test_until_it_is_started_again_it_holds_nothing_of_what_was_loaded() -> None:
    """Where memory is short, it would be held from those who are to let go of theirs."""
    done = run(HOLD)
    assert (done.returncode, done.stdout.split()) == (1, ["2", "0"])
