"""What the oracles know is what the replays find, and the bench says how near the control comes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.drift import contenders
from benchmarks.oracle import jobs, oracle
from benchmarks.oracle.runs import costs_of, runs_of
from benchmarks.record import Options, Row
from benchmarks.replays import closed_loop, lookup
from benchmarks.replays.closed_loop import DRAFT, MEMORY, ClosedLoop
from benchmarks.replays.recording import Recorded
from benchmarks.replays.step_times import ModelledStepTimes, published
from osd.config.schema import Config, SpeculationConfig
from osd.evaluate.bound.foresight import KNOWS, PAYS
from osd.evaluate.bound.replay import runs_of_memory
from osd.evaluate.bound.rules import fixed
from osd.evaluate.bound.speeds import (
    ALL,
    NONE,
    adaptive_name,
    fixed_name,
    oracle_name,
    speeds,
)
from osd.evaluate.bound.speeds import rules_of as all_rules
from serving.speculation.memory.memory import Memory
from tests.support.tiny_drafts import save_draft
from tests.unit.benchmarks.drift.test_contenders import a_setup, recorded
from trainer.draft import load_draft

TIMES = ModelledStepTimes(verify_s=(0.04, 0.05, 0.12), draft_s=0.008, batch=1)
K, MEMORY_K = 4, 8
BYTES = 4 << 20


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that knows the planted language."""
    directory = tmp_path_factory.mktemp("good")
    draft = save_draft(directory / "first")
    setup = a_setup(draft, directory)
    contenders.train_ceiling(setup.config, draft, recorded(64, start=1000), directory / "draft")
    return directory / "draft"


def config(mode: str, proposers: list[str]) -> Config:
    given = SpeculationConfig.model_validate(
        {"mode": mode, "k_max": K, "memory_k_max": MEMORY_K, "proposers": proposers}
    )
    return Config(speculation=given)


def repeating(num: int) -> list[Recorded]:
    """Answers of which the later ones were seen before, in part."""
    found = []
    for number, one in enumerate(recorded(num)):
        ids = one.output_ids.copy()
        ids[number % 3 :: 7] = 3 + number % 2
        found.append(replace(one, name=f"r{number}", output_ids=np.tile(ids, 2)))
    return found


@pytest.mark.parametrize("batch", [1, 4])
def test_a_fixed_k_takes_in_the_bound_what_it_takes_in_the_replay(
    good: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_loop, "NOISE", 0.0)
    times, requests = replace(TIMES, batch=batch), recorded(12)
    loop = ClosedLoop(requests, config("fixed", ["draft"]), times, seed=0)
    loop.swap(good, None)
    served = sorted(loop.serve(), key=lambda one: one.index)
    runs = runs_of(requests, load_draft(good), Memory(BYTES, MEMORY_K), k=K, batch=batch)
    found = speeds(runs, costs_of(times), {"fixed": fixed(DRAFT, K)})["fixed"]
    assert [one.counts.steps for one in served] == [len(c.steps) for c in found.courses]
    assert [batch * (one.seconds or 0.0) for one in served] == pytest.approx(
        found.seconds_R.tolist()
    )
    assert jobs.speed_of(served, times) == pytest.approx(found.of_sums)


def test_the_memory_is_right_in_the_bound_where_it_is_in_the_replay(good: Path) -> None:
    requests = repeating(16)
    curve = lookup.remembered(requests, Memory(BYTES, MEMORY_K), MEMORY_K, 0.0)
    runs = runs_of(requests, load_draft(good), Memory(BYTES, MEMORY_K), k=K, batch=1)
    found = speeds(runs, costs_of(TIMES), {"fixed": fixed(MEMORY, MEMORY_K)})["fixed"]
    drafted, accepted = (
        [sum(step[place] for step in course.steps) for course in found.courses] for place in (1, 2)
    )
    assert sum(accepted) > 50
    assert [len(course.steps) for course in found.courses] == curve.counts["steps"].tolist()
    assert accepted == curve.counts["accepted"].tolist()
    assert drafted == curve.counts["drafted"].tolist()


def test_side_by_side_the_memory_knows_less_of_who_is_still_under_way() -> None:
    requests = [replace(repeating(1)[0], name=f"r{number}").bare_trace("t") for number in range(8)]
    alone, together = (
        sum(int(one.right.sum()) for one in runs_of_memory(requests, Memory(BYTES, 8), batch))
        for batch in (1, 8)
    )
    assert 0 < together < 0.8 * alone


def test_a_request_that_prefill_ends_has_no_position() -> None:
    one = repeating(1)[0]
    short = replace(one, name="short", output_ids=one.output_ids[:1])
    answers = [short.bare_trace("t"), one.bare_trace("t")]
    found = runs_of_memory(answers, Memory(BYTES, 8), 2)
    assert [len(runs.right) for runs in found] == [0, len(one.output_ids) - 1]


@pytest.mark.parametrize("batch", [1, 4])
def test_the_control_is_no_faster_than_the_oracle_and_the_parts_are_all(
    good: Path, batch: int
) -> None:
    times, requests = published(num_kv_tokens=0, batch=batch), repeating(48)
    loop = ClosedLoop(requests, config("auto", ["draft", "memory"]), times, seed=0)
    loop.swap(good, None)
    served = list(loop.serve())
    runs = runs_of(requests, load_draft(good), Memory(BYTES, MEMORY_K), k=K, batch=batch)
    found = speeds(runs, costs_of(times), all_rules({DRAFT: K, MEMORY: MEMORY_K}))
    control = jobs.speed_of(served, times)
    assert 0.5 < control < found[ALL].of_sums
    parts = jobs.parts_of(loop, served, found, times)
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts[jobs.STEPS] > 0 and parts[jobs.DRAFTING] > 0


def test_a_measured_step_that_shrinks_as_it_widens_is_taken_as_level() -> None:
    noisy = replace(TIMES, verify_s=(0.05, 0.04, 0.12))
    assert costs_of(noisy).verify_s == (0.05, 0.05, 0.12)


# -- figures --------------------------------------------------------------------------------------


def a_row(seed: int, control: float, **changed: float) -> Row:
    """Of the steady schedule, whose best fixed choice is the draft's 2 tokens."""
    found = dict.fromkeys(all_rules({DRAFT: K, MEMORY: MEMORY_K}), 1.0)
    found |= {fixed_name(DRAFT, 2): 1.4, oracle_name(DRAFT): 1.8, ALL: 2.0} | changed
    return {
        "schedule": "steady",
        "seed": seed,
        "batch": 4,
        "price": oracle.PUBLISHED,
        "control": control,
        "speeds": found,
        "parts": {jobs.STEPS: 0.7, jobs.DRAFTING: 0.1, jobs.VERIFYING: 0.2},
    }


def figures(rows: list[Row], tmp_path: Path, group: str = "steady") -> dict[str, Any]:
    result = oracle.summarise(oracle.protocol(Options(directory=tmp_path)), rows)
    mine = [figure for figure in result.figures if figure.group.startswith(group)]
    (met,) = (is_met for _, figure, is_met in result.verdicts() if figure in mine)
    return {figure.name: figure for figure in mine} | {"met": met}


def test_the_share_of_the_gap_is_held_to_half_of_it(tmp_path: Path) -> None:
    found = figures([a_row(0, 1.7), a_row(1, 1.76)], tmp_path)
    assert found[f"{oracle.BEST_FIXED}: draft, k = 2"].value == pytest.approx(1.4)
    assert found[oracle.CLOSED].value == pytest.approx((0.5 + 0.6) / 2)
    assert found["met"] and found[oracle.CLOSED].low is not None
    assert adaptive_name(MEMORY) in found and NONE not in found
    found = figures([a_row(0, 1.6), a_row(1, 1.6)], tmp_path)
    assert found[oracle.CLOSED].value == pytest.approx(1 / 3) and not found["met"]
    assert found[f"time over the oracle's: {jobs.STEPS}"].value == pytest.approx(0.7)


def test_what_nobody_can_close_who_does_not_know_what_will_be_drawn_is_told(tmp_path: Path) -> None:
    found = figures([a_row(0, 1.45, **{KNOWS: 1.6, PAYS: 1.5})], tmp_path)
    assert found[f"{oracle.CLOSED}, {KNOWS}"].value == pytest.approx(0.2 / 0.6)
    assert found[f"{oracle.CLOSED}, {PAYS}"].value == pytest.approx(0.1 / 0.6)
    assert found[oracle.CLOSED].value == pytest.approx(0.05 / 0.6) and not found["met"]
    assert f"{oracle.CLOSED}, {KNOWS}" not in figures([a_row(0, 1.45)], tmp_path)


def test_who_fixes_k_chooses_once_for_all_seeds(tmp_path: Path) -> None:
    # Each seed's own best would be 1.5; of what is chosen once, 1.4 and 1.5.
    rows = [a_row(0, 1.7, **{"draft, k = 3": 1.5}), a_row(1, 1.7, **{"draft, k = 2": 1.5})]
    found = figures(rows, tmp_path)
    assert found[f"{oracle.BEST_FIXED}: draft, k = 2"].value == pytest.approx(1.45)
    assert found[oracle.CLOSED].value == pytest.approx((0.3 / 0.6 + 0.2 / 0.5) / 2)


def test_of_all_traffic_one_choice_is_fixed(tmp_path: Path) -> None:
    # Steady traffic likes the draft, the sharp shift the memory: who fixes one of them loses half.
    sharp = a_row(0, 1.7, **{"draft, k = 2": 1.0, "memory, k = 8": 1.5}) | {"schedule": "sharp"}
    rows = [a_row(0, 1.7), sharp]
    of_each = [figures(rows, tmp_path, name)[oracle.CLOSED].value for name in ("steady", "sharp")]
    assert of_each == pytest.approx([0.3 / 0.6, 0.2 / 0.5])
    found = figures(rows, tmp_path, oracle.ALL_TRAFFIC)
    assert found[f"{oracle.BEST_FIXED}: memory, k = 8"].value == pytest.approx(1.25)
    assert found[oracle.CLOSED].value == pytest.approx((1.7 - 1.25) / (2.0 - 1.25))
    assert found["met"]


def test_language_traffic_is_of_the_prose_family(tmp_path: Path) -> None:
    plan = oracle.protocol(Options(directory=tmp_path), oracle.LANGUAGES)
    families = {tree["family"] for tree in plan.sizes["schedules"].values()}
    assert families == {"prose"} and plan.sizes["batches"] == [1, 4, 16]
    quick = oracle.protocol(Options(directory=tmp_path, quick=True), oracle.LANGUAGES)
    assert [p["requests"] for p in quick.sizes["schedules"]["prose/home-and-de"]["phases"]] == [
        32,
        64,
    ]
