"""The teacher: the target itself, frozen, in the trainer's process.

    tokens ─► RowModel (packed lines) ─► logits [N, V] ─► top-k and the mass of the rest

Capture gives the target's rows for what was served. For any other text the trainer has to ask the
target itself. The rows are those that capture would have stored for the same tokens.

Legend: T output tokens, N rows, V vocabulary, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from osd.common.memory import has_run_out
from osd.errors import OSDError, first_line
from osd.records import NO_VERSION, PLAIN, Trace
from trainer.batch import collate_outputs, to_device
from trainer.draft import LOADING, RowModel

WHOLE = 2**31
"""No sequence loses its start: the target has served contexts of this length."""
BATCH = 8
"""Sequences that are scored together, fewer over a large vocabulary."""
MAX_ELEMENTS = 1 << 26
"""Most logits that are computed at once."""


class Teacher:
    """A target in `directory`, loaded when it is first asked.

    dtype: torch's name of the type it computes in; "auto" = that of its checkpoint.
    memory: bytes for its weights; layers that do not fit are read from its files whenever they
        compute. None = it is loaded whole.
    """

    def __init__(
        self, directory: Path, *, top_k: int, dtype: str = "auto", memory: int | None = None
    ) -> None:
        self._directory, self._top_k, self._dtype = directory, top_k, dtype
        self._memory = memory
        self.device = torch.device("cpu")
        """Where it is loaded to. Set before it is first asked."""

    @cached_property
    def model(self) -> RowModel:
        """The target without gradients. Raises `OSDError` when it cannot be loaded."""
        dtype = self._dtype if self._dtype == "auto" else getattr(torch, self._dtype)
        try:
            with LOADING:
                hf = AutoModelForCausalLM.from_pretrained(
                    self._directory,
                    dtype=dtype,
                    local_files_only=True,
                    trust_remote_code=False,
                    **self._placed(),
                )
            hf = hf.eval().requires_grad_(False)
            if self._memory is not None and hf.get_input_embeddings().weight.is_meta:
                raise OSDError(
                    f"trainer.target_memory_bytes={self._memory}: does not hold the target's "
                    "embedding and the larger of a layer and an output layer that is not the "
                    "embedding; raise it"
                )
            return RowModel(hf if self._memory is not None else hf.to(self.device))
        except Exception as error:  # transformers and its quantisers raise many types
            if isinstance(error, OSDError) or has_run_out(error):
                raise
            raise OSDError(
                f"serving.target={self._directory}: the trainer cannot load it "
                f"({first_line(error)}); make it whole there, or use trainer.sampling=teacher, "
                "with which a draft model needs no target"
            ) from error

    def _placed(self) -> dict[str, Any]:
        """Where accelerate is to put the layers: in order, as many as the memory holds."""
        if self._memory is None:
            return {}
        place = "cpu" if self.device.type == "cpu" else self.device.index or 0
        return {"device_map": "sequential", "max_memory": {place: self._memory}}

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens with which the target ends an answer."""
        found = getattr(self.model.hf.generation_config, "eos_token_id", None)
        return tuple(found) if isinstance(found, list) else () if found is None else (found,)

    def label(self, texts: Sequence[Trace]) -> list[Trace]:
        """The same texts with a row at every output token, in the given order. Raises `ValueError`
        for a token that the target does not have."""
        labelled: dict[int, Trace] = {}
        sizes = [len(text.prompt_ids) + len(text.output_ids) for text in texts]
        order = sorted(range(len(texts)), key=lambda i: sizes[i])
        longest = max((len(text.output_ids) for text in texts), default=1)
        size = min(BATCH, max(1, MAX_ELEMENTS // (self.model.vocab_size * longest)))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            rows = self._rows([texts[i] for i in chosen])
            labelled |= dict(zip(chosen, rows, strict=True))
        return [labelled[i] for i in range(len(texts))]

    @torch.no_grad()
    def _rows(self, texts: Sequence[Trace]) -> list[Trace]:
        model = self.model
        batch = to_device(
            collate_outputs(texts, WHOLE, model.vocab_size, packed=model.can_pack, first=0),
            self.device,
        )
        ids_NK, logprobs_NK, tail_N = top_of(model(*batch.inputs), self._top_k)
        trace_N = batch.trace_N.cpu().numpy()
        return [
            _with_rows(text, ids_NK[here], logprobs_NK[here], tail_N[here])
            for text, here in ((text, trace_N == i) for i, text in enumerate(texts))
        ]


def top_of(logits_NV: Tensor, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What capture keeps of logits: the top-k of the raw log-softmax, most likely first, and the
    log of the other mass. int32 [N, K], float16 [N, K], float32 [N]."""
    logprobs_NV = logits_NV.float().log_softmax(-1)
    top = logprobs_NV.topk(min(top_k, logprobs_NV.shape[-1]), -1)
    tail_N = logprobs_NV.scatter(1, top.indices, -torch.inf).logsumexp(-1)
    return (
        top.indices.to("cpu", torch.int32).numpy(),
        top.values.to("cpu", torch.float16).numpy(),
        tail_N.cpu().numpy(),
    )


def _with_rows(
    text: Trace, ids_TK: np.ndarray, logprobs_TK: np.ndarray, tail_T: np.ndarray
) -> Trace:
    """Every row is there, so each counts once."""
    num = len(text.output_ids)
    return replace(
        text,
        position=len(text.prompt_ids) + np.arange(num),
        kind=np.full(num, PLAIN),
        draft_ids=np.full(num, -1),
        target_ids=ids_TK,
        target_logprobs=logprobs_TK,
        tail_logprob=tail_T,
        keep_prob=np.ones(num),
        draft_version=np.full(num, NO_VERSION),
    )
