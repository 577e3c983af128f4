"""Requests as an agent's loop makes them: a few tasks, called again and again in other words.

They are answered greedily, so that a task called again is answered much as before: here looking up
should win.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.prose import traffic
from benchmarks.prose.corpus import HOME
from osd.tiny.traffic import Request

DOMAIN = "agent"
TASKS = 24
"""Different calls."""
LEAD_WORDS = 3
"""Words before the task, which are new with every request."""
TASKS_FROM = 3 * traffic.BLOCK_SIZE
"""Place of the tasks among the prompts to serve: behind all blocks of the smallest domain's."""


def requests(block: int, num: int, directory: Path | None = None) -> list[Request]:
    """The first `num` requests of a block. Tasks come in turn, in each block the same.

    `directory`: as of `traffic.requests`.
    """
    leads = traffic.requests(HOME, block, num, directory)
    tasks = traffic.some(HOME, "serve", TASKS_FROM, TASKS, directory)
    return [
        Request(
            domain=DOMAIN,
            prompt=f"{' '.join(lead.prompt.split()[:LEAD_WORDS])} ({number}). {task}",
            answer="",
        )
        for number, (lead, task) in enumerate(
            zip(leads, (tasks * (num // TASKS + 1))[:num], strict=True)
        )
    ]
