"""Releases of EAGLE-3 heads, over ways of running vLLM: swapped in, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.conftest import release_of
from tests.integration.serving.test_swap import acceptance_and_outputs, truncated
from tests.support.engines import Engine
from tests.support.headed import WEIGHTS, build_head, form_of_heads
from tests.support.pairs import Pair
from tests.support.reference import K, Reference
from tests.support.ways import Way

LONG = {"ignore_eos": True, "max_tokens": 32}
PLANS = [("off", 0), *(("draft", k) for k in range(1, K + 1))]


def test_with_a_head_tokens_are_the_targets_while_20_heads_are_swapped_in(
    head: Engine, alone: Reference, headed: Pair, prompts: list[list[int]]
) -> None:
    answers = []

    def swap(_step: int) -> None:
        if len(answers) < 20:
            path = (headed.stranger, headed.draft)[len(answers) % 2]
            answers.append(head.swap(release_of(path, 2 + len(answers))))

    before = head.worker.osd_target_checksum()
    ids = [head.add(prompt, **LONG) for prompt in prompts[:4]]
    done = head.run(swap)
    assert [done[i][0] for i in ids] == alone.generate(prompts[:4], **LONG)
    assert [(answer["error"], answer["proved"]) for answer in answers] == [("", True)] * 20
    assert head.worker.osd_target_checksum() == before


def test_a_head_over_two_ranks_serves_and_is_swapped(
    drafting: Engine, alone: Reference, headed: Pair, prompts: list[list[int]]
) -> None:
    """Ranks split its layer and its output head; each has all of what combines the taps."""
    answers = []

    def change(step: int) -> None:
        drafting.command("force", PLANS[step % len(PLANS)])
        if step % 4 == 0 and len(answers) < 4:
            path = (headed.stranger, headed.draft)[len(answers) % 2]
            answers.append(drafting.swap(release_of(path, 2 + len(answers))))

    ids = [drafting.add(prompt, **LONG) for prompt in prompts[:4]]
    done = drafting.run(change)
    assert [done[i][0] for i in ids] == alone.generate(prompts[:4], **LONG)
    assert [(answer["error"], answer["proved"]) for answer in answers] == [("", True)] * 4
    stands = drafting.llm.collective_rpc("osd_stands")
    assert [(rank["version"], rank["is_whole"]) for rank in stands] == [(5, True)] * 2


def with_tensor(name: str, change: Callable[[torch.Tensor], None]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        change(tensors[name])
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})

    return act


def foreign_embedding(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    own = tensors.get("embed_tokens.weight", torch.zeros(96, 64))
    tensors["embed_tokens.weight"] = own + 0.5
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def other_taps(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]
    (path / "config.json").write_text(json.dumps(config))


REFUSALS: dict[str, tuple[Callable[[Path], None], str]] = {
    "another embedding": (foreign_embedding, "another embedding than the target's"),
    "another d2t": (with_tensor("d2t", lambda t: t[3:].add_(1)), "d2t is another than the engine"),
    "NaN": (with_tensor("fc.weight", lambda t: t[0].fill_(torch.nan)), "fc.weight holds NaN"),
    "truncated": (truncated, "is damaged"),
    "other taps": (other_taps, "taps=(1, 3, 5), the engine runs (1, 3, 6)"),
}


@pytest.mark.parametrize("what", [*REFUSALS, "another hidden size"])
def test_a_bad_release_of_a_head_is_refused_and_nothing_changes(
    head: Engine, headed: Pair, prompts: list[list[int]], tmp_path: Path, way: Way, what: str
) -> None:
    before = acceptance_and_outputs(head, prompts[:2])
    change, line = REFUSALS.get(what, (lambda path: None, "the engine runs 64"))
    if what in REFUSALS:
        shutil.copytree(headed.stranger, tmp_path / "bad")
    else:
        build_wide(tmp_path / "bad", headed.target, way)
    change(tmp_path / "bad")
    if what == "another embedding" and not holds_embedding(headed.draft):
        line = "1 tensors are unknown, first embed_tokens.weight"
    answer = head.swap(release_of(tmp_path / "bad", 2))
    assert line in answer["error"]
    assert acceptance_and_outputs(head, prompts[:2]) == before
    assert head.worker.osd_swapper.prove() == ""


def holds_embedding(path: Path) -> bool:
    return "embed_tokens.weight" in load_file(path / WEIGHTS)


def build_wide(directory: Path, target: Path, way: Way) -> Path:
    """A head that is 128 wide."""
    build_head(directory, target, 2, **form_of_heads(way))
    config = json.loads((directory / "config.json").read_text())
    config.get("transformer_layer_config", config)["hidden_size"] = 128
    (directory / "config.json").write_text(json.dumps(config))
    return directory
