"""`osd bench sampling`: whose text a draft should learn from (`trainer.sampling`).

Replays of the drift benchmark's recordings, as `benchmarks/drift/drift.py` makes them; the arms
differ in who wrote the answers that the trainer learns from. *teacher*: what was served, with the
rows that capture kept. *student*: the draft answers the same prompts anew, and the target labels
every token. *mixed*: half of each. Training takes no time here; its CPU seconds are counted, and
those of sampling and scoring apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.drift import jobs, names
from benchmarks.drift.contest import LAST, Contest, Measure, compared, mean_with_interval
from benchmarks.drift.drift import NUM_PROCESSES
from benchmarks.drift.memory import contests, schedules_of, streams_of
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.replays.curve import Curve
from benchmarks.result import Figure, Result
from benchmarks.traffic.family import FAMILIES
from benchmarks.traffic.schedule import read_all

ARMS = (names.FROZEN, names.OURS, *names.SAMPLED)
REQUESTS = {"sharp": (96, 288), "natural": (72, 192, 192)}
"""Schedule -> requests of each phase: shorter than the drift benchmark's."""
QUICK_REQUESTS = {"sharp": (48, 96)}
BETTER = "{}: α of all requests minus that of served text"
CHEAP = "{}: CPU over that of served text"


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    given = QUICK_REQUESTS if options.quick else REQUESTS
    schedules = read_all()
    config = jobs.base_config()
    return Protocol(
        bench="sampling",
        question="Whose text should a draft learn from: the target's, its own, or both?",
        arms=ARMS,
        order="Every arm on the same recorded requests, two at a time.",
        sizes={
            "schedules": {
                name: schedules[name].shortened(requests).model_dump()
                for name, requests in given.items()
            },
            "seeds": [0] if options.quick else [0, 1],
            "k": config.speculation.k_max,
            "trainer": config.trainer.model_dump(),
            "last_requests": LAST,
        },
        goals=tuple(Goal(figure=BETTER.format(arm), at_least=0.0) for arm in names.SAMPLED),
    )


def run(options: Options) -> Result:
    """Record where the cache lacks it, then replay every arm."""
    plan = protocol(options)
    notebook = Notebook(options, plan)
    schedules = schedules_of(plan)
    for family in dict.fromkeys(schedule.family for schedule in schedules.values()):
        FAMILIES[family].models()
    runs = [(name, seed) for name in schedules for seed in plan.sizes["seeds"]]
    with ProcessPoolExecutor(
        NUM_PROCESSES, mp_context=get_context("spawn"), initializer=jobs.prepare
    ) as pool:
        options.say("recording the target's answers, where they are not in the cache")
        for stream in [pool.submit(jobs.record_stream, *s) for s in streams_of(schedules, runs)]:
            stream.result()
        found = [
            pool.submit(jobs.run_one, name, schedules[name], seed, arm, 0)
            for name, seed in runs
            for arm in plan.arms
        ]
        for number, done in enumerate(found, 1):
            row = done.result()
            notebook.add(**row)
            options.say(
                f"{number} of {len(found)}: {row['schedule']}, seed {row['seed']}, "
                f"{row['contender']}: α {Curve.from_row(row).alpha():.3f}, "
                f"{row['cpu_s'][-1]:.0f} s"
            )
    return summarise(plan, notebook.rows)


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures from the raw rows."""
    figures = [figure for contest in contests(plan, rows) for figure in _of_schedule(contest)]
    return Result(protocol=plan, figures=tuple(figures))


def _of_schedule(contest: Contest) -> Iterator[Figure]:
    yield from compared(contest, "α, all requests", Curve.alpha)
    bounds, phases = contest.schedule.bounds, contest.schedule.phases
    for phase, start, stop in zip(phases, bounds, bounds[1:], strict=False):
        last = max(start, stop - LAST)
        yield from compared(
            contest, f"α, last {stop - last} of {phase.name}", _alpha_between(last, stop)
        )
    for arm, curves in contest.curves.items():
        group = f"{contest.name}: training, {arm}"
        if not any(curve.num_rounds for curve in curves):
            continue
        for title, measure, unit in COSTS:
            yield mean_with_interval(group, title, [measure(c) for c in curves], unit)
    group, ours = f"{contest.name}: compared", contest.curves[names.OURS]
    for arm in names.SAMPLED:
        pairs = list(zip(contest.curves[arm], ours, strict=True))
        gains = [mine.alpha() - served.alpha() for mine, served in pairs]
        yield mean_with_interval(group, BETTER.format(arm), gains)
        dearer = [float(mine.cpu_s[-1] / served.cpu_s[-1]) for mine, served in pairs]
        yield mean_with_interval(group, CHEAP.format(arm), dearer)


COSTS: tuple[tuple[str, Measure, str], ...] = (
    ("CPU", lambda c: float(c.cpu_s[-1]), "s"),
    ("CPU of sampling", lambda c: float(c.notes["sampling_cpu_s"]), "s"),
    ("CPU of scoring", lambda c: float(c.notes["scoring_cpu_s"]), "s"),
    ("rounds", lambda c: c.num_rounds, ""),
    ("published", lambda c: c.num_published, ""),
    ("undone", lambda c: c.num_discarded, ""),
)


def _alpha_between(start: int, stop: int) -> Measure:
    return lambda curve: curve.alpha(start, stop)
