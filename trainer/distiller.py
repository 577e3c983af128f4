"""The weights being trained and their optimizer: one step on one batch. Device and precision are Accelerate's."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

from osd.config import TrainerConfig
from osd.errors import ConfigError
from trainer.batch import TrainBatch, to_device
from trainer.checkpoint import restore_moments
from trainer.draft import RowModel
from trainer.loss import forward_kl, weighted_mean


class Distiller:
    """A draft, its AdamW, and the step that moves the one by the other. Only for full fine-tuning on one device."""

    def __init__(self, model: RowModel, config: TrainerConfig) -> None:
        self.model = model
        self._config = config
        self._accelerator = accelerator(config)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self._prepared, self._prepared_optimizer = self._accelerator.prepare(model, self.optimizer)

    def restart(self, model: RowModel, moments: Mapping[str, Tensor] | None = None) -> None:
        """Take these weights and moments (None = a fresh optimizer) in place of the present ones."""
        self.model.hf.load_state_dict(model.hf.state_dict())
        restore_moments(self.optimizer, moments or {})

    def step(self, batch: TrainBatch, index: int) -> float | None:
        """One optimizer step, the `index`-th of its round; the loss, or None (and no step) when it is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._config.learning_rate * min(1.0, (index + 1) / max(1, self._config.warmup_steps))
        batch = to_device(batch, self._accelerator.device)
        logits_NV = self._prepared(*batch.inputs)
        loss_N = forward_kl(logits_NV, batch.target_ids_NK, batch.target_logprobs_NK, batch.tail_logprob_N)
        loss = weighted_mean(loss_N, batch.weight_N)
        value = float(loss.detach())
        if not math.isfinite(value):
            return None
        self._prepared_optimizer.zero_grad()
        self._accelerator.backward(loss)
        norm = self._accelerator.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        # With fp16 an infinite gradient is how the loss scale is found: the scaler skips that step by itself.
        if self._config.precision != "fp16" and not math.isfinite(float(norm)):
            return None
        self._prepared_optimizer.step()
        return value

    def is_finite(self) -> bool:
        """Whether every weight is a number."""
        return all(bool(torch.isfinite(parameter).all()) for parameter in self.model.parameters())


def accelerator(config: TrainerConfig) -> Accelerator:
    """Device and precision as configured."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device='cuda': no CUDA device here; use auto or cpu")
    return Accelerator(cpu=config.device == "cpu", mixed_precision=config.precision)
