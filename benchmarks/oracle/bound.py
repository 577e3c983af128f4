"""`osd bench bound --traces DIR`: our bound on the public simulator's own traces.

    traces ─► as simulated: its rule, its charging ──► its published figures
          ├─► the same rule, the chosen proposer charged
          └─► the oracle: backward over proposers and lengths, nobody where it does not pay

The simulator's oracle of both proposers pays for the n-gram lookup alone, also where it takes
EAGLE's draft. It pays for a proposer where that has nothing to propose. Speeds are over no
speculation, prefill included, of a batch of equal requests: means over requests, as the simulator
has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.oracle import public_traces
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result
from osd.evaluate.bound.costs import StepCosts
from osd.evaluate.bound.published import EAGLE, NGRAM, published
from osd.evaluate.bound.rules import Rule, adaptive, fixed, longest, oracle
from osd.evaluate.bound.speeds import ALL, adaptive_name, fixed_name, oracle_name, speeds

BOTH = (NGRAM, EAGLE)
"""The simulator takes n-gram's where both are right equally often."""
BATCHES, QUICK_BATCHES = (1, 16, 64, 128), (1, 16)
LONGEST_FIXED = 12
"""Most draft tokens of EAGLE in every step."""
SIMULATED = "oracle of both, as simulated"
EAGLE_SIMULATED = "EAGLE, oracle length, as simulated"
CHARGED = "the same choice, the chosen proposer charged"
NGRAM_SIMULATED = "n-gram, oracle length, as simulated"
BOTH_MEANS = (SIMULATED, EAGLE_SIMULATED, CHARGED, ALL, oracle_name(EAGLE))
"""Rules whose ratio of sums is shown beside their mean over requests; the raw rows have both."""
DISTANCE = "distance to the published figure"
MOST_DISTANCE = 0.01
PUBLISHED = {
    ("gsm8k", SIMULATED): (2.80, 2.50, 2.00, 1.71),
    ("gsm8k", EAGLE_SIMULATED): (2.13, 1.98, 1.71, 1.54),
    ("gsm8k", "EAGLE, k = 1"): (1.29, 1.26, 1.19, 1.14),
    ("gsm8k", "EAGLE, k = 3"): (1.81, 1.65, 1.36, 1.18),
    ("gsm8k", "EAGLE, k = 5"): (2.01, 1.73, 1.29, 1.07),
    ("instructcoder", SIMULATED): (4.89, 3.53, 2.32, 1.87),
    ("sharegpt", SIMULATED): (3.11,),
    ("cnn", SIMULATED): (2.97,),
}
"""(Data set, rule) -> figures at `BATCHES`, of the paper's Figures 10 and 12 and its simulator."""


def protocol(options: Options) -> Protocol:
    """What will be computed."""
    return Protocol(
        bench="bound",
        question="Does our bound give the public simulator's figures, and what do fair prices do?",
        arms=(SIMULATED, CHARGED, ALL),
        order="Every rule on the same requests.",
        sizes={
            "batches": list(QUICK_BATCHES if options.quick else BATCHES),
            "requests": public_traces.NUM_SIMULATED,
            "longest_fixed": LONGEST_FIXED,
        },
        goals=(Goal(figure=DISTANCE, at_most=MOST_DISTANCE),),
    )


def run(options: Options) -> Result:
    """All data sets found."""
    traces = public_traces.read(options.traces)
    plan = protocol(options)
    notebook = Notebook(options, plan)
    for name, traced in traces.items():
        options.say(f"{name}: {len(traced)} requests")
        for batch in plan.sizes["batches"]:
            for row in _rows(traced, batch):
                notebook.add(dataset=name, batch=batch, **row)
    return summarise(plan, notebook.rows)


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures from the raw rows."""
    return Result(protocol=plan, figures=tuple(_figures(rows)))


def _rows(traced: Sequence[public_traces.Traced], batch: int) -> Iterator[Row]:
    """{"rule", "mean", "of_sums"}: each rule, over the requests as far as the proposers that are
    compared are known."""
    lookup_alone = _paid_as_lookup(batch)
    simulated = published(batch, is_charged_empty=True)
    fair = published(batch)
    of_eagle = {fixed_name(EAGLE, k): fixed(EAGLE, k) for k in range(1, LONGEST_FIXED + 1)}
    for proposers, costs, rules in (
        (BOTH, lookup_alone, {SIMULATED: longest(BOTH)}),
        (BOTH, simulated, {CHARGED: longest(BOTH)}),
        (BOTH, fair, {ALL: oracle(BOTH)}),
        ((NGRAM,), simulated, {NGRAM_SIMULATED: longest((NGRAM,))}),
        ((EAGLE,), simulated, {EAGLE_SIMULATED: longest((EAGLE,)), **of_eagle}),
        ((EAGLE,), fair, _fair_rules()),
    ):
        requests = public_traces.simulated(traced, proposers)
        for name, found in speeds(requests, costs, rules).items():
            yield {"rule": name, "mean": found.mean, "of_sums": found.of_sums}


def _fair_rules() -> dict[str, Rule]:
    return {
        adaptive_name(EAGLE): adaptive(EAGLE, LONGEST_FIXED),
        oracle_name(EAGLE): oracle((EAGLE,)),
    }


def _paid_as_lookup(batch: int) -> StepCosts:
    """Whoever proposes, an n-gram lookup is paid for."""
    costs = published(batch, is_charged_empty=True)
    return replace(costs, drafts=dict.fromkeys(BOTH, costs.drafts[NGRAM]))


def _figures(rows: Sequence[Row]) -> Iterator[Figure]:
    for row in rows:
        group = f"{row['dataset']}, batch {row['batch']}: speed over no speculation"
        figure = partial(Figure, group=group, n=public_traces.NUM_SIMULATED)
        yield figure(name=row["rule"], value=row["mean"])
        if row["rule"] in BOTH_MEANS:
            yield figure(name=f"{row['rule']}, ratio of sums", value=row["of_sums"])
    for row in rows:
        known = PUBLISHED.get((row["dataset"], row["rule"]), ())
        at = BATCHES.index(row["batch"])
        if at < len(known):
            group = f"{row['dataset']}, batch {row['batch']}, {row['rule']}: {known[at]} published"
            yield Figure(group=group, name=DISTANCE, value=abs(row["mean"] - known[at]))
