"""The hidden states of the target that a head reads, computed anew from stored tokens.

    token ids of a batch ─► the target (frozen, its own dtype) ─► hidden states at the taps

Nothing of them is captured: the target computes the same for the same text, so traces stay small
and older ones serve as well. A text that was stored without its start is read without it.

Legend: B lines, S tokens, H hidden size of the target, F = taps x H, V vocabulary.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from osd.config.schema import TrainerConfig
from osd.models.eagle3 import HeadSpec
from trainer.batch import RowBatch
from trainer.distiller import accelerator
from trainer.eagle3.feature_cache import FeatureCache
from trainer.eagle3.head import Features
from trainer.pack import one_a_line, pack

if TYPE_CHECKING:
    from trainer.sampling.teacher import Teacher


class TargetFeatures:
    """The target of a head. Loaded when it is first asked.

    num_depths: draft tokens of a step, for which heads are trained and judged
    cache_bytes: of features that are kept for texts that come again
    """

    def __init__(self, teacher: Teacher, num_depths: int, cache_bytes: int = 0) -> None:
        self._teacher, self.num_depths = teacher, num_depths
        self._cache_bytes = cache_bytes
        self._caches: dict[tuple[int, ...], FeatureCache] = {}
        """by taps; all heads of a service have the same"""
        self._one_at_a_time = threading.Lock()
        self.cpu_s = 0.0
        """CPU seconds spent on features so far."""

    def embedding(self) -> Tensor:
        """float32 [V, H]"""
        weight = cast(Tensor, self._teacher.model.hf.get_input_embeddings().weight)
        return weight.detach().float()

    def forget(self) -> None:
        """Keep no features, nor the texts they are of."""
        with self._one_at_a_time:
            for cache in self._caches.values():
                cache.clear()

    def of(self, spec: HeadSpec) -> Features:
        """The features that this head reads."""
        taps = spec.taps_in(int(self._teacher.model.hf.config.num_hidden_layers))
        arrange = pack if self._teacher.model.can_pack else one_a_line
        width = spec.target_hidden_size * len(taps)
        cache = self._caches.setdefault(taps, FeatureCache(width, self._cache_bytes, arrange))

        def compute(ids_BS: Tensor, position_ids_BS: Tensor) -> Tensor:
            return self._hidden_states(ids_BS, position_ids_BS, taps)

        def features(batch: RowBatch) -> Tensor:
            started = time.process_time()
            with self._one_at_a_time:
                found = cache.features(batch.ids_BS, batch.position_ids_BS, compute)
            self.cpu_s += time.process_time() - started
            return found.to(batch.ids_BS.device)

        return features

    @torch.no_grad()
    def _hidden_states(
        self, ids_BS: Tensor, position_ids_BS: Tensor, taps: tuple[int, ...]
    ) -> Tensor:
        """[B, S, F]. The target stops before the layer of the last tap."""
        model, device = self._teacher.model, self._teacher.device
        inputs = {"input_ids": ids_BS.to(device)}
        if model.can_pack:
            inputs["position_ids"] = position_ids_BS.to(device)
        layers = cast(nn.ModuleList, model.hf.base_model.layers)
        found: list[Tensor] = []

        def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            found.append(given[0])
            if len(found) == len(taps):
                raise _LastTap

        handles = [layers[tap].register_forward_pre_hook(keep) for tap in taps]
        try:
            model.hf.base_model(**inputs, use_cache=False)
        except _LastTap:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat(found, -1)


def features_of(config: TrainerConfig, teacher: Teacher | None, k: int) -> TargetFeatures | None:
    """Of the trainer's target, on its device; None where it has none."""
    if teacher is None:
        return None
    teacher.device = accelerator(config).device
    return TargetFeatures(teacher, k, config.feature_cache_bytes)


class _LastTap(Exception):
    """Enough of the target was computed."""
