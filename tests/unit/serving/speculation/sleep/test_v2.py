"""How often the draft is asked to run on the V2 runner, on a runner written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from serving.speculation.sleep.missed import Span
from serving.speculation.sleep.v2 import LazyDraftV2

K_MAX = 4


class Speculator:
    """Notes in how many passes it proposes."""

    draft_attn_layer_names = {"draft.0"}
    kv_cache_config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(layer_names=["target.0"]),
            SimpleNamespace(layer_names=["draft.0"]),
        ]
    )
    max_num_tokens = 100

    def __init__(self) -> None:
        self.num_speculative_steps = K_MAX
        self.draft_tokens = torch.zeros(8, K_MAX, dtype=torch.int64)
        self.passes: list[int] = []
        self.is_failing = False

    def propose(self, input_batch: Any, **named: Any) -> torch.Tensor:
        if self.is_failing:
            raise RuntimeError("out of memory")
        self.passes.append(self.num_speculative_steps)
        return self.draft_tokens[: input_batch.num_reqs, : self.num_speculative_steps]


class Runner:
    def __init__(self, num_ranks: int = 1) -> None:
        self.speculator = Speculator()
        self.req_states = SimpleNamespace(req_id_to_index={})
        parallel = SimpleNamespace(tensor_parallel_size=num_ranks)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.block_tables = SimpleNamespace(
            block_sizes=[16, 4], append_block_ids=lambda *given, **named: None
        )


class Lazy(LazyDraftV2):
    """Notes what it would have caught up."""

    spans: list[Span]

    def _catch_up(self, batch: Any, spans: list[Span]) -> None:
        self.spans = spans


@pytest.fixture
def lazy() -> Lazy:
    return Lazy(Runner())


def step(lazy: Lazy, k: int | None, starts: dict[str, int], **named: Any) -> torch.Tensor:
    """One step of one token for each request, which stand in the runner's rows 5, 6, ..."""
    batch = SimpleNamespace(
        num_reqs=len(starts),
        req_ids=list(starts),
        idx_mapping_np=np.arange(5, 5 + len(starts)),
        num_computed_tokens_np=np.array(list(starts.values()), np.int32),
        num_scheduled_tokens=np.ones(len(starts), np.int32),
    )
    return lazy._runner.speculator.propose(batch, num_speculative_tokens=k, **named)


def allot(lazy: Lazy, index: int, blocks: Sequence[int], *, overwrite: bool = False) -> None:
    lazy._runner.block_tables.append_block_ids(index, ([1], list(blocks)), overwrite=overwrite)


@pytest.mark.parametrize("k", range(1, K_MAX + 1))
def test_it_proposes_in_k_passes_and_returns_as_many_columns_as_ever(lazy: Lazy, k: int) -> None:
    assert step(lazy, k, {"a": 0, "b": 3}).shape == (2, K_MAX)
    assert lazy._speculator.passes == [k]
    assert lazy._speculator.num_speculative_steps == K_MAX


def test_at_0_it_does_not_run(lazy: Lazy) -> None:
    assert step(lazy, 0, {"a": 0, "b": 3}).shape == (2, K_MAX)
    assert lazy._speculator.passes == []
    assert lazy.num_forwards_saved == 1


@pytest.mark.parametrize("named", [{"dummy_run": True}, {}])
def test_a_run_that_only_warms_up_is_vllms(lazy: Lazy, named: dict[str, Any]) -> None:
    step(lazy, 0 if named else None, {"a": 0}, **named)
    assert lazy._speculator.passes == [K_MAX]


def test_what_fails_leaves_the_number_of_passes(lazy: Lazy) -> None:
    lazy._speculator.is_failing = True
    with pytest.raises(RuntimeError, match="out of memory"):
        step(lazy, 2, {"a": 0})
    assert lazy._speculator.num_speculative_steps == K_MAX


def test_once_sleeping_has_failed_it_runs_once_at_0(
    lazy: Lazy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy._missed, "meet", lambda *_: 1 / 0)
    for k in (0, 3):
        step(lazy, k, {"a": 0})
    assert lazy.is_off
    assert lazy._speculator.passes == [1, 3]


def test_among_several_ranks_sleeping_that_fails_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others would wait for this one in the next pass of the draft."""
    lazy, said = Lazy(Runner(num_ranks=2)), list[str]()
    lazy.before_ending = said.append
    lazy.end_process = lambda: said.append("ended")
    monkeypatch.setattr(lazy._missed, "meet", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(lazy, 0, {"a": 0})
    assert said == ["ZeroDivisionError: division by zero", "ended"]
    assert lazy._speculator.passes == []


def test_a_draft_that_is_left_to_vllm_makes_as_many_passes_as_vllm_says(lazy: Lazy) -> None:
    lazy.leave()
    for k in (0, 3):
        step(lazy, k, {"a": 0})
    assert lazy._speculator.passes == [K_MAX, K_MAX]


def test_it_begins_as_many_positions_early_as_the_host_may_be_ahead(lazy: Lazy) -> None:
    step(lazy, 4, {"a": 10})
    step(lazy, 0, {"a": 15})
    step(lazy, 0, {"a": 12})
    step(lazy, 2, {"a": 13})
    assert lazy.spans == [(0, 15 - K_MAX, 13)]


def test_a_request_with_cached_blocks_that_were_slept_through_catches_them_up(lazy: Lazy) -> None:
    allot(lazy, 5, [30, 31], overwrite=True)
    step(lazy, 0, {"a": 0})
    step(lazy, 0, {"a": 5})
    allot(lazy, 5, [30, 31, 40], overwrite=True)
    step(lazy, 1, {"b": 8})
    assert lazy.spans == [(0, 0, 8)]


def test_a_request_that_is_announced_anew_starts_again(lazy: Lazy) -> None:
    allot(lazy, 5, [30], overwrite=True)
    step(lazy, 1, {"a": 0})
    step(lazy, 0, {"a": 1})
    allot(lazy, 5, [31], overwrite=True)
    step(lazy, 1, {"a": 0})
    assert lazy.spans == []


def test_a_request_that_starts_again_near_where_it_stood_reads_what_others_slept_through(
    lazy: Lazy,
) -> None:
    """The prefix cache gives it blocks of a request that slept; its own were awake."""
    allot(lazy, 5, [30, 31], overwrite=True)
    step(lazy, 0, {"b": 0})
    step(lazy, 0, {"b": 5})
    allot(lazy, 5, [40, 41], overwrite=True)
    step(lazy, 1, {"a": 8})
    assert lazy.spans == [], "its blocks are no other's"
    allot(lazy, 5, [30, 31], overwrite=True)
    step(lazy, 1, {"a": 8})
    assert lazy.spans == [(0, 0, 8)]
