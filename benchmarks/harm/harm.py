"""`osd bench harm`: whether traffic can make the service worse than a draft that never learns, or
make it forget.

Recorded requests come one by one and without labels. The project's trainer and gate learn from them
with the settings of the tiny preset, and replay counts the acceptance of each draft.

    poisoned    two domains in turns; half of all stored rows have random tokens instead of the
                target's; and the same without poison, candidates averaged or not
    sly         the same, but half of the poisoned rows keep the served token, and are wrong about
                the next one; and the same where candidates are averaged
    hostile     home traffic; every second request is of a client that sends and gets noise
    return      home, then another domain, then home again
    steady      home alone, long after there is anything left to learn
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drift.jobs import base_config, ceiling, prepare
from benchmarks.harm.forged import noise, poison
from benchmarks.harm.report import AGAINST, AVERAGED, GAINED, WINDOW, WITH, summarise
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.replays.curve import Curve
from benchmarks.replays.recording import Recorded
from benchmarks.result import Result
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED

FAMILY = "tiny"
OTHER = "sql"
RATE = 0.25
"""Averaging of candidates over rounds, where they are averaged."""


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    return Protocol(
        bench="harm",
        question="Can traffic make the draft that serves worse for others, or make it forget, or "
        "keep training busy?",
        arms=("learnt", "frozen"),
        order="Each scenario and seed by itself; both drafts are counted on the same requests.",
        sizes={
            "preset": "configs/tiny-cpu.yaml",
            "family": FAMILY,
            "seeds": (0,) if options.quick else (0, 1),
            "requests": 200 if options.quick else 600,
            "home_before": 150 if options.quick else 200,
            "other": 200 if options.quick else 400,
            "home_after": 50 if options.quick else 100,
            "steady": 200 if options.quick else 600,
            "ceiling_requests": 96 if options.quick else 576,
            "window": WINDOW,
        },
        goals=(
            Goal(figure=AGAINST["frozen"], at_least=-0.02),
            Goal(figure=WITH, at_least=-0.02),
            Goal(figure=GAINED, at_least=0.1),
            Goal(figure="α at once on return over α before", at_least=0.9),
            Goal(figure="α reached on the other domain over its ceiling", at_least=0.9),
            Goal(figure="publications in the second half", at_most=0),
        ),
    )


def run(options: Options) -> Result:
    """Every scenario with every seed."""
    prepare()
    plan = protocol(options)
    notebook = Notebook(options, plan)
    for seed in plan.sizes["seeds"]:
        for name, scenario in SCENARIOS.items():
            options.say(f"{name}, seed {seed}")
            notebook.add(scenario=name, seed=seed, **scenario(plan, seed))
    return summarise(plan, notebook.rows)


def poisoned(plan: Protocol, seed: int) -> Row:
    """All requests are users'; half of what is learnt from is random."""
    honest, stored, kinds = _two_domains(plan, seed, sly=0.0)
    return _both(honest, stored, seed, *kinds) | {
        "unpoisoned": _counts(_learn(honest, seed)),
        "unpoisoned, averaged": _counts(_learn(honest, seed, averaging_rate=RATE)),
    }


def sly(plan: Protocol, seed: int) -> Row:
    """The same, but half of what is wrong is not to be told from the text."""
    honest, stored, kinds = _two_domains(plan, seed, sly=0.5)
    return _both(honest, stored, seed, *kinds) | {
        AVERAGED: _counts(_learn(stored, seed, averaging_rate=RATE))
    }


def hostile(plan: Protocol, seed: int) -> Row:
    """Every second request is noise; the rest is home traffic, and is what counts."""
    rng = np.random.default_rng(seed)
    home, _ = _recorded(seed, plan.sizes["requests"] // 2)
    vocabulary = 1 + max(int(request.target_ids.max()) for request in home)
    mixed = _named([request for own in home for request in (own, noise(own, vocabulary, rng))])
    return _both(mixed, mixed, seed, range(0, len(mixed), 2))


def comes_back(plan: Protocol, seed: int) -> Row:
    """Home, another domain, home."""
    sizes = plan.sizes
    before, after = sizes["home_before"], sizes["home_after"]
    home, other = _recorded(seed, max(before + after, sizes["other"]))
    requests = _named([*home[:before], *other[: sizes["other"]], *home[before : before + after]])
    row = _both(requests, requests, seed, range(len(requests)))
    best = ceiling(FAMILY, (FAMILIES[FAMILY].home(), OTHER), sizes["ceiling_requests"])
    return row | {"ceiling": _counts(_fixed(best, requests))}


def steady(plan: Protocol, seed: int) -> Row:
    """Home traffic alone."""
    home, _ = _recorded(seed, plan.sizes["steady"])
    requests = _named(home)
    return _both(requests, requests, seed, range(len(requests)))


SCENARIOS: dict[str, Callable[[Protocol, int], Row]] = {
    "poisoned": poisoned,
    "sly": sly,
    "hostile": hostile,
    "return": comes_back,
    "steady": steady,
}


def _recorded(seed: int, num: int) -> tuple[list[Recorded], list[Recorded]]:
    from benchmarks.traffic.recordings import take

    home, block = FAMILIES[FAMILY].home(), FIRST_SERVED + seed
    return take(FAMILY, home, block, num), take(FAMILY, OTHER, block, num)


def _two_domains(
    plan: Protocol, seed: int, sly: float
) -> tuple[list[Recorded], list[Recorded], tuple[range, range]]:
    """Requests of two domains in turns, the same with half of all rows poisoned, and the places of
    each domain."""
    rng = np.random.default_rng(seed)
    home, other = _recorded(seed, plan.sizes["requests"] // 2)
    honest = [request for pair in zip(home, other, strict=True) for request in pair]
    vocabulary = 1 + max(int(request.target_ids.max()) for request in honest)
    stored = [poison(request, vocabulary, rng, sly) for request in honest]
    places = range(0, len(honest), 2), range(1, len(honest), 2)
    return _named(honest), _named(stored), places


def _named(requests: Sequence[Recorded]) -> list[Recorded]:
    """By their place: nothing tells what they are."""
    return [replace(request, name=f"request-{place}") for place, request in enumerate(requests)]


def _both(honest: Sequence[Recorded], stored: Sequence[Recorded], seed: int, *rest: range) -> Row:
    """Counts per request of a draft that learns from `stored`, and of one that does not; tokens
    served are the same. `rest`: the requests that count, each kind by itself, so that none pays for
    another's gain unseen."""
    learnt = _learn(stored, seed)
    return {
        "learnt": _counts(learnt),
        "frozen": _counts(_fixed(FAMILIES[FAMILY].models()[1], honest)),
        "rest": [list(places) for places in rest],
        "rounds": learnt.num_rounds,
        "published_at": learnt.notes.get("published_at", []),
        "train_seconds": learnt.train_seconds,
    }


def _learn(stored: Sequence[Recorded], seed: int, **trainer: Any) -> Curve:
    """`trainer`: settings in place of the preset's."""
    from benchmarks.replays.learning import learn

    config, draft = base_config(), FAMILIES[FAMILY].models()[1]
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=trainer)})
    with tempfile.TemporaryDirectory(prefix="osd-harm-") as directory:
        return learn(config, draft, stored, Path(directory), seed=seed, may_rest=True)


def _fixed(draft: Path, requests: Sequence[Recorded]) -> Curve:
    from benchmarks.replays.served import counts_of, matches_of
    from trainer.draft import load_draft

    model, k = load_draft(draft), base_config().speculation.k_max
    return Curve.of([counts_of(matches_of(model, request), k) for request in requests])


def _counts(curve: Curve) -> dict[str, list[int]]:
    return {name: curve.counts[name].tolist() for name in ("tested", "accepted")}
