"""Rounds of a head: it learns, what leaves the trainer is the head that came in, and its target
stays as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from osd.errors import ReleaseError
from osd.models.eagle3 import MAPS
from osd.records import NO_TRACES, DraftRelease, Trace
from tests.support.deep_targets import TAPS, VOCABULARY, save_target
from tests.support.heads import write_head
from tests.support.tiny_drafts import TARGET_ID, chain_trace, release_of
from tests.support.tiny_rounds import GATE, buffer_with, config
from trainer.draft import load_draft
from trainer.eagle3.features import TargetFeatures
from trainer.evaluate import replay
from trainer.loop import Trainer
from trainer.optimizer import moments_of
from trainer.sampling.teacher import Teacher

K = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def teacher(target: Path) -> Teacher:
    return Teacher(target, top_k=16)


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    """Answers in which each token follows from the one before."""
    return [chain_trace(i, holdout=i % 8 == 0) for i in range(224)]


def head(directory: Path, target: Path, **options: Any) -> DraftRelease:
    return release_of(write_head(directory, target, **({"taps": TAPS} | options)))


def trainer(
    directory: Path, teacher: Teacher | None, traces: list[Trace], **fields: Any
) -> Trainer:
    buffer = buffer_with(*traces)
    return Trainer(config(**fields), GATE, K, buffer, directory, TARGET_ID, teacher=teacher)


def alphas(path: str | Path, teacher: Teacher, traces: list[Trace]) -> tuple[float, ...]:
    """α per depth on the held-out traces."""
    model = load_draft(path, TargetFeatures(teacher, K))
    held_out = [trace for trace in traces if trace.is_holdout][-GATE.max_holdout_traces :]
    return replay(model, held_out, K, max_length=256).alpha_per_pos


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ({"form": "specforge", "draft_vocab_size": 60}, {"learning_rate": 5e-3}),
        ({"form": "speculators"}, {"learning_rate": 5e-3}),
        ({"form": "specforge"}, {"learning_rate": 2e-2, "method": "lora", "lora_rank": 16}),
    ],
    ids=["specforge", "speculators", "lora"],
)
def test_a_head_learns_and_leaves_as_it_came(
    target: Path,
    teacher: Teacher,
    traces: list[Trace],
    tmp_path: Path,
    form: dict[str, Any],
    fields: dict[str, Any],
) -> None:
    base = head(tmp_path / "head", target, **form)
    before = {name: value.clone() for name, value in teacher.model.hf.state_dict().items()}
    rounds = trainer(tmp_path / "work", teacher, traces, **fields)
    outcome = rounds.run_round(base)
    assert outcome.eval is not None and outcome.discarded == ""
    assert outcome.eval.alpha_candidate > outcome.eval.alpha_base + 0.15
    assert all(a > 0.3 for a in outcome.eval.alpha_candidate_per_pos)
    assert outcome.features_cpu_s > 0
    old, new = (
        load_file(Path(base.path) / "model.safetensors"),
        load_file(Path(outcome.path) / "model.safetensors"),
    )
    assert {n: (t.shape, t.dtype) for n, t in old.items()} == {
        n: (t.shape, t.dtype) for n, t in new.items()
    }
    same = {name for name in old if torch.equal(old[name], new[name])}
    assert same >= {name for name in old if name in MAPS or "embed" in name}
    assert "fc.weight" not in same
    assert (Path(outcome.path) / "config.json").read_text() == (
        Path(base.path) / "config.json"
    ).read_text()
    assert alphas(outcome.path, teacher, traces) == outcome.eval.alpha_candidate_per_pos
    after = teacher.model.hf.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_trainer_that_starts_again_goes_on_with_the_same_weights(
    target: Path, teacher: Teacher, traces: list[Trace], tmp_path: Path
) -> None:
    base = head(tmp_path / "head", target, form="speculators", draft_vocab_size=60)
    first = trainer(tmp_path / "work", teacher, traces[:40])
    first.run_round(base)
    again = trainer(tmp_path / "work", teacher, traces[:40])
    went_on, resumed = (own._working.distiller for own in (first, again))
    assert_same(went_on.model.hf.state_dict(), resumed.model.hf.state_dict())
    assert_same(moments_of(went_on.optimizer), moments_of(resumed.optimizer))
    assert first._working.state == again._working.state
    assert again.run_round(base).discarded == NO_TRACES


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_head_without_its_target_is_refused(
    target: Path, traces: list[Trace], tmp_path: Path
) -> None:
    base = head(tmp_path / "head", target)
    with pytest.raises(ReleaseError, match="EAGLE-3 head.*serving.target"):
        trainer(tmp_path / "work", None, traces).run_round(base)


def test_a_head_without_a_tensor_is_refused(target: Path, teacher: Teacher, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    directory = write_head(tmp_path, target, taps=TAPS)
    tensors = load_file(directory / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ReleaseError, match="hidden_norm"):
        load_draft(directory, TargetFeatures(teacher, K))


def test_features_are_those_of_the_taps(target: Path, teacher: Teacher, tmp_path: Path) -> None:
    """Another tap is another vector: a head that reads the wrong layers is told apart."""
    from trainer.batch import collate_outputs

    trace = replace(_trace(), prompt_ids=np.arange(4), output_ids=np.arange(4, 12))
    found = []
    for taps in (TAPS, (2, 4, 6)):
        model = load_draft(
            write_head(tmp_path / str(taps), target, taps=taps), TargetFeatures(teacher, K)
        )
        batch = model.prepared(collate_outputs([trace], 256, VOCABULARY))
        assert batch.features_BSF is not None
        found.append(batch.features_BSF)
    states = teacher.model.hf(torch.arange(11)[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[tap] for tap in TAPS], -1)
    torch.testing.assert_close(found[0], expected, atol=5e-5, rtol=0)
    assert float((found[0] - found[1]).abs().max()) > 0.1


def _trace() -> Trace:
    from tests.support.builders import make_trace

    return make_trace(vocab_size=VOCABULARY, num_rows=0)


def test_what_was_purged_is_not_kept_in_memory(
    target: Path, teacher: Teacher, traces: list[Trace], tmp_path: Path
) -> None:
    found = trainer(tmp_path / "trainer", teacher, traces, feature_cache_bytes=1 << 20)
    found.run_round(head(tmp_path / "head", target))
    assert found._features is not None
    caches = list(found._features._caches.values())
    assert [bool(cache.num_bytes and cache._kept) for cache in caches] == [True]
    found.forget()
    assert [(cache.num_bytes, len(cache._kept)) for cache in caches] == [(0, 0)]
