"""The hidden states of the target that a head reads, computed anew from stored tokens.

    token ids of a batch ─► the target (frozen, its own dtype) ─► hidden states at the taps

Nothing of them is captured: the target computes the same for the same text, so traces stay small
and older ones serve as well. A text that was stored without its start is read without it.

Legend: B lines, S tokens, H hidden size of the target, F = taps x H, V vocabulary.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from osd.models.eagle3 import HeadSpec
from trainer.batch import RowBatch
from trainer.eagle3.head import Features

if TYPE_CHECKING:
    from trainer.sampling.teacher import Teacher


class TargetFeatures:
    """The target of a head. Loaded when it is first asked.

    num_depths: draft tokens of a step, for which heads are trained and judged
    """

    def __init__(self, teacher: Teacher, num_depths: int) -> None:
        self._teacher = teacher
        self.num_depths = num_depths
        self.cpu_s = 0.0
        """CPU seconds spent on features so far."""

    def embedding(self) -> Tensor:
        """float32 [V, H]"""
        weight = cast(Tensor, self._teacher.model.hf.get_input_embeddings().weight)
        return weight.detach().float()

    def of(self, spec: HeadSpec) -> Features:
        """The features that this head reads."""
        taps = spec.taps_in(int(self._teacher.model.hf.config.num_hidden_layers))

        @torch.no_grad()
        def features(batch: RowBatch) -> Tensor:
            started = time.process_time()
            found = self._hidden_states(batch, taps)
            self.cpu_s += time.process_time() - started
            return found

        return features

    def _hidden_states(self, batch: RowBatch, taps: tuple[int, ...]) -> Tensor:
        model = self._teacher.model
        inputs = {"input_ids": batch.ids_BS, "use_cache": False, "output_hidden_states": True}
        if model.can_pack:
            inputs["position_ids"] = batch.position_ids_BS
        given = {
            k: v.to(self._teacher.device) if isinstance(v, Tensor) else v for k, v in inputs.items()
        }
        states = model.hf.base_model(**given).hidden_states
        return torch.cat([states[tap] for tap in taps], -1).to(batch.ids_BS.device).float()
