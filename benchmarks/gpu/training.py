"""`python -m benchmarks.gpu.training DRAFT DEVICE`: trains a draft as the service's trainer does,
on traces of made-up tokens, from the word `begin` on its standard input to the word `end`."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.costs.trainer import mixed_traces
from osd.config.schema import TrainerConfig


def main() -> None:
    draft, device = Path(sys.argv[1]), sys.argv[2]
    config = TrainerConfig(device="cuda" if device == "cuda" else "cpu")
    step = _Steps(draft, config)
    _say({"ready": True})
    _wait_for("begin")
    is_over = threading.Event()
    threading.Thread(target=_wait_for, args=("end", is_over.set), daemon=True).start()
    started = time.perf_counter()
    step.take()
    _say({"training": True})
    while not is_over.is_set():
        step.take()
    _say({"learnt": step.learnt(time.perf_counter() - started)})


class _Steps:
    """The trainer's own step, over the same batches again and again."""

    def __init__(self, draft: Path, config: TrainerConfig) -> None:
        import torch

        from trainer.distiller import Distiller
        from trainer.draft import load_draft

        torch.set_num_threads(config.num_threads)
        self._allowed_gib = 0.0
        if config.device == "cuda":
            torch.cuda.set_per_process_memory_fraction(config.gpu_memory_fraction)
            total = torch.cuda.mem_get_info()[1]
            self._allowed_gib = config.gpu_memory_fraction * total / 2**30
        model = load_draft(draft)
        self._distiller = Distiller(model, config)
        traces = mixed_traces(4 * config.batch_size, model.vocab_size, np.random.default_rng(0))
        self._batches = [
            self._distiller.collate(traces[i : i + config.batch_size])
            for i in range(0, len(traces), config.batch_size)
        ]
        self._num_tokens = 0
        self.losses: list[float | None] = []

    def take(self) -> None:
        """One optimizer step."""
        batch = self._batches[len(self.losses) % len(self._batches)]
        self.losses.append(self._distiller.step(batch, len(self.losses)))
        self._num_tokens += batch.num_tokens

    def learnt(self, seconds: float) -> dict[str, Any]:
        """Plain JSON."""
        import torch

        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return {
            "num_steps": len(self.losses),
            "is_finite": all(loss is not None and math.isfinite(loss) for loss in self.losses),
            "tokens_per_second": self._num_tokens / seconds,
            "peak_gib": peak / 2**30,
            "allowed_gib": self._allowed_gib,
        }


def _wait_for(word: str, then: Callable[[], None] = lambda: None) -> None:
    """Read up to the word. Where the input ends before it, the check has gone, and so do we."""
    for line in sys.stdin:
        if line.strip() == word:
            return then()
    os._exit(1)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"osd-training": answer}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
