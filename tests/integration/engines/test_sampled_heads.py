"""Draft tokens that are drawn from an EAGLE-3 head's distribution, whose vocabulary is a part of
the target's."""

from __future__ import annotations

import pytest
import torch

from tests.integration.conftest import release_of
from tests.integration.engines.test_sampled_drafts import (
    DRAWN,
    assert_tokens_are_the_targets,
    served_with,
    unrest,
)
from tests.support.engines import Engine
from tests.support.fit import misfit_of
from tests.support.pairs import Pair
from tests.support.reference import Reference
from trainer.draft import load_draft
from trainer.eagle3.features import TargetFeatures
from trainer.evaluate import replay
from trainer.sampling.teacher import Teacher


def test_with_a_sampled_head_tokens_are_the_targets(
    sampling_head: Engine, alone: Reference, headed: Pair, prompts: list[list[int]]
) -> None:
    assert_tokens_are_the_targets(sampling_head, alone, headed, prompts)


def test_with_a_sampled_head_tokens_at_temperature_one_follow_the_target(
    sampling_head: Engine, deep: torch.nn.Module, headed: Pair, prompts: list[list[int]]
) -> None:
    """The memory's among them."""
    before = sampling_head.command("report")["sources"]
    for prompt in prompts * 2:
        sampling_head.add(prompt, **DRAWN)
    sampling_head.run(unrest(sampling_head, headed, []))
    after = sampling_head.command("report")["sources"]
    new = {name: after[name][0] - before.get(name, [0])[0] for name in ("draft", "memory")}
    assert min(new.values()) > 100
    traces = sampling_head.traces()
    assert misfit_of(deep, traces, 1.0, is_sampled=True) > 1e-4
    assert misfit_of(deep, traces, 0.7, is_sampled=True) < 1e-6, "too few to tell"


def test_a_sampled_head_serves_as_its_replay_says(
    sampling_head: Engine, headed: Pair, prompts: list[list[int]]
) -> None:
    """Within what chance explains, and far from what a head that drafts greedily would."""
    teacher, farthest = Teacher(headed.target, top_k=4), 0.0
    is_v1 = sampling_head.way.runner == "V1"
    asked = prompts * (4 if is_v1 else 1)  # interpreted kernels take long
    for version, directory in ((2, headed.stranger), (3, headed.draft)):
        release = release_of(directory, version)
        alpha, error, traces = served_with(sampling_head, release, asked, 0.7)
        head = load_draft(directory, TargetFeatures(teacher, sampling_head.k))
        how = {"k": sampling_head.k, "max_length": 512}
        found = replay(head, traces, **how, is_sampled=True).alpha
        greedy = replay(head, traces, **how).alpha or 0.0
        print(f"v{version}: served {alpha:.3f} ± {error:.3f}, predicted {found:.3f}, {greedy:.3f}")
        assert found == pytest.approx(alpha, abs=4 * error)
        farthest = max(farthest, abs(greedy - alpha) / error)
    assert farthest > (3 if is_v1 else 1)
