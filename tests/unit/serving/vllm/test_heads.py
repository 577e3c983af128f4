"""Whether vLLM drafts with a head as the head needs it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from osd.errors import SwapError
from serving.vllm import heads
from serving.vllm.heads import check_draft, method_for
from tests.support.draft_releases import written
from tests.support.heads import write_head


class Decoder(nn.Module):
    aux_hidden_state_layers: tuple[int, ...] = ()


def worker(method: str, taps: tuple[int, ...] = (), num_layers: int = 8) -> Any:
    """Of an engine whose target gives its head these layers."""
    target = nn.Sequential(nn.Identity(), Decoder())
    target[1].aux_hidden_state_layers = taps
    config = SimpleNamespace(get_total_num_hidden_layers=lambda: num_layers)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            speculative_config=SimpleNamespace(method=method), model_config=config
        ),
        model_runner=SimpleNamespace(get_model=lambda: target),
    )


@pytest.fixture
def target(tmp_path: Path) -> Path:
    sizes = {"intermediate_size": 6, "num_attention_heads": 2, "num_hidden_layers": 8}
    embedding = {"model.embed_tokens.weight": torch.ones(8, 4)}
    return Path(written(tmp_path / "target", embedding, **sizes).path)


@pytest.fixture(autouse=True)
def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads.parts, "problem_with", lambda part: "")


def test_the_draft_says_by_which_method_vllm_drafts(tmp_path: Path, target: Path) -> None:
    assert method_for(target) == "draft_model"
    assert method_for(write_head(tmp_path / "1", target)) == "eagle3"
    assert method_for(write_head(tmp_path / "2", target, form="speculators")) == "eagle3"


def test_a_head_starts_where_the_target_gives_it_its_taps(tmp_path: Path, target: Path) -> None:
    head = write_head(tmp_path / "head", target, taps=(2, 3, 6))
    check_draft(worker("eagle3", (2, 3, 6)), head)
    silent = write_head(tmp_path / "silent", target, taps=())
    check_draft(worker("eagle3", (2, 4, 5)), silent)
    check_draft(worker("draft_model"), target)


@pytest.mark.parametrize(
    ("found", "listed"),
    [((2, 4, 5), "2, 4, 5"), ((2, 6), "2, 6"), ((), "none")],
    ids=["vLLM's own", "one left out", "none"],
)
def test_a_head_that_would_read_other_layers_does_not_start(
    tmp_path: Path, target: Path, found: tuple[int, ...], listed: str
) -> None:
    head = write_head(tmp_path / "head", target, taps=(2, 3, 6))
    line = f"the target's layers {listed}, and it was trained on 2, 3, 6: its config.json must name"
    with pytest.raises(SwapError, match=line):
        check_draft(worker("eagle3", found), head)


def test_draft_and_method_must_fit(tmp_path: Path, target: Path) -> None:
    head = write_head(tmp_path / "head", target)
    with pytest.raises(SwapError, match=r"method 'draft_model' with .*head, which needs 'eagle3'"):
        check_draft(worker("draft_model"), head)
    with pytest.raises(SwapError, match=r"'eagle3' with .*target, which needs 'draft_model'"):
        check_draft(worker("eagle3"), target)
    with pytest.raises(SwapError, match="by the method 'medusa', which is not served"):
        check_draft(worker("medusa"), head)


def test_heads_are_refused_where_this_vllm_serves_them_otherwise(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads.parts, "problem_with", lambda part: f"{part} changed")
    with pytest.raises(SwapError, match="heads changed; EAGLE-3 heads are not served"):
        check_draft(worker("eagle3", (2, 4, 5)), write_head(tmp_path / "head", target))
    check_draft(worker("draft_model"), target)
