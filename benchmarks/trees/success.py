"""`osd bench success`: how often a draft's k likeliest, or k drawn, would hold the target's token.

    target ─► its own answers ─► p of the target and q of the draft at each token ─► success by k

What a token tree of width k could gain, without a tree (`docs/trees.md`); beside the table that was
published for LLaMA-7B with a draft of 68 M parameters (SpecInfer, arXiv 2305.09781, table 1), which
holds *greedy* against *stochastic* decoding with multi-step sampling. The draft is the one that the
family serves first: on domains off home it is frozen, and has learnt nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Lines, Result
from benchmarks.stats import estimate_mean
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED
from benchmarks.trees.trees import GREEDY, KS, MULTI_STEP

PUBLISHED = {
    "Alpaca": ((68, 77, 81, 84, 85), (54, 81, 91, 95, 97)),
    "CP": ((69, 79, 83, 86, 87), (56, 82, 92, 95, 97)),
    "WebQA": ((62, 72, 77, 80, 82), (52, 80, 90, 94, 96)),
    "CIP": ((70, 81, 85, 88, 89), (57, 84, 92, 95, 97)),
    "PIQA": ((63, 75, 79, 83, 85), (55, 82, 91, 95, 97)),
}
"""Data set -> percent at k = 1 to 5, greedy and stochastic."""
FLATTENS = "greedy, k = 5 less k = 4"
CROSSES = "stochastic less greedy, k = 5"
BEGINS_BELOW = "stochastic less greedy, k = 1"
STOCHASTIC_TEMPERATURE = 1.0
"""At which the stochastic row is held against the greedy one."""


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    return Protocol(
        bench="success",
        question="How often would k tokens of the draft hold the target's, on the tiny pair and on "
        "prose in five languages?",
        arms=(GREEDY, MULTI_STEP),
        order="Each rule at the same positions of the target's own answers.",
        sizes={
            "domains": {
                "tiny": ["arithmetic", "sql"],
                "prose": ["en", "de"] if options.quick else ["en", "de", "fr", "es", "ru"],
            },
            "num_requests": 8 if options.quick else 32,
            "answer_tokens": 48,
            "temperatures": (0.0, 0.7, STOCHASTIC_TEMPERATURE),
            "ks": KS,
        },
        goals=(
            Goal(figure=FLATTENS, at_most=0.03),
            Goal(figure=BEGINS_BELOW, at_most=0.0),
            Goal(figure=CROSSES, at_least=0.0),
        ),
    )


def run(options: Options) -> Result:
    """Let the target answer, and count."""
    plan = protocol(options)
    notebook = Notebook(options, plan)
    for family, domains in plan.sizes["domains"].items():
        source = Source(family)
        for domain in domains:
            for temperature in plan.sizes["temperatures"]:
                for row in source.successes(domain, temperature, plan.sizes):
                    notebook.add(family=family, domain=domain, temperature=temperature, **row)
            options.say(f"{family}, {domain}: counted")
    return summarise(plan, notebook.rows)


class Source:
    """A family's target and the draft that it serves first."""

    def __init__(self, family: str) -> None:
        import torch
        from transformers import AutoTokenizer

        from serving.trees import fitting

        torch.set_num_threads(1)
        self._family = FAMILIES[family]
        target, draft = self._family.models()
        self._target, (self._draft,) = fitting.load(target, [draft])
        self._tokenizer: Any = AutoTokenizer.from_pretrained(target)

    def successes(self, domain: str, temperature: float, sizes: dict[str, Any]) -> list[Row]:
        """Rows as of `success_rules.successes`."""
        from benchmarks.trees.success_rules import successes
        from osd.tiny.tokenizer import chat_prompt
        from serving.trees.engine import TreeEngine

        asked = self._family.prompts(domain, FIRST_SERVED, sizes["num_requests"])
        prompts = [chat_prompt(self._tokenizer, prompt) for prompt in asked]
        ends = {int(self._tokenizer.eos_token_id)}
        engine = TreeEngine(self._target, temperature=temperature)
        answers = engine.generate(prompts, sizes["answer_tokens"], ends)
        texts = [(p, answer.output_ids) for p, answer in zip(prompts, answers, strict=True)]
        return successes(self._target, self._draft, texts, temperature, sizes["ks"])


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Success by k, whether greedy flattens and stochastic crosses it, and the published table."""
    figures = [*_measured(rows), *_compared(rows), *_published()]
    return Result(protocol=plan, figures=tuple(figures), drawings=tuple(_drawings(rows)))


def _measured(rows: Sequence[Row]) -> Iterator[Figure]:
    for row in rows:
        group = f"{_where(row)}, T = {row['temperature']:g}"
        yield Figure.of(group, f"{row['rule']}, k = {row['k']}", estimate_mean(row["success"]))


def _compared(rows: Sequence[Row]) -> Iterator[Figure]:
    """Pairs of requests."""
    for where in dict.fromkeys(map(_where, rows)):
        mine = [row for row in rows if _where(row) == where]
        greedy = {row["k"]: row["success"] for row in mine if row["rule"] == GREEDY}
        drawn = {
            row["k"]: row["success"]
            for row in mine
            if (row["rule"], row["temperature"]) == (MULTI_STEP, STOCHASTIC_TEMPERATURE)
        }
        yield Figure.of(where, FLATTENS, estimate_mean(np.subtract(greedy[5], greedy[4])))
        yield Figure.of(where, BEGINS_BELOW, estimate_mean(np.subtract(drawn[1], greedy[1])))
        yield Figure.of(where, CROSSES, estimate_mean(np.subtract(drawn[5], greedy[5])))


def _published() -> Iterator[Figure]:
    for data, both in PUBLISHED.items():
        for rule, percents in zip((GREEDY, "stochastic"), both, strict=True):
            for k, percent in zip(KS, percents, strict=True):
                group = f"published, {data} (LLaMA-7B, draft of 68 M)"
                yield Figure(group=group, name=f"{rule}, k = {k}", value=percent / 100)


def _drawings(rows: Sequence[Row]) -> Iterator[Lines]:
    for where in dict.fromkeys(map(_where, rows)):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if _where(row) == where:
                label = f"{row['rule']}, T = {row['temperature']:g}"
                lines.setdefault(label, []).append((row["k"], float(np.mean(row["success"]))))
        yield Lines(
            title=f"{where}: a child is accepted",
            x_label="children of a node",
            y_label="share of positions",
            lines={label: tuple(points) for label, points in lines.items()},
        )


def _where(row: Row) -> str:
    return f"{row['family']}, {row['domain']}"
