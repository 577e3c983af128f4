"""Drafts exchanged in a running engine, over all ways of running vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.integration.conftest import release_of
from tests.integration.serving.test_swap import (
    acceptance_and_outputs,
    nan,
    test_a_swap_that_does_not_land_is_taken_back,
    test_a_swap_that_reaches_the_target_is_taken_back,
    test_a_swapped_in_draft_serves_exactly_as_its_replay_says,
    test_committing_what_was_not_staged_is_refused,
    test_there_and_back_is_exact_and_the_target_is_untouched,
)
from tests.support.engines import Engine
from tests.support.pairs import Pair

__all__ = [
    "test_a_swap_that_does_not_land_is_taken_back",
    "test_a_swap_that_reaches_the_target_is_taken_back",
    "test_a_swapped_in_draft_serves_exactly_as_its_replay_says",
    "test_committing_what_was_not_staged_is_refused",
    "test_there_and_back_is_exact_and_the_target_is_untouched",
]


def test_a_bad_release_is_refused_and_nothing_changes(
    engine: Engine, pair: Pair, prompts: list[list[int]], tmp_path: Path
) -> None:
    before = acceptance_and_outputs(engine, prompts)
    shutil.copytree(pair.draft, tmp_path / "bad")
    nan(tmp_path / "bad")
    assert "NaN" in engine.swap(release_of(tmp_path / "bad", 2))["error"]
    assert acceptance_and_outputs(engine, prompts) == before
