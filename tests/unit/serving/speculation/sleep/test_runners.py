"""Which model runners' drafts can sleep. What sleeping does is tested on real engines
(`tests/integration/serving/test_control.py`, `tests/integration/engines/test_sleep.py`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serving.speculation.sleep.lazy import LazyDraft
from serving.speculation.sleep.runners import can_sleep, why_awake

V1 = "vllm.v1.worker.gpu_model_runner"
V2 = "vllm.v1.worker.gpu.model_runner"


def runner_of(module: str, *, is_subclass: bool = False, **changes: Any) -> Any:
    """A model runner with what is asked of it; `changes` by name, wherever it stands."""
    parallel = {
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
    }
    parallel = {name: changes.get(name, value) for name, value in parallel.items()}
    group = SimpleNamespace(layer_names=["target.0", "draft.0"])
    groups = [group] * changes.get("num_groups", 1)
    members: dict[str, Any] = {
        "speculative_config": SimpleNamespace(
            method=changes.get("method", "draft_model"),
            uses_draft_model=lambda: changes.get("method", "draft_model") == "draft_model",
        ),
        "vllm_config": SimpleNamespace(parallel_config=SimpleNamespace(**parallel)),
        "use_async_scheduling": changes.get("use_async_scheduling", False),
        "drafter": SimpleNamespace(uses_mrope=changes.get("uses_mrope", False)),
        "speculator": SimpleNamespace(
            draft_attn_layer_names={"draft.0"},
            kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
            draft_model_config=SimpleNamespace(uses_mrope=changes.get("uses_mrope", False)),
        ),
        "block_tables": SimpleNamespace(cp_size=changes.get("decode_context_parallel_size", 1)),
    }
    for absent in ("drafter", "speculator"):
        if changes.get("is_first_stage"):
            del members[absent]
    runner = type("GPUModelRunner", (), {"__module__": module, **members})
    if is_subclass:
        runner = type("CPUModelRunner", (runner,), {"__module__": "elsewhere"})
    return runner()


@pytest.mark.parametrize("module", [V1, V2])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("is_subclass", [True, False])
def test_the_draft_of_any_runner_sleeps(module: str, is_async: bool, is_subclass: bool) -> None:
    assert can_sleep(runner_of(module, use_async_scheduling=is_async, is_subclass=is_subclass))


@pytest.mark.parametrize("module", [V1, V2])
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "medusa"},
        {"uses_mrope": True},
        {"data_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "is_first_stage": True},
        {"decode_context_parallel_size": 2},
    ],
    ids=str,
)
def test_a_draft_that_cannot_sleep_is_left_to_vllm(module: str, changes: dict[str, Any]) -> None:
    assert not can_sleep(runner_of(module, **changes))


@pytest.mark.parametrize("module", [V1, V2])
def test_a_head_stays_awake_since_it_reads_the_targets_hidden_states(module: str) -> None:
    assert "an EAGLE-3 head reads the target" in why_awake(runner_of(module, method="eagle3"))


def test_a_draft_with_several_kinds_of_caches_is_left_to_vllm() -> None:
    assert not can_sleep(runner_of(V2, num_groups=2))


def test_an_error_of_one_rank_among_several_ends_its_process() -> None:
    """The others would sleep on, and wait for it in the next pass of the target."""
    alone, among, ended = LazyDraft(1), LazyDraft(2), list[str]()
    among.before_ending = ended.append
    among.end_process = lambda: ended.append("process")
    assert alone._guarded(lambda: 1 // 0) is None
    assert (alone.is_off, alone.problem) == (
        True,
        "ZeroDivisionError: integer division or modulo by zero",
    )
    with pytest.raises(ZeroDivisionError):
        among._guarded(lambda: 1 // 0)
    assert ended == ["ZeroDivisionError: integer division or modulo by zero", "process"]
    assert not among.is_off
