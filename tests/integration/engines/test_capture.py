"""What is captured, over all ways of running vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from osd.records import ACCEPTED, PLAIN, Trace
from tests.integration.serving.test_capture import (
    keep_all,
    target,
    test_a_failing_hook_costs_no_request,
    test_a_spent_budget_drops_traces_and_counts_them,
    test_an_aborted_request_leaves_a_correct_trace_of_what_was_served,
    test_an_opted_out_request_leaves_counts_and_nothing_else,
    test_counters_equal_vllms_own,
    test_each_row_carries_the_version_that_proposed_it,
    test_each_sample_of_a_request_is_a_trace_of_its_own,
    test_rows_equal_a_plain_forward_pass_of_the_target,
    test_rows_stay_right_under_chunked_prefill_and_prefix_cache_hits,
    test_tokens_past_the_end_of_a_request_are_not_captured,
)
from tests.integration.serving.test_capture_full import (
    by_prompt,
    generate_and_count_preemptions,
)
from tests.support.engines import Engine
from tests.support.reference import Reference

__all__ = [
    "target",
    "test_a_failing_hook_costs_no_request",
    "test_a_spent_budget_drops_traces_and_counts_them",
    "test_an_aborted_request_leaves_a_correct_trace_of_what_was_served",
    "test_an_opted_out_request_leaves_counts_and_nothing_else",
    "test_counters_equal_vllms_own",
    "test_each_row_carries_the_version_that_proposed_it",
    "test_each_sample_of_a_request_is_a_trace_of_its_own",
    "test_rows_equal_a_plain_forward_pass_of_the_target",
    "test_rows_stay_right_under_chunked_prefill_and_prefix_cache_hits",
    "test_tokens_past_the_end_of_a_request_are_not_captured",
]

LONG = {"ignore_eos": True, "max_tokens": 60}
EXACT_FIELDS = ("output_ids", "position", "kind", "draft_ids", "target_ids", "keep_prob")
COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "temperature")


@pytest.fixture(scope="module")
def undisturbed(reference: Reference, crowd: list[list[int]]) -> dict[tuple[int, ...], Trace]:
    """prompt -> its trace on the V1 runner, all rows kept"""
    return by_prompt(reference.traces(crowd, **LONG))


def test_traces_equal_those_of_the_synchronous_v1_runner(
    engine: Engine, crowd: list[list[int]], undisturbed: dict[tuple[int, ...], Trace]
) -> None:
    keep_all(engine)
    engine.generate(crowd, **LONG)
    traces = by_prompt(engine.traces())
    assert traces.keys() == undisturbed.keys()
    for prompt, expected in undisturbed.items():
        got = traces[prompt]
        for name in EXACT_FIELDS:
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
        for name in COUNTS:
            assert getattr(got, name) == getattr(expected, name), name
        assert_same_distributions(got, expected)


def test_a_preempted_request_leaves_the_trace_of_an_undisturbed_one(
    tight: Engine, crowd: list[list[int]], undisturbed: dict[tuple[int, ...], Trace]
) -> None:
    assert generate_and_count_preemptions(tight, crowd, **LONG) >= 10
    preempted = by_prompt(tight.traces())
    assert preempted.keys() == undisturbed.keys()
    for prompt, expected in undisturbed.items():
        got = preempted[prompt]
        assert got.output_ids.tolist() == expected.output_ids.tolist()
        assert got.position.tolist() == expected.position.tolist()
        assert_same_distributions(got, expected)
        assert 0 <= got.num_accepted_tokens - (got.kind == ACCEPTED).sum() <= tight.k
    num_plain = [
        sum((t.kind == PLAIN).sum() for t in traces.values()) for traces in (undisturbed, preempted)
    ]
    assert num_plain[0] < num_plain[1], "proposals are thrown away with the cache"
    assert tight.worker.osd_capture.assembler.skipped["gap"] == 0


def assert_same_distributions(got: Trace, expected: Trace) -> None:
    assert got.target_ids[:, 0].tolist() == expected.target_ids[:, 0].tolist()
    for name in ("target_logprobs", "tail_logprob"):
        values = (getattr(trace, name).astype(np.float32) for trace in (got, expected))
        np.testing.assert_allclose(*values, atol=2e-2, err_msg=name)
