"""Draft tokens on the device, and the two model runners that ask the memory within a step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from serving.speculation.memory.in_worker import (
    AskV1,
    AskV2,
    DraftsV1,
    DraftsV2,
    HostCopy,
    Sampled,
    ask_in_worker,
    emitted,
)
from serving.speculation.scheduler import IN_THIS_PROCESS

DRAFTED = torch.tensor([[1, 2], [3, 4], [5, 6]])


def test_rows_are_replaced_by_longer_and_by_shorter_ones() -> None:
    drafts = DraftsV1(DRAFTED)
    drafts.replace({0: [7, 8, 9], 2: [7]})
    assert drafts.tokens[0].tolist() == [7, 8, 9]
    assert drafts.tokens[1, :2].tolist() == [3, 4], "the draft's are left where they were"
    assert drafts.tokens[2, 0] == 7
    assert drafts.tokens.dtype == DRAFTED.dtype


def test_where_nothing_is_replaced_the_drafts_tensor_is_handed_on() -> None:
    drafts = DraftsV1(DRAFTED)
    drafts.replace({})
    assert drafts.tokens is DRAFTED


PACKED = torch.tensor([[2, 7, 8, 9], [0, 0, 0, 0], [3, 7, 8, 9]], dtype=torch.int32)
"""Two tokens for the first row, none for the second, three for the third."""


def test_all_rows_are_put_at_once_and_get_as_long() -> None:
    drafts = DraftsV1(DRAFTED)
    drafts.put(PACKED)
    assert drafts.tokens.tolist() == [[7, 8, 0], [3, 4, 0], [7, 8, 9]]
    assert drafts.tokens.dtype == DRAFTED.dtype
    drafts = DraftsV1(torch.empty(3, 0, dtype=torch.int64))
    drafts.put(PACKED)
    assert drafts.tokens.tolist() == [[7, 8, 0], [0, 0, 0], [7, 8, 9]]


def test_rows_of_the_v2_runners_table_hold_tokens_as_far_as_there_may_be_room() -> None:
    """vLLM leaves −1 behind the draft's tokens, which is no token."""
    table = torch.full((5, 4), -1, dtype=torch.int32)
    index_B = np.array([4, 0, 2])
    table[index_B, :2] = DRAFTED.int()
    drafts = DraftsV2(DRAFTED.int(), table, index_B)
    drafts.put(PACKED)
    assert drafts.tokens.tolist() == [[7, 8, 0], [3, 4, 0], [7, 8, 9]]
    assert table[4].tolist() == [7, 8, 0, 0]
    assert table[0].tolist() == [3, 4, 0, 0]
    assert table[2].tolist() == [7, 8, 9, 0]
    assert (table[[1, 3]] == -1).all(), "nothing of other requests is touched"


def test_after_no_pass_of_the_draft_there_is_room_for_the_memory() -> None:
    drafts = DraftsV1(torch.empty(2, 0, dtype=torch.int64))
    drafts.replace({1: [7, 8]})
    assert drafts.tokens.shape == (2, 2) and drafts.tokens[1].tolist() == [7, 8]


def test_the_drafts_own_tokens_are_kept_and_read_when_they_are_asked_for() -> None:
    tokens = DRAFTED.clone()
    drafts = DraftsV1(tokens)
    row = drafts.row(1)
    drafts.replace({1: [7, 8]})
    tokens.zero_()  # the runner uses its buffer again
    assert len(row) == 2 and list(row) == [3, 4] and row[1] == 4


def test_the_v2_runner_finds_the_tokens_where_it_keeps_those_of_a_request() -> None:
    table = torch.zeros(5, 4, dtype=torch.int32)
    index_B = np.array([4, 0, 2])
    drafts = DraftsV2(DRAFTED.int(), table, index_B)
    drafts.replace({0: [7, 8, 9], 2: [6]})
    assert table[4].tolist() == [7, 8, 9, 0]
    assert table[2, 0] == 6
    assert not table[[0, 1, 3]].any(), "nothing of other requests is touched"


def test_what_was_not_emitted_and_what_a_prompt_ends_with_is_left_out() -> None:
    sampled = torch.tensor([[4, 5, -1], [6, -1, -1], [7, 8, 9]])
    found = Sampled(["a", "b", "c"], sampled, np.array([False, True, False])).tokens()
    assert found == {"a": [4, 5], "c": [7, 8, 9]}
    left_over = torch.tensor([[4, 5, 99], [99, 99, 99]])
    rows = emitted(left_over, torch.tensor([2, 0]))
    assert Sampled(["a", "b"], HostCopy(rows)).tokens() == {"a": [4, 5], "b": []}


class Asked:
    """A scheduler that proposes the same to the first request, or fails."""

    def __init__(self, tokens: list[int] | None = None, error: bool = False) -> None:
        self.tokens, self.error = tokens, error
        self.sampled: list[dict[str, list[int]]] = []

    def _osd_guard(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except ZeroDivisionError:
            return None

    def osd_propose(self, sampled: Sampled | None, drafts: DraftsV1) -> None:
        def propose() -> None:
            if sampled is None:
                return
            self.sampled.append({r: list(tokens) for r, tokens in sampled.tokens().items()})
            if self.error:
                raise ZeroDivisionError
            if self.tokens:
                drafts.replace({0: self.tokens})

        self._osd_guard(propose)


def v1_runner(drafts: Any) -> Any:
    return SimpleNamespace(
        input_batch=SimpleNamespace(num_reqs=2, req_ids=["a", "b", "gone"]),
        discard_request_mask=SimpleNamespace(np=np.array([False, True, True])),
        propose_draft_token_ids=lambda output, sampled, *given: drafts,
    )


@pytest.mark.parametrize(
    "scheduler, row", [(Asked([7, 8, 9]), [7, 8, 9]), (Asked(), [1, 2]), (Asked([7], True), [1, 2])]
)
def test_the_v1_runner_gets_what_was_found(scheduler: Asked, row: list[int]) -> None:
    runner = v1_runner(DRAFTED[:2])
    AskV1(runner, scheduler)  # type: ignore[arg-type]
    drafts = runner.propose_draft_token_ids("output", torch.tensor([[4, -1], [5, 6]]), "more")
    assert drafts[0].tolist() == row
    assert drafts[1, :2].tolist() == [3, 4]
    assert scheduler.sampled == [{"a": [4]}], "the prompt of b has not ended"


def test_which_prompts_have_not_ended_is_known_as_of_the_step_that_sampled() -> None:
    mask = np.array([False, True, True])

    def draft(output: Any, sampled: torch.Tensor) -> torch.Tensor:
        mask[:] = [True, False, False]  # the runner uses its buffer again
        return DRAFTED[:2]

    runner, scheduler = v1_runner(DRAFTED), Asked()
    runner.discard_request_mask.np, runner.propose_draft_token_ids = mask, draft
    AskV1(runner, scheduler)  # type: ignore[arg-type]
    runner.propose_draft_token_ids("output", torch.tensor([[4, -1], [5, 6]]))
    assert scheduler.sampled == [{"a": [4]}]


def test_a_v1_runner_that_drafts_on_the_host_asks_nobody() -> None:
    runner, scheduler = v1_runner([[1], [2]]), Asked([7])
    AskV1(runner, scheduler)  # type: ignore[arg-type]
    assert runner.propose_draft_token_ids("output", torch.tensor([[4], [5]])) == [[1], [2]]
    assert scheduler.sampled == []


def test_the_v2_runner_gets_what_was_found_and_tells_its_scheduler() -> None:
    told: list[Any] = []
    table = torch.zeros(4, 4, dtype=torch.int64)
    runner = SimpleNamespace(
        postprocess_sampled=lambda *given, **named: told.append(given[0]),
        draft_tokens_handler=SimpleNamespace(
            set_draft_tokens=lambda batch, tokens: told.append(tokens.tolist())
        ),
        req_states=SimpleNamespace(draft_tokens=table),
    )
    scheduler = Asked([7, 8, 9])
    AskV2(runner, scheduler)  # type: ignore[arg-type]
    batch = SimpleNamespace(req_ids=["a", "b"], idx_mapping_np=np.array([3, 1]))
    runner.postprocess_sampled(
        "index", torch.tensor([[4, 5], [6, 0]]), torch.tensor([2, 1]), "rejected"
    )
    runner.draft_tokens_handler.set_draft_tokens(batch, DRAFTED[:2])
    assert told == ["index", [[7, 8, 9], [3, 4, 0]]]
    assert scheduler.sampled == [{"a": [4, 5], "b": [6]}]
    assert table[3].tolist() == [7, 8, 9, 0]
    runner.draft_tokens_handler.set_draft_tokens(batch, DRAFTED[:2])
    assert told[-1] == [[1, 2], [3, 4]], "a step of which nothing was heard is left alone"


class Beside:
    """A scheduler in the worker's process."""

    def __init__(self) -> None:
        self.vllm_config, self.is_asked_by_worker, self.num_begun = SimpleNamespace(), True, 0

    def osd_begin_to_ask(self) -> None:
        self.num_begun += 1


def test_a_worker_asks_the_scheduler_of_its_own_engine() -> None:
    own, other = Beside(), Beside()
    for scheduler in (own, other):
        IN_THIS_PROCESS.add(scheduler)  # type: ignore[arg-type]
    for mine, others in ((own, other), (other, own)):
        assert isinstance(ask_in_worker(mine.vllm_config, v1_runner(DRAFTED)), AskV1)
        assert (mine.num_begun, others.num_begun) == (1, 0)
        mine.num_begun = 0
    runner = v1_runner(DRAFTED)
    drafts = runner.propose_draft_token_ids
    assert ask_in_worker(SimpleNamespace(), runner) is None, "its own engine has none"
    assert runner.propose_draft_token_ids is drafts and own.num_begun == other.num_begun == 0


def test_a_worker_without_a_scheduler_beside_it_asks_nobody() -> None:
    runner = v1_runner(DRAFTED)
    own = runner.propose_draft_token_ids
    assert ask_in_worker(SimpleNamespace(), runner) is None
    assert runner.propose_draft_token_ids is own
