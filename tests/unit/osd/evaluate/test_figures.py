"""Figures of made-up runs, against what is reckoned by hand."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from osd.evaluate.figures import Figures, figures_of
from osd.evaluate.runs import Run
from osd.evaluate.table import table
from tests.support.evaluations import REQUESTS, run_of, served, step

NONE_STEPS = (step(2, 2, verify=0.001),) * 3
DRAFT_STEPS = (step(2, 8, verify=0.002),) * 3


def none(**fields: Any) -> Run:
    requests = [served(0, [0] * 5, 0), served(1, [0] * 3, 0)]
    return run_of("none", 0, requests, **({"steps": NONE_STEPS} | fields))


def drafting(**fields: Any) -> Run:
    """Request 0 accepts 3 and 1 of 3 and 3, request 1 none and 2."""
    requests = [served(0, [3, 1], 3), served(1, [0, 2], 3)]
    return run_of("draft", 3, requests, **({"steps": DRAFT_STEPS} | fields))


def found(*runs: Run) -> list[Figures]:
    return figures_of(runs, REQUESTS)


def test_acceptance_by_position_place_request_and_data() -> None:
    _, draft = found(none(), drafting())
    assert draft.acceptance_length == 1 + 6 / 4
    assert draft.by_draft_position.tested == (4, 3, 2)
    assert draft.by_draft_position.accepted == (3, 2, 1)
    assert draft.by_draft_position.alpha == (0.75, 2 / 3, 0.5)
    # request 0 has 7 tokens, its steps begin at 1 and 5; request 1 has 5, at 1 and 2
    assert draft.by_output_place.tested == (0, 3, 1, 0, 3, 0, 0, 2, 0, 0)
    assert draft.by_output_place.accepted == (0, 3, 0, 0, 2, 0, 0, 1, 0, 0)
    assert draft.by_request == pytest.approx((0.53, 0.575, 0.65, 0.725, 0.77))
    assert [of.data for of in draft.by_data] == ["sql", "sums"]
    assert [of.alpha for of in draft.by_data] == [4 / 5, 2 / 4]
    assert [of.acceptance_length for of in draft.by_data] == [3.0, 2.0]


def test_speed_over_none_is_taken_by_pairs_of_one_engine() -> None:
    first, draft = found(
        none(),
        drafting(seconds=1.0),
        none(repeat=1, seconds=8.0),
        drafting(repeat=1, seconds=1.0),
        none(repeat=2),
        drafting(repeat=2, started="another engine", seconds=100.0),
    )
    assert first.over_none is None
    assert draft.over_none is not None
    one, other = (12 / 1) / (10 / 2), (12 / 1) / (10 / 8)
    assert (draft.over_none.low, draft.over_none.high) == pytest.approx((one, other))
    assert draft.over_none.num == 2
    assert draft.tokens_per_second == 12


def test_of_none_the_time_of_the_control_is_left_out() -> None:
    slow = none(steps=(step(2, 2, verify=0.001, own=0.5),) * 2)
    assert found(slow)[0].tokens_per_second == 10 / (2 - 1)
    paid = drafting(steps=(step(2, 8, verify=0.001, own=0.5),) * 2)
    for method in ("draft", "auto"):
        assert found(replace(paid, method=method))[0].tokens_per_second == 12 / 2


def test_latencies_begin_with_the_arrival() -> None:
    (one,) = found(none())
    assert (one.ttft.p50, one.ttft.p99) == (0.5, 0.5)
    assert one.latency.p99 == 1.5
    assert (one.tpot.p50, one.tpot.p99) == (1 / 5, 1 / 3)


def test_a_step_and_its_parts() -> None:
    mixed = step(2, 60, verify=0.5, is_pure=False)
    first, draft = found(none(), drafting(steps=(*DRAFT_STEPS, mixed)))
    assert draft.target_efficiency == pytest.approx(0.5)
    assert draft.step_ms == pytest.approx(20)
    assert draft.parts_ms == pytest.approx(
        {"draft": 4, "verify": 2, "sample": 6, "scheduling": 2, "other": 6}
    )
    assert (draft.drafted_per_step, draft.verified_per_step) == (3, 4)
    assert (first.drafted_per_step, first.verified_per_step) == (0, 1)
    cut = drafting(steps=[step(2, 4, verify=0.002, proposed=6)] * 3)
    assert (found(cut)[0].drafted_per_step, found(cut)[0].verified_per_step) == (3, 2)
    unseen = drafting(steps=[step(2, 8, verify=0.002, proposed=0)] * 3)
    assert found(unseen)[0].drafted_per_step == 3


def test_steps_of_another_width_say_nothing_of_the_targets_efficiency() -> None:
    narrow = (*[step(2, 6, verify=0.001)] * 3, step(2, 8, verify=0.004))
    _, draft = found(none(), drafting(steps=narrow))
    assert draft.target_efficiency is None
    _, untold = found(none(), drafting(steps=(step(2, 8, verify=0.1, parts=None),) * 3))
    assert untold.target_efficiency is None and untold.parts_ms == {}


def test_answers_and_counters_that_differ_are_told() -> None:
    alike = [served(0, [3, 1], 3), served(1, [0, 2], 3)]
    same = found(run_of("none", 0, alike), run_of("draft", 3, alike))[1]
    assert (same.num_compared, same.num_different, same.agrees_with_vllm) == (2, 0, True)
    assert "2 compared with those of none at temperature 0: all identical" in table([same], [], [])
    other = found(none(), drafting(counters=none().counters))[1]
    assert (other.num_compared, other.num_different, other.agrees_with_vllm) == (2, 2, False)
    assert "2 DIFFERENT" in table([other], [], [])
    assert "DIFFER from what was written down: draft 3 at batch 2" in table([other], [], [])
    sampled = found(none(temperature=0.7), drafting(temperature=0.7))[1]
    assert sampled.num_compared == 0


def test_the_table_has_a_block_for_each_load() -> None:
    lines = table(
        found(none(), drafting(), none(load="1/s"), drafting(load="1/s")), [], []
    ).splitlines()
    heads = [line for line in lines if line.endswith("temperature 0")]
    assert heads == ["batch 2, temperature 0", "1/s, temperature 0"]
    row = next(line.split() for line in lines if line.split()[:2] == ["draft", "3"])
    assert row[2:4] == ["6.0", "1.20"]
    assert len({len(line) for line in lines if line.startswith("  ")}) == 1
