"""The target in the trainer: its rows are those that capture stores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from osd.errors import OSDError
from osd.records import PLAIN, Trace
from serving.capture.rows import summarise
from tests.support.tiny_drafts import VOCAB_SIZE, chain_traces, save_draft
from trainer.batch import check_rows
from trainer.sampling import teacher as teacher_module
from trainer.sampling.teacher import Teacher

TOP_K = 8


def captured(directory: Path, trace: Trace, dtype: torch.dtype) -> list[np.ndarray]:
    """What capture keeps of one plain forward pass of one request: ids, log-probabilities, tail."""
    target = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    tokens = np.concatenate([trace.prompt_ids, trace.output_ids]).astype(np.int64)
    with torch.no_grad():
        logits = target(torch.from_numpy(tokens[None])).logits[0, len(trace.prompt_ids) - 1 : -1]
    return [part.numpy() for part in summarise(logits.clone(), TOP_K)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_capture(tmp_path: Path, dtype: torch.dtype) -> None:
    """Of requests of several lengths at once, in float32 packed, in the type of the checkpoint.
    Differences are those of a float16 (0.1 %) and of another shape of the batch."""
    directory = save_draft(tmp_path / "target", seed=3, scale=0.5, dtype=dtype)
    traces = [t for num in (12, 3, 20, 1, 7) for t in chain_traces(2, start=num, num_output=num)]
    teacher = Teacher(directory, top_k=TOP_K)
    labelled = teacher.label(traces)
    assert teacher.model.hf.dtype == dtype
    step = 1e-3 if dtype == torch.float32 else 0.13  # two steps of a bfloat16 from 8 on
    for trace, found in zip(traces, labelled, strict=True):
        ids, logprobs, tail = captured(directory, trace, dtype)
        first = len(trace.prompt_ids)
        assert found.position.tolist() == list(range(first, first + len(trace.output_ids)))
        assert (found.kind == PLAIN).all() and (found.keep_prob == 1).all()
        np.testing.assert_allclose(
            found.target_logprobs.astype(np.float32), logprobs.astype(np.float32), 2e-3, step
        )
        np.testing.assert_allclose(found.tail_logprob, tail, rtol=2e-3, atol=step)
        if dtype == torch.float32:
            np.testing.assert_array_equal(found.target_ids, ids)
        check_rows(found, VOCAB_SIZE)


def test_a_large_vocabulary_is_scored_in_smaller_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Teacher(save_draft(tmp_path / "target", scale=0.5), top_k=TOP_K)
    traces = chain_traces(9)
    together = teacher.label(traces)
    monkeypatch.setattr(teacher_module, "MAX_ELEMENTS", 1)
    sizes: list[int] = []
    hook = teacher.model.register_forward_hook(lambda _, given, out: sizes.append(len(out)))
    alone = teacher.label(traces)
    hook.remove()
    assert sizes == [12] * 9, "one sequence at a time"
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.target_ids, other.target_ids)
        np.testing.assert_allclose(one.tail_logprob, other.tail_logprob, atol=1e-4)


def test_all_of_a_small_vocabulary_leaves_no_mass(tmp_path: Path) -> None:
    (found,) = Teacher(save_draft(tmp_path / "target"), top_k=1000).label(chain_traces(1))
    assert found.target_ids.shape == (12, VOCAB_SIZE)
    assert (found.tail_logprob == -np.inf).all()
    check_rows(found, VOCAB_SIZE)


def test_the_dtype_can_be_that_of_the_engine(tmp_path: Path) -> None:
    directory = save_draft(tmp_path / "target", dtype=torch.bfloat16)
    model = Teacher(directory, top_k=4, dtype="float32").model
    assert model.hf.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_target_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    directory = save_draft(tmp_path / "target")
    (directory / "model.safetensors").write_bytes(b"none")
    with pytest.raises(OSDError) as caught:
        Teacher(directory, top_k=4).label(chain_traces(1))
    assert str(caught.value).startswith(f"serving.target={directory}: the trainer cannot load it (")
    assert str(caught.value).endswith(
        "trainer.sampling=teacher, with which a draft model needs no target"
    )
    assert "\n" not in str(caught.value)


def test_a_token_that_the_target_does_not_have(tmp_path: Path) -> None:
    (trace,) = chain_traces(1)
    teacher = Teacher(save_draft(tmp_path / "target"), top_k=4)
    with pytest.raises(ValueError, match="output_ids holds 64"):
        teacher.label([replace(trace, output_ids=np.full(12, VOCAB_SIZE))])
