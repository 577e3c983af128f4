"""What the runs of `osd bench papers_methods` say of the published shapes, on known numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.models import COST_SHAPES
from benchmarks.papers import methods
from benchmarks.papers.methods_runs import AGAIN, ASKED, bleu, of_request, traffic
from benchmarks.record import Options, Row
from osd.evaluate.plan import DRAFT, NGRAM, NONE
from osd.evaluate.runs import Request, Served, Verified

SIZE = "77 M"


def of_run(engine: str, method: str, batch: int, repeat: int, speed: float, **parts: float) -> Row:
    parts = {"draft": 0.0, "verify": 20.0} | parts
    return {
        "what": "run",
        "size": SIZE,
        "engine": engine,
        "method": method,
        "batch": batch,
        "repeat": repeat,
        "tokens_per_second": speed,
        "step_ms": 30.0,
        "parts_ms": parts,
        "tested": [10, 8, 4],
        "accepted": [8, 4, 1],
    }


def of_one(
    engine: str, method: str, index: int, seconds: float, bleu: float, accepted: list[int]
) -> Row:
    return {
        "what": "request",
        "size": SIZE,
        "engine": engine,
        "method": method,
        "batch": 1,
        "repeat": 0,
        "index": index,
        "bleu": bleu,
        "seconds": seconds,
        "accepted": accepted,
    }


def a_gap(batch: int, fixed: float, oracle: float) -> Row:
    return {
        "what": "gap",
        "draft": "good",
        "batch": batch,
        "plain_s": [2.0, 2.0],
        "fixed_s": [fixed, fixed],
        "oracle_s": [oracle, oracle],
    }


def all_rows(
    *,
    ups: tuple[float, float] = (2.0, 1.2),
    ngram_of_repeating: float = 0.2,
    ngram_ms: float = 0.1,
    model_ms: float = 4.0,
    ngram_steps: tuple[list[int], list[int]] = ([0, 0, 0, 3], [0, 3, 0, 0]),
    last_gap: float = 1.5,
    bleus: tuple[float, float] = (0.9, 0.2),
) -> list[Row]:
    """`ups`: of the draft model at batch 1 and 8. Gap to the oracle at batch 1: 1.25. Of each kind
    there are two requests."""
    rows = []
    for repeat in range(2):
        for batch, up in zip((1, 8), ups, strict=True):
            base = 10.0 * batch + repeat
            rows += [
                of_run(DRAFT, NONE, batch, repeat, base),
                of_run(DRAFT, DRAFT, batch, repeat, base * up, draft=model_ms),
                of_run(NGRAM, NONE, batch, repeat, base),
                of_run(NGRAM, NGRAM, batch, repeat, base * 1.5 / batch, draft=ngram_ms),
            ]
    kinds = list(zip(bleus, (ngram_of_repeating, 1.0), ngram_steps, strict=True))
    for index, (score, fast, steps) in enumerate(2 * kinds):
        rows += [
            of_one(NGRAM, NONE, index, 1.0, score, [0] * 4),
            of_one(NGRAM, NGRAM, index, fast, score, steps),
            of_one(DRAFT, NONE, index, 1.0, score, [0] * 4),
            of_one(DRAFT, DRAFT, index, 0.5, score, [1, 2, 1, 2]),
        ]
    return [*rows, a_gap(1, 1.0, 0.8), a_gap(256, last_gap, 1.0)]


def verdicts(rows: list[Row], tmp_path: Path) -> dict[str, set[str]]:
    """Shape -> what its figures say."""
    plan = methods.protocol(Options(directory=tmp_path, quick=True))
    found: dict[str, set[str]] = {}
    for one in methods.summarise(plan, rows).as_dict()["shapes"]:
        found.setdefault(one["figure"], set()).add(one["verdict"])
    return found


def test_every_published_shape_is_seen_where_it_is(tmp_path: Path) -> None:
    found = verdicts(all_rows(), tmp_path)
    assert len(found) == 7
    assert set.union(*found.values()) == {"seen"}


@pytest.mark.parametrize(
    ("changed", "figure"),
    [
        ({"ups": (1.2, 1.3)}, methods.SHRINKS),
        ({"ngram_of_repeating": 0.8}, methods.LOOKUP_WINS),
        ({"model_ms": 25.0}, methods.VERIFY_OVER_DRAFT),
        ({"ngram_ms": 5.0}, methods.DRAFT_OVER_NGRAM),
        ({"ngram_ms": 2.0}, methods.NGRAM_SHARE),
        ({"ngram_steps": ([1, 2, 1, 2], [1, 2, 1, 2])}, methods.BURSTS),
        ({"last_gap": 1.2}, methods.WIDENS),
    ],
)
def test_it_is_not_seen_where_it_is_not(
    changed: dict[str, Any], figure: str, tmp_path: Path
) -> None:
    assert "not seen" in verdicts(all_rows(**changed), tmp_path)[figure]


def test_where_no_answer_repeats_its_prompt_nothing_is_said_of_look_up(tmp_path: Path) -> None:
    found = verdicts(all_rows(bleus=(0.3, 0.2)), tmp_path)
    assert found[methods.LOOKUP_WINS] == {"inconclusive"}


def test_the_larger_target_has_no_bound_of_its_own(tmp_path: Path) -> None:
    options = Options(directory=tmp_path, quick=True)
    small, large = (methods.protocol(options, size) for size in COST_SHAPES)
    assert {shape.figure for shape in set(small.shapes) - set(large.shapes)} == {methods.WIDENS}
    assert (small.sizes["target"], large.sizes["target"]) == tuple(COST_SHAPES)
    assert small.sizes["gap_drafts"] and not large.sizes["gap_drafts"]


def test_a_speed_up_is_over_none_of_the_same_engine_and_turn() -> None:
    rows = [
        of_run(DRAFT, NONE, 1, 0, 10.0),
        of_run(DRAFT, DRAFT, 1, 0, 30.0),
        of_run(DRAFT, NONE, 1, 1, 20.0),
        of_run(DRAFT, DRAFT, 1, 1, 30.0),
        of_run(NGRAM, NONE, 1, 0, 99.0),
    ]
    assert methods.speed_ups(rows, DRAFT) == {1: [3.0, 1.5]}


def test_dispersion_is_variance_over_mean_of_all_steps() -> None:
    found = methods.dispersion([[0, 0, 0, 4], [4, 0, 0, 0]])  # mean 1, variance 3
    assert found.value == pytest.approx(3.0)
    assert found.low == pytest.approx(3.0) and found.n == 2
    even = methods.bursts([[0, 0, 0, 4]], [[1, 2, 1, 2]])  # over (9/4 - ... ) 0.25 / 1.5
    assert even.value == pytest.approx(3.0 / (0.25 / 1.5))


def test_the_gap_widens_by_ratios_of_sums() -> None:
    found = methods.widening(a_gap(1, 1.0, 0.8), a_gap(256, 1.5, 1.0))
    assert found.value == pytest.approx(1.5 / 1.25)
    assert methods.of_sums(a_gap(1, 1.0, 0.8), "plain", "oracle").value == pytest.approx(2.5)


def test_bleu_is_1_for_a_copy_and_counts_clipped() -> None:
    assert bleu([1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 5, 9]) == pytest.approx(1.0)
    assert bleu([6, 7, 8, 9], [1, 2, 3, 4]) == 0.0
    # 5 tokens, of which 4 in order: 4/5, 3/4, 2/3, 1/2.
    assert bleu([1, 2, 3, 4, 7], [1, 2, 3, 4]) == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 / 2) ** 0.25)
    # The prompt has the 1 once only.
    assert bleu([1] * 5, [1, 2, 3, 4]) == 0.0 == bleu([1, 2], [1, 2])


def test_half_of_the_questions_come_a_second_time() -> None:
    found = traffic(3)
    assert [one["data"] for one in found] == [ASKED] * 3 + [AGAIN] * 3
    first, *_, again = found
    assert len(first["messages"]) == 1
    assert again["messages"][0] == again["messages"][2] != again["messages"][1]
    assert len({one["messages"][0]["content"] for one in found}) == 6


def test_of_a_request_each_step_after_prefill_counts() -> None:
    steps = (
        Verified(0, 0, (), 0),
        Verified(1, 1, (5, 6), 2),
        Verified(2, 4, (), 0),
        Verified(3, 5, (1, 2), 1),
    )
    one = Served(
        index=4, arrived=0.0, first_at=1.0, ended=3.5, token_ids=(1, 2, 3, 4, 5, 6, 7), steps=steps
    )
    request = Request(prompt_ids=(1, 2, 3, 4), data=ASKED, max_tokens=8)
    row = of_request(one, request)
    assert row["accepted"] == [2, 0, 1]
    assert row["seconds"] == 2.5
    assert (row["index"], row["data"]) == (4, ASKED)
