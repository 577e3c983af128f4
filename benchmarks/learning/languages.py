"""`osd bench languages`: does the prose family show anything? A look before any contest on it.

    target ─► answers in five languages, recorded ─► how good, how sure, how often in circles
          └─► the frozen draft, one trained offline on each language, the memory, suffix decoding

Learning can be shown only where there is something to learn (a draft trained offline is accepted
more often than the frozen one) that cannot be looked up (the memory makes fewer tokens a step).
Bounds for both stand in the protocol before anything is measured; where one is missed off home, the
verdict is that the family shows nothing. The draft proposes `K` tokens in every step; the memory up
to as many as it does in the service, cut where one is worth less than verifying it takes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.drift import jobs
from benchmarks.drift.contest import mean_with_interval
from benchmarks.drift.drift import NUM_PROCESSES, SUFFIX_MODULE, SUFFIX_PACKAGE
from benchmarks.learning import languages_jobs
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED, PROSE, TRAINING

FROZEN, OFFLINE, MEMORY, SUFFIX = "frozen draft", "draft trained offline", "memory", "suffix"
GAIN = "alpha, trained offline - frozen"
OVER_MEMORY = "tokens per step, trained offline / memory"
LEAST_GAIN, LEAST_OVER_MEMORY = 0.12, 1.05
VERIFY_PRICE = 0.02
"""What verifying a token takes, of a step."""
PLAIN_FIGURES = {
    "perplexity": "perplexity",
    "top_probability": "mean top probability",
    "loops_greedy": "answers that loop, T = 0",
    "loops_sampled": "answers that loop, T = 0.7",
}
"""Key of a row -> name of a figure of the target."""


def protocol(options: Options) -> Protocol:
    """What will be measured, and what must come out of it."""
    from benchmarks.prose.corpus import DOMAINS, LANGUAGES

    without = () if importlib.util.find_spec(SUFFIX_MODULE) else (SUFFIX,)
    return Protocol(
        bench="languages",
        question="Is there anything in the prose family to learn that cannot be looked up?",
        arms=tuple(a for a in (FROZEN, OFFLINE, MEMORY, SUFFIX) if a not in without),
        order="All on the same recorded answers, one domain after the other.",
        sizes={
            "families": list(PROSE[:1] if options.quick else PROSE),
            "domains": list(LANGUAGES if options.quick else DOMAINS),
            "home": FAMILIES[PROSE[0]].home(),
            "temperature": FAMILIES[PROSE[0]].temperature,
            "requests": 192 if options.quick else 576,
            "offline_requests": 192 if options.quick else 576,
            "greedy_requests": 96,
            "k": jobs.base_config().speculation.k_max,
            "memory_k": jobs.base_config().speculation.memory_k_max,
            "verify_price": VERIFY_PRICE,
            "left_out": dict.fromkeys(without, f"{SUFFIX_PACKAGE} is not installed"),
        },
        goals=(
            Goal(figure=GAIN, at_least=LEAST_GAIN),
            Goal(figure=OVER_MEMORY, at_least=LEAST_OVER_MEMORY),
        ),
    )


def run(options: Options) -> Result:
    """Build and record what the cache lacks, measure, and say the verdict."""
    plan = protocol(options)
    notebook = Notebook(options, plan)
    for arm, reason in plan.sizes["left_out"].items():
        options.say(f"left out: {arm}: {reason}")
    sizes = plan.sizes
    for family in sizes["families"]:
        FAMILIES[family].models()  # built by one process, with its progress to be seen
    todo = [(family, domain) for family in sizes["families"] for domain in sizes["domains"]]
    with ProcessPoolExecutor(
        NUM_PROCESSES, mp_context=get_context("spawn"), initializer=jobs.prepare
    ) as pool:
        options.say("recording the target's answers, where they are not in the cache")
        blocks = {TRAINING: sizes["offline_requests"], FIRST_SERVED: sizes["requests"]}
        recorded = [
            pool.submit(jobs.record_stream, *one, block, num)
            for block, num in blocks.items()
            for one in todo
        ]
        for stream in recorded:
            stream.result()
        options.say("training a draft for each domain, where it is not in the cache; measuring")
        found = [pool.submit(languages_jobs.measure, *one, sizes) for one in todo]
        for done in found:
            row = done.result()
            notebook.add(**row)
            options.say(f"{row['family']}, {row['domain']}: measured")
    result = summarise(plan, notebook.rows)
    options.say(verdict(result))
    return result


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures by domain: means over the seeds of the models."""
    figures: list[Figure] = []
    for domain in plan.sizes["domains"]:
        mine = [row for row in rows if row["domain"] == domain]
        figures += [
            mean_with_interval(domain, name, [row[key] for row in mine])
            for key, name in PLAIN_FIGURES.items()
        ]
        for key, name in (("alpha", "alpha"), ("tokens_per_step", "tokens per step")):
            figures += [
                mean_with_interval(domain, f"{name}, {arm}", [row[key][arm] for row in mine])
                for arm in plan.arms
                if mine and all(arm in row[key] for row in mine)
            ]
        if domain != plan.sizes["home"]:
            figures += _compared(domain, mine)
    return Result(protocol=plan, figures=tuple(figures))


def _compared(domain: str, rows: Sequence[Row]) -> list[Figure]:
    gains = [row["alpha"][OFFLINE] - row["alpha"][FROZEN] for row in rows]
    lengths = [row["tokens_per_step"] for row in rows]
    return [
        mean_with_interval(domain, GAIN, gains),
        mean_with_interval(domain, OVER_MEMORY, [one[OFFLINE] / one[MEMORY] for one in lengths]),
    ]


def verdict(result: Result) -> str:
    """One line: whether every domain off home has something to learn that cannot be looked up."""
    missed = [
        f"{figure.group}: {figure.name} {figure.value:.3f} ({goal})"
        for goal, figure, is_met in result.verdicts()
        if not is_met
    ]
    if missed or result.unjudged():
        return f"the family shows nothing: {'; '.join(missed) or 'nothing was measured off home'}"
    domains = dict.fromkeys(figure.group for _, figure, _ in result.verdicts())
    return f"the family can show learning that looking up does not replace: {', '.join(domains)}"
