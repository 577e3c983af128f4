"""What the hooks read from vLLM's two model runners.

The batches are built by hand of the runners' own data classes. A V1 runner also runs for real in
tests/integration; a V2 runner exists on CUDA only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from serving.capture.pick import Lot, pick_on_host
from serving.capture.rows import top_of
from serving.vllm.hooks import (
    NewRequest,
    Verification,
    VerificationHook,
    is_v2,
    verification_v1,
    verification_v2,
)

VOCAB = 64

# Three requests in one step: "a" decodes at position 12 with drafts [21, 22, 23], of which 21 is
# accepted and 22 replaced by 40; "b" is in the middle of its prompt; "c" decodes at position 30
# without drafts.
NUM_DRAFTS = np.array([3, 0, 0])
SAMPLED = [[21, 40, -1, -1], [-1, -1, -1, -1], [41, -1, -1, -1]]


def check(step: Verification) -> None:
    assert step.req_ids == ["a", "b", "c"]
    assert step.num_draft_tokens_B.tolist() == [3, 0, 0]
    assert step.is_partial_B.tolist() == [False, True, False]
    assert step.draft_ids.tolist() == [21, 22, 23]
    assert step.first_position_B[[0, 2]].tolist() == [13, 31]
    assert [row for b, row in enumerate(step.sampled_BG.tolist()) if b != 1] == [
        SAMPLED[0],
        SAMPLED[2],
    ]
    lot = Lot(np.ones(3, bool), np.zeros((3, 4)), np.ones(3), top_k=4)
    landed = pick_on_host(step, lot).land()
    assert landed.sampled_BG.tolist() == SAMPLED
    assert landed.rows is not None
    assert landed.rows.request_R.tolist() == [0, 0, 2]
    assert landed.rows.draft_id_R.tolist() == [21, 22, -1]
    top = top_of([landed.rows.scores], 1)
    # Rows of the logits: "a" has 0 to 3, "b" has 4, "c" has 5.
    assert top.ids_RK[:, 0].tolist() == [0, 1, 5]


def logits() -> torch.Tensor:
    """Row r has its peak at token r."""
    return torch.eye(VOCAB)[:6] * 9


def test_v1_runner() -> None:
    metadata = SimpleNamespace(
        num_draft_tokens=NUM_DRAFTS.tolist(),
        draft_token_ids=torch.tensor([21, 22, 23], dtype=torch.int32),
        cu_num_sampled_tokens=torch.tensor([4, 5, 6], dtype=torch.int32),
        logits_indices=torch.tensor([0, 1, 2, 3, 10, 11], dtype=torch.int32),
    )
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["a", "b", "c", "stale"]),
        discard_request_mask=SimpleNamespace(np=np.array([False, True, False, True])),
        positions=torch.tensor([12, 13, 14, 15, *range(100, 107), 30, 0, 0]),
    )
    sampled = torch.tensor(SAMPLED, dtype=torch.int32)
    sampled[1, 0] = 33  # V1 samples unfinished prefills too and throws the token away
    step = verification_v1(
        runner, (metadata, None, logits(), None), SimpleNamespace(sampled_token_ids=sampled)
    )
    check(step)


def v2_batch(**changes: Any) -> Any:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    fields: dict[str, Any] = {
        "req_ids": ["a", "b", "c"],
        "num_reqs": 3,
        "num_reqs_after_padding": 4,
        "idx_mapping": torch.tensor([5, 1, 3]),
        "idx_mapping_np": np.array([5, 1, 3]),
        "expanded_idx_mapping": torch.tensor([5, 5, 5, 5, 1, 3]),
        "expanded_local_pos": torch.tensor([0, 1, 2, 3, 0, 0], dtype=torch.int32),
        "num_scheduled_tokens": np.array([4, 7, 1], np.int32),
        "num_tokens": 12,
        "num_tokens_after_padding": 16,
        "num_draft_tokens": 3,
        "num_draft_tokens_per_req": NUM_DRAFTS.astype(np.int32),
        "query_start_loc": torch.tensor([0, 4, 11, 12], dtype=torch.int32),
        "query_start_loc_np": np.array([0, 4, 11, 12], np.int32),
        "seq_lens": torch.tensor([16, 107, 31, 0], dtype=torch.int32),
        "seq_lens_cpu_upper_bound": torch.tensor([16, 107, 31, 0], dtype=torch.int32),
        "dcp_local_seq_lens": None,
        "num_computed_tokens_np": np.array([12, 100, 30], np.int32),
        "prefill_len_np": np.array([10, 300, 25], np.int32),
        "num_computed_prefill_tokens_np": np.array([10, 100, 25], np.int32),
        "is_prefilling_np": np.array([False, True, False]),
        "has_prefill": True,
        "decode_graph_eligible": False,
        "input_ids": torch.tensor([20, 21, 22, 23, *range(7), 50, 0, 0, 0, 0], dtype=torch.int32),
        "positions": torch.tensor([12, 13, 14, 15, *range(100, 107), 30, 0, 0, 0, 0]),
        "is_padding": torch.zeros(16, dtype=torch.bool),
        "logits_indices": torch.tensor([0, 1, 2, 3, 10, 11]),
        "cu_num_logits": torch.tensor([0, 4, 5, 6], dtype=torch.int32),
        "cu_num_logits_np": np.array([0, 4, 5, 6], np.int32),
        "has_structured_output_reqs": False,
        "prompt_lens": None,
    }
    return InputBatch(**(fields | changes))


def v2_output(sampled: list[list[int]], num_sampled: list[int]) -> Any:
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    return SamplerOutput(
        sampled_token_ids=torch.tensor(sampled),
        logprobs_tensors=None,
        num_nans=None,
        num_sampled=torch.tensor(num_sampled, dtype=torch.int32),
        num_rejected=torch.tensor([2, 0, 0], dtype=torch.int32),
    )


def test_v2_runner() -> None:
    garbage = 123456  # what is in memory beyond `num_sampled`
    output = v2_output([[21, 40, garbage, 0], [garbage, 0, 0, 0], [41, garbage, 0, 0]], [2, 0, 1])
    check(verification_v2(logits(), v2_batch(), output))


def test_v2_runner_in_a_step_without_drafts() -> None:
    batch = v2_batch(
        num_draft_tokens=0,
        num_draft_tokens_per_req=None,
        num_scheduled_tokens=np.array([1, 7, 1], np.int32),
        logits_indices=torch.tensor([0, 7, 8]),
        cu_num_logits=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        positions=torch.tensor([12, *range(100, 107), 30, 0, 0, 0]),
    )
    step = verification_v2(torch.eye(VOCAB)[:3], batch, v2_output([[21], [9], [41]], [1, 0, 1]))
    assert step.num_draft_tokens_B.tolist() == [0, 0, 0]
    assert len(step.draft_ids) == 0
    assert step.first_position_B[[0, 2]].tolist() == [13, 31]
    assert step.sampled_BG.tolist() == [[21], [-1], [41]]
    assert step.is_partial_B.tolist() == [False, True, False]


def test_v2_is_read_without_waiting_for_the_device() -> None:
    """`meta` tensors hold no data: reading a value of one raises."""
    batch = v2_batch()
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            setattr(batch, name, value.to("meta"))
    output = v2_output(SAMPLED, [2, 0, 1])
    output.sampled_token_ids, output.num_sampled = (
        output.sampled_token_ids.to("meta"),
        output.num_sampled.to("meta"),
    )
    step = verification_v2(logits().to("meta"), batch, output)
    assert step.sampled_BG.shape == (3, 4)
    assert step.draft_ids.shape == (3,)


# ------------------------------------------------------------------------------ hooking a V2 runner


class Ear:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.steps: list[Verification] = []
        self.failures: list[Exception] = []
        self.new: list[str] = []
        self.shared: list[str] = []

    def on_schedule(self, new: list[NewRequest], finished: set[str]) -> None:
        self.new += [request.req_id for request in new]
        self.shared += [request.req_id for request in new if request.is_shared]

    def on_verify(self, step: Verification) -> None:
        self.steps.append(step)

    def on_failure(self, error: Exception) -> None:
        self.failures.append(error)


class V1Runner:
    """Before vLLM 0.32: the rejection sampler is passed by where nothing was drafted, and the plain
    sampler changes the logits."""

    def __init__(self) -> None:
        self.rejection_sampler = torch.nn.Identity()
        self.input_batch = SimpleNamespace(req_ids=["a", "b", "c"], num_reqs=3)
        self.query_start_loc = SimpleNamespace(gpu=torch.tensor([0, 1, 8, 9], dtype=torch.int32))
        self.positions = torch.tensor([12, 1, 2, 3, 4, 5, 6, 7, 30])
        self.discard_request_mask = SimpleNamespace(np=np.array([False, True, False, True]))

    def execute_model(self, scheduler_output: Any) -> Any:
        return scheduler_output

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is None:
            sampled = logits.argmax(-1, keepdim=True)
            logits.zero_()
            return SimpleNamespace(sampled_token_ids=sampled)
        return self.rejection_sampler(logits)


def test_steps_of_a_v1_runner_that_pass_by_the_rejection_sampler_are_heard() -> None:
    ear, runner = Ear(), V1Runner()
    hook = VerificationHook(runner, ear)
    runner._sample(logits()[:3], None)
    (step,) = ear.steps
    assert step.req_ids == ["a", "b", "c"] and step.is_partial_B.tolist() == [False, True, False]
    assert step.num_draft_tokens_B.tolist() == [0, 0, 0] and step.draft_ids.tolist() == []
    assert step.first_position_B.tolist() == [13, 8, 31]
    assert step.sampled_BG.tolist() == [[0], [1], [2]]
    assert torch.equal(step.logits, logits()[:3]), "as they were before the sampler changed them"
    hook.remove()
    runner._sample(logits()[:3], None)
    assert len(ear.steps) == 1 and ear.failures == []


@pytest.mark.parametrize("told, shared", [({"osd_shared": ("b",)}, ["b"]), ({}, [])])
def test_answers_may_be_shared_where_the_scheduler_says_so(
    told: dict[str, Any], shared: list[str]
) -> None:
    ear, runner = Ear(), V1Runner()
    VerificationHook(runner, ear)
    from tests.unit.serving.capture.test_assemble import announced

    new = [announced(req_id="a"), announced(req_id="b")]
    runner.execute_model(SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=set(), **told))
    assert ear.failures == [] and ear.new == ["a", "b"] and ear.shared == shared


def test_a_copy_of_logits_that_fails_ends_capture_and_no_request() -> None:
    class Full(torch.Tensor):
        def clone(self, **_: Any) -> Any:
            raise torch.OutOfMemoryError("no memory for a copy")

    ear, runner = Ear(), V1Runner()
    hook = VerificationHook(runner, ear)
    output = runner._sample(logits()[:3].as_subclass(Full), None)
    assert output.sampled_token_ids.tolist() == [[0], [1], [2]]
    assert not hook.is_listening and hook.problem == "no memory for a copy" and ear.steps == []


@pytest.fixture
def runner() -> Iterator[Any]:
    """A V2 runner as far as the hook sees one: classes of those names, from modules of those
    names."""

    def fake(name: str, module: str, **members: Any) -> Any:
        return type(name, (), {"__module__": f"vllm.v1.worker.gpu.{module}", **members})()

    output = v2_output(SAMPLED, [2, 0, 1])
    yield fake(
        "GPUModelRunner",
        "model_runner",
        sampler=fake(
            "Sampler", "sample.sampler", __call__=lambda self, *args: output, penalties="its own"
        ),
        rejection_sampler=fake(
            "RejectionSampler", "spec_decode.rejection_sampler", __call__=lambda self, *args: output
        ),
        batch_sharder=None,
        pcp_manager=None,
        adaptive_verification=None,
        execute_model=lambda self, scheduler_output: "executed",
    )


def test_both_samplers_of_a_v2_runner_are_heard_and_left_as_they_were(runner: Any) -> None:
    ear = Ear()
    own = runner.sampler, runner.rejection_sampler
    assert is_v2(runner)
    hook = VerificationHook(runner, ear)
    output = runner.rejection_sampler(logits(), v2_batch(), None, None)
    assert output.num_sampled.tolist() == [2, 0, 1]
    runner.sampler(logits(), v2_batch())
    assert runner.sampler.penalties == "its own"
    assert len(ear.steps) == 2
    check(ear.steps[0])
    scheduled = SimpleNamespace(scheduled_new_reqs=[], finished_req_ids=set())
    assert runner.execute_model(scheduled) == "executed"
    hook.remove()
    assert (runner.sampler, runner.rejection_sampler) == own
    assert ear.failures == []


@pytest.mark.parametrize(
    "module, expected",
    [("gpu.model_runner", True), ("gpu_model_runner", False), ("cpu_model_runner", False)],
)
def test_a_runner_is_v2_if_a_class_it_is_made_of_is(module: str, expected: bool) -> None:
    base = type("GPUModelRunner", (), {"__module__": f"vllm.v1.worker.{module}"})
    on_cpu = type("CPUModelRunner", (base,), {"__module__": "vllm.v1.worker.cpu.model_runner"})
    assert is_v2(base()) is is_v2(on_cpu()) is expected


@pytest.mark.parametrize("part", ["batch_sharder", "adaptive_verification", "rejection_sampler"])
def test_a_v2_runner_that_cannot_be_read_serves_on_without_capture(
    runner: Any, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.unit.serving.capture.test_assemble import make_capture

    setattr(runner, part, SimpleNamespace())
    before = dict(vars(runner))
    capture = make_capture(len)
    try:
        with caplog.at_level(logging.ERROR):
            hook = VerificationHook(runner, capture)
        assert vars(runner) == before
        assert not hook.is_listening
        assert capture.assembler.skipped == {"hook_error": 1}
        (record,) = caplog.records
        assert part in record.getMessage()
        assert "VLLM_USE_V2_MODEL_RUNNER=0" in record.getMessage()
        assert record.exc_info is None
        hook.remove()
    finally:
        capture.close()
