"""A second deployment beside a first one, as a process that tests end in every way there is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from osd.service.note import Running
from tests.support.processes import Identity, alive, descendants, is_listening, ray_directories
from tests.support.services import Served, osd, wait_for_version, wait_until


@dataclass
class Beside:
    """The second deployment: one `osd serve` after another on the same data directory. The first
    that serves for a test promotes version 1 by hand, and trains no more."""

    arguments: list[str]
    directory: Path
    served: Served | None = None
    note: Running | None = None
    processes: set[Identity] = field(default_factory=set)
    is_promoted: bool = False

    def start(self) -> Served:
        if self.served is not None:
            self.served.end()  # still runs if the test that ends it was not selected
        self.served = Served(self.arguments, self.directory / f"serve-{time.time():.0f}.log")
        return self.served

    def running(self) -> tuple[Served, Running]:
        """The process and its note; starts it unless an earlier test did."""
        if self.served is None or self.note is None or self.served.process.poll() is not None:
            self.note = self.start().wait_ready()
            self.look()
            if not self.is_promoted:
                self.promote_by_hand()
        assert self.served is not None
        return self.served, self.note

    def promote_by_hand(self) -> None:
        """From version 2, the newest, back to 1. From then on no draft of its own comes in."""
        assert self.served is not None and self.note is not None
        wait_for_version(self.note.control_url, 2)
        osd("drafts", "promote", 1, "--deployment", self.served.deployment)
        osd("pause", "--deployment", self.served.deployment)
        wait_for_version(self.note.control_url, 1)
        self.is_promoted = True

    def has_run(self) -> None:
        """Version 1 was promoted by hand; runs it for that unless an earlier test did."""
        if not self.is_promoted:
            self.running()

    def look(self) -> set[Identity]:
        """Notes the processes it has now. Returns all that it ever had."""
        assert self.served is not None
        self.processes |= descendants(self.served.process.pid)
        return self.processes


def assert_gone(beside: Beside, seconds: float) -> float:
    """All its processes and directories go within `seconds`. Returns after how many."""
    directories = ray_directories(beside.processes)
    clock = time.monotonic()
    while (left := alive(beside.processes)) and time.monotonic() - clock < seconds:
        time.sleep(0.05)
    assert not left, f"still there after {seconds} s: {left}"
    took = time.monotonic() - clock
    what = f"{directories} are removed"
    wait_until(lambda: not any(path.exists() for path in directories), 2, what)
    return took


def assert_nothing_is_left(beside: Beside, note: Running) -> None:
    """Nothing listens, and no file is half written."""
    # A process counts as dead a moment before its last thread lets go of its sockets.
    urls = (note.service_url, note.control_url)
    wait_until(lambda: not any(map(is_listening, urls)), 2, "nothing listens")
    names = {path.name for path in beside.directory.rglob("*")}
    assert {name for name in names if name.startswith(".tmp-") or name.endswith(".tmp")} == set()
