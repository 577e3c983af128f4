"""The weights being trained and their optimizer: one step on one batch. Accelerate handles device
and precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from osd.config.schema import TrainerConfig
from osd.errors import ConfigError
from osd.records import Trace
from trainer import adapter
from trainer.batch import TrainBatch, collate, to_device
from trainer.draft import Draft
from trainer.loss import LOSSES, weighted_mean
from trainer.optimizer import restore_moments


class Distiller:
    """A draft and its AdamW optimizer on one device.

    With `trainer.method` lora the given model gets adapters, and only they are trained.
    """

    def __init__(self, model: Draft, config: TrainerConfig) -> None:
        self.model = model
        self.max_length = min(config.max_length, model.max_length)
        self._config = config
        self._loss = LOSSES[config.loss]
        self._accelerator = accelerator(config)
        if config.method == "lora":
            adapter.add_lora(model.hf, config.lora_rank, config.lora_alpha)
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._trainable, lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self._prepared, self._prepared_optimizer = self._accelerator.prepare(model, self.optimizer)

    def restart(
        self,
        weights: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        adapters: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take the weights of a plain model, the optimizer's moments ({} = fresh) and the adapters
        (None = fresh). Raises `ValueError` when the adapters are of other settings."""
        adapter.restart_from(self.model.hf, weights)
        if adapters is not None:
            adapter.restore(self.model.hf, adapters)
        restore_moments(self.optimizer, moments)

    def collate(self, traces: Sequence[Trace]) -> TrainBatch:
        """The batch, within the length and vocabulary of this draft, with all that it reads."""
        batch = collate(traces, self.max_length, self.model.vocab_size, packed=self.model.can_pack)
        return self.model.prepared(batch)

    def losses(self, batch: TrainBatch) -> Tensor:
        """float32 [N], on the device."""
        batch = to_device(batch, self._accelerator.device)
        logits = self._prepared(*self.model.inputs(batch))
        loss_N = torch.zeros(batch.num_rows, device=self._accelerator.device)
        for share_N, both in self.model.distances(logits, batch):
            loss_N = loss_N + share_N * self._loss(both)
        return loss_N

    def step(self, batch: TrainBatch, index: int, scale: float = 1.0) -> float | None:
        """Take the `index`-th optimizer step of a round, at `scale` times the configured learning
        rate. Return the loss; when loss or gradient is not finite, take no step and return None."""
        peak = self._config.learning_rate * scale
        for group in self.optimizer.param_groups:
            group["lr"] = peak * min(1.0, (index + 1) / max(1, self._config.warmup_steps))
        loss = weighted_mean(self.losses(batch), batch.weight_N.to(self._accelerator.device))
        value = float(loss.detach())
        if not math.isfinite(value):
            return None
        self._prepared_optimizer.zero_grad()
        self._accelerator.backward(loss)
        norm = self._accelerator.clip_grad_norm_(self._trainable, self._config.max_grad_norm)
        # With fp16 infinite gradients are normal: the scaler finds the loss scale by them, and
        # skips these steps itself.
        if self._config.precision != "fp16" and not math.isfinite(float(norm)):
            return None
        self._prepared_optimizer.step()
        return value

    def is_finite(self) -> bool:
        """Whether every trained weight is finite."""
        return all(bool(torch.isfinite(parameter).all()) for parameter in self._trainable)


def needing_less(config: TrainerConfig, *, has_teacher: bool = False) -> str:
    """What to do where a round runs out of memory. `has_teacher`: whether it asks the target, as
    for a head, or by `trainer.sampling`, with which no head learns."""
    less = [f"lower trainer.max_length={config.max_length}"]
    if config.batch_size > 1:
        less.insert(0, f"lower trainer.batch_size={config.batch_size}")
    if config.method == "full":
        less.append("use trainer.method=lora")
    if has_teacher and config.sampling == "teacher" and config.feature_cache_bytes:
        less.append(f"lower trainer.feature_cache_bytes={config.feature_cache_bytes}")
    if has_teacher:
        most = config.target_memory_bytes
        less.append(
            "set trainer.target_memory_bytes"
            if most is None
            else f"lower trainer.target_memory_bytes={most}"
        )
    if config.num_gpus < 1 and config.device != "cpu" and torch.cuda.is_available():
        less.append(f"raise trainer.gpu_memory_fraction={config.gpu_memory_fraction:g}")
    return " or ".join(filter(None, [", ".join(less[:-1]), less[-1]]))


def accelerator(config: TrainerConfig) -> Accelerator:
    """Device and precision as configured. Raises `ConfigError` when there is no such device."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device='cuda': no CUDA device here; use auto or cpu")
    return Accelerator(cpu=config.device == "cpu", mixed_precision=config.precision)
