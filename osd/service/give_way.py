"""What the trainer's process does so that it takes nothing from an engine beside it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from osd.common.backoff import MAX_PAUSE_S
from osd.common.memory import end_me_first, has_run_out, let_go
from osd.config.schema import TrainerConfig

logger = logging.getLogger(__name__)


def give_way(config: TrainerConfig) -> None:
    """Low priority where it computes on a CPU, and the first to go where memory runs out."""
    end_me_first()
    if not config.num_gpus:
        os.nice(10)


def limit_gpu_memory(config: TrainerConfig) -> None:
    """Limit this process to its share of a GPU that it shares with an engine."""
    import torch

    if config.num_gpus < 1 and config.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(config.gpu_memory_fraction)


@contextmanager
def started_again_when_out(pause_s: float = MAX_PAUSE_S) -> Iterator[None]:
    """In an actor's constructor: end the process where memory runs out, so that Ray tries again. An
    actor whose constructor raises is never started again. During the pause it holds nothing of what
    was called inside."""
    try:
        yield
        return
    except Exception as error:
        if not has_run_out(error):
            raise
        logger.error("no memory to start in (%s); trying again in %g s", error, pause_s)
        let_go(error)
    time.sleep(pause_s)
    os._exit(1)
