"""Draft tokens that are drawn from the draft's distribution, over all ways of running vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from osd.records import DraftRelease, Trace
from tests.integration.conftest import release_of
from tests.integration.engines.test_memory import MIXED, served
from tests.integration.serving.test_capture import assert_rows_are_the_targets, target
from tests.support.engines import Engine
from tests.support.fit import misfit_of
from tests.support.pairs import Pair
from tests.support.reference import Reference
from trainer.draft import load_draft
from trainer.evaluate import replay

__all__ = ["target"]

LONG = {"ignore_eos": True, "max_tokens": 48}
DRAWN = {"ignore_eos": True, "max_tokens": 80, "temperature": 1.0}


def unrest(engine: Engine, pair: Pair, swaps: list[dict[str, Any]]) -> Callable[[int], None]:
    """Between two steps: another k, 0 among them, or the memory; and 20 times another draft."""
    random = np.random.default_rng(0)
    plans = [["off", 0], *(["draft", k] for k in range(1, engine.k + 1))]
    plans += [["memory", engine.k], MIXED]

    def change(step: int) -> None:
        engine.command("force", plans[random.integers(len(plans))])
        if len(swaps) < 20:
            path = (pair.stranger, pair.draft)[len(swaps) % 2]
            swaps.append(engine.swap(release_of(path, 2 + len(swaps))))

    return change


def assert_tokens_are_the_targets(
    engine: Engine, plain: Reference, pair: Pair, prompts: list[list[int]]
) -> None:
    """Also beside requests above temperature 0, whose drafts are drawn in the same step."""
    swaps: list[dict[str, Any]] = []
    ids = [engine.add(prompt, **LONG) for prompt in prompts[:4]]
    for prompt in prompts[4:]:
        engine.add(prompt, temperature=0.8, **LONG)
    done = engine.run(unrest(engine, pair, swaps))
    assert [done[i][0] for i in ids] == plain.generate(prompts[:4], **LONG)
    assert [(swap["error"], swap["proved"]) for swap in swaps] == [("", True)] * 20


def served_with(
    engine: Engine, release: DraftRelease, prompts: list[list[int]], temperature: float
) -> tuple[float, float, list[Trace]]:
    """α of a draft while it serves, its standard error, and what was captured meanwhile."""
    assert engine.swap(release)["error"] == ""
    engine.llm.reset_prefix_cache()
    engine.rpc("osd_report", "test", "default")
    engine.generate(prompts, **DRAWN | {"temperature": temperature, "max_tokens": 56})
    traces = engine.traces()
    (window,) = json.loads(engine.rpc("osd_report", "test", "default"))["windows"]
    assert window["version"] == release.version
    assert {v for trace in traces for v in trace.draft_version} <= {0, release.version}
    tested = sum(window["num_tested_per_pos"])
    alpha = sum(window["num_accepted_tokens_per_pos"]) / tested
    return alpha, float(np.sqrt(alpha * (1 - alpha) / tested)), traces


def test_with_sampled_drafts_tokens_are_the_targets(
    sampling: Engine, plain: Reference, pair: Pair, prompts: list[list[int]]
) -> None:
    slept = sampling.worker.osd_lazy_draft.num_forwards_saved
    assert_tokens_are_the_targets(sampling, plain, pair, prompts)
    assert sampling.worker.osd_lazy_draft.num_forwards_saved > slept


def test_with_sampled_drafts_tokens_at_temperature_one_follow_the_target(
    sampling: Engine, target: torch.nn.Module, pair: Pair, prompts: list[list[int]]
) -> None:
    for prompt in prompts * 2:
        sampling.add(prompt, **DRAWN)
    sampling.run(unrest(sampling, pair, []))
    traces = sampling.traces()
    assert misfit_of(target, traces, 1.0, is_sampled=True) > 1e-4
    assert misfit_of(target, traces, 0.7, is_sampled=True) < 1e-6, "too few to tell"


def test_rows_captured_beside_sampled_drafts_are_the_targets(
    sampling: Engine, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    sampling.generate(prompts, temperature=1.0, **LONG)
    traces = sampling.traces()
    assert assert_rows_are_the_targets(target, traces) == 48 * len(prompts)
    drafted = np.concatenate([trace.draft_ids for trace in traces])
    assert (drafted >= 0).sum() > 100


def test_beside_sampled_drafts_tokens_of_the_memory_follow_the_target(
    sampling: Engine, target: torch.nn.Module, pair: Pair, prompts: list[list[int]]
) -> None:
    """In one step with drawn ones; verified as if they were drawn, they would not."""
    assert sampling.swap(release_of(pair.stranger, 2))["error"] == "", "the memory knows better"
    sampling.command("restart", 0.1)
    sampling.command("forget")
    sharp = DRAWN | {"temperature": 0.5}
    served(sampling, MIXED, prompts, **sharp)  # of these the memory knows something afterwards
    sampling.traces()
    asked = prompts * (2 if sampling.way.runner == "V1" else 1)  # interpreted kernels take long
    certain = sampling.worker.osd_certain
    own = certain._is_certain
    for is_broken in (False, True):
        if is_broken:
            certain._is_certain = lambda req_ids: [False for _ in req_ids]
        try:
            _, log, counts = served(sampling, MIXED, asked, **sharp)
        finally:
            certain._is_certain = own
        num_mixed = sum(0 < step["from_memory"] < step["batch"] for step in log)
        fit = misfit_of(target, sampling.traces(), 0.5, is_sampled=True)
        print(f"broken: {is_broken}, misfit {fit:.2g}, {num_mixed} steps mixed, {counts}")
        if is_broken:
            assert fit < 1e-6
        else:
            assert fit > 1e-4
            assert num_mixed > 20 and min(verified for verified, _ in counts.values()) > 100


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_sampled_draft_serves_as_its_replay_says(
    sampling: Engine, pair: Pair, prompts: list[list[int]], temperature: float
) -> None:
    """Within what chance explains, and far from what greedy drafts would serve with."""
    greedy, served = [], []
    asked = prompts * (2 if sampling.way.runner == "V1" else 1)  # interpreted kernels take long
    for version, path in ((2, pair.stranger), (3, pair.draft)):
        release = release_of(path, version)
        alpha, error, traces = served_with(sampling, release, asked, temperature)
        draft = load_draft(path)
        found = replay(draft, traces, sampling.k, max_length=512, is_sampled=True).alpha
        print(f"v{version}: served {alpha:.3f} ± {error:.3f}, predicted {found:.3f}")
        assert found == pytest.approx(alpha, abs=4 * error)
        greedy.append(replay(draft, traces, sampling.k, max_length=512).alpha or 0.0)
        print(f"drafted greedily it would serve with {greedy[-1]:.3f}")
        served.append((alpha, error))
    assert max(abs(g - a) / e for g, (a, e) in zip(greedy, served, strict=True)) > 5
