"""Tokens of the memory in a step with drawn ones: whose rows are certain, and what becomes of a
step of which that is not known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from serving.speculation.memory import certain as of_memory
from serving.speculation.memory.certain import CertainV1, CertainV2, verify_certain, write_certain
from serving.speculation.scheduler import IN_THIS_PROCESS
from serving.vllm import parts

VOCABULARY, K = 5, 3
DRAWN = torch.rand(3, K, VOCABULARY, generator=torch.Generator().manual_seed(0)).softmax(-1)
"""q of three requests, a, b and c."""
REQUESTS = ["a", "b", "c"]


def output_of(*from_memory: str) -> Any:
    return SimpleNamespace(osd_from_memory=from_memory)


def one_hot(*tokens: int) -> list[list[float]]:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float().tolist()


class Runner:
    """As vLLM's V1 runner, which gathers q of the requests of the step before."""

    def __init__(self, drawn: torch.Tensor | None = DRAWN) -> None:
        self.drawn = drawn
        self.input_batch = SimpleNamespace(req_ids=[*REQUESTS, "gone"])

    def _get_spec_decode_draft_probs(self, metadata: Any) -> torch.Tensor | None:
        if self.drawn is None:
            return None
        num_B = metadata.num_draft_tokens
        rows = [self.drawn[b, :num] for b, num in enumerate(num_B) if num]
        return torch.cat(rows) if rows else None


def worker_of(runner: Any) -> Any:
    return SimpleNamespace(model_runner=runner, execute_model=lambda output: "done")


def step_v1(runner: Runner, output: Any, num_B: list[int], tokens: list[int]) -> Any:
    """q by which the draft tokens of a step are verified."""
    worker = worker_of(runner)
    CertainV1(worker)
    assert worker.execute_model(output) == "done"
    metadata = SimpleNamespace(num_draft_tokens=num_B, draft_token_ids=torch.tensor(tokens))
    return runner._get_spec_decode_draft_probs(metadata)


def test_rows_of_the_memory_are_certain_and_those_of_the_draft_what_it_drew_from() -> None:
    rows = step_v1(Runner(), output_of("b"), [2, 4, 1], [0, 1, 4, 3, 2, 1, 0])
    assert rows[:2].equal(DRAWN[0, :2]) and rows[6].equal(DRAWN[2, 0])
    assert rows[2:6].tolist() == one_hot(4, 3, 2, 1), "more than the draft would propose"


def test_where_the_memory_proposed_nothing_vllms_own_rows_are_handed_on() -> None:
    rows = step_v1(Runner(), output_of(), [2, 0, 1], [0, 1, 4])
    assert rows.equal(torch.cat([DRAWN[0, :2], DRAWN[2, :1]]))
    assert step_v1(Runner(None), output_of(), [2, 0, 1], [0, 1, 4]) is None


@pytest.mark.parametrize("drawn", [DRAWN, None])
def test_where_all_tokens_are_the_memorys_none_has_a_row(drawn: torch.Tensor | None) -> None:
    assert step_v1(Runner(drawn), output_of("a", "c"), [2, 0, 1], [0, 1, 4]) is None


def test_where_it_is_not_known_whose_tokens_they_are_all_are_certain() -> None:
    assert step_v1(Runner(), SimpleNamespace(), [2, 0, 1], [0, 1, 4]) is None


def test_what_was_known_of_one_step_says_nothing_of_the_next() -> None:
    runner = Runner()
    worker = worker_of(runner)
    CertainV1(worker)
    metadata = SimpleNamespace(num_draft_tokens=[1, 1, 1], draft_token_ids=torch.zeros(3))
    for output, is_known in ((output_of(), True), (SimpleNamespace(), False), (output_of(), True)):
        worker.execute_model(output)
        assert (runner._get_spec_decode_draft_probs(metadata) is not None) is is_known


def test_a_failure_makes_all_tokens_certain_from_then_on() -> None:
    runner = Runner()
    worker = worker_of(runner)
    certain = CertainV1(worker)
    worker.execute_model(output_of("b"))
    broken = SimpleNamespace(num_draft_tokens=[1, 1, 1], draft_token_ids=None)
    assert runner._get_spec_decode_draft_probs(broken) is None
    assert certain.problem.startswith("TypeError")
    worker.execute_model(output_of())
    whole = SimpleNamespace(num_draft_tokens=[1, 1, 1], draft_token_ids=torch.zeros(3))
    assert runner._get_spec_decode_draft_probs(whole) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1e-2, 1.0, 100.0])
def test_rows_of_the_v2_runners_table_are_certain_at_any_temperature(
    dtype: torch.dtype, temperature: float
) -> None:
    table_SKV = torch.randn(4, K, VOCABULARY).to(dtype)
    before = table_SKV.clone()
    id_N = torch.tensor([9, 1, 2, 8, 3, 4, 0, 7])
    write_certain(table_SKV, id_N, np.array([2, 3, 0]), np.array([3, 0, 1]), [False, True, True])
    q_KV = (table_SKV[0].float() / temperature).softmax(-1)
    assert q_KV.tolist() == one_hot(3, 4, 0)
    assert table_SKV[0].isfinite().all(), "nothing of it may become NaN"
    assert table_SKV[1:].equal(before[1:]), "nothing of other requests is touched"


def verified_v2(output: Any, table: torch.Tensor | None, num_B: Any = (1, 2)) -> Any:
    """The table with which the V2 runner's sampler verifies a step."""
    sampler = SimpleNamespace(
        _verify_in_chunks=lambda logits, batch, table, *more: (table, more),
        enable_adaptive_verification=False,
    )
    worker = worker_of(SimpleNamespace(rejection_sampler=sampler))
    CertainV2(worker)
    worker.execute_model(output)
    batch = SimpleNamespace(
        req_ids=["a", "b"],
        num_draft_tokens_per_req=None if num_B is None else np.array(num_B),
        idx_mapping_np=np.array([2, 0]),
    )
    id_N = torch.tensor([9, 1, 8, 3, 4])
    found, more = sampler._verify_in_chunks("logits", batch, table, id_N, "more")
    assert more[0] is id_N and more[1:] == ("more",)
    return found


def test_the_v2_runner_verifies_with_the_table_that_was_written() -> None:
    table = torch.zeros(3, K, VOCABULARY)
    assert verified_v2(output_of("b"), table) is table
    assert table[0, :2].softmax(-1).tolist() == one_hot(3, 4)
    assert not table[2].any(), "drawn"
    assert verified_v2(output_of(), torch.zeros(3, K, VOCABULARY)).eq(0).all()
    assert verified_v2(output_of("b"), torch.zeros(3, K, VOCABULARY), None) is None


def test_the_v2_runner_verifies_without_a_table_what_is_not_known() -> None:
    table = torch.zeros(3, K, VOCABULARY)
    assert verified_v2(SimpleNamespace(), table) is None
    assert verified_v2(output_of("b"), None) is None
    assert verified_v2(output_of("b"), table, (1, K + 1)) is None, "more than it has rows for"


class Scheduler:
    """Beside a worker of the engine with this configuration."""

    def __init__(self, config: Any) -> None:
        self.vllm_config, self.may_mix = config, False

    def osd_begin_to_mix(self) -> None:
        self.may_mix = True


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("is_beside", [True, False])
def test_the_scheduler_may_mix_once_its_worker_tells_them_apart(
    method: str, is_beside: bool
) -> None:
    config = SimpleNamespace(speculative_config=SimpleNamespace(draft_sample_method=method))
    worker = worker_of(Runner())
    worker.vllm_config = config
    scheduler, off = Scheduler(config), dict[str, str]()
    if is_beside:
        IN_THIS_PROCESS.add(scheduler)  # type: ignore[arg-type]
    wanted = is_beside and method == "probabilistic"
    assert isinstance(verify_certain(worker, off), CertainV1) is wanted
    assert scheduler.may_mix is wanted and off == {}


def test_a_worker_that_cannot_tell_them_apart_says_why() -> None:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_sample_method="probabilistic")
    )
    worker = worker_of(SimpleNamespace())
    worker.vllm_config = config
    scheduler, off = Scheduler(config), dict[str, str]()
    IN_THIS_PROCESS.add(scheduler)  # type: ignore[arg-type]
    assert verify_certain(worker, off) is None
    assert off["sampled"].endswith("; the memory proposes nothing beside sampled drafts")
    assert not scheduler.may_mix


def test_a_runner_that_shortens_drafts_on_the_device_mixes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a request's draft tokens lie is not known on the host."""
    monkeypatch.setattr(of_memory, "is_v2", lambda runner: True)
    monkeypatch.setattr(parts, "problem_with", lambda part: "")
    sampler = SimpleNamespace(_verify_in_chunks=None, enable_adaptive_verification=True)
    worker = worker_of(SimpleNamespace(rejection_sampler=sampler))
    worker.vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_sample_method="probabilistic")
    )
    scheduler, off = Scheduler(worker.vllm_config), dict[str, str]()
    IN_THIS_PROCESS.add(scheduler)  # type: ignore[arg-type]
    assert verify_certain(worker, off) is None and not scheduler.may_mix
    assert "shortens drafts on the device" in off["sampled"]
