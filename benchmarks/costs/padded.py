"""The rival of `trainer.py`: Hugging Face's `Trainer`, with our loss at the captured rows of its
full logits.

Legend: B traces, S tokens of the longest, N captured rows, V vocabulary.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from osd.config.schema import TrainerConfig
from osd.records import Trace
from trainer.batch import collate
from trainer.loss import LOSSES, coarsen, weighted_mean


class PaddedLoop:
    """Every trace once, in order, in batches that are padded to their longest.

    Example:
        seconds, num_tokens, losses = PaddedLoop(draft, traces, config, batch_size=8).run()
    """

    def __init__(
        self, draft: Path, traces: Sequence[Trace], config: TrainerConfig, batch_size: int
    ) -> None:
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
        self._vocab_size, self._max_length = int(model.config.vocab_size), config.max_length
        self._num_tokens = 0
        self._watch = _Watch()
        self._trainer = _PaddedTrainer(
            model=model,
            args=_arguments(config, len(traces) // batch_size, batch_size),
            train_dataset=list(traces),
            data_collator=self._pad,
            callbacks=[self._watch],
        )
        self._trainer.loss = config.loss
        self._trainer.remove_callback(PrinterCallback)

    def run(self) -> tuple[float, int, list[float]]:
        """Seconds of its steps, tokens without padding, losses."""
        self._trainer.train()
        return self._watch.ended - self._watch.began, self._num_tokens, self._trainer.losses

    def _pad(self, some: list[Trace]) -> dict[str, Any]:
        batch = collate(some, self._max_length, self._vocab_size, packed=False)
        self._num_tokens += batch.num_tokens
        lengths_B = torch.zeros(len(some), dtype=torch.long).scatter_reduce(
            0, batch.row_b_N, batch.row_s_N + 1, reduce="amax"
        )
        mask_BS = (torch.arange(batch.ids_BS.shape[1])[None] < lengths_B[:, None]).long()
        return {"input_ids": batch.ids_BS, "attention_mask": mask_BS, "batch": batch}


class _PaddedTrainer(Trainer):
    loss = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(cast(list[Trace], self.train_dataset))

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        batch = inputs["batch"]
        logits_BSV = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).logits
        rows_NV = logits_BSV[batch.row_b_N, batch.row_s_N]
        both = coarsen(rows_NV, batch.target_ids_NK, batch.target_logprobs_NK, batch.tail_logprob_N)
        loss = weighted_mean(LOSSES[self.loss](both), batch.weight_N)
        self.losses.append(float(loss.detach()))
        return loss


class _Watch(TrainerCallback):
    began = ended = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.ended = time.perf_counter()


def _arguments(config: TrainerConfig, num_steps: int, batch_size: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=batch_size,
        max_steps=num_steps,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
