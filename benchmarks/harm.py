"""`osd bench harm`: whether traffic can make the service worse than a draft that never learns, or
make it forget.

Recorded requests come one by one and without labels. The project's trainer and gate learn from them
with the settings of the tiny preset, and replay counts the acceptance of each draft.

    poisoned    two domains in turns; half of all stored rows have random tokens instead of the
                target's; and the same without poison
    sly         the same, but half of the poisoned rows keep the served token, and are wrong about
                the next one
    hostile     home traffic; every second request is of a client that sends and gets noise
    return      home, then another domain, then home again
    steady      home alone, long after there is anything left to learn
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.curve import Curve
from benchmarks.drift_family import FAMILIES, FIRST_SERVED
from benchmarks.drift_jobs import base_config, ceiling, prepare
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.recording import Recorded
from benchmarks.result import Figure, Lines, Result

FAMILY = "tiny"
OTHER = "sql"
WINDOW = 100
"""Requests of the rest over which α is compared."""
NOISE_TOKENS = 40


AGAINST = {
    "frozen": "α on the rest, learnt - frozen, worst window",
    "unpoisoned": "α on the rest, learnt - learnt without poison, worst window",
}

GAINED = "α on the other domain, learnt - frozen"
"""What is poisoned must still be learnt from, else nothing was at stake."""


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


def poisoned(plan: Protocol, seed: int, sly: float = 0.0) -> Row:
    """All requests are users'; half of what is learnt from is wrong, a share of that not to be told
    from the text."""
    rng = np.random.default_rng(seed)
    home, other = _recorded(seed, plan.sizes["requests"] // 2)
    honest = [request for pair in zip(home, other, strict=True) for request in pair]
    vocabulary = 1 + max(int(request.target_ids.max()) for request in honest)
    stored = [_poison(request, vocabulary, rng, sly) for request in honest]
    home_places, other_places = range(0, len(honest), 2), range(1, len(honest), 2)
    row = _both(_named(honest), _named(stored), seed, home_places, other_places)
    return row | {
        "unpoisoned": _both(_named(honest), _named(honest), seed, home_places, other_places)[
            "learnt"
        ]
    }


def hostile(plan: Protocol, seed: int) -> Row:
    """Every second request is noise; the rest is home traffic, and is what counts."""
    rng = np.random.default_rng(seed)
    home, _ = _recorded(seed, plan.sizes["requests"] // 2)
    vocabulary = 1 + max(int(request.target_ids.max()) for request in home)
    mixed = _named([request for own in home for request in (own, _noise(own, vocabulary, rng))])
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
    "sly": partial(poisoned, sly=0.5),
    "hostile": hostile,
    "return": comes_back,
    "steady": steady,
}


def _recorded(seed: int, num: int) -> tuple[list[Recorded], list[Recorded]]:
    from benchmarks.drift_recordings import take

    home, block = FAMILIES[FAMILY].home(), FIRST_SERVED + seed
    return take(FAMILY, home, block, num), take(FAMILY, OTHER, block, num)


def _named(requests: Sequence[Recorded]) -> list[Recorded]:
    """By their place: nothing tells what they are."""
    return [replace(request, name=f"request-{place}") for place, request in enumerate(requests)]


def _poison(request: Recorded, vocabulary: int, rng: np.random.Generator, sly: float) -> Recorded:
    """Half of the rows are as sure of themselves as before, of random tokens; but a share `sly` of
    these leaves the likeliest token where it is, which is what was served, and gives almost as much
    to a random one."""
    num, width = request.target_ids.shape
    lot_T = rng.random((num,))
    shift_T1 = rng.integers(1, vocabulary, (num, 1))  # tokens of a row stay different ones
    ids = ((request.target_ids + shift_T1) % vocabulary).astype(request.target_ids.dtype)
    has_first_T: np.ndarray = np.equal(ids, request.target_ids[:, :1]).any(1)
    is_sly_T = (lot_T < 0.5 * sly) & ~has_first_T
    ids[is_sly_T, 0] = request.target_ids[is_sly_T, 0]
    flat = np.full(width, -15.0)
    flat[:2] = np.log(0.53), np.log(0.45)
    return replace(
        request,
        target_ids=np.where((lot_T < 0.5)[:, None], ids, request.target_ids),
        target_logprobs=np.where(is_sly_T[:, None], flat, request.target_logprobs).astype(
            np.float16
        ),
        tail_logprob=np.where(is_sly_T, np.log(0.02), request.tail_logprob).astype(np.float32),
    )


def _noise(like: Recorded, vocabulary: int, rng: np.random.Generator) -> Recorded:
    """Random prompt and answer, and a target that was sure of every token of it."""
    num, width = NOISE_TOKENS, like.target_ids.shape[1]
    output = rng.integers(0, vocabulary, num).astype(np.int32)
    targets = ((output[:, None] + np.arange(width)) % vocabulary).astype(like.target_ids.dtype)
    logprobs = np.full((num, width), -12.0, np.float16)
    logprobs[:, 0] = -0.01
    prompt = rng.integers(0, vocabulary, len(like.prompt_ids)).astype(np.int32)
    tail = np.full(num, -9.0, np.float32)
    return replace(
        like,
        prompt_ids=prompt,
        output_ids=output,
        target_ids=targets,
        target_logprobs=logprobs,
        tail_logprob=tail,
    )


def _both(honest: Sequence[Recorded], stored: Sequence[Recorded], seed: int, *rest: range) -> Row:
    """Counts per request of a draft that learns from `stored`, and of one that does not; tokens
    served are the same. `rest`: the requests that count, each kind by itself, so that none pays for
    another's gain unseen."""
    from benchmarks.learning import learn

    draft = FAMILIES[FAMILY].models()[1]
    with tempfile.TemporaryDirectory(prefix="osd-harm-") as directory:
        learnt = learn(base_config(), draft, stored, Path(directory), seed=seed, may_rest=True)
    return {
        "learnt": _counts(learnt),
        "frozen": _counts(_fixed(draft, honest)),
        "rest": [list(places) for places in rest],
        "rounds": learnt.num_rounds,
        "published_at": learnt.notes.get("published_at", []),
        "train_seconds": learnt.train_seconds,
    }


def _fixed(draft: Path, requests: Sequence[Recorded]) -> Curve:
    from benchmarks.served import counts_of, matches_of
    from trainer.draft import load_draft

    model, k = load_draft(draft), base_config().speculation.k_max
    return Curve.of([counts_of(matches_of(model, request), k) for request in requests])


def _counts(curve: Curve) -> dict[str, list[int]]:
    return {name: curve.counts[name].tolist() for name in ("tested", "accepted")}


# From rows to figures


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """One group of figures per scenario; the worst of the seeds where a goal is a bound."""
    figures: list[Figure] = []
    for name in ("poisoned", "sly", "hostile"):
        mine = [row for row in rows if row["scenario"] == name]
        others = [other for other in AGAINST if other in mine[0]]
        figures += [
            *(
                Figure(
                    group=name,
                    name=AGAINST[other],
                    value=min(min(_differences(row, other)) for row in mine),
                    n=len(mine),
                )
                for other in others
            ),
            *_means(name, mine, {f"α on the rest, {arm}": arm for arm in ("learnt", *others)}),
            Figure(
                group=name,
                name="rounds",
                value=float(np.mean([row["rounds"] for row in mine])),
                n=len(mine),
            ),
            Figure(
                group=name,
                name="publications",
                value=float(np.mean([len(row["published_at"]) for row in mine])),
                n=len(mine),
            ),
        ]
        if name != "hostile":
            gains = [
                alpha(row["learnt"], row["rest"][-1]) - alpha(row["frozen"], row["rest"][-1])
                for row in mine
            ]
            figures.append(Figure(group=name, name=GAINED, value=min(gains), n=len(gains)))
    figures += _return(plan, [row for row in rows if row["scenario"] == "return"])
    figures += _steady(plan, [row for row in rows if row["scenario"] == "steady"])
    return Result(
        protocol=plan,
        figures=tuple(figures),
        drawings=tuple(_drawing(rows, name) for name in SCENARIOS),
    )


def alpha(counts: dict[str, list[int]], places: Sequence[int]) -> float:
    """Conditional acceptance over some requests."""
    tested = sum(counts["tested"][i] for i in places)
    return sum(counts["accepted"][i] for i in places) / max(tested, 1)


def _differences(row: Row, other: str) -> list[float]:
    """α learnt less that of the other draft, in each window of each kind of the rest."""
    windows = [
        places[i : i + WINDOW]
        for places in row["rest"]
        for i in range(0, len(places) - WINDOW + 1, WINDOW // 2)
    ]
    return [alpha(row["learnt"], w) - alpha(row[other], w) for w in windows]


def _means(group: str, rows: Sequence[Row], names: dict[str, str]) -> list[Figure]:
    kinds = range(len(rows[0]["rest"]))
    return [
        Figure(
            group=group,
            name=name + (f", kind {kind + 1}" if len(kinds) > 1 else ""),
            value=float(np.mean([alpha(r[arm], r["rest"][kind]) for r in rows])),
            n=len(rows),
        )
        for name, arm in names.items()
        for kind in kinds
    ]


def _return(plan: Protocol, rows: Sequence[Row]) -> list[Figure]:
    home, other = plan.sizes["home_before"], plan.sizes["other"]
    before, reached = range(home - min(home, 100), home), range(home + other - 100, home + other)
    at_once = range(home + other, home + other + min(50, plan.sizes["home_after"]))
    kept = [alpha(r["learnt"], at_once) / alpha(r["learnt"], before) for r in rows]
    learnt = [alpha(r["learnt"], reached) / alpha(r["ceiling"], reached) for r in rows]
    return [
        Figure(
            group="return", name="α at once on return over α before", value=min(kept), n=len(kept)
        ),
        Figure(
            group="return",
            name="α reached on the other domain over its ceiling",
            value=min(learnt),
            n=len(rows),
        ),
        Figure(
            group="return",
            name="α reached on the other domain, mean",
            value=float(np.mean([alpha(r["learnt"], reached) for r in rows])),
            n=len(rows),
        ),
    ]


def _steady(plan: Protocol, rows: Sequence[Row]) -> list[Figure]:
    half = plan.sizes["steady"] // 2
    late = [sum(at >= half for at in row["published_at"]) for row in rows]
    return [
        Figure(
            group="steady", name="publications in the second half", value=max(late), n=len(rows)
        ),
        Figure(
            group="steady",
            name="rounds",
            value=float(np.mean([row["rounds"] for row in rows])),
            n=len(rows),
        ),
        Figure(
            group="steady",
            name="rounds if training never rested",
            value=plan.sizes["steady"] // base_config().trainer.min_new_traces,
            n=len(rows),
        ),
    ]


def _drawing(rows: Sequence[Row], name: str) -> Lines:
    row = next(row for row in rows if row["scenario"] == name)
    places = sorted(place for kind in row["rest"] for place in kind)
    lines: dict[str, tuple[tuple[float, float], ...]] = {}
    for arm in ("learnt", "frozen", "ceiling"):
        if arm in row:
            windows = [places[max(0, i - 24) : i + 1] for i in range(24, len(places), 8)]
            lines[arm] = tuple((float(w[-1]), alpha(row[arm], w)) for w in windows)
    return Lines(
        title=f"{name}: α over the last 25 requests of the rest",
        x_label="request",
        y_label="α",
        lines=lines,
    )
