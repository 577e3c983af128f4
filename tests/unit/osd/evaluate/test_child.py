"""What an engine's process refuses to measure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from osd.evaluate.child import unfairness


def config_of(mode: str | None, speculative: Any = "a draft") -> Any:
    compilation = SimpleNamespace(cudagraph_mode=mode and SimpleNamespace(name=mode))
    return SimpleNamespace(compilation_config=compilation, speculative_config=speculative)


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_arms_of_an_engine_with_full_graphs_for_one_length_are_not_compared(mode: str) -> None:
    assert "cudagraph_mode=PIECEWISE" in unfairness(config_of(mode))
    assert unfairness(config_of(mode, None)) == "", "none alone has its graphs"


@pytest.mark.parametrize("mode", ["PIECEWISE", "NONE", None])
def test_without_full_graphs_all_lengths_are_alike(mode: str | None) -> None:
    assert unfairness(config_of(mode)) == ""
