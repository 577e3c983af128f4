"""Swapping drafts in a live engine.

A draft that does not fit is refused, and the old draft serves on exactly as before.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from osd.records import DraftRelease
from serving.swap import weights
from serving.swap.live_draft import LiveDraft, Weights
from tests.integration.conftest import release_of
from tests.support.engines import Engine
from tests.support.pairs import Pair
from tests.support.starving import MemoryFor
from trainer.draft import load_draft
from trainer.evaluate import replay

WEIGHTS = "model.safetensors"


def truncated(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) // 2])


def wrong_shape(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 127)
    save_file(tensors, path / WEIGHTS)


def missing_tensor(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, path / WEIGHTS)


def unknown_tensor(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    tensors["model.layers.9.mlp.down_proj.weight"] = torch.zeros(4)
    save_file(tensors, path / WEIGHTS)


def nan(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, path / WEIGHTS)


def wrong_architecture(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({**config, "num_attention_heads": 4, "head_dim": 16})
    )


def integers(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, path / WEIGHTS)


def deleted(path: Path) -> None:
    (path / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncated, "damaged"),
        (wrong_shape, "down_proj.weight has shape (64, 127), expected (64, 128)"),
        (missing_tensor, "q_proj.weight"),
        (unknown_tensor, "unknown"),
        (nan, "NaN"),
        (wrong_architecture, "num_attention_heads=4"),
        (integers, "int32"),
    ],
)
def test_a_bad_release_is_refused_and_nothing_changes(
    engine: Engine,
    pair: Pair,
    prompts: list[list[int]],
    tmp_path: Path,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    before = acceptance_and_outputs(engine, prompts)
    bad = tmp_path / "bad"
    shutil.copytree(pair.draft, bad)
    damage(bad)
    answer = engine.swap(release_of(bad, 2))
    assert reason in answer["error"]
    assert acceptance_and_outputs(engine, prompts) == before


def test_a_wrong_hash_and_a_deleted_file_are_refused(
    engine: Engine, pair: Pair, prompts: list[list[int]], tmp_path: Path
) -> None:
    before = acceptance_and_outputs(engine, prompts)
    wrong: DraftRelease = replace(release_of(pair.stranger, 2), sha256="0" * 64)
    assert "sha256" in engine.swap(wrong)["error"]
    gone = tmp_path / "gone"
    shutil.copytree(pair.stranger, gone)
    release = release_of(gone, 3)
    deleted(gone)
    assert "cannot be read" in engine.swap(release)["error"]
    assert acceptance_and_outputs(engine, prompts) == before


class Tampering:
    """The live draft of an engine, until `put` has done something else once."""

    def __init__(self, swapper: Any, put: Callable[[LiveDraft, Weights], None]) -> None:
        self._swapper, self._live, self._put = swapper, swapper._draft, put
        swapper._draft = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._live, name)

    def put(self, weights: Weights) -> None:
        self._swapper._draft = self._live
        self._put(self._live, weights)


def test_weights_that_are_put_in_half_are_taken_out_again(
    engine: Engine, pair: Pair, prompts: list[list[int]]
) -> None:
    before = acceptance_and_outputs(engine, prompts)

    def fail_half_way(live: LiveDraft, weights: Weights) -> None:
        live.put(Weights(first_half(weights.values), first_half(weights.attributes)))
        raise RuntimeError("half of it")

    Tampering(engine.worker.osd_swapper, fail_half_way)
    answer = engine.swap(release_of(pair.stranger, 2))
    assert "previous draft was restored: RuntimeError: half of it" in answer["error"]
    assert acceptance_and_outputs(engine, prompts) == before


def first_half(entries: dict[Any, Any]) -> dict[Any, Any]:
    return dict(list(entries.items())[: len(entries) // 2])


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_a_swap_that_does_not_land_is_taken_back(
    request: pytest.FixtureRequest, engine: Engine, pair: Pair, prompts: list[list[int]], kind: str
) -> None:
    """The engine says nothing, and goes on with one matrix of the old draft: packed, so that every
    parameter is right. Of tied weights it is the output head's, whose parameter is the embedding's
    own."""
    live, drafts = (engine, pair) if kind == "untied" else request.getfixturevalue("tied")
    swapper, packed = (
        live.worker.osd_swapper,
        {"untied": "QKVParallelLinear", "tied": "ParallelLMHead"}[kind],
    )
    if swapper.version != 1:
        assert live.swap(release_of(drafts.draft, 1))["error"] == ""
    before = acceptance_and_outputs(live, prompts)

    def forget_one(draft: LiveDraft, weights: Weights) -> None:
        stays = next(layer for layer, _ in weights.attributes if type(layer).__name__ == packed)
        draft.put(
            Weights(
                weights.values,
                {at: held for at, held in weights.attributes.items() if at[0] is not stays},
            )
        )

    Tampering(swapper, forget_one)
    answer = live.swap(release_of(drafts.stranger, 2))
    assert "the engine holds other weights" in answer["error"]
    assert "previous draft was restored" in answer["error"]
    assert swapper.version == 1
    assert acceptance_and_outputs(live, prompts) == before


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_a_swap_that_runs_out_of_memory_anywhere_leaves_the_old_draft(
    request: pytest.FixtureRequest, engine: Engine, pair: Pair, prompts: list[list[int]], kind: str
) -> None:
    """The first of what a swap takes is refused, and all after it; then the second; until the swap
    succeeds."""
    live, drafts = (engine, pair) if kind == "untied" else request.getfixturevalue("tied")
    if live.worker.osd_swapper.version != 1:
        assert live.swap(release_of(drafts.draft, 1))["error"] == ""
    before, held, swapper = (
        acceptance_and_outputs(live, prompts),
        live_bits(live),
        live.worker.osd_swapper,
    )
    begin, swapper._begin = swapper._begin, lambda read: read()  # memory is counted by thread
    try:
        for room in range(2000):
            with MemoryFor(room):
                error = live.swap(release_of(drafts.stranger, 2))["error"]
            if not error:
                break
            assert live_bits(live) == held, f"room for {room}: {error}"
            if room % 40 == 0:
                assert acceptance_and_outputs(live, prompts) == before
    finally:
        swapper._begin = begin
    assert room > 40 and swapper.version == 2 and live_bits(live) != held
    assert live.swap(release_of(drafts.draft, 1))["error"] == ""
    assert acceptance_and_outputs(live, prompts) == before


def live_bits(engine: Engine) -> list[int]:
    """Of every tensor of the draft, and of what its layers answer to unit vectors."""
    draft = engine.worker.get_draft_model()
    held = [part for _, part in weights.read_back(engine.worker)]
    parts = [*held, *draft.parameters(), *draft.buffers()]
    assert not any(part.is_meta for part in parts)
    return [hash(part.detach().numpy().tobytes()) for part in parts]


def test_a_swap_that_reaches_the_target_is_taken_back(engine: Engine, pair: Pair) -> None:
    norm = next(
        p
        for n, p in engine.worker.model_runner.get_model().named_parameters()
        if n.endswith("norm.weight")
    )
    before = norm.data.clone()
    norm.data[3] *= 1 + 1e-6
    try:
        error = engine.swap(release_of(pair.stranger, 2))["error"]
        assert "the target's weights are no longer" in error
        assert not engine.worker.osd_swapper.is_whole, "whether the draft is back, nothing proves"
    finally:
        norm.data.copy_(before)
    assert engine.swap(release_of(pair.draft, 1))["error"] == ""
    assert engine.worker.osd_swapper.is_whole


def test_there_and_back_is_exact_and_the_target_is_untouched(
    engine: Engine, pair: Pair, prompts: list[list[int]]
) -> None:
    checksum = engine.rpc("osd_target_checksum")
    before = acceptance_and_outputs(engine, prompts)
    assert engine.swap(release_of(pair.stranger, 2))["error"] == ""
    other = acceptance_and_outputs(engine, prompts)
    assert other[1] == before[1]
    assert other[0] != before[0]
    back = engine.swap(release_of(pair.draft, 3))
    assert (back["error"], back["proved"]) == ("", True)
    assert acceptance_and_outputs(engine, prompts) == before
    assert engine.rpc("osd_target_checksum") == checksum


def test_committing_what_was_not_staged_is_refused(engine: Engine) -> None:
    committed = asyncio.run(engine.ranks.commit(77))
    assert "v77 is not staged" in committed.error and engine.worker.osd_swapper.version == 1


def acceptance_and_outputs(engine: Engine, prompts: list[list[int]]) -> tuple[Any, list[list[int]]]:
    """Counts per position (exact, not a rate) and the tokens of all prompts, with no help from
    earlier draft KV."""
    engine.llm.reset_prefix_cache()
    engine.rpc("osd_report", "test", "default")
    outputs = engine.generate(prompts, ignore_eos=True)
    engine.traces()
    windows = json.loads(engine.rpc("osd_report", "test", "default"))["windows"]
    return [(w["num_tested_per_pos"], w["num_accepted_tokens_per_pos"]) for w in windows], outputs


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_a_swapped_in_draft_serves_exactly_as_its_replay_says(
    request: pytest.FixtureRequest, engine: Engine, pair: Pair, prompts: list[list[int]], kind: str
) -> None:
    """The gate judges by replay: what it measures must be what the engine then serves, token by
    token."""
    live, drafts = (engine, pair) if kind == "untied" else request.getfixturevalue("tied")
    for version, path in ((2, drafts.stranger), (3, drafts.draft)):
        assert live.swap(release_of(path, version))["error"] == ""
        live.llm.reset_prefix_cache()
        live.rpc("osd_report", "test", "default")
        live.generate(prompts, ignore_eos=True, max_tokens=24)
        traces = live.traces()
        (window,) = json.loads(live.rpc("osd_report", "test", "default"))["windows"]
        counts = replay(load_draft(path), traces, live.k, max_length=512)
        assert counts.tested_RG.sum(0).tolist() == window["num_tested_per_pos"]
        assert counts.accepted_RG.sum(0).tolist() == window["num_accepted_tokens_per_pos"]
