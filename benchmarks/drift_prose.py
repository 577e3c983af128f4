"""`osd bench drift_prose`: the drift benchmark on prose in five languages.

The schedules of `configs/drift/prose`: each language alone, one after the other in the order of a
Latin square's rows, all at once, a shift of topic within one language, and calls of a few tasks
again and again, where looking up should win. All else is as in `benchmarks/drift.py`, and
`osd bench languages` says beforehand whether there is anything to learn.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks import drift
from benchmarks import drift_names as names
from benchmarks.drift_report import summarise
from benchmarks.drift_schedule import DIRECTORY, read_all
from benchmarks.record import Options, Protocol
from benchmarks.result import Result

__all__ = ["protocol", "run", "summarise"]

SCHEDULES = DIRECTORY / "prose"
QUICK_SCHEDULE, QUICK_PHASES = "sharp-1", (96, 192)
CONTROLLED = (names.FROZEN_LOOP, names.MEMORY, names.DRAFT_LOOP, names.SUFFIX_LOOP, names.SERVED)
"""Contenders that decide by measured times of steps, which a quick run does not have."""
ARMS = (names.FROZEN, names.CEILING, *CONTROLLED, *names.OSD_PUBLISHED, names.OURS)


def protocol(options: Options) -> Protocol:
    """What will be measured. No goals: this run records and replays; what is held to a bound is
    fixed in a protocol of its own."""
    schedules = read_all(SCHEDULES)
    if options.quick:
        schedules = {QUICK_SCHEDULE: schedules[QUICK_SCHEDULE].shortened(QUICK_PHASES)}
    usual = drift.protocol(options)
    missing = {names.SUFFIX_LOOP} if names.SUFFIX in usual.sizes["left_out"] else set()
    arms = drift.QUICK_ARMS if options.quick else ARMS
    given = {name: schedule.model_dump() for name, schedule in schedules.items()}
    return replace(
        usual,
        bench="drift_prose",
        question="Whose draft tokens are accepted when the language changes, and how soon after?",
        arms=tuple(arm for arm in arms if arm not in missing and arm != names.NGRAM),
        sizes=usual.sizes | {"schedules": given},
        goals=(),
    )


def run(options: Options) -> Result:
    """Record, train ceilings, then run every contender over every schedule."""
    return drift.replay(options, protocol(options))
