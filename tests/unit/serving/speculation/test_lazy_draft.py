"""Which model runners' drafts can sleep. What sleeping does is tested on a real engine
(`tests/integration/serving/test_control.py`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serving.speculation.lazy_draft import can_sleep, lazy_draft


def runner_of(module: str, **members: Any) -> Any:
    config = SimpleNamespace(uses_draft_model=lambda: True)
    parallel = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    names = {"__module__": module, "speculative_config": config, "vllm_config": parallel}
    return type("GPUModelRunner", (), {**names, **members})()


@pytest.mark.parametrize("is_async", [True, False])
def test_the_draft_of_a_v1_runner_sleeps_where_steps_follow_one_another(is_async: bool) -> None:
    runner = runner_of(
        "vllm.v1.worker.gpu_model_runner", use_async_scheduling=is_async, drafter=object()
    )
    assert can_sleep(runner) is not is_async


def test_the_draft_of_a_v2_runner_is_left_to_vllm_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has neither a `drafter` nor `use_async_scheduling`."""
    assert lazy_draft(runner_of("vllm.v1.worker.gpu.model_runner")) is None
    assert caplog.messages == []
