"""Two ranks, each in a process of its own: they draft, sleep and swap together, and one of them
captures. What the tests of the other files reach by looking into the worker's process is asked for
here."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from osd.config.schema import CaptureConfig
from serving.vllm import undrafted
from tests.integration.conftest import release_of
from tests.integration.engines.conftest import KEPT
from tests.integration.engines.test_memory import MIXED
from tests.integration.serving.test_capture import keep_all
from tests.integration.serving.test_odd_requests import answers, difference
from tests.integration.serving.test_swap import acceptance_and_outputs
from tests.support.pairs import Pair
from tests.support.ranked_engines import NUM_RANKS, RankedEngine, RankedPasses
from tests.support.reference import K, Reference, plain_engine
from tests.support.ways import Way

LONG = {"ignore_eos": True, "max_tokens": 40}
SHORT = {"ignore_eos": True, "max_tokens": 20}
Drafts = tuple[RankedEngine, Pair]


@pytest.fixture(params=["untied", "tied"])
def drafts(request: pytest.FixtureRequest, engine: RankedEngine, pair: Pair) -> Drafts:
    """An engine that serves the first draft of a pair."""
    if request.param == "untied":
        return engine, pair
    tied: Drafts = request.getfixturevalue("tied")
    if versions(tied[0]) != [1] * NUM_RANKS:
        assert tied[0].swap(release_of(tied[1].draft, 1))["error"] == ""
    return tied


def versions(engine: RankedEngine) -> list[int]:
    """What each rank serves; 0 = no version."""
    return [rank["version"] if rank["is_whole"] else 0 for rank in engine.stands()]


def test_both_ranks_run_this_way(engine: RankedEngine) -> None:
    config = engine.llm.llm_engine.vllm_config
    assert config.parallel_config.tensor_parallel_size == NUM_RANKS
    assert config.speculative_config.draft_parallel_config.tensor_parallel_size == NUM_RANKS
    assert engine.llm.collective_rpc("osd_parts_off") == ["{}"] * NUM_RANKS
    assert engine.ranks.unproved == ""
    held = [rank["held"] for rank in engine.stands()]
    assert [set(parts) for parts in held] == [{f"rank {i}", "every rank"} for i in range(NUM_RANKS)]


def test_one_rank_captures_and_counts(engine: RankedEngine, prompts: list[list[int]]) -> None:
    keep_all(engine)
    served = engine.generate(prompts, **SHORT)
    traces = engine.traces_by_rank()
    assert traces.keys() == {0}
    assert sorted(trace.output_ids.tolist() for trace in traces[0]) == sorted(served)
    first, *others = engine.reports()
    assert first.num_traces >= len(prompts)
    assert sum(window.num_output_tokens for window in first.windows) == 20 * len(prompts)
    assert all(other.windows == [] and other.num_traces == 0 for other in others)


# -- a rank that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("build", "MemoryError: no room to build"),
        ("put", "previous draft was restored: rank {}: MemoryError: no room to put"),
        ("half", "previous draft was restored: the engine holds other weights"),
        ("norm", "previous draft was restored: the copies on every rank differ"),
        ("embedding", "previous draft was restored: the engine holds other weights"),
    ],
)
def test_where_one_rank_fails_all_keep_the_draft_they_had(
    drafts: Drafts, prompts: list[list[int]], rank: int, step: str, error: str
) -> None:
    """`half` loses half of the weights, `norm` and `embedding` have one wrong value: silently."""
    engine, pair = drafts
    some = prompts[:2]
    held, before = engine.stands(), acceptance_and_outputs(engine, some)
    engine.break_rank(rank, step)
    answer = engine.swap(release_of(pair.stranger, 2))
    assert error.format(rank) in answer["error"]
    assert not answer["proved"]
    assert engine.stands() == held
    assert acceptance_and_outputs(engine, some) == before


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rank_that_fails_to_confirm_once_serves_what_the_others_do(
    engine: RankedEngine, pair: Pair, rank: int
) -> None:
    engine.break_rank(rank, "keep")
    assert engine.swap(release_of(pair.stranger, 2))["error"] == ""
    assert versions(engine) == [2] * NUM_RANKS


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (("keep", "keep"), "v2: it is live, but could not be kept"),
        (("put", "put_back"), "v2: rank {}: MemoryError: no room to put; and the previous draft "),
    ],
)
def test_ranks_that_differ_serve_no_version_until_the_next_swap(
    engine: RankedEngine,
    pair: Pair,
    plain: Reference,
    prompts: list[list[int]],
    rank: int,
    steps: tuple[str, ...],
    error: str,
) -> None:
    keep_all(engine)
    engine.break_rank(rank, *steps)
    said = engine.swap(release_of(pair.stranger, 2))["error"]
    assert said.startswith(error.format(rank)) and said.endswith("restart this replica")
    assert versions(engine) == [0] * NUM_RANKS
    engine.llm.reset_prefix_cache()
    assert engine.generate(prompts[:3], **SHORT) == plain.generate(prompts[:3], **SHORT)
    assert {int(v) for trace in engine.traces() for v in trace.draft_version} == {0}
    assert engine.swap(release_of(pair.draft, 3))["error"] == ""
    assert versions(engine) == [3] * NUM_RANKS


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_swap_that_reaches_one_ranks_target_is_taken_back(
    engine: RankedEngine, pair: Pair, rank: int
) -> None:
    engine.llm.collective_rpc("osd_touch_target", args=(rank, 2.0))
    try:
        error = engine.swap(release_of(pair.stranger, 2))["error"]
    finally:
        engine.llm.collective_rpc("osd_touch_target", args=(rank, 0.5))
    assert f"rank {rank}: the target's weights are no longer those of the start" in error
    assert engine.swap(release_of(pair.draft, 1))["error"] == ""


def test_what_one_rank_could_not_build_no_rank_puts_in_later(
    engine: RankedEngine, pair: Pair
) -> None:
    engine.break_rank(1, "build")
    assert "rank 1" in engine.swap(release_of(pair.stranger, 2))["error"]
    committed = asyncio.run(engine.ranks.commit(2))
    assert "v2 is not staged" in committed.error
    assert versions(engine) == [1] * NUM_RANKS


# -- a draft that fails to sleep -----------------------------------------------------------------


def test_a_draft_that_failed_to_sleep_on_one_rank_stays_awake_in_the_next_engine(
    way: Way, pair: Pair, plain: Reference, prompts: list[list[int]], tmp_path: Path
) -> None:
    some = prompts[:2]
    first, second = (unlike_the_others(pair, way, tmp_path / "note") for _ in range(2))
    first.start_hooks(CaptureConfig(top_k=16))
    assert first.llm.collective_rpc("osd_parts_off") == ["{}"] * NUM_RANKS
    first.llm.collective_rpc("osd_break_sleep", args=(1,))
    before = time.monotonic()
    with pytest.raises(RuntimeError):
        first.generate(some, **SHORT)
    assert time.monotonic() - before < 60, "vLLM itself would wait for five minutes"
    second.start_hooks(CaptureConfig(top_k=16))
    for off in second.llm.collective_rpc("osd_parts_off"):
        assert "KeyError: 'block'" in json.loads(off)["sleep"]
    second.llm.collective_rpc("osd_stay_awake")
    second.command("force", ["off", 0])
    passes = RankedPasses(second)
    for prompt in some:
        second.add(prompt, **SHORT)
    done = second.run(passes.next_step)
    passes.close()
    assert [tokens for (tokens,) in done.values()] == plain.generate(some, **SHORT)
    assert min(passes.per_step[:-1]) == 1, "vLLM's own way"


def unlike_the_others(pair: Pair, way: Way, note: Path) -> RankedEngine:
    """An engine of its own, without hooks so far."""
    release = release_of(pair.draft, 1)
    engine = RankedEngine(pair.target, release, k=K, control={}, way=way, disable_log_stats=True)
    KEPT.append(engine)
    engine.awake_note = str(note)
    return engine


# -- what other files look for in the worker -----------------------------------------------------


def test_rows_carry_the_version_that_proposed_them(
    engine: RankedEngine, pair: Pair, prompts: list[list[int]]
) -> None:
    keep_all(engine)

    def swap(step: int) -> None:
        if step == 5:
            assert engine.swap(release_of(pair.stranger, 2))["error"] == ""

    for prompt in prompts:
        engine.add(prompt, **LONG)
    engine.run(swap)
    traces = engine.traces()
    assert len(traces) == len(prompts)
    for trace in traces:
        assert set(trace.draft_version) == {1, 2} and (trace.draft_version[:-1] <= 2).all()
        assert sorted(trace.draft_version) == trace.draft_version.tolist()
    alphas = {
        window.version: sum(window.num_accepted_tokens_per_pos) / sum(window.num_tested_per_pos)
        for window in engine.reports()[0].windows
    }
    assert alphas[1] > 0.3 > 0.15 > alphas[2]


def test_a_budget_is_kept(engine: RankedEngine, prompts: list[list[int]]) -> None:
    keep_all(engine)
    before = engine.worker.osd_capture.assembler.skipped["budget"]
    engine.rpc("osd_set_budget", 2048)
    try:
        assert all(len(output) == 24 for output in engine.generate(prompts, ignore_eos=True))
        traces = engine.traces()
    finally:
        engine.rpc("osd_set_budget", 8 << 20)
    dropped = engine.worker.osd_capture.assembler.skipped["budget"] - before
    assert dropped > 0 and dropped + len(traces) == len(prompts)


@pytest.mark.parametrize("broken", ["_take", "on_schedule"])
def test_a_hook_that_fails_on_the_first_rank_costs_no_request(
    engine: RankedEngine, plain: Reference, prompts: list[list[int]], broken: str
) -> None:
    before = engine.worker.osd_capture.assembler.skipped["hook_error"]
    engine.rpc("osd_break_hook", broken)
    try:
        assert engine.generate(prompts[:4], **SHORT) == plain.generate(prompts[:4], **SHORT)
        assert engine.worker.osd_capture.assembler.skipped["hook_error"] == before + 1
        assert not engine.worker.osd_hook.is_listening
    finally:
        engine.rpc("osd_mend_hook", broken)
        engine.generate(prompts[:1])
        engine.traces()


def test_a_control_that_fails_leaves_both_ranks_drafting(
    engine: RankedEngine,
    plain: Reference,
    prompts: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.scheduler.osd.plan = lambda *_: 1 / 0
    try:
        with caplog.at_level(logging.ERROR, logger="serving.speculation.scheduler"):
            assert engine.generate(prompts[:2], **SHORT) == plain.generate(prompts[:2], **SHORT)
        assert "ZeroDivisionError" in engine.command("report")["problem"]
        assert sum(trace.num_draft_tokens for trace in engine.traces()) > 0
    finally:
        del engine.scheduler.osd.plan
        engine.scheduler._osd_problem = ""


def test_a_memory_that_fails_costs_no_request(
    engine: RankedEngine, plain: Reference, prompts: list[list[int]]
) -> None:
    """In the scheduler's process, or in the first rank's."""
    some, want = prompts[:2], plain.generate(prompts[:2], **LONG)
    engine.command("force", MIXED)
    try:
        assert engine.generate(some, **LONG) == want
        engine.break_memory()
        assert engine.generate(some, **LONG) == want
        assert "ZeroDivisionError" in engine.command("report")["problem"]
        engine.traces()
        assert engine.generate(some, **LONG) == want
        assert sum(trace.num_draft_tokens for trace in engine.traces()) > 0, "the draft's"
    finally:
        engine.mend_memory()
        engine.scheduler._osd_problem = ""


BIAS = {"logit_bias": {5: 4.0, 7: -100.0, 11: 3.0}}
MIN_P = {"min_p": 0.2, "temperature": 1.2, "seed": 5}
UNDRAFTED = [
    BIAS,
    {**BIAS, "logprobs": 4},
    {**BIAS, "temperature": 1.0, "seed": 11},
    MIN_P,
    {"logprob_token_ids": [3, 50, 7]},
    {**BIAS, **MIN_P, "logprob_token_ids": list(range(30))},
]


@pytest.fixture
def permitted(engine: RankedEngine) -> Iterator[RankedEngine]:
    """As a replica starts it."""
    core = engine.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    problems = [*engine.llm.collective_rpc("osd_undrafted"), core.osd_undrafted()]
    assert problems == [""] * (NUM_RANKS + 1)
    undrafted.refuse_undrafted()
    assert undrafted.permit(engine.llm.llm_engine.vllm_config.speculative_config, problems) == ""
    yield engine


def test_what_is_not_drafted_for_is_answered_as_without_speculation(
    permitted: RankedEngine, pair: Pair, prompts: list[list[int]]
) -> None:
    """Beside a drafted request; the bare engine answers each alone, as there they disturb one
    another."""
    given: list[dict[str, Any]] = [*UNDRAFTED, {}]
    some = [prompts[i % len(prompts)] for i in range(len(given))]
    found = answers(permitted, some, given)
    bare = plain_engine(pair)
    expected = [answers(bare, [some[i]], [given[i]])[0] for i in range(len(given))]
    wrong = [difference(*both) for both in zip(found, expected, strict=True)]
    assert wrong == [""] * len(given)
    assert [bool(answer.num_draft_tokens) for answer in found] == [False] * len(UNDRAFTED) + [True]
