"""Student sampling: the draft answers stored prompts, and the target says what it thinks of it.

    traces of a round ─► some are chosen ─► the draft answers their prompts ─► teacher labels
          └────────────── the others stay as served ──────────────────────────────┴► steps

Online Speculative Decoding (arXiv 2310.07177; `sample_source` of its released code) trains on the
teacher's text, the student's, or a mix. What the draft sampled is an ordinary trace, marked
`BY_STUDENT`, which is gone after the round: it is never stored, and no draft is judged on it. Its
rows are not held against its text either (`trainer.batch.trainable`): that the target finds a token
of the draft all but impossible is what is to be learnt.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from osd.config.schema import TrainerConfig
from osd.records import BY_STUDENT, TRACE_ARRAYS, Trace
from trainer.sampling.teacher import Teacher

MAX_TOKENS = 128
"""Most tokens that the draft samples for a prompt, as OSD does; never more than were served."""
BATCH = 32
"""Prompts that the draft continues together."""
GREEDY = 1e-5
"""Below this temperature vLLM takes the likeliest token."""

Sampling = tuple[float, float, int]
"""temperature, top_p, top_k of a request"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingCost:
    """What student sampling took so far.

    Example:
        SamplingCost(num_traces=24, sampling_cpu_s=0.8, scoring_cpu_s=0.3)
    """

    num_traces: int = 0
    sampling_cpu_s: float = 0.0
    scoring_cpu_s: float = 0.0

    def __add__(self, other: SamplingCost) -> SamplingCost:
        return SamplingCost(
            num_traces=self.num_traces + other.num_traces,
            sampling_cpu_s=self.sampling_cpu_s + other.sampling_cpu_s,
            scoring_cpu_s=self.scoring_cpu_s + other.scoring_cpu_s,
        )


class StudentSampler:
    """Replaces the answers of a share of traces by the draft's own."""

    def __init__(self, config: TrainerConfig, teacher: Teacher) -> None:
        self._fraction = config.student_fraction if config.sampling == "mixed" else 1.0
        self._teacher = teacher

    def replace(
        self,
        student: PreTrainedModel,
        traces: Sequence[Trace],
        max_length: int,
        rng: np.random.Generator,
    ) -> tuple[list[Trace], SamplingCost]:
        """The traces in their order, a share of them with an answer of `student` as it is now.

        max_length: tokens of prompt and answer that the student sees. Traces without a prompt
        or an answer stay as they are. Raises `OSDError` when the target cannot be loaded.
        """
        able = [i for i, t in enumerate(traces) if len(t.prompt_ids) and len(t.output_ids)]
        num = min(round(self._fraction * len(traces)), len(able))
        chosen = rng.permutation(able)[:num].tolist()
        end_ids = self._teacher.end_ids  # loads the target, which is no part of the cost
        began = time.process_time()
        answers = sample(student, [traces[i] for i in chosen], max_length, end_ids, rng)
        sampled = time.process_time()
        texts = [_text(traces[i], ids) for i, ids in zip(chosen, answers, strict=True)]
        labelled = [_marked(trace) for trace in self._teacher.label(texts)]
        found = dict(zip(chosen, labelled, strict=True))
        cost = SamplingCost(
            num_traces=num,
            sampling_cpu_s=sampled - began,
            scoring_cpu_s=time.process_time() - sampled,
        )
        return [found.get(i, trace) for i, trace in enumerate(traces)], cost


def sample(
    student: PreTrainedModel,
    traces: Sequence[Trace],
    max_length: int,
    end_ids: Sequence[int],
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """An answer of the student to each prompt, int32 [T]: at the temperature, top-p and top-k of
    its request, at most as long as the answer that was served, cut after the first of
    `end_ids`."""
    answers: dict[int, np.ndarray] = {}
    device = student.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(rng.integers(2**62)))
        for sampling, chosen in _alike(traces):
            lengths = [min(len(traces[i].output_ids), MAX_TOKENS, max_length - 1) for i in chosen]
            num_seen = max_length - max(lengths)  # no prompt runs out of the draft's context
            ids_BS, mask_BS = _padded([traces[i].prompt_ids[-num_seen:] for i in chosen])
            found_BT = student.generate(  # type: ignore[operator]  # transformers leaves it untyped
                ids_BS.to(device),
                attention_mask=mask_BS.to(device),
                generation_config=_generation(sampling, max(lengths), end_ids),
            )[:, ids_BS.shape[1] :]
            for i, num, ids_T in zip(chosen, lengths, found_BT.cpu().numpy(), strict=True):
                answers[i] = _ended(ids_T[:num], end_ids).astype(np.int32)
    return [answers[i] for i in range(len(traces))]


def _alike(traces: Sequence[Trace]) -> Iterator[tuple[Sampling, list[int]]]:
    """Indices of at most `BATCH` traces that are sampled alike, with prompts of like lengths."""
    groups: dict[Sampling, list[int]] = defaultdict(list)
    for index, trace in enumerate(traces):
        groups[trace.temperature, trace.top_p, trace.top_k].append(index)
    for sampling, indices in groups.items():
        indices.sort(key=lambda i: len(traces[i].prompt_ids))
        for start in range(0, len(indices), BATCH):
            yield sampling, indices[start : start + BATCH]


def _padded(prompts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, and 1 where they are: int64 [B, S] each."""
    length = max(map(len, prompts))
    ids_BS = torch.zeros((len(prompts), length), dtype=torch.long)
    mask_BS = torch.zeros_like(ids_BS)
    for row, prompt in enumerate(prompts):
        ids_BS[row, length - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask_BS[row, length - len(prompt) :] = 1
    return ids_BS, mask_BS


def _generation(sampling: Sampling, num_tokens: int, end_ids: Sequence[int]) -> GenerationConfig:
    """What is left out here, transformers would take from the draft's own defaults."""
    temperature, top_p, top_k = sampling
    drawn: dict[str, Any] = {"do_sample": False}
    if temperature >= GREEDY:
        drawn = {"do_sample": True, "temperature": temperature, "top_p": top_p}
        drawn |= {"top_k": max(0, top_k)}
    return GenerationConfig(
        **drawn,
        max_new_tokens=num_tokens,
        repetition_penalty=1.0,
        eos_token_id=list(end_ids) or None,
        pad_token_id=0,
        remove_invalid_values=True,  # of a draft that diverged: the round's loss will tell
    )


def _ended(ids_T: np.ndarray, end_ids: Sequence[int]) -> np.ndarray:
    ends = np.flatnonzero(np.isin(ids_T, end_ids))
    return ids_T[: ends[0] + 1] if len(ends) else ids_T


def _text(trace: Trace, output_ids: np.ndarray) -> Trace:
    """The prompt with another answer, and no rows."""
    nothing: dict[str, Any] = {
        name: np.zeros((0,) * ndim, dtype) for name, (dtype, ndim) in TRACE_ARRAYS.items()
    }
    nothing |= {"prompt_ids": trace.prompt_ids, "output_ids": output_ids}
    return replace(trace, **nothing, num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0)


def _marked(trace: Trace) -> Trace:
    return replace(trace, draft_version=np.full(trace.num_rows, BY_STUDENT))


def student_of(config: TrainerConfig, teacher: Teacher | None) -> StudentSampler | None:
    """Who answers prompts anew; None where only served text is learnt."""
    if config.sampling == "teacher":
        return None
    assert teacher is not None, f"trainer.sampling={config.sampling} needs the target"
    return StudentSampler(config, teacher)
