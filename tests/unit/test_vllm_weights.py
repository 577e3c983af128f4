"""What vLLM says while a draft is loaded."""

from __future__ import annotations

import logging

import pytest

from serving.vllm_weights import _nothing_said_of_layers_without_weights


def test_layers_without_weights_are_no_news_and_others_are(caplog: pytest.LogCaptureFixture) -> None:
    vllm = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    with caplog.at_level(logging.WARNING):
        with _nothing_said_of_layers_without_weights():
            for layer in ("RotaryEmbedding", "ParallelLMHead", "QKVParallelLinear"):
                vllm.warning("%s: Failed to load weights", layer)
        vllm.warning("RotaryEmbedding: Failed to load weights")
    assert [record.getMessage() for record in caplog.records] == [
        "QKVParallelLinear: Failed to load weights",
        "RotaryEmbedding: Failed to load weights",
    ]
