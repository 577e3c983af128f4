"""Leads the process group of a machine's Ray, and ends with it.

    ray_leader.py ray start --block ...     ends ──► the rest of the group is killed

`ray stop`, and so `ray down`, ends Ray's processes but `ray start --block`, which takes their end
for wanted and waits on for ever. So this looks whether the raylet is still there, too. It runs as a
script that imports only the standard library; without /proc it waits for its command alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_END = 15.0
"""After its raylet has ended a Ray has this long to end by itself. `ray stop` takes up to 11 s."""


def main(argv: list[str]) -> None:
    ray = subprocess.Popen(argv[1:])
    has_run, raylet_at = False, 0.0
    while ray.poll() is None:
        names, now = children(ray.pid), time.monotonic()
        if "raylet" in names:
            has_run, raylet_at = True, now
        elif has_run and (not names or now - raylet_at > SECONDS_TO_END):
            break
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.killpg(0, signal.SIGKILL)


def children(parent: int) -> set[str]:
    """Names of the children of a process that live."""
    names = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            state, ppid = rest.split()[:2]
            if int(ppid) == parent and state not in ("Z", "X"):
                names.add(name)
    return names


if __name__ == "__main__":
    main(sys.argv)
