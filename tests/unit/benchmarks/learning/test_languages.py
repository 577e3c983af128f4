"""`osd bench languages`: its figures and its verdict from rows, and the memory's part of a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning.languages import (
    FROZEN,
    GAIN,
    MEMORY,
    OFFLINE,
    OVER_MEMORY,
    SUFFIX,
    protocol,
    summarise,
    verdict,
)
from benchmarks.learning.languages_jobs import of_lookups
from benchmarks.record import Options, Protocol
from benchmarks.replays.recording import Recorded

HOME = "en"


def plan() -> Protocol:
    found = protocol(Options(directory=Path("unused"), quick=True))
    return replace(found, arms=(FROZEN, OFFLINE, MEMORY))


def a_row(domain: str, gain: float, length: float) -> dict[str, Any]:
    """A draft that learns as much, and whose steps make as many tokens; the memory makes 1.2."""
    row: dict[str, Any] = {
        "family": "prose",
        "domain": domain,
        "perplexity": 30.0,
        "top_probability": 0.4,
        "loops_greedy": 0.5,
        "loops_sampled": 0.0,
        "alpha": {FROZEN: 0.2, OFFLINE: 0.2 + gain},
        "tokens_per_step": {FROZEN: 1.2, OFFLINE: length, MEMORY: 1.2},
    }
    if domain == HOME:  # where no draft is trained offline
        del row["alpha"][OFFLINE], row["tokens_per_step"][OFFLINE]
    return row


def rows(**others: tuple[float, float]) -> list[dict[str, Any]]:
    given = {"en": (0.01, 1.2), **dict.fromkeys(("de", "fr", "es", "ru"), (0.2, 1.5)), **others}
    return [a_row(domain, *pair) for domain, pair in given.items()]


def test_the_family_shows_something_where_every_foreign_language_can_be_learnt() -> None:
    result = summarise(plan(), rows())
    figures = {(one.group, one.name): one.value for one in result.figures}
    assert round(figures["de", GAIN], 6) == 0.2
    assert figures["ru", OVER_MEMORY] == 1.25
    assert (HOME, GAIN) not in figures
    assert figures[HOME, f"tokens per step, {MEMORY}"] == 1.2
    assert verdict(result) == (
        "the family can show learning that looking up does not replace: de, fr, es, ru"
    )


def test_one_language_that_cannot_be_learnt_is_enough_to_show_nothing() -> None:
    said = verdict(summarise(plan(), rows(es=(0.11, 1.5))))
    assert said == f"the family shows nothing: es: {GAIN} 0.110 (>= 0.12)"


def test_what_can_be_looked_up_shows_nothing() -> None:
    said = verdict(summarise(plan(), rows(fr=(0.3, 1.21))))
    assert said == f"the family shows nothing: fr: {OVER_MEMORY} 1.008 (>= 1.05)"


def test_home_alone_shows_nothing() -> None:
    whole = plan()
    alone = replace(whole, sizes=whole.sizes | {"domains": [HOME]})
    said = verdict(summarise(alone, [a_row(HOME, 0.5, 3.0)]))
    assert said == "the family shows nothing: nothing was measured off home"


def test_the_memory_finds_what_was_served_before_and_nothing_in_new_text() -> None:
    rng = np.random.default_rng(0)
    answers = [rng.integers(100, 4000, 64).astype(np.int32) for _ in range(6)]
    sizes = plan().sizes | {"left_out": {SUFFIX: "not installed"}}
    new = of_lookups([recorded(i, one) for i, one in enumerate(answers)], sizes)[MEMORY]
    again = [recorded(i, answers[i % 3]) for i in range(24)]
    known = of_lookups(again, sizes)[MEMORY]
    assert new.tokens_per_step() == 1.0
    assert known.tokens_per_step(12) > 4
    assert known.total("tokens") == 24 * 63


def recorded(number: int, answer: np.ndarray) -> Recorded:
    rows = np.zeros((len(answer), 1))
    return Recorded(
        name=str(number),
        prompt_ids=np.arange(4, dtype=np.int32) + 50 + 4 * number,
        output_ids=answer,
        target_ids=rows.astype(np.int32),
        target_logprobs=rows.astype(np.float16),
        tail_logprob=rows[:, 0].astype(np.float32),
    )
