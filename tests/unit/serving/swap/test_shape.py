"""What a release must be like beside an EAGLE-3 head that serves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from osd.errors import SwapError
from osd.models import eagle3
from osd.records import DraftRelease
from serving.swap.shape import WEIGHTS, DraftShape, read_release
from tests.support.heads import write_head

FORMS: tuple[eagle3.Form, ...] = ("specforge", "speculators")
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its configuration and its embedding."""
    path = tmp_path_factory.mktemp("target")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "num_hidden_layers": 8,
        "vocab_size": 20,
        "rms_norm_eps": 1e-5,
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": torch.randn(20, 8)}, path / WEIGHTS)
    return path


def released(directory: Path) -> DraftRelease:
    digest = hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest()
    return DraftRelease(
        version=2, parent=1, path=str(directory), sha256=digest, target_id="t", created_at=0.0
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_head_of_other_weights_fits(tmp_path: Path, target: Path, form: eagle3.Form) -> None:
    first = write_head(tmp_path / "1", target, form=form, draft_vocab_size=16)
    second = write_head(tmp_path / "2", target, form=form, draft_vocab_size=16, seed=2)
    read = read_release(released(second), DraftShape.of(first))
    stored = load_file(second / WEIGHTS)
    assert read.keys() == stored.keys()
    assert all(torch.equal(read[name], stored[name]) for name in stored)


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def act(head: Path) -> None:
        tensors = load_file(head / WEIGHTS)
        tensors[name] = change(tensors[name])
        save_file(tensors, head / WEIGHTS)

    return act


def with_key(key: str, value: Any, inside: str = "") -> Change:
    def act(head: Path) -> None:
        config = json.loads((head / "config.json").read_text())
        (config[inside] if inside else config)[key] = value
        (head / "config.json").write_text(json.dumps(config))

    return act


def moved(d2t: torch.Tensor) -> torch.Tensor:
    d2t[-1] += 1
    return d2t


REFUSALS: list[tuple[eagle3.Form, Change, str]] = [
    ("specforge", with_tensor("d2t", moved), "d2t is another than the engine's"),
    ("specforge", with_tensor("d2t", torch.Tensor.int), "d2t is another than the engine's"),
    ("speculators", with_tensor("t2d", torch.logical_not), "t2d is another than the engine's"),
    ("specforge", with_tensor("fc.weight", lambda t: t * torch.nan), "fc.weight holds NaN"),
    (
        "specforge",
        with_key(eagle3.TAPS, [2, 4, 6]),
        r"taps=\(2, 4, 6\), the engine runs \(2, 4, 5\)",
    ),
    ("speculators", with_key(eagle3.TAPS, None), r"taps=\(\), the engine runs \(2, 4, 5\)"),
    ("specforge", with_key("norm_output", True), "norm_output=True, the engine runs False"),
    ("specforge", with_key("fc_norm", True), "has_fc_norm=True, the engine runs False"),
    (
        "specforge",
        with_key("eagle_config", {"norm_before_fc": True}),
        "norm_before_fc=True, the engine runs False",
    ),
    (
        "speculators",
        with_key("norm_before_residual", True),
        "norm_before_residual=True, the engine runs False",
    ),
    ("specforge", with_key("target_hidden_size", 16), "target_hidden_size=16, the engine runs 8"),
    ("specforge", with_key("draft_vocab_size", 15), "draft_vocab_size=15, the engine runs 16"),
    (
        "speculators",
        with_key("hidden_size", 16, eagle3.LAYER),
        "hidden_size=16, the engine runs 8",
    ),
    (
        "speculators",
        with_key("rms_norm_eps", 1e-6, eagle3.LAYER),
        "rms_norm_eps=1e-06, the engine runs 1e-05",
    ),
    (
        "speculators",
        with_key("num_hidden_layers", 2, eagle3.LAYER),
        r"an EAGLE-3 head of 2 llama layer\(s\)",
    ),
    (
        "specforge",
        with_key("architectures", ["EagleLlamaForCausalLM"]),
        r"a draft head \(EagleLlamaForCausalLM\), and of heads only EAGLE-3 heads",
    ),
]


@pytest.mark.parametrize(
    ("form", "change", "line"), REFUSALS, ids=[line for _, _, line in REFUSALS]
)
def test_a_head_that_would_compute_otherwise_is_refused(
    tmp_path: Path, target: Path, form: eagle3.Form, change: Change, line: str
) -> None:
    first = write_head(tmp_path / "1", target, form=form, draft_vocab_size=16)
    second = write_head(tmp_path / "2", target, form=form, draft_vocab_size=16, seed=2)
    change(second)
    with pytest.raises(SwapError, match=line):
        read_release(released(second), DraftShape.of(first))


def test_a_draft_model_is_not_swapped_for_a_head(tmp_path: Path, target: Path) -> None:
    (tmp_path / "model").mkdir()
    config = json.loads((target / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "model" / WEIGHTS)
    head = write_head(tmp_path / "head", target)
    with pytest.raises(SwapError, match="the engine runs"):
        read_release(released(head), DraftShape.of(tmp_path / "model"))
    with pytest.raises(SwapError, match="the engine runs"):
        read_release(released(tmp_path / "model"), DraftShape.of(head))
