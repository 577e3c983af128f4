"""What the checks compute, on known answers: whose code waited, which rows are the target's, which
samples follow it, what a step was."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.checks.swap import least_alpha
from benchmarks.gpu.checks.syncs import PLANS, ROOT, WaitsByPlace, _changing
from benchmarks.gpu.engines import Step, step_of
from benchmarks.gpu.fit import MIN_LOGPROB, compare, fit
from benchmarks.gpu.pairs import Pair
from osd.records import ACCEPTED, PLAIN, REJECTED, Trace
from tests.support.builders import trace_id

VOCABULARY = 12


# -- waits ----------------------------------------------------------------------------------------

VLLM = "/x/site-packages/vllm"
HOOKS = (f"{ROOT}/serving/vllm/hooks.py", 70)
PICK = (f"{ROOT}/serving/capture/pick.py", 12)
RUNNER = (f"{VLLM}/v1/worker/gpu_model_runner.py", 900)
TORCH = ("/x/site-packages/torch/_tensor.py", 5)
OF_CHECK = (f"{VLLM}/utils/gpu_sync_debug.py", 300)


@pytest.mark.parametrize(
    ("stack", "ours", "vllms"),
    [
        ([RUNNER, HOOKS, PICK, TORCH], {"serving/capture/pick.py:12": 1}, {}),
        ([HOOKS, RUNNER, TORCH], {}, {"vllm/v1/worker/gpu_model_runner.py:900": 1}),
        ([RUNNER, PICK, OF_CHECK], {"serving/capture/pick.py:12": 1}, {}),
        ([HOOKS, RUNNER, OF_CHECK], {}, {"vllm/v1/worker/gpu_model_runner.py:900": 1}),
    ],
)
def test_a_wait_is_of_the_innermost_of_the_two_codes(
    stack: list[tuple[str, int]], ours: dict[str, int], vllms: dict[str, int]
) -> None:
    waits = WaitsByPlace()
    waits.add(stack)
    assert (dict(waits.ours), dict(waits.vllms)) == (ours, vllms)


def test_only_warnings_about_waits_are_counted() -> None:
    waits, others = WaitsByPlace(), list[str]()
    own = warnings.showwarning
    warnings.showwarning = lambda message, *rest: others.append(str(message))  # type: ignore[assignment]
    try:
        waits.listen()
        show: Any = warnings.showwarning
        show("called a synchronizing CUDA operation", UserWarning, "f", 1)
        show("something else", UserWarning, "f", 1)
    finally:
        warnings.showwarning = own
    assert (waits.ours.total() + waits.vllms.total(), others) == (1, ["something else"])


def test_plans_change_every_second_step_and_pass_through_off() -> None:
    forced: list[int | None] = []
    is_over = _changing(forced.append)
    assert not any(is_over() for _ in range(2 * len(PLANS)))
    assert forced == list(PLANS)
    assert {0, None} < set(PLANS) and max(k or 0 for k in PLANS) > 1


# -- rows -----------------------------------------------------------------------------------------


SCORES = np.random.default_rng(0).normal(0, 2, (VOCABULARY, VOCABULARY))
TABLE = SCORES - np.logaddexp.reduce(SCORES, axis=1, keepdims=True)


def logprobs_of(tokens: Sequence[int]) -> np.ndarray:
    """A target: the distribution after a token depends on that token."""
    found: np.ndarray = TABLE[list(tokens)]
    return found


def a_trace(**changes: Any) -> Trace:
    """Every output token has its row, all kinds occur."""
    prompt, output = [1, 2, 3], [4, 5, 6, 7]
    rows = logprobs_of([*prompt, *output])[2:6]
    ids = np.argsort(-rows, axis=1)[:, :5]
    values: dict[str, Any] = {
        "trace_id": trace_id(1),
        "target_id": "t",
        "finished_at": 0.0,
        "prompt_ids": prompt,
        "output_ids": output,
        "position": np.arange(3, 7),
        "kind": [PLAIN, ACCEPTED, REJECTED, PLAIN],
        "draft_ids": [-1, 5, 9, -1],
        "target_ids": ids,
        "target_logprobs": np.take_along_axis(rows, ids, 1),
        "tail_logprob": np.full(4, -5.0),
        "keep_prob": np.ones(4),
        "draft_version": np.ones(4),
    }
    return Trace(**(values | changes))


def test_rows_of_the_target_agree_and_shifted_ones_do_not() -> None:
    rows = compare([a_trace(), a_trace()], logprobs_of)
    assert (rows.num, rows.num_missing, rows.num_wrong_kinds) == (8, 0, 0)
    assert max(rows.differences) < 0.01
    assert np.median(rows.shifted) > 1


def test_a_row_one_position_off_is_seen() -> None:
    moved = a_trace()
    rows = compare(
        [a_trace(target_logprobs=np.roll(moved.target_logprobs, 1, axis=0))], logprobs_of
    )
    assert max(rows.differences) > 0.5


def test_a_missing_row_and_a_wrong_kind_are_counted() -> None:
    assert compare([a_trace(position=[3, 4, 4, 6])], logprobs_of).num_missing == 2
    kinds = compare([a_trace(kind=[PLAIN, REJECTED, ACCEPTED, ACCEPTED])], logprobs_of)
    assert kinds.num_wrong_kinds == 3


def test_what_float16_cannot_hold_is_not_compared() -> None:
    low = a_trace()
    logprobs = np.where(np.arange(5) == 4, MIN_LOGPROB - 8, low.target_logprobs)
    assert max(compare([a_trace(target_logprobs=logprobs)], logprobs_of).differences) < 0.01


# -- samples --------------------------------------------------------------------------------------


def sampled(num: int, sharpness: float = 1.0) -> list[list[int]]:
    """Three tokens after token 1, drawn from the target's distribution, or a sharper one."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(num):
        tokens = [1]
        for place in range(3):
            factor = sharpness if place else 1.0
            scores = factor * logprobs_of(tokens)[-1]
            weights = np.exp(scores - scores.max())
            tokens.append(int(rng.choice(VOCABULARY, p=weights / weights.sum())))
        found.append(tokens[1:])
    return found


def test_samples_of_the_target_fit_and_others_do_not() -> None:
    good = fit([[1]], [sampled(2000)], logprobs_of)
    assert good.p_value > 1e-3 and good.freedom >= 20 and good.num_tokens > 2000
    assert fit([[1]], [sampled(2000, sharpness=1.5)], logprobs_of).p_value < 1e-6


def test_the_first_token_is_not_judged_since_it_is_never_drafted() -> None:
    wrong_first = [[3, *tokens[1:]] for tokens in sampled(10)]
    assert fit([[1]], [wrong_first], logprobs_of).num_tokens == 0


# -- steps ----------------------------------------------------------------------------------------


def scheduled(lengths: dict[str, int], drafts: dict[str, list[int]]) -> Any:
    return SimpleNamespace(num_scheduled_tokens=lengths, scheduled_spec_decode_tokens=drafts)


def test_a_step_tells_its_requests_drafts_and_graph() -> None:
    result = SimpleNamespace(cudagraph_stats=SimpleNamespace(runtime_mode="CUDAGraphMode.FULL"))
    given = scheduled({"a": 5, "b": 1}, {"a": [-1] * 4})
    assert step_of(given, result) == Step(num_reqs=2, num_drafted=4, graph="FULL")
    result.cudagraph_stats.runtime_mode = "PIECEWISE"
    assert step_of(given, result) == Step(num_reqs=2, num_drafted=4, graph="PIECEWISE")
    without = step_of(given, SimpleNamespace(cudagraph_stats=None))
    assert without is not None and without.graph == ""


def test_a_step_with_a_prefill_or_without_requests_is_left_out() -> None:
    nothing = SimpleNamespace(cudagraph_stats=None)
    assert step_of(scheduled({"a": 16, "b": 1}, {}), nothing) is None
    assert step_of(scheduled({}, {}), nothing) is None


# -- swaps ----------------------------------------------------------------------------------------


def test_less_is_asked_of_a_draft_that_its_user_gave(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(models=tmp_path / "models")

    def pair_in(place: Path) -> Pair:
        return Pair(target=place / "target", draft=place / "draft", stranger=place / "stranger")

    assert least_alpha(run, pair_in(run.models / "costly")) == 0.3
    assert least_alpha(run, pair_in(tmp_path / "mine")) == 0.1
