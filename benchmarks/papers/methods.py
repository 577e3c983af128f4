"""`osd bench papers_methods`: shapes of "Speculative Decoding: Performance or Illusion?"
(arXiv 2601.11580), on the built-in models.

    osd evaluate's engines, one method each ─► speed by batch, parts of a step, what each step
                                               accepted, request by request
    the bound at published prices           ─► how far a fixed length is from the oracle

`papers_methods_large` has a target that costs 3.5 times as much, and no bound of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import Any

import numpy as np

from benchmarks.drift import jobs
from benchmarks.engines.models import COST_SHAPES, SMALL
from benchmarks.record import Notebook, Options, Protocol, Row, Shape
from benchmarks.result import Figure, Result
from benchmarks.stats import Estimate, estimate, median_ratio
from osd.evaluate.plan import DRAFT, MEMORY, NGRAM, NONE

REPEATS_PROMPT = 0.6
"""BLEU-4 of an answer against its prompt from which on it repeats it."""
ALMOST_NOTHING = 0.05
SHRINKS = "speed-up at batch 1 / at the largest batch"
LOOKUP_WINS = f"speed of n-gram / draft model, BLEU-4 above {REPEATS_PROMPT}"
LOOKUP_ELSE = f"speed of n-gram / draft model, BLEU-4 up to {REPEATS_PROMPT}"
VERIFY_OVER_DRAFT = "time of a step: verifying / drafting, draft model"
DRAFT_OVER_NGRAM = "time of a step: drafting, draft model / n-gram"
NGRAM_SHARE = f"{ALMOST_NOTHING} less n-gram's share of a step"
BURSTS = "variance / mean of accepted tokens of a step, n-gram / draft model"
WIDENS = "oracle / fixed k, largest batch over batch 1"
_WIDENS = (Shape(figure=WIDENS, says="the gap to the oracle widens with batch", above=1),)


def protocol(options: Options, size: str = SMALL) -> Protocol:
    """What will be measured on a target of a size."""
    from benchmarks.engines.loaded import NOISE

    is_small = size == SMALL
    methods = (NONE, NGRAM, DRAFT) if options.quick else (NONE, NGRAM, MEMORY, DRAFT)
    requests, max_tokens = ((8, 32) if is_small else (3, 12)) if options.quick else (24, 64)
    return Protocol(
        bench="papers_methods" if is_small else "papers_methods_large",
        question="Which published shapes of speed, step time and acceptance do the built-in models "
        "show?",
        arms=methods,
        order="One engine for each method, which serves `none` too, in turns on the same requests.",
        sizes={
            "target": size,
            "methods": methods,
            "k": 3,
            "batches": (1, 8) if options.quick else (1, 4, 16),
            "repeats": 2 if options.quick else 5,
            "requests": requests,
            "max_tokens": max_tokens,
            "num_recorded": 48 if options.quick else 96,
            "gap_batches": (1, 16, 64, 256),
            "gap_drafts": {name: NOISE[name] for name in ("good", "middling")} if is_small else {},
            "speed-up": "tokens per second over `none` of the same engine and turn; intervals over "
            "turns",
            "look-up": "seconds of a request after its first token at batch 1, each over `none` of "
            "its engine, median over turns; intervals over requests. BLEU-4 by tokens, without "
            "penalty for short answers",
            "bursts": "accepted draft tokens of a step, 0 where nothing was proposed, at batch 1; "
            "intervals over requests",
            "oracle": "exact lengths over k in every step, the same draft, at the published prices "
            "of Llama-3.1-8B with EAGLE on an H100 (modelled); intervals over requests",
        },
        shapes=(
            Shape(figure=SHRINKS, says="the speed-up falls with batch", above=1),
            Shape(figure=LOOKUP_WINS, says="look-up wins where the prompt is repeated", above=1),
            Shape(figure=VERIFY_OVER_DRAFT, says="verifying takes longer than drafting", above=1),
            Shape(figure=DRAFT_OVER_NGRAM, says="a draft model takes longer than n-gram", above=1),
            Shape(figure=NGRAM_SHARE, says="n-gram takes next to nothing", above=0),
            Shape(figure=BURSTS, says="n-gram comes in bursts, a draft model evenly", above=1),
            *(_WIDENS if is_small else ()),
        ),
    )


def run(options: Options, size: str = SMALL) -> Result:
    """The bound first, then the engines."""
    from benchmarks.papers.methods_runs import gaps, measure
    from benchmarks.traffic.family import FAMILIES

    plan = protocol(options, size)
    notebook = Notebook(options, plan)
    FAMILIES["tiny"].models()
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=jobs.prepare
    ) as process:
        for draft, noise in plan.sizes["gap_drafts"].items():
            options.say(f"the bound: {draft} draft")
            for row in process.submit(gaps, draft, noise, plan.sizes).result():
                notebook.add(**row)
    for row in measure(size, COST_SHAPES[size], plan.sizes, options.say):
        notebook.add(**row)
    return summarise(plan, notebook.rows)


# ------------------------------------------------------------------------------------------ summary


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures of each target, then of the bound."""
    figures: list[Figure] = []
    for size in dict.fromkeys(row["size"] for row in rows if row["what"] == "run"):
        runs = [row for row in rows if row["what"] == "run" and row["size"] == size]
        requests = [row for row in rows if row["what"] == "request" and row["size"] == size]
        group = f"target of {size}"
        figures += _speeds(group, runs)
        figures += _parts(group, runs)
        figures += _lookup(group, requests)
        figures += _acceptance(group, runs, requests)
    gap_rows = [row for row in rows if row["what"] == "gap"]
    for draft in dict.fromkeys(row["draft"] for row in gap_rows):
        figures += _gap(draft, [row for row in gap_rows if row["draft"] == draft])
    return Result(protocol=plan, figures=tuple(figures))


def _speeds(group: str, runs: Sequence[Row]) -> Iterator[Figure]:
    for method in (NGRAM, MEMORY, DRAFT):
        of_batch = speed_ups(runs, method)
        for batch, found in of_batch.items():
            name = f"speed-up at batch {batch}"
            yield Figure.of(f"{group}, {method}", name, estimate(found))
        if len(of_batch) > 1:
            most = max(of_batch)
            yield Figure.of(
                f"{group}, {method}", SHRINKS, median_ratio(of_batch[1], of_batch[most])
            )


def speed_ups(runs: Sequence[Row], method: str) -> dict[int, list[float]]:
    """Batch -> tokens per second over none of the same engine and turn, in the order of turns."""
    found: dict[int, list[float]] = {}
    own = [row for row in runs if row["engine"] == method]
    for row in sorted(own, key=lambda row: (row["batch"], row["repeat"])):
        if row["method"] == method:
            (none,) = (
                other["tokens_per_second"]
                for other in own
                if other["method"] == NONE
                and (other["batch"], other["repeat"]) == (row["batch"], row["repeat"])
            )
            found.setdefault(row["batch"], []).append(row["tokens_per_second"] / none)
    return found


def _parts(group: str, runs: Sequence[Row]) -> Iterator[Figure]:
    for batch in dict.fromkeys(row["batch"] for row in runs):
        here = [row for row in runs if row["batch"] == batch and row["parts_ms"]]
        drafting = {
            method: [row for row in here if row["method"] == method] for method in (DRAFT, NGRAM)
        }
        where = f"{group}, batch {batch}"
        for method, mine in drafting.items():
            for part in ("draft", "verify"):
                found = estimate([row["parts_ms"][part] for row in mine])
                yield Figure.of(where, f"{part}, {method}", found, "ms")
        model, ngram = (
            [row["parts_ms"]["draft"] for row in drafting[method]] for method in (DRAFT, NGRAM)
        )
        verify = [row["parts_ms"]["verify"] for row in drafting[DRAFT]]
        yield Figure.of(where, VERIFY_OVER_DRAFT, median_ratio(verify, model))
        yield Figure.of(where, DRAFT_OVER_NGRAM, median_ratio(model, ngram))
        shares = [row["parts_ms"]["draft"] / row["step_ms"] for row in drafting[NGRAM]]
        yield Figure.of(where, NGRAM_SHARE, estimate(ALMOST_NOTHING - np.array(shares)))


def _lookup(group: str, requests: Sequence[Row]) -> Iterator[Figure]:
    """By request: how much faster than none, n-gram over draft model."""
    gain = {method: gains(requests, method) for method in (NGRAM, DRAFT)}
    bleu = {row["index"]: row["bleu"] for row in requests if row["method"] == NONE}
    repeats = [index for index in bleu if bleu[index] > REPEATS_PROMPT]
    others = [index for index in bleu if index not in repeats]
    where = f"{group}, look-up"
    yield Figure(group=where, name="answers that repeat their prompt", value=len(repeats))
    for name, some in ((LOOKUP_WINS, repeats), (LOOKUP_ELSE, others)):
        if some:
            pairs = ([gain[method][index] for index in some] for method in (NGRAM, DRAFT))
            yield Figure.of(where, name, median_ratio(*pairs))


def gains(requests: Sequence[Row], method: str) -> dict[int, float]:
    """Request -> how many times as fast as with none of the same engine and turn, median over
    turns. Answers of one token are left out."""
    seconds = {
        (row["index"], row["method"], row["repeat"]): row["seconds"]
        for row in requests
        if row["engine"] == method
    }
    ratios: dict[int, list[float]] = {}
    for (index, of, repeat), own in seconds.items():
        if of == method and own:
            ratios.setdefault(index, []).append(seconds[index, NONE, repeat] / own)
    return {index: median(found) for index, found in ratios.items()}


def _acceptance(group: str, runs: Sequence[Row], requests: Sequence[Row]) -> Iterator[Figure]:
    where = f"{group}, acceptance at batch 1"
    of_method: dict[str, list[list[int]]] = {}
    for method in (NGRAM, DRAFT):
        mine = [row for row in runs if row["method"] == method and row["batch"] == 1]
        counts = (
            [sum(column) for column in zip(*(r[name] for r in mine), strict=True)]
            for name in ("tested", "accepted")
        )
        for place, (tested, accepted) in enumerate(zip(*counts, strict=True), 1):
            if tested:
                name = f"α at position {place}, {method}"
                yield Figure(group=where, name=name, value=accepted / tested, n=tested)
        first = [row for row in requests if row["method"] == method and row["repeat"] == 0]
        of_method[method] = [row["accepted"] for row in first if row["accepted"]]
        means = [float(np.mean(steps)) for steps in of_method[method]]
        for share in (0.1, 0.5, 0.9):
            name = f"accepted per step, {share:.0%} of the requests below, {method}"
            yield Figure(group=where, name=name, value=float(np.quantile(means, share)))
        yield Figure.of(where, f"variance / mean, {method}", dispersion(of_method[method]))
    yield Figure.of(where, BURSTS, bursts(of_method[NGRAM], of_method[DRAFT]))


def _sums(steps_of: Sequence[Sequence[int]]) -> np.ndarray:
    """float [requests, 3]: steps, tokens, their squares."""
    return np.array([[len(s), sum(s), sum(n * n for n in s)] for s in steps_of], float)


def _dispersion(sums: np.ndarray) -> np.ndarray:
    """Variance over mean of the tokens of a step. `sums`: [..., 3]."""
    num, first, second = np.moveaxis(sums, -1, 0)
    mean = np.maximum(first, 1e-9) / num
    return np.asarray((second / num - mean**2) / mean)


def dispersion(steps_of: Sequence[Sequence[int]]) -> Estimate:
    """Of all steps; resampled by request."""
    sums = _sums(steps_of)

    def statistic(chosen: np.ndarray, axis: int) -> np.ndarray:
        return _dispersion(sums[chosen.astype(int)].sum(axis))

    return estimate(np.arange(len(sums)), statistic)


def bursts(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Estimate:
    """Dispersion over dispersion, on the same requests; resampled by request."""
    above, below = _sums(one), _sums(other)
    assert len(above) == len(below), "both serve the same requests"

    def statistic(chosen: np.ndarray, axis: int) -> np.ndarray:
        which = chosen.astype(int)
        return _dispersion(above[which].sum(axis)) / _dispersion(below[which].sum(axis))

    return estimate(np.arange(len(above)), statistic)


def _gap(draft: str, rows: Sequence[Row]) -> Iterator[Figure]:
    where = f"the bound, {draft} draft"
    seconds: dict[int, dict[str, Any]] = {row["batch"]: row for row in rows}
    for batch, row in seconds.items():
        yield Figure.of(where, f"oracle over none, batch {batch}", of_sums(row, "plain", "oracle"))
        yield Figure.of(where, f"fixed k over none, batch {batch}", of_sums(row, "plain", "fixed"))
        yield Figure.of(
            where, f"oracle over fixed k, batch {batch}", of_sums(row, "fixed", "oracle")
        )
    yield Figure.of(where, WIDENS, widening(seconds[1], seconds[max(seconds)]))


def of_sums(row: Row, above: str, below: str) -> Estimate:
    """All seconds over all seconds; resampled by request."""
    return _ratio_of_sums(np.array([row[f"{name}_s"] for name in (above, below)]))


def widening(first: Row, last: Row) -> Estimate:
    """How many times as far the fixed length is from the oracle in the last batch as in the
    first; resampled by request."""
    names = (last, "fixed_s"), (last, "oracle_s"), (first, "oracle_s"), (first, "fixed_s")
    return _ratio_of_sums(np.array([row[name] for row, name in names]))


def _ratio_of_sums(rows: np.ndarray) -> Estimate:
    """Of [4, requests] a / b x c / d, of [2, requests] a / b: sums over requests."""

    def statistic(chosen: np.ndarray, axis: int) -> np.ndarray:
        sums = rows[:, chosen.astype(int)].sum(axis + 1)
        return np.asarray((sums[0::2] / sums[1::2]).prod(0))

    return estimate(np.arange(rows.shape[1]), statistic)
